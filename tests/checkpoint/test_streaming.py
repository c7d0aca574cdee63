"""Reading a checkpoint straight into the parts of a mesh.

Run: .venv/bin/python -m pytest tests/checkpoint/test_streaming.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.hf_target import load_target, open_target, target_leaves
from mimo_jax.models.params import flatten
from tests.golden.files import DATA

PRO = DATA / "pro-tiny"


@pytest.fixture(scope="module")
def whole():
    return {name: np.asarray(value) for name, value in flatten(load_target(PRO)[2]).items()}


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (8, 1)])
def test_every_device_gets_its_part(whole, shape):
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices (XLA_FLAGS=--xla_force_host_platform_device_count=8)")
    mesh = jax.make_mesh(shape, ("a", "b"))

    def sharding_of(name):
        spec = [None] * whole[name].ndim
        for axis_name, size in zip("ab", shape, strict=True):
            free = [
                i for i, n in enumerate(whole[name].shape) if spec[i] is None and n % size == 0
            ]
            if free and size > 1:
                spec[free[-1]] = axis_name
        return NamedSharding(mesh, PartitionSpec(*spec))

    progress = []
    _, _, params = load_target(
        PRO, sharding_of=sharding_of, on_progress=lambda *done: progress.append(done)
    )
    for name, value in flatten(params).items():
        assert value.sharding == sharding_of(name), name
        np.testing.assert_array_equal(np.asarray(value), whole[name], err_msg=name)
    assert progress[-1][0] == progress[-1][1] == sum(v.nbytes for v in whole.values())
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


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
