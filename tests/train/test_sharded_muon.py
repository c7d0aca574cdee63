"""Newton-Schulz on cut matrices: equal to the whole one, and what moves is counted.

Run: .venv/bin/python -m pytest tests/train/test_sharded_muon.py
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from configs.tiny import train_mesh_target
from mimo_jax.config import SLIDING
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train.config import TargetTrainConfig
from mimo_jax.train.muon import RMS_OF_ADAMW, newton_schulz
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.placement import hold_state, place_params
from mimo_jax.train.sharded_muon import newton_schulz_on_mesh
from mimo_jax.train.step import apply_gradients, init_state

pytestmark = pytest.mark.multi_device

WIDE, TALL, STACK, FEW = (24, 40), (56, 16), (16, 24, 32), (3, 24, 32)
# As sharding.TRAIN cuts them: [embed, heads], [hidden, embed], [experts, embed, expert_hidden].
SPECS = {
    WIDE: P("data", "tensor"),
    TALL: P("tensor", "data"),
    STACK: P("expert", "data", "tensor"),
}


def count(text: str) -> dict[str, int]:
    names = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter")
    return {n: found for n in names if (found := text.count(f" {n}(") + text.count(f" {n}-start("))}


def matrices(shape) -> jax.Array:
    return jax.random.normal(jax.random.key(len(shape)), shape)


@functools.cache
def expected(shape) -> np.ndarray:
    return np.asarray(jax.jit(newton_schulz)(matrices(shape)))


def on_mesh(shape, spec, sizes, **options):
    """(result, text of the compiled program)."""
    mesh = make_mesh(TRAIN, sizes)
    placed = jax.device_put(matrices(shape), NamedSharding(mesh, spec))
    iterate = lambda g: newton_schulz_on_mesh(g, spec, mesh, **options)
    program = jax.jit(iterate).lower(placed).compile()
    out = program(placed)
    assert out.sharding.is_equivalent_to(placed.sharding, len(shape))
    return out, program.as_text()


def check(shape, spec, sizes) -> dict[str, int]:
    """Compares with the unsharded result and returns the collectives of the compiled program."""
    out, text = on_mesh(shape, spec, sizes)
    whole = expected(shape)
    # an update as the optimizer applies it, at a learning rate of .05
    scale = 0.05 * RMS_OF_ADAMW * max(shape[-2:]) ** 0.5
    np.testing.assert_allclose(scale * np.asarray(out), scale * whole, atol=1e-6, rtol=0)
    np.testing.assert_allclose(out, whole, atol=1e-5, rtol=0)
    return count(text)


@pytest.mark.parametrize("shape", [WIDE, TALL])
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1)])
def test_a_cut_matrix_is_gathered_once(shape, sizes):
    assert check(shape, SPECS[shape], sizes) == {"all-gather": 1}


@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 1, 8), (2, 2, 2), (4, 2, 1)])
def test_a_stack_of_cut_matrices_is_traded_and_never_gathered(sizes):
    assert check(STACK, SPECS[STACK], sizes) == {"all-to-all": 2}


def test_experts_cut_by_expert_move_nothing():
    assert check(STACK, SPECS[STACK], (1, 8, 1)) == {}
    assert check(WIDE, SPECS[WIDE], (1, 8, 1)) == {}  # and a matrix that nobody cuts


def test_a_stack_that_cannot_be_dealt_out_is_gathered_once():
    assert check(FEW, P(None, "data", "tensor"), (2, 2, 2)) == {"all-gather": 1}


@pytest.mark.parametrize("options", [{}, {"dtype": jnp.bfloat16}, {"num_steps": 3}], ids=str)
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_a_stack_is_worked_on_bit_for_bit_as_its_parts_on_one_device(sizes, options):
    """Each of 8 devices has 2 of 16 matrices; no sum is split, whatever the options.

    Against all 16 at once the result differs by 1e-6 (float32): there XLA:CPU multiplies otherwise.
    """
    out, text = on_mesh(STACK, SPECS[STACK], sizes, **options)
    alone = jax.jit(functools.partial(newton_schulz, **options))
    parts = [alone(matrices(STACK)[first : first + 2]) for first in range(0, 16, 2)]
    np.testing.assert_array_equal(out, np.concatenate(parts))
    assert count(text) == ({} if sizes == (1, 8, 1) else {"all-to-all": 2})


def layer_params():
    config = dataclasses.replace(
        train_mesh_target(), layer_kinds=(SLIDING,), is_moe_layer=(True,)
    )
    return split(Target(config, rngs=nnx.Rngs(0)))[1]


@pytest.mark.parametrize(
    ("sizes", "change", "num_gathers", "num_trades"),
    [
        ((1, 8, 1), {}, 0, 0),
        # w_qkv and w_out, each once; three stacks of experts, there and back.
        ((2, 2, 2), {"schedule": "cosine", "newton_schulz_steps": 4}, 2, 6),
        ((2, 2, 2), {"matrix_optimizer": "adamw"}, 0, 0),
    ],
)
def test_a_whole_update_equals_that_of_one_device(
    sizes, change, num_gathers, num_trades, standard_promotion
):
    """Parameters after an update within 1e-6 (rate 8e-3), and no stack is ever gathered."""
    config = dataclasses.replace(TargetTrainConfig(warmup_steps=0), **change)
    params = layer_params()
    grads = jax.tree.map(lambda p: jax.random.normal(jax.random.key(p.size), p.shape), params)

    def program(mesh):
        optimizer = make_optimizer(params, config, mesh)

        def update(state, grads):
            state, _ = apply_gradients(state, grads, jnp.float32(1), optimizer, config)
            return hold_state(state, mesh)

        state = init_state(place_params(params, mesh), optimizer, mesh)
        arguments = (state, place_params(grads, mesh))
        return jax.jit(update).lower(*arguments).compile(), arguments

    alone, arguments = program(None)
    expected_params = alone(*arguments).params
    cut, arguments = program(make_mesh(TRAIN, sizes))
    for ours, one in zip(
        jax.tree.leaves(cut(*arguments).params), jax.tree.leaves(expected_params), strict=True
    ):
        np.testing.assert_allclose(ours, one, atol=1e-6, rtol=0)
    found = count(cut.as_text())
    assert found.get("all-gather", 0) == num_gathers
    assert found.get("all-to-all", 0) == num_trades
    # Gathered are [pieces, matrices, rows, columns]: one matrix each time.
    gathered = re.findall(r"= f32\[(\d+),(\d+),\d+,\d+\]\S* all-gather", cut.as_text())
    assert gathered == [("4", "1")] * num_gathers
