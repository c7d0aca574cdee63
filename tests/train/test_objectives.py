"""Objectives of draft blocks: literal numbers, a float64 oracle, gradients, garbage in the padding.

Run: .venv/bin/python -m pytest tests/train/test_objectives.py
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.train import objectives
from mimo_jax.train.objectives import DPACE, POSITION, ObjectiveConfig, score_slots
from tests.oracles import objectives as oracle

N, M, V = 3, 4, 5
TERMS = ("cross_entropy", "forward_kl", "reverse_kl", "total_variation")


def mixture(weighting: str = POSITION, **shares: float) -> ObjectiveConfig:
    return ObjectiveConfig(
        **{"cross_entropy": 0.0, **shares}, weighting=weighting, gamma=3.0, dpace_alpha=0.4
    )


def batch_loss(config, logits, labels, is_valid, target_logits=None):
    scores = score_slots(config, logits, labels, is_valid, target_logits)
    return jnp.sum(scores.weight * scores.loss) / jnp.sum(scores.weight)


@pytest.fixture
def case():
    """Logits, labels, valid slots (a hole in block 0, block 2 cut short), the target's logits."""
    rng = np.random.default_rng(0)
    logits, target_logits = rng.normal(0, 2, (2, N, M, V)).astype(np.float32)
    labels = rng.integers(0, V, (N, M)).astype(np.int32)
    is_valid = np.array([[1, 0, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], bool)
    return tuple(map(jnp.asarray, (logits, labels, is_valid, target_logits)))


@pytest.mark.parametrize(
    ("term", "expected"),
    [("forward_kl", 0.1308120), ("reverse_kl", 0.1438410), ("total_variation", 0.25)],
)
def test_terms_of_a_quarter_against_a_half(term: str, expected: float) -> None:
    log_q, log_p = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.25, 0.75]]))
    np.testing.assert_allclose(getattr(objectives, term)(log_q, log_p), [expected], rtol=1e-6)
    labels, valid = jnp.array([[1]], jnp.int32), jnp.array([[True]])
    loss = score_slots(mixture(**{term: 2.0}), log_q[:, None], labels, valid, log_p[:, None]).loss
    np.testing.assert_allclose(loss, [[2 * expected]], rtol=1e-6)


def test_dpace_weights_are_the_published_ones() -> None:
    probs, valid = jnp.array([[0.9, 0.5, 0.8]]), jnp.ones((1, 3), bool)
    weights = objectives.dpace_weights(probs, valid, 0.5)
    np.testing.assert_allclose(weights, [[2.30375, 1.35375, 0.64125]], rtol=1e-6)
    # A slot without a label: 1 in the product, 0 in the sum, whatever stands there.
    probs, valid = jnp.array([[0.9, jnp.nan, 0.8]]), jnp.array([[True, False, True]])
    weights = objectives.dpace_weights(probs, valid, 0.5)
    np.testing.assert_allclose(weights, [[0.95 + 0.855, 0, 0.855]], rtol=1e-6)


@pytest.mark.parametrize("weighting", [POSITION, DPACE])
@pytest.mark.parametrize(
    "shares",
    [*({term: 1.0} for term in TERMS), dict(zip(TERMS, (0.1, 0.5, 0.2, 0.9), strict=True))],
)
def test_objectives_match_a_float64_oracle(case, weighting: str, shares: dict) -> None:
    """Value, and gradient by central differences of the oracle with its weights held fixed."""
    logits, labels, is_valid, target_logits = case
    config = mixture(weighting, **shares)
    loss, grad = jax.value_and_grad(lambda x: batch_loss(config, x, *case[1:]))(logits)
    alpha = config.dpace_alpha if weighting == DPACE else None
    exact = [np.asarray(x) for x in case]
    exact[0] = exact[0].astype(np.float64)
    of = lambda logits, weights=None: oracle.objective(
        logits, *exact[1:], shares=shares, alpha=alpha, gamma=3.0, weights=weights
    )
    expected, weights = of(exact[0])
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    scores = score_slots(config, *case)
    np.testing.assert_allclose(scores.weight, weights, rtol=2e-6)
    for index in [(0, 0, 1), (1, 3, 4), (1, 1, 0), (2, 1, 2), (0, 1, 3)]:
        moved = [exact[0].copy(), exact[0].copy()]
        moved[0][index] += 1e-5
        moved[1][index] -= 1e-5
        slope = (of(moved[0], weights)[0] - of(moved[1], weights)[0]) / 2e-5
        np.testing.assert_allclose(grad[index], slope, atol=2e-6)


@pytest.mark.parametrize("weighting", [POSITION, DPACE])
def test_garbage_where_nothing_counts_reaches_neither_value_nor_gradient(case, weighting) -> None:
    logits, labels, is_valid, target_logits = case
    config = mixture(weighting, **dict.fromkeys(TERMS, 0.5))
    run = jax.value_and_grad(
        lambda logits, labels, target: batch_loss(config, logits, labels, is_valid, target)
    )
    clean, clean_grad = run(logits, labels, target_logits)
    hole = ~is_valid[..., None]
    value, grad = run(
        jnp.where(hole, jnp.nan, logits),
        jnp.where(is_valid, labels, -(2**30)),
        jnp.where(hole, jnp.inf, target_logits),
    )
    np.testing.assert_array_equal(value, clean)
    np.testing.assert_array_equal(grad, clean_grad)
    assert not grad[0, 1].any()
    assert grad[0, 0].any()


def test_a_hit_is_an_argmax_that_counts() -> None:
    logits = jnp.array([[[0.0, 2, 1], [0, 2, 1], [3, 2, 1]]])
    labels, is_valid = jnp.array([[1, 1, 1]], jnp.int32), jnp.array([[True, False, True]])
    scores = score_slots(ObjectiveConfig(), logits, labels, is_valid)
    assert scores.is_correct.tolist() == [[True, False, False]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cross_entropy": 0.0}, "objective: shares [0.0, 0.0, 0.0, 0.0] must be at least 0"),
        ({"forward_kl": -0.1}, "objective: shares [1.0, -0.1, 0.0, 0.0] must be at least 0"),
        ({"weighting": "dpace"}, "weighting 'dpace' is unknown; allowed: position, d-pace"),
        ({"gamma": 0.0}, "objective.gamma 0.0 must be above 0"),
        ({"dpace_alpha": 1.5}, "objective.dpace_alpha 1.5 is out of range; allowed: 0 to 1"),
    ],
)
def test_what_makes_no_objective_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ObjectiveConfig(**options)


def test_a_term_of_the_target_without_its_logits_is_refused(case) -> None:
    with pytest.raises(ConfigError, match="need the target's logits"):
        score_slots(mixture(reverse_kl=1.0), *case[:3])
