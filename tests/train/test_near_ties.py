"""Near ties: the smallest gap along an answer, and the order that follows.

Run: .venv/bin/python -m pytest tests/train/test_near_ties.py
"""

import jax
import numpy as np
from flax import nnx

from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.train.near_ties import NEAR_TIE, smallest_margins, ties_last
from tests.golden.files import DATA, arrays


def test_margins_are_the_golden_ones():
    """The golden runs list the gap at every step of two answers of 48 tokens."""
    golden = arrays("mimo_tiny")
    target = Model(*load_target(DATA / "mimo-tiny"))
    requests = [Request(row[:16].tolist(), 48) for row in golden["greedy_ids"]]
    got = smallest_margins(target, requests, max_len=64)
    np.testing.assert_allclose(got, golden["greedy_margin"].min(axis=1), atol=2e-5)
    # One token: prefill's choice, which decides as much as any step's.
    first = [Request(row[:16].tolist(), 1) for row in golden["greedy_ids"]]
    got = smallest_margins(target, first, max_len=64)
    np.testing.assert_allclose(got, golden["greedy_margin"][:, 0], atol=2e-5)


def test_a_model_that_cannot_decide_is_always_in_a_tie():
    config, graph, params = load_target(DATA / "mimo-tiny")
    undecided = jax.tree.map(lambda leaf: leaf * 0, params)
    target = Model(config, *nnx.split(nnx.merge(graph, undecided)))
    assert smallest_margins(target, [Request([5, 6], 4)], max_len=16) == [0.0]


def test_order():
    assert ties_last(np.array([0.1, NEAR_TIE / 2, 0.2, 0.0])) == [0, 2, 1, 3]
