"""Run: pytest tests/train/test_muon.py"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mimo_jax.train import muon
from mimo_jax.train.schedule import WSD, make_schedule

E, D, F = 7, 28, 20


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("shape", [(D, F), (F, D), (D, D), (E, D, F), (2, E, F, D), (3, 61)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_singular_values_land_in_the_band(shape: tuple[int, ...], scale: float) -> None:
    x = muon.newton_schulz(scale * normal(0, *shape))
    values = np.linalg.svd(np.asarray(x, np.float64), compute_uv=False)
    assert x.shape == shape
    assert values.min() > 0.6
    assert values.max() < 1.2


def test_keeps_singular_vectors() -> None:
    g = np.asarray(normal(1, D, F), np.float64)
    u, _, vt = np.linalg.svd(g, full_matrices=False)
    inner = u.T @ np.asarray(muon.newton_schulz(jnp.asarray(g, jnp.float32)), np.float64) @ vt.T
    off_diagonal = inner - np.diag(np.diag(inner))
    assert np.abs(off_diagonal).max() < 1e-4  # float32 products of 20..28 terms
    assert np.diag(inner).min() > 0.6


def test_matches_the_scalar_polynomial_on_a_diagonal() -> None:
    values = np.array([3.0, 4.0, 0.5])
    expected = values / np.linalg.norm(values)
    for _ in range(5):
        expected = 3.4445 * expected - 4.7750 * expected**3 + 2.0315 * expected**5
    x = muon.newton_schulz(jnp.diag(jnp.asarray(values, jnp.float32)))
    np.testing.assert_allclose(np.diag(x), expected, rtol=1e-5)


def test_batched_equals_loop() -> None:
    g = normal(2, E, D, F) * jnp.arange(1, E + 1, dtype=jnp.float32)[:, None, None]
    together = muon.newton_schulz(g)
    alone = jnp.stack([muon.newton_schulz(matrix) for matrix in g])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_transposed_input_gives_transposed_output() -> None:
    g = normal(3, E, D, F)
    np.testing.assert_allclose(muon.newton_schulz(g.mT), muon.newton_schulz(g).mT, atol=1e-5)


def test_zero_matrix_stays_zero_beside_others() -> None:
    g = normal(4, E, D, F).at[3].set(0.0)
    x = muon.newton_schulz(g)
    assert not x[3].any()
    assert np.isfinite(x).all()
    assert (np.abs(x[2]) > 0).any()


def test_bfloat16_is_computed_in_float32() -> None:
    g = normal(5, D, F).astype(jnp.bfloat16)
    x = muon.newton_schulz(g)
    assert x.dtype == jnp.float32
    np.testing.assert_array_equal(x, muon.newton_schulz(g.astype(jnp.float32)))


def test_vectors_are_refused() -> None:
    # a type error where annotations are checked, as in this test run when beartype is installed
    with pytest.raises((ValueError, TypeError)):
        muon.newton_schulz(jnp.ones((5,)))


@pytest.mark.parametrize("shape", [(D, F), (F, D), (E, F, 3 * D), (64, 65)])
def test_update_has_the_rms_of_adamw(shape: tuple[int, ...]) -> None:
    transform = muon.scale_by_muon()
    g = 1e-3 * normal(6, *shape)
    update, _ = transform.update(g, transform.init(g))
    rms = float(jnp.sqrt(jnp.mean(update**2)))
    # all min(rows, cols) singular values are s: RMS = .2 sqrt(max) s sqrt(min / (rows cols)) = .2 s
    assert 0.2 * 0.7 < rms < 0.2 * 1.15


def test_momentum_is_nesterov() -> None:
    transform = muon.scale_by_muon(momentum=0.9, nesterov=True)
    g1, g2 = normal(7, D, F), normal(8, D, F)
    _, state = transform.update(g1, transform.init(g1))
    update, state = transform.update(g2, state)
    accumulator = 0.9 * g1 + g2
    np.testing.assert_allclose(state.momentum, accumulator, rtol=1e-6)
    expected = 0.2 * D**0.5 * muon.newton_schulz(g2 + 0.9 * accumulator)
    np.testing.assert_allclose(update, expected, atol=1e-5)
    plain, _ = muon.scale_by_muon(momentum=0.9, nesterov=False).update(g2, muon.MuonState(g1))
    expected = 0.2 * D**0.5 * muon.newton_schulz(accumulator)
    np.testing.assert_allclose(plain, expected, atol=1e-5)


def test_direction_equals_optax_up_to_scale() -> None:
    g = normal(9, E, D, F)
    ours = muon.scale_by_muon()
    theirs = optax.contrib.scale_by_muon(
        weight_dimension_numbers=optax.contrib.MuonDimensionNumbers(1, 2)
    )
    update, _ = ours.update(g, ours.init(g))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        reference, _ = theirs.update(g, theirs.init(g), g)

    def unit(x: jax.Array) -> np.ndarray:
        flat = np.asarray(x, np.float64).reshape(E, -1)
        return flat / np.linalg.norm(flat, axis=1, keepdims=True)

    np.testing.assert_allclose(unit(update), unit(reference), atol=1e-5)


def model_params() -> dict[str, Any]:
    return {
        "embed_tokens": normal(10, 51, D),
        "lm_head": {"kernel": normal(11, D, 51)},
        "layers": [
            {
                "q_proj": normal(12, D, F),
                "experts": normal(13, E, D, F),
                "router": {"kernel": normal(14, D, E)},
                "norm": {"scale": jnp.ones((D,))},
                "sink": jnp.ones((6,)),
            }
        ],
        "stacked_norm": jnp.ones((4, D)),
    }


def test_default_split() -> None:
    marks = jax.tree_util.tree_map_with_path(muon.default_is_matrix, model_params())
    assert marks["layers"][0] == {
        "q_proj": True,
        "experts": True,
        "router": {"kernel": False},
        "norm": {"scale": False},
        "sink": False,
    }
    assert not marks["embed_tokens"]
    assert not marks["lm_head"]["kernel"]
    assert not marks["stacked_norm"]


def test_each_group_gets_its_own_rule_and_rate() -> None:
    params = model_params()
    shapes = jax.eval_shape(lambda: params)
    optimizer = muon.muon_or_adamw(
        shapes, muon_lr=optax.constant_schedule(0.01), adamw_lr=1e-3, weight_decay=0.1
    )
    grads = jax.tree.map(lambda p: 1e-2 * normal(15, *p.shape), params)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    layer, layer_grads, layer_params = (t["layers"][0] for t in (updates, grads, params))

    for name in ("q_proj", "experts"):
        g = layer_grads[name]
        direction = 0.2 * D**0.5 * muon.newton_schulz(1.95 * g)
        expected = -0.01 * (direction + 0.1 * layer_params[name])
        np.testing.assert_allclose(layer[name], expected, atol=1e-6)
    # the first step of Adam is the sign of the gradient; rank two is decayed, vectors are not
    for actual, g, p, decay in [
        (updates["embed_tokens"], grads["embed_tokens"], params["embed_tokens"], 0.1),
        (updates["lm_head"], grads["lm_head"], params["lm_head"], 0.1),
        (layer["router"], layer_grads["router"], layer_params["router"], 0.1),
        (layer["norm"], layer_grads["norm"], layer_params["norm"], 0.0),
        (layer["sink"], layer_grads["sink"], layer_params["sink"], 0.0),
        (updates["stacked_norm"], grads["stacked_norm"], params["stacked_norm"], 0.0),
    ]:
        expected = jax.tree.map(lambda g, p, d=decay: -1e-3 * (jnp.sign(g) + d * p), g, p)
        assert_tree_close(actual, expected)


def assert_tree_close(actual: Any, expected: Any) -> None:
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-6)  # Adam's eps against gradients near zero


def test_marks_as_a_tree_and_their_check() -> None:
    params = {"a": normal(16, D, F), "b": normal(17, F, D), "c": jnp.ones((5,))}
    optimizer = muon.muon_or_adamw(
        params,
        muon_lr=1.0,
        adamw_lr=1e-3,
        weight_decay=0.0,
        is_matrix={"a": True, "b": False, "c": False},
    )
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert float(jnp.abs(updates["a"]).max()) > 0.1
    assert float(jnp.abs(updates["b"]).max()) < 2e-3
    with pytest.raises(ValueError, match=r"c has shape \(5,\)"):
        muon.muon_or_adamw(
            params, muon_lr=1.0, adamw_lr=1.0, weight_decay=0.0, is_matrix=lambda path, leaf: True
        )


def test_muon_fits_a_linear_map_with_a_decaying_rate() -> None:
    goal, x = normal(18, D, F), normal(19, 96, D)
    params = {"w": jnp.zeros((D, F))}
    rate = make_schedule(WSD, 0.5, num_steps=120, warmup_steps=3, decay_fraction=0.8)
    optimizer = muon.muon_or_adamw(params, muon_lr=rate, adamw_lr=rate, weight_decay=0.0)

    def loss_of(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((x @ params["w"] - x @ goal) ** 2)

    @jax.jit
    def step(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    first = loss_of(params)
    for _ in range(120):
        params, state = step(params, state)
    assert loss_of(params) < 1e-4 * first
