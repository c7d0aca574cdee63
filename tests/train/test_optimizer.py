"""Groups, options and refusals of the optimizer; the average of weights; steps that are skipped.

Run: .venv/bin/python -m pytest tests/train/test_optimizer.py
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_target, train_mesh_target
from mimo_jax.checkpoint.store import CheckpointStore
from mimo_jax.config import SLIDING, ConfigError
from mimo_jax.models.params import abstract, flatten, split, unflatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train.config import TargetTrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.muon import newton_schulz
from mimo_jax.train.optimizer import describe_optimizer, make_optimizer
from mimo_jax.train.placement import param_shardings, place_params, state_shardings
from mimo_jax.train.step import (
    TrainState,
    apply_gradients,
    eval_params,
    init_state,
    make_target_step,
    place_batch,
)

E, D, F = 7, 28, 20
CONFIG = TargetTrainConfig(num_steps=20, warmup_steps=2, batch_rows=4, weight_decay=0.1)
POISONED_ID = 5
# Half the compile time, and the same program as far as anything here can tell.
FAST = {"xla_backend_optimization_level": 0}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def small() -> dict:
    return {
        "embedding": normal(0, 51, D),
        "layers": {"w_out": normal(1, F, D), "experts_gate": normal(2, D, E, F)},
        "norm": jnp.ones((D,)),
    }


def assert_same_bits(ours, expected, but: tuple[str, ...] = ()) -> None:
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(expected), strict=True
    )
    for (path, a), b in pairs:
        name = jax.tree_util.keystr(path)
        if name not in but:
            np.testing.assert_array_equal(a, b, err_msg=name)


def train(config: TargetTrainConfig, all_grads: list, state: TrainState | None = None):
    """States after each of some gradients, and the metrics."""
    optimizer = make_optimizer(small(), config)
    update = jax.jit(
        lambda state, grads, loss: apply_gradients(state, grads, loss, optimizer, config)
    )
    state = state or init_state(small(), optimizer, has_ema=config.ema_decay > 0)
    found = []
    for grads in all_grads:
        state, metrics = update(state, grads, jnp.float32(1.5))
        found.append((state, metrics))
    return found


def grads(seed: int, poison: float | None = None) -> dict:
    found = jax.tree.map(lambda p: 1e-2 * normal(seed, *p.shape), small())
    if poison is not None:
        found["norm"] = found["norm"].at[3].set(poison)
    return found


# ---- groups


def test_which_leaf_goes_to_which_group():
    told = describe_optimizer(small(), CONFIG)
    assert json.loads(json.dumps(told)) == told
    assert told["groups"]["muon"] == {
        "num_leaves": 2,
        "num_parameters": F * D + D * E * F,
        "peak_lr": 8e-3,
        "leaves": {"layers.experts_gate": [D, E, F], "layers.w_out": [F, D]},
        "num_matrices": 1 + E,
        "momentum": 0.95,
        "newton_schulz_steps": 5,
        "newton_schulz_dtype": "float32",
    }
    assert told["groups"]["adamw"]["leaves"] == {"embedding": [51, D], "norm": [D]}
    assert (told["schedule"], told["ema_decay"]) == ("wsd", 0.0)
    only_adamw = describe_optimizer(
        small(), dataclasses.replace(CONFIG, matrix_optimizer="adamw")
    )["groups"]
    assert list(only_adamw) == ["adamw"]
    assert only_adamw["adamw"]["num_leaves"] == 4


def test_groups_of_a_target_have_the_names_of_its_weights():
    _, params = abstract(lambda: Target(tiny_target(), rngs=nnx.Rngs(0)))
    groups = describe_optimizer(params, CONFIG)["groups"]
    names = [name for group in groups.values() for name in group["leaves"]]
    assert sorted(names) == sorted(flatten(params))
    adamw = {name.rpartition(".")[2] for name in groups["adamw"]["leaves"]}
    assert adamw >= {"embedding", "head", "w_router", "final_norm", "selection_bias"}
    muon = {name.rpartition(".")[2] for name in groups["muon"]["leaves"]}
    assert muon == {
        "w_qkv", "w_out", "w_gate", "w_up", "w_down", "experts_gate", "experts_up", "experts_down"
    }  # fmt: skip
    # per layer w_qkv and w_out; one dense layer of three; three sparse ones of three stacks
    assert groups["muon"]["num_matrices"] == 4 * 2 + 3 + 3 * 3 * 7


# ---- options


def first_update(config: TargetTrainConfig) -> dict:
    config = dataclasses.replace(config, warmup_steps=0, weight_decay=0.0, clip_norm=1e9)
    ((state, _),) = train(config, [grads(3)])
    return jax.tree.map(lambda new, old: new - old, state.params, small())


def test_newton_schulz_steps_reach_the_update():
    moved = first_update(dataclasses.replace(CONFIG, newton_schulz_steps=2))["layers"]
    expected = newton_schulz(grads(3)["layers"]["w_out"], num_steps=2)
    np.testing.assert_allclose(moved["w_out"], -8e-3 * 0.2 * D**0.5 * expected, atol=1e-6)
    stack = grads(3)["layers"]["experts_gate"].swapaxes(0, 1)
    expected = newton_schulz(stack, num_steps=2).swapaxes(0, 1)
    np.testing.assert_allclose(moved["experts_gate"], -8e-3 * 0.2 * D**0.5 * expected, atol=1e-6)


def apart(rough, exact) -> float:
    rough, exact = np.asarray(rough, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(rough - exact) / np.linalg.norm(exact))


def test_bfloat16_products_turn_the_update_by_a_fiftieth():
    g = normal(4, E, 96, 64)
    rough = newton_schulz(g, dtype=jnp.bfloat16)
    assert rough.dtype == jnp.float32
    assert 0.01 < apart(rough, newton_schulz(g)) < 0.03  # measured 0.023
    values = np.linalg.svd(np.asarray(rough, np.float64), compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.2
    updates = [
        first_update(dataclasses.replace(CONFIG, newton_schulz_dtype=dtype))["layers"]
        for dtype in ("bfloat16", "float32")
    ]
    for name in ("w_out", "experts_gate"):
        assert 0.005 < apart(updates[0][name], updates[1][name]) < 0.04


def test_momentum_and_moments_are_the_configs():
    config = dataclasses.replace(
        CONFIG, muon_momentum=0.5, adam_b1=0.25, adam_b2=0.75, clip_norm=1e9
    )
    state = train(config, [grads(3), grads(4)])[-1][0]
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
    }

    def leaf(*words: str):
        (name,) = [n for n in found if all(word in n.split("/") for word in words)]
        return found[name]

    g1, g2 = grads(3), grads(4)
    expected = 0.5 * g1["layers"]["w_out"] + g2["layers"]["w_out"]
    np.testing.assert_allclose(leaf("momentum", "w_out"), expected, rtol=1e-5, atol=1e-8)
    mean = 0.25 * 0.75 * g1["norm"] + 0.75 * g2["norm"]
    np.testing.assert_allclose(leaf("mu", "norm"), mean, rtol=1e-5, atol=1e-8)
    square = 0.75 * 0.25 * g1["norm"] ** 2 + 0.25 * g2["norm"] ** 2
    np.testing.assert_allclose(leaf("nu", "norm"), square, rtol=1e-5, atol=1e-8)


def test_adamw_on_matrices_moves_by_the_sign():
    config = dataclasses.replace(CONFIG, matrix_optimizer="adamw", adamw_lr=0.02)
    moved = first_update(config)["layers"]["experts_gate"]
    expected = -0.02 * jnp.sign(grads(3)["layers"]["experts_gate"])
    np.testing.assert_allclose(moved, expected, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrix_optimizer": "sgd"}, "matrix_optimizer 'sgd' is unknown; allowed: muon, adamw"),
        (
            {"newton_schulz_dtype": "float16"},
            "newton_schulz_dtype 'float16' is unknown; allowed: float32, bfloat16",
        ),
        ({"schedule": "step"}, "schedule 'step' is unknown; allowed: linear, cosine, wsd"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps 0 is out of range; allowed: 1 and more"),
        ({"max_bad_steps": 0}, "max_bad_steps 0 is out of range; allowed: 1 and more"),
        ({"num_steps": -1}, "num_steps -1 is out of range; allowed: 1 and more"),
        ({"muon_lr": float("nan")}, "muon_lr nan is out of range; allowed: 0 and more"),
        ({"adamw_lr": float("inf")}, "adamw_lr inf is out of range; allowed: 0 and more"),
        ({"muon_momentum": 1.0}, "muon_momentum 1.0 is out of range; allowed: 0 to below 1"),
        ({"adam_b2": -0.1}, "adam_b2 -0.1 is out of range; allowed: 0 to below 1"),
        ({"ema_decay": 1.0}, "ema_decay 1.0 is out of range; allowed: 0 to below 1"),
        ({"decay_fraction": 0.0}, "decay_fraction 0.0 is out of range; allowed: above 0 to 1"),
        ({"clip_norm": 0.0}, "clip_norm 0.0 is out of range; allowed: above 0"),
        ({"capacity_factor": 0.0}, "capacity_factor 0.0 is out of range; allowed: above 0"),
        ({"balance_rate": -1.0}, "balance_rate -1.0 is out of range; allowed: 0 and more"),
    ],
)
def test_what_no_training_can_do_is_refused_in_one_line(change, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        dataclasses.replace(CONFIG, **change)


# ---- the average of weights


def test_average_forgets_its_start_and_then_keeps_the_decay():
    """decay_t = min(.15, (1 + t) / (10 + t)) = .1, .15, .15."""
    config = dataclasses.replace(CONFIG, ema_decay=0.15)
    states = [state for state, _ in train(config, [grads(3), grads(4), grads(5)])]
    norms = [np.ones(D), *(np.asarray(state.params["norm"]) for state in states)]
    expected = norms[0]
    for kept, norm, state in zip((0.1, 0.15, 0.15), norms[1:], states, strict=True):
        expected = kept * expected + (1 - kept) * norm
        np.testing.assert_allclose(state.ema["norm"], expected, rtol=1e-6)
        assert eval_params(state) is state.ema
    assert np.abs(expected - norms[-1]).max() > 1e-4
    off = train(CONFIG, [grads(3)])[0][0]
    assert off.ema is None
    assert eval_params(off) is off.params


def test_a_state_and_a_config_that_disagree_about_the_average_are_refused():
    without = init_state(small(), make_optimizer(small(), CONFIG))
    with pytest.raises(ConfigError, match="ema_decay 0.9 does not go with a state without"):
        train(dataclasses.replace(CONFIG, ema_decay=0.9), [grads(3)], without)
    having = init_state(small(), make_optimizer(small(), CONFIG), has_ema=True)
    with pytest.raises(ConfigError, match="ema_decay 0.0 does not go with a state with an"):
        train(CONFIG, [grads(3)], having)


# ---- bad steps


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_a_bad_step_changes_counts_alone_and_the_next_one_is_as_if_it_had_not_been(poison):
    config = dataclasses.replace(CONFIG, ema_decay=0.9)
    straight = train(config, [grads(3), grads(4)])
    bumpy = train(config, [grads(3), grads(5, poison), grads(6, poison), grads(4)])
    counts = (".step", ".num_bad", ".num_skipped")
    assert_same_bits(bumpy[2][0], straight[0][0], but=counts)
    assert_same_bits(bumpy[3][0], straight[1][0], but=counts)
    names = ("is_bad", "num_bad", "num_skipped")
    told = [{name: float(metrics[name]) for name in names} for _, metrics in bumpy]
    assert told == [
        {"is_bad": 0, "num_bad": 0, "num_skipped": 0},
        {"is_bad": 1, "num_bad": 1, "num_skipped": 1},
        {"is_bad": 1, "num_bad": 2, "num_skipped": 2},
        {"is_bad": 0, "num_bad": 0, "num_skipped": 2},
    ]
    assert [int(state.step) for state, _ in bumpy] == [1, 2, 3, 4]
    assert not np.isfinite(bumpy[1][1]["grad_norm"])
    assert float(bumpy[1][1]["update_norm_muon"]) == 0.0
    # rates follow the updates that were done
    np.testing.assert_array_equal(bumpy[3][1]["lr_muon"], straight[1][1]["lr_muon"])


def test_metrics_of_a_good_step():
    config = dataclasses.replace(CONFIG, clip_norm=1e-3)
    old = small()
    ((state, metrics),) = train(config, [grads(3)])
    assert float(metrics["loss"]) == 1.5
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads(3))))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    assert norm > 1e-3  # before clipping
    np.testing.assert_allclose(metrics["lr_muon"], 0.5 * 8e-3, rtol=1e-6)
    np.testing.assert_allclose(metrics["lr_adamw"], 0.5 * 3e-3, rtol=1e-6)
    moved = jax.tree.map(lambda a, b: float(jnp.sum((a - b) ** 2)), state.params, old)
    muon = np.sqrt(moved["layers"]["w_out"] + moved["layers"]["experts_gate"])
    adamw = np.sqrt(moved["embedding"] + moved["norm"])
    np.testing.assert_allclose(metrics["update_norm_muon"], muon, rtol=1e-4)
    np.testing.assert_allclose(metrics["update_norm_adamw"], adamw, rtol=1e-4)


@functools.cache
def poisoned_target():
    """A target in which one token's embedding is not a number: batches with it are bad."""
    config = dataclasses.replace(
        train_mesh_target(), layer_kinds=(SLIDING,), is_moe_layer=(True,)
    )
    graph, params = split(Target(config, rngs=nnx.Rngs(0)))
    flat = flatten(params)
    flat["embedding"] = flat["embedding"].at[POISONED_ID].set(jnp.nan)
    return graph, unflatten(params, flat)


def rows(seed: int, has_poison: bool = False) -> PackedRows:
    shape = (8, 13)
    ids = np.random.default_rng(seed).integers(6, 71, shape, dtype=np.int32)
    if has_poison:
        ids[5, 4] = POISONED_ID
    ones = np.ones(shape, np.int32)
    positions = np.broadcast_to(np.arange(13, dtype=np.int32), shape)
    return PackedRows(ids, ones, np.ones(shape, bool), positions)


@pytest.mark.multi_device
@pytest.mark.parametrize("sizes", [None, (2, 2, 2)])
def test_a_bad_batch_is_skipped_balancing_and_all(sizes, tmp_path):
    """Through the target's whole step; on a mesh too; and the state goes on on another one."""
    mesh = None if sizes is None else make_mesh(TRAIN, sizes)
    graph, params = poisoned_target()
    config = dataclasses.replace(CONFIG, ema_decay=0.9, capacity_factor=12.0)
    optimizer = make_optimizer(params, config, mesh)
    step = make_target_step(graph, optimizer, config, mesh)

    def fresh():
        placed = place_params(jax.tree.map(jnp.copy, params), mesh)
        return init_state(placed, optimizer, mesh, has_ema=True)

    program = step.lower(fresh(), place_batch(rows(1), mesh)).compile(compiler_options=FAST)

    def run(batches):
        state = fresh()
        for batch in batches:
            state, metrics = program(state, place_batch(batch, mesh))
        return state, metrics

    straight, _ = run([rows(1), rows(2)])
    bumpy, metrics = run([rows(1), rows(3, has_poison=True), rows(2)])
    assert_same_bits(bumpy, straight, but=(".step", ".num_skipped"))
    assert (int(bumpy.step), int(bumpy.num_skipped), int(metrics["num_skipped"])) == (3, 1, 1)
    bias = flatten(bumpy.params)["layers.0.selection_bias"]
    assert float(jnp.abs(bias).max()) > 0
    if mesh is None:
        return
    places = jax.tree.leaves(param_shardings(bumpy.params, mesh))
    for leaf, place in zip(jax.tree.leaves(bumpy.ema), places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)
    store = CheckpointStore(tmp_path)
    store.save(3, bumpy, {})
    for other in (None, make_mesh(TRAIN, (4, 1, 1))):
        like = jax.eval_shape(lambda: bumpy)
        if other is not None:
            like = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                like,
                state_shardings(like, other),
            )
        found = store.restore_latest(like)
        assert found is not None
        assert_same_bits(found[1], bumpy)
