"""Reading a checkpoint straight into the parts of a mesh.

Run: .venv/bin/python -m pytest tests/checkpoint/test_streaming.py
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target, open_target, target_leaves
from mimo_jax.models.cut import cut_model
from mimo_jax.models.params import flatten, transpose_weights
from mimo_jax.sharding import DECODE, make_mesh
from tests.golden.files import DATA

PRO = DATA / "pro-tiny"


@pytest.fixture(scope="module")
def whole():
    return {name: np.asarray(value) for name, value in flatten(load_target(PRO)[2]).items()}


@pytest.mark.multi_device
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (8, 1)])
def test_every_device_gets_its_part(whole, shape, is_transposed):
    """What is read straight into the parts is what cutting the whole model gives."""
    mesh = make_mesh(DECODE, shape)
    config, graph, params = load_target(PRO)
    if is_transposed:
        graph, params = transpose_weights(graph, params)
    _, cut = cut_model(graph, params, config, mesh)
    progress = []
    _, part, placed = load_target(
        PRO,
        mesh=mesh,
        is_transposed=is_transposed,
        on_progress=lambda *done: progress.append(done),
    )
    assert nnx.merge(part, placed).is_transposed == is_transposed
    expected = flatten(cut)
    for name, value in flatten(placed).items():
        assert value.sharding.is_equivalent_to(expected[name].sharding, value.ndim), name
        np.testing.assert_array_equal(np.asarray(value), np.asarray(expected[name]), err_msg=name)
    assert progress[-1][0] == progress[-1][1] >= sum(v.nbytes for v in whole.values())
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


@pytest.mark.multi_device
def test_a_drafter_is_cut_as_it_is_read():
    mesh = make_mesh(DECODE, (1, 2))
    config, graph, params = load_drafter(PRO / "dflash")
    _, cut = cut_model(graph, params, config, mesh)
    _, part, placed = load_drafter(PRO / "dflash", mesh=mesh)
    assert nnx.merge(part, placed).mesh_axis == "model"
    for name, value in flatten(placed).items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(flatten(cut)[name]), name)


def test_rows_in_another_order_are_read_as_pieces():
    leaf = name_map.columns("w_qkv", 3, {"q": 4, "k": 1}).in_rows(np.array([0, 1, 4, 2, 3, 4]))
    assert (leaf.sources, leaf.offsets) == (("q", "k", "q", "k"), (0, 0, 2, 0))
    files = {"q": np.arange(12.0).reshape(4, 3), "k": np.full((1, 3), -1.0)}
    get = lambda source, region: files[source][region]
    value = leaf.read(get, (slice(1, 5), slice(0, 2)), np.float32)
    assert value.tolist() == [[3, 4], [-1, -1], [6, 7], [9, 10]]


@pytest.fixture(scope="module")
def leaves():
    config, tensors = open_target(PRO)
    kept = ("embedding", "head", "layers.1.w_qkv", "layers.0.w_down", "layers.1.experts_gate",
            "layers.2.experts_down_scale", "layers.1.w_router", "layers.1.sink")
    return tensors, [leaf for leaf in target_leaves(config) if leaf.name in kept]


@given(st.data())
def test_any_region_of_any_parameter(leaves, whole, data):
    """What is read is what a slice of the whole parameter holds, and no more than its sources."""
    tensors, kept = leaves
    leaf = data.draw(st.sampled_from(kept))
    index = []
    for size in leaf.stored_shape:
        low = data.draw(st.integers(0, size - 1))
        index.append(slice(low, data.draw(st.integers(low + 1, size))))
    num_read = 0

    def get(source, region):
        nonlocal num_read
        part = tensors.get(source, region)
        num_read += part.size
        return part

    value = leaf.read(get, tuple(index), leaf.dtype or np.dtype(jnp.bfloat16))
    stored = np.transpose(whole[leaf.name], np.argsort(leaf.axes))
    np.testing.assert_array_equal(value, stored[tuple(index)])
    assert num_read == value.size


def test_parameters_without_a_source_are_zero():
    leaf = name_map.zeros("bias", 5)
    assert leaf.read(lambda *_: 1 / 0, (slice(1, 4),), np.float32).tolist() == [0, 0, 0]
