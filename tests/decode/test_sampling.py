"""python -m pytest tests/decode/test_sampling.py"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.decode.request import Request, row_sampling
from mimo_jax.decode.sampling import FILTERED, GREEDY, SAMPLED, sample, target_logits
from mimo_jax.layers.vocab import argmax_lowest


def _params(b, **fields):
    """Row b times over, at temperature 1 unless told otherwise."""
    one = row_sampling(Request((1,), 1, **{"temperature": 1.0} | fields), 4)
    return jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), b, axis=0), one)


def test_lowest_id_wins_ties():
    assert argmax_lowest(jnp.asarray([[3.0, 7.0, 7.0], [1.0, 1.0, 1.0]])).tolist() == [1, 0]


def test_filters_match_the_golden_of_the_published_package():
    """sampling.npz: rows 4 and 5 have ties, so sorted probabilities are compared there."""
    golden = np.load("tests/golden/data/sampling.npz")
    logits = jnp.asarray(golden["logits"])[:, None, :]
    for (temperature, top_p, top_k), expected in zip(
        golden["params"], golden["probs"], strict=True
    ):
        if temperature == 0:
            continue
        top_p = float(top_p) if top_p > 0 else 1.0
        params = _params(
            len(logits), temperature=float(temperature), top_p=top_p, top_k=int(top_k)
        )
        probs = np.asarray(jax.nn.softmax(target_logits(logits, params, FILTERED), axis=-1))[:, 0]
        np.testing.assert_allclose(probs[:4], expected[:4], atol=2e-6)
        np.testing.assert_allclose(np.sort(probs[4:]), np.sort(expected[4:]), atol=2e-6)


def test_temperature_zero_rows_are_greedy_in_every_mode(getkey):
    logits = jax.random.normal(getkey(), (2, 3, 11))
    positions = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    greedy = sample(logits, _params(2, temperature=0.0), positions, GREEDY)
    for mode in (SAMPLED, FILTERED):
        assert (sample(logits, _params(2, temperature=0.0), positions, mode) == greedy).all()


def test_noise_depends_on_seed_and_position_only(getkey):
    row = jax.random.normal(getkey(), (1, 1, 13))
    positions = jnp.asarray([[41]], jnp.int32)
    alone = sample(row, _params(1, seed=7), positions, SAMPLED)
    others = jnp.concatenate([row, row * 2, row], axis=0)
    params = _params(3, seed=7)
    together = sample(others, params, jnp.asarray([[40], [40], [41]], jnp.int32), SAMPLED)
    assert together[2, 0] == alone[0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_follow_the_distribution(temperature):
    """Chi-square over 7 ids, 4,000 draws; the power check shows that a wrong law is rejected."""
    logits = jnp.asarray([1.0, 0.5, 0.0, -0.5, -1.0, 0.3, -2.0])
    n = 4000
    positions = jnp.arange(n, dtype=jnp.int32)[None, :]
    ids = sample(
        jnp.broadcast_to(logits, (1, n, 7)),
        _params(1, temperature=temperature, seed=3),
        positions,
        SAMPLED,
    )
    counts = np.bincount(np.asarray(ids)[0], minlength=7)

    def chi_square(t):
        expected = np.asarray(jax.nn.softmax(logits / t)) * n
        return float(((counts - expected) ** 2 / expected).sum())

    assert chi_square(temperature) < 22.46  # 0.999 quantile of chi-square with 6 degrees
    assert chi_square(temperature * 1.3) > 22.46
