"""Router and experts against loops, and against the golden router choices.

Run: .venv/bin/python -m pytest tests/layers/test_moe.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.layers import moe
from mimo_jax.layers.dispatch import run_experts_with_capacity
from mimo_jax.layers.norm import rms_norm
from mimo_jax.models.params import flatten
from tests.golden.files import DATA, arrays
from tests.oracles import router as oracle

D, E, F, TOP_K = 10, 7, 6, 3
ATOL = 1e-5


def draw(t, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((t, D), (D, E), (E,), (D, E, F), (D, E, F), (E, F, D))
    x, w_router, bias, *experts = (
        rng.standard_normal(shape).astype(np.float32) for shape in shapes
    )
    return x, w_router, 0.3 * bias, moe.Experts(*experts)


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_route_equals_the_loop(scoring):
    x, w_router, bias, _ = draw(11)
    options = {"top_k": TOP_K, "routed_scale": 1.7, "scoring": scoring}
    ids, weights, logits = jax.jit(functools.partial(moe.route, **options))(x, w_router, bias)
    expected_ids, expected_weights = oracle.route(x, w_router, bias, **options)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected_weights, atol=ATOL, rtol=0)
    np.testing.assert_allclose(logits, x @ w_router, atol=ATOL, rtol=0)


def test_the_bias_moves_the_choice_and_not_the_weights():
    scores = np.array([0.5, 0.6, 0.4])
    w_router = np.log(scores / (1 - scores))[None].astype(np.float32)
    route = jax.jit(functools.partial(moe.route, top_k=2, routed_scale=1.0))
    one = np.ones((1, 1), np.float32)
    ids, weights, _ = route(one, w_router, np.array([0, 0, 0.3], np.float32))
    np.testing.assert_array_equal(ids, [[2, 1]])
    np.testing.assert_allclose(weights, [[0.4, 0.6]], atol=1e-6)
    ids, weights, _ = route(one, w_router, np.zeros(3, np.float32))
    np.testing.assert_array_equal(ids, [[1, 0]])
    np.testing.assert_allclose(weights, [[6 / 11, 5 / 11]], atol=1e-6)


def test_ties_go_to_the_lower_expert():
    x, w_router = np.ones((1, D), np.float32), np.zeros((D, E), np.float32)
    route = jax.jit(functools.partial(moe.route, top_k=TOP_K, routed_scale=1.0))
    ids, weights, _ = route(x, w_router, np.zeros(E, np.float32))
    np.testing.assert_array_equal(ids, [[0, 1, 2]])
    np.testing.assert_allclose(weights, np.full((1, 3), 1 / 3), atol=1e-6)


def test_the_router_is_float32_for_bfloat16_tokens():
    x, w_router, bias, _ = draw(11)
    x = jnp.asarray(x, jnp.bfloat16)
    route = jax.jit(functools.partial(moe.route, top_k=TOP_K, routed_scale=1.0))
    _, weights, logits = route(x, w_router, bias)
    assert weights.dtype == logits.dtype == jnp.float32
    # 1e-5: products of bf16 x would already differ by 1e-2.
    np.testing.assert_allclose(logits, np.asarray(x, np.float32) @ w_router, atol=ATOL, rtol=0)


WAYS = {
    "sliced": moe._run_sliced,
    "dense": moe._run_dense,
    "grouped": moe._run_grouped,
    # A factor of e / top_k gives every expert room for all tokens.
    "capacity": functools.partial(run_experts_with_capacity, capacity_factor=E / TOP_K),
    "chosen": moe.run_experts,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("t", [1, 5])
def test_all_ways_equal_the_loop(way, t):
    x, w_router, bias, experts = draw(t, seed=t)
    ids, weights = oracle.route(x, w_router, bias, top_k=TOP_K, routed_scale=1.3, scoring="sigmoid")
    ids, weights = ids.astype(np.int32), weights.astype(np.float32)
    out = jax.jit(WAYS[way])(x, ids, weights, experts)
    expected = oracle.run_experts(x, ids, weights, *experts)
    np.testing.assert_allclose(out, expected, atol=5e-5, rtol=0)


def test_a_full_expert_drops_the_later_tokens():
    x, _, _, experts = draw(5)
    ids = np.array([[0, 1], [0, 2], [0, 3], [0, 1], [4, 0]], np.int32)
    weights = np.random.default_rng(1).random((5, 2)).astype(np.float32)
    # int(5 * 2 * 1.5) = 15 rows over 7 experts: 3 each. Expert 0 is asked for five times.
    run = functools.partial(run_experts_with_capacity, capacity_factor=1.5)
    out = jax.jit(run)(x, ids, weights, experts)
    expected = oracle.run_experts(x, ids, weights, *experts, capacity=3)
    np.testing.assert_allclose(out, expected, atol=5e-5, rtol=0)
    whole = oracle.run_experts(x, ids, weights, *experts)
    assert np.abs(expected[3:] - whole[3:]).min(axis=1).max() > 1e-3


def test_gradients_of_the_capacity_way_are_those_of_the_dense_way():
    x, w_router, bias, experts = draw(5)
    ids, weights = oracle.route(x, w_router, bias, top_k=TOP_K, routed_scale=1.0, scoring="sigmoid")
    ids, weights = jnp.asarray(ids, jnp.int32), weights.astype(np.float32)
    cotangent = np.random.default_rng(2).standard_normal(x.shape).astype(np.float32)

    def gradients(way):
        loss = lambda x, w, experts: jnp.sum(way(x, ids, w, experts) * cotangent)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(x, weights, experts)

    both = (jax.tree.leaves(gradients(WAYS[way])) for way in ("capacity", "dense"))
    for ours, dense in zip(*both, strict=True):
        np.testing.assert_allclose(ours, dense, atol=1e-4, rtol=1e-5)


def test_golden_router_choices():
    config, _, params = load_target(DATA / "mimo-tiny")
    golden, flat = arrays("mimo_tiny"), flatten(params)

    @jax.jit
    def choose(x, norm, w_router, bias):
        normed = rms_norm(x, norm, eps=config.norm_eps).reshape(-1, config.hidden_size)
        return moe.route(normed, w_router, bias, top_k=2, routed_scale=config.moe.routed_scale)

    for i in range(1, config.num_layers):
        x = golden["layer_out"][i - 1] + golden["attn_out"][i]
        names = ("ffn_norm", "w_router", "selection_bias")
        ids, weights, logits = choose(x, *[flat[f"layers.{i}.{name}"] for name in names])
        order = np.argsort(ids, axis=-1)
        pick = lambda values, order=order: np.take_along_axis(np.asarray(values), order, axis=-1)
        np.testing.assert_array_equal(pick(ids), golden[f"router_idx_{i}"].reshape(-1, 2))
        np.testing.assert_allclose(
            pick(weights), golden[f"router_w_{i}"].reshape(-1, 2), atol=ATOL, rtol=0
        )
        np.testing.assert_allclose(
            logits, golden[f"router_logits_{i}"].reshape(-1, 8), atol=2e-5, rtol=0
        )
