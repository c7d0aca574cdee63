"""Accept length over known text against decoding it with the weights of the moment.

Run: pytest tests/train/test_evaluate.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_target
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.train import evaluate
from mimo_jax.train.data import PackedRows, pack_documents

ROW_LEN = 64


@pytest.fixture(scope="module")
def target():
    module = Target(tiny_target(), rngs=nnx.Rngs(0))
    return Model(module.config, *split(module))


@pytest.fixture(scope="module")
def heldout(target):
    """Prompts with the target's own greedy answers, one document per row; the last has none."""
    rng = np.random.default_rng(2)
    prompts = [rng.integers(4, 61, n).tolist() for n in (3, 9, 14, 20)]
    engine = Engine(target, max_len=ROW_LEN)
    done = generate_all(engine, [Request(p, 37) for p in prompts])
    answers = [c.token_ids for c in done]
    pages = [
        pack_documents([pair], ROW_LEN, pad_id=0, seed=0)
        for pair in [*zip(prompts, answers, strict=True), ([5, 6, 7], [])]
    ]
    return PackedRows(*(np.concatenate(arrays) for arrays in zip(*pages, strict=True)))


def test_simulated_and_real_accept_length_agree_for_any_weights_without_compiling_anew(
    target, heldout, monkeypatch
):
    engines = []

    class Recorded(Engine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            engines.append(self)

    monkeypatch.setattr(evaluate, "Engine", Recorded)
    config = tiny_drafter()
    real = evaluate.make_real_accept_length(target, config, max_len=ROW_LEN, batch_size=3)
    requests = evaluate.known_requests(heldout, 10)
    assert [(len(r.prompt_ids), r.max_tokens) for r in requests] == [
        (3, 37), (9, 37), (14, 37), (20, 37)
    ]
    results, compiled = [], []
    for seed in (7, 3):  # τ 1.35 and 1.03: chance finds few good drafters
        graph, params = split(Drafter(config, rngs=nnx.Rngs(seed)))
        vector = jax.random.normal(jax.random.key(seed), (config.hidden_size,))
        trained = {"drafter": params, "mask_embedding": vector}
        propose = evaluate.make_propose(target.graph, graph)
        simulated = evaluate.simulate(propose, target.params, trained, heldout)
        measured = real(trained, requests)
        for field in ("num_steps", "num_committed", "histogram", "tried"):
            assert getattr(simulated, field) == getattr(measured, field)
        # The last block of a row is shorter in the loop, and may be drafted otherwise there.
        apart = np.subtract(simulated.accepted, measured.accepted)
        assert np.abs(apart).sum() <= len(requests)
        results.append(measured)
        compiled.append(engines[0].compile_s)
    assert results[0] != results[1]
    assert all(stats.tau > 1.02 for stats in results)
    assert len(results[0].per_position_acceptance) == config.draft_block_len - 1
    assert len(engines) == 1
    assert compiled[0] == compiled[1] > 0
    assert engines[0].drafter is None  # a train step may donate what it held


def test_walk_counts_what_was_offered():
    ids = np.asarray([7, 8, 9, 9, 4], np.int32)
    proposals = np.asarray([[8, 9, 1], [0, 0, 0], [0, 0, 0], [5, 5, 5], [0, 0, 0]])
    done = evaluate.walk(ids, proposals, first=0, end=5)
    assert done.token_ids == [7, 8, 9, 9, 4]
    assert done.num_committed_per_step == [3, 1]
    assert done.num_accepted_per_step == [2, 0]
    assert done.num_offered_per_step == [3, 1]
    assert evaluate.walk(ids, proposals, first=0, end=1).num_committed_per_step == []


def test_known_requests_are_the_first_that_have_an_answer(heldout):
    rows = PackedRows(*(array[::-1] for array in heldout))
    assert [len(r.prompt_ids) for r in evaluate.known_requests(rows, 2)] == [20, 14]
    assert evaluate.known_requests(PackedRows(*(array[4:] for array in heldout)), 2) == []


def test_rows_without_any_answer_have_no_accept_length(heldout):
    rows = PackedRows(*(array[4:] for array in heldout))
    propose = lambda target_params, trained, batch, starts: [jnp.zeros((1, 32, 4), jnp.int32)]
    assert evaluate.simulate(propose, None, None, rows).tau is None
    assert evaluate.simulated_accept_length(propose, None, None, rows) == 0.0
