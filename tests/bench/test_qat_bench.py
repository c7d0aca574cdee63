"""Losses by document and paired differences, with made-up losses of tokens.

Run: .venv/bin/python -m pytest tests/bench/test_qat_bench.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.bench.qat_bench import check_same_ids, difference, document_losses
from mimo_jax.config import ConfigError
from mimo_jax.train.data import PackedRows, pack_documents


def test_losses_are_summed_by_document():
    """Nine rows in batches of eight; a token costs a hundredth of its id, padding nothing."""
    docs = [([i], [i, i + 1, i + 2]) for i in range(10, 28)]
    rows = pack_documents(docs, 9, pad_id=0, seed=0, num_open_rows=1)
    assert rows.token_ids.shape == (9, 9)

    def token_losses(params, token_ids, segment_ids, positions):
        mask = segment_ids > 0
        return jnp.where(mask, params * token_ids.astype(jnp.float32), 0.0), mask

    sums, tokens = document_losses(token_losses, 0.01, PackedRows(*rows))
    assert tokens.tolist() == [4] * 18
    np.testing.assert_allclose(sorted(sums), [(4 * i + 3) / 100 for i in range(10, 28)], rtol=1e-6)


def test_difference_is_one_of_sums_over_documents():
    tokens = np.array([2.0, 2.0])
    same = difference(np.array([3.0, 4.0]), np.array([1.0, 2.0]), tokens)
    assert same == pytest.approx((1.0, 0.0))
    apart = difference(np.array([3.0, 5.0]), np.array([2.0, 2.0]), tokens)
    # Differences 1 and 3 about a mean of 1 per token: residuals -1 and 1, variance 2 * 2 / 1.
    assert apart == pytest.approx((1.0, 1.96 * 2 / 4))


def test_ids_of_another_tokenizer_are_refused(tmp_path):
    """A run's target is asked for its corpus's tokenizer, a published one for its own."""
    texts, published = tmp_path / "run/corpus/heldout", tmp_path / "published"
    trained = tmp_path / "run/target/export"
    for directory in (texts, published, trained):
        directory.mkdir(parents=True)
    check_same_ids(published, texts)  # neither has a tokenizer: nothing is known
    (tmp_path / "run/corpus/tokenizer.json").write_text('{"merges": ["a b"]}')
    check_same_ids(published, texts)
    (published / "tokenizer.json").write_text('{\n "merges": [\n  "a b"\n ]\n}')
    check_same_ids(published, texts)
    check_same_ids(trained, texts)
    (published / "tokenizer.json").write_text('{"merges": ["a c"]}')
    with pytest.raises(ConfigError, match="published reads ids of another tokenizer"):
        check_same_ids(published, texts)
    check_same_ids(trained, texts)
