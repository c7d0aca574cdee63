"""Reading a checkpoint straight into the parts of a mesh.

Run: .venv/bin/python -m pytest tests/checkpoint/test_streaming.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.decoded import FUSED, DecodedTensors
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_published import save_published
from mimo_jax.checkpoint.hf_target import (
    load_target,
    open_kept,
    open_target,
    save_target,
    target_leaves,
)
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import GLOBAL, SLIDING, AttentionConfig, ConfigError, TargetConfig
from mimo_jax.models.cut import cut_model, fp8_misfit
from mimo_jax.models.params import abstract, flatten, transpose_weights
from mimo_jax.models.target import Target
from mimo_jax.sharding import DECODE, make_mesh
from tests.golden.files import DATA

PRO = DATA / "pro-tiny"


@pytest.fixture(scope="module")
def whole():
    """Every parameter of the whole model, by how FP8 was read."""
    return {
        how: {name: np.asarray(value) for name, value in flatten(params).items()}
        for how in ("expanded", "kept")
        for params in [load_target(PRO, expands_fp8=how == "expanded")[2]]
    }


@pytest.mark.multi_device
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (8, 1)])
def test_every_device_gets_its_part(whole, shape, is_transposed):
    """What is read straight into the parts is what cutting the whole model gives.

    Two devices would share a block of the dense 320, so that FP8 is expanded for them.
    """
    mesh = make_mesh(DECODE, shape)
    config, graph, params = load_target(PRO, expands_fp8=shape[1] > 1)
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
    assert progress[-1][0] == progress[-1][1] >= sum(v.nbytes for v in whole["kept"].values())
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


@pytest.fixture(scope="module")
def in_chunks(tmp_path_factory):
    """A dense checkpoint whose FP8 two devices can share: 4 chunks of 136 rows, 2 blocks each."""
    sliding = AttentionConfig(
        num_heads=8, num_kv_heads=4, head_dim=48, v_head_dim=40, rope_theta=1e4, rope_dim=16,
        window=5, has_sink=True,
    )
    attention = {SLIDING: sliding, GLOBAL: dataclasses.replace(sliding, window=None)}
    config = TargetConfig(
        vocab_size=24, hidden_size=136, layer_kinds=(GLOBAL, SLIDING), attention=attention,
        dense_hidden_size=256,
    )
    _, like = abstract(lambda: Target(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(0.1 * rng.normal(size=leaf.shape), leaf.dtype)
    directory = tmp_path_factory.mktemp("chunks")
    save_published(directory, config, jax.tree.map(draw, like), projections=FUSED)
    return directory


@pytest.mark.multi_device
def test_every_device_gets_whole_chunks(in_chunks):
    """The codes of the file, cut between chunks; the logits are those of one device, expanded."""
    config, graph, params = load_target(in_chunks, jnp.float32)
    assert config.is_fp8
    local, placed = cut_model(graph, params, config, make_mesh(DECODE, (1, 2)))
    _, part, read = load_target(in_chunks, jnp.float32, mesh=make_mesh(DECODE, (1, 2)))
    assert nnx.merge(part, read).config.num_fp8_chunks == 2
    same = lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    jax.tree.map(same, read, placed)
    shapes = {name: value.addressable_shards[0].data.shape for name, value in flatten(read).items()}
    assert shapes["layers.1.w_qkv"] == (2 * 184, 136)
    assert shapes["layers.1.w_qkv_scale"] == (2 * 2, 2)
    assert shapes["layers.0.w_down"] == (136, 128)
    assert shapes["layers.0.w_down_scale"] == (2, 1)
    ids = jnp.asarray([[3, 20, 7, 1, 15, 9]], jnp.int32)
    run = lambda graph: lambda params: nnx.merge(graph, params)(ids).logits
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, read)
    cut = jax.shard_map(
        run(part), mesh=make_mesh(DECODE, (1, 2)), in_specs=(specs,),
        out_specs=PartitionSpec(None, None, "model"), check_vma=False,
    )  # fmt: skip
    _, graph, params = load_target(in_chunks, jnp.float32, expands_fp8=True)
    want = jax.jit(run(graph))(params)
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(jax.jit(cut)(read), want, atol=2e-5)


def test_chunks_that_devices_would_share_are_expanded(in_chunks, caplog):
    config, tensors = open_kept(in_chunks, num_parts=8)
    assert not config.is_fp8
    assert isinstance(tensors, DecodedTensors)
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    assert "FP8 projections are expanded: FP8 qkv of 4 chunks cannot be cut into 8 parts" in message
    whole, graph, params = load_target(in_chunks)
    with pytest.raises(ConfigError, match="4 chunks cannot be cut into 8 parts.*load .*expanded"):
        cut_model(graph, params, whole, make_mesh(DECODE, (1, 8)))
    assert "of whole blocks of 128" in str(fp8_misfit(whole, 4))


def test_fp8_does_not_go_into_plain_layouts(in_chunks, tmp_path):
    config, _, params = load_target(in_chunks)
    with pytest.raises(CheckpointError, match=r"config.json: .*no FP8 codes.*expands_fp8=True"):
        save_target(tmp_path, config, params)


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
    kept = ("embedding", "head", "layers.1.w_qkv", "layers.0.w_down", "layers.1.experts_gate",
            "layers.2.experts_down_scale", "layers.1.w_router", "layers.1.sink",
            "layers.1.w_qkv_scale", "layers.0.w_down_scale")
    opened = {"expanded": open_target(PRO), "kept": open_kept(PRO)}
    return {
        how: (tensors, [leaf for leaf in target_leaves(config) if leaf.name in kept])
        for how, (config, tensors) in opened.items()
    }


@given(st.data())
@pytest.mark.parametrize("how", ["expanded", "kept"])
def test_any_region_of_any_parameter(leaves, whole, how, data):
    """What is read is what a slice of the whole parameter holds, and no more than its sources."""
    tensors, kept = leaves[how]
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
    stored = np.transpose(whole[how][leaf.name], np.argsort(leaf.axes))
    np.testing.assert_array_equal(value, stored[tuple(index)])
    assert num_read == value.size


def test_parameters_without_a_source_are_zero():
    leaf = name_map.zeros("bias", 5)
    assert leaf.read(lambda *_: 1 / 0, (slice(1, 4),), np.float32).tolist() == [0, 0, 0]
