"""Newton-Schulz on cut matrices: equal to the whole one, and what moves is counted.

Run: .venv/bin/python -m pytest tests/train/test_sharded_muon.py
"""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train.muon import RMS_OF_ADAMW, newton_schulz
from mimo_jax.train.sharded_muon import newton_schulz_on_mesh

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


@functools.cache
def expected(shape):
    g = jax.random.normal(jax.random.key(len(shape)), shape)
    return g, np.asarray(jax.jit(newton_schulz)(g))


def check(shape, spec, sizes) -> dict[str, int]:
    """Compares with the unsharded result and returns the collectives of the compiled program."""
    mesh = make_mesh(TRAIN, sizes)
    g, whole = expected(shape)
    placed = jax.device_put(g, NamedSharding(mesh, spec))
    program = jax.jit(lambda g: newton_schulz_on_mesh(g, spec, mesh)).lower(placed).compile()
    out = program(placed)
    assert out.sharding.is_equivalent_to(placed.sharding, g.ndim)
    # an update as the optimizer applies it, at a learning rate of .05
    scale = 0.05 * RMS_OF_ADAMW * max(shape[-2:]) ** 0.5
    np.testing.assert_allclose(scale * np.asarray(out), scale * whole, atol=1e-6, rtol=0)
    np.testing.assert_allclose(out, whole, atol=1e-5, rtol=0)
    return count(program.as_text())


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
