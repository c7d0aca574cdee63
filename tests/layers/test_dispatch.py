"""Experts over a mesh: values, gradients, what is dropped, and both ways to exchange rows.

Run: .venv/bin/python -m pytest tests/layers/test_dispatch.py
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers import dispatch, moe
from mimo_jax.sharding import TRAIN, make_mesh
from tests.oracles import router as oracle

B, T, D, E, F, TOP_K = 8, 4, 12, 16, 24, 3
ROUTE = functools.partial(moe.route, top_k=TOP_K, routed_scale=1.0)


def draw(seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, D), (D, E), (E,), (D, E, F), (D, E, F), (E, F, D))
    x, w_router, bias, *experts = (
        rng.standard_normal(shape).astype(np.float32) for shape in shapes
    )
    return x, w_router, 0.3 * bias, moe.Experts(*(D**-0.5 * w for w in experts))


def value_and_gradients(layer):
    """Of sum(layer * fixed numbers) by tokens, router and experts; and the layer's results."""
    cotangent = np.random.default_rng(9).standard_normal((B, T, D)).astype(np.float32)

    def loss(x, w_router, bias, experts):
        out, ids, weights = layer(ROUTE, x, w_router, bias, experts)
        return jnp.sum(out * cotangent), (out, ids, weights)

    return jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True)


def on_mesh(sizes, **options):
    mesh = make_mesh(TRAIN, sizes)
    return functools.partial(dispatch.route_and_run_on_mesh, mesh=mesh, **options)


@pytest.fixture(scope="module")
def expected():
    # dense: a way that knows nothing of slots
    layer = functools.partial(moe.route_and_run, run=moe._run_dense)
    return jax.jit(value_and_gradients(layer))(*draw())


@pytest.mark.multi_device
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (2, 1, 2, 2)])
def test_any_mesh_equals_one_device(sizes, expected):
    layer = on_mesh(sizes, capacity_factor=None)
    actual = jax.jit(value_and_gradients(layer))(*draw())
    for ours, one in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, one, atol=1e-5, rtol=1e-5)


def test_slots_literal():
    ids = jnp.array([[0, 1], [0, 2], [0, 1]], jnp.int32)
    slots = dispatch.assign_slots(ids, 3, 2)
    assert slots.slot_of_pair.tolist() == [0, 2, 1, 4, 6, 3]
    assert slots.pair_of_slot.tolist() == [0, 2, 1, 5, 3, 6]
    assert slots.num_filled.tolist() == [2, 2, 1]


@pytest.mark.multi_device
def test_each_device_group_drops_for_itself():
    """Two groups of 16 tokens, int(16 * 3 * .5) = 24 rows over 16 experts: 2 rows each."""
    x, w_router, bias, experts = draw()
    out, ids, weights = jax.jit(functools.partial(on_mesh((1, 2, 2), capacity_factor=0.5), ROUTE))(
        x, w_router, bias, experts
    )
    flat = lambda a: np.asarray(a).reshape(B * T, -1)
    out, ids, weights, x = flat(out), flat(ids), flat(weights), flat(x)
    halves = [
        oracle.run_experts(x[half], ids[half], weights[half], *experts, capacity=2)
        for half in (slice(0, 16), slice(16, 32))
    ]
    np.testing.assert_allclose(out, np.concatenate(halves), atol=1e-5, rtol=0)
    whole = oracle.run_experts(x, ids, weights, *experts)
    assert np.abs(out - whole).max() > 1e-2


@pytest.mark.multi_device
@pytest.mark.parametrize(("sizes", "exchanges"), [((1, 8, 1), 2), ((2, 2, 2), 2), ((8, 1, 1), 0)])
def test_the_forward_moves_rows_twice_and_gathers_nothing(sizes, exchanges):
    layer = functools.partial(on_mesh(sizes, capacity_factor=1.0), ROUTE)
    text = jax.jit(layer).lower(*draw()).compile().as_text()
    assert text.count(" all-to-all(") == exchanges
    # Arguments that are not placed are cut for free; what is gathered would be tokens or scores.
    assert text.count(" all-gather(") == 0


def _ragged_all_to_all_by_gather(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """What `jax.lax.ragged_all_to_all` documents, from everybody's arrays, row by row."""
    me, n = jax.lax.axis_index(axis_name), jax.lax.axis_size(axis_name)
    slices = input_offsets.shape[0] // n
    operands, starts, lengths, goals = (
        jax.lax.all_gather(a, axis_name)
        for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    index = jnp.arange(output.shape[0], dtype=jnp.int32)
    for source in range(n):
        for j in range(slices):
            i = me * slices + j
            length, goal, start = (a[source, i] for a in (lengths, goals, starts))
            rows = jnp.take(operands[source], index - goal + start, axis=0, mode="clip")
            is_here = (index >= goal) & (index < goal + length)
            output = jnp.where(is_here[:, None], rows, output)
            expected = recv_sizes[source * slices + j]
            output = jnp.where(length == expected, output, jnp.nan)  # both sides must agree
    return output


@pytest.mark.multi_device
def test_ragged_equals_padded(monkeypatch):
    """XLA:CPU has no ragged all-to-all, so its documented meaning stands in for it here."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", _ragged_all_to_all_by_gather)
    results = [
        jax.jit(value_and_gradients(on_mesh((1, 4, 2), capacity_factor=0.5, dispatch=kind)))(
            *draw()
        )
        for kind in dispatch.DISPATCHES
    ]
    for padded, ragged in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ragged, padded, atol=1e-6, rtol=1e-6)


@pytest.mark.multi_device
def test_ragged_lowers_for_cuda_forward_and_backward():
    function = value_and_gradients(
        on_mesh((2, 2, 2), capacity_factor=1.0, dispatch=dispatch.RAGGED)
    )
    lowered = jax.jit(function).trace(*draw()).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@ragged_all_to_all(") == 4  # there and back, and the gradients of both
    padded = [line for line in text.splitlines() if "stablehlo.all_to_all" in line]
    assert padded  # sizes and offsets
    assert not any("f32" in line for line in padded)


GPU_COMPILER = Path(sys.prefix) / "aot"


@pytest.mark.skipif(
    not (GPU_COMPILER / "jax_plugins/xla_cuda13").is_dir(),
    reason="needs the GPU compiler (jax-cuda13-plugin) in the environment's aot folder",
)
def test_ragged_compiles_for_eight_gpus():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(GPU_COMPILER), "."]),
        "XLA_FLAGS": "",
    }
    script = Path(__file__).with_name("ragged_on_gpus.py")
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["4"], done.stderr[-2000:]
