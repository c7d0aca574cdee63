"""Rule sets: specs, collisions, divisibility, meshes.

Run: .venv/bin/python -m pytest tests/test_sharding.py
"""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs.tiny import mesh_target, tiny_target
from mimo_jax.config import AttentionConfig, ConfigError, TargetConfig
from mimo_jax.models.params import (
    abstract,
    flatten,
    logical_axes,
    partition_specs,
    transpose_weights,
)
from mimo_jax.models.target import Target
from mimo_jax.sharding import (
    DECODE,
    TRAIN,
    AxisRules,
    check_divides,
    constrain,
    make_mesh,
    mesh_sizes,
    part_shape,
)


def test_specs_of_the_two_rule_sets():
    assert DECODE.spec(("embed", "heads")) == P(None, "model")
    assert DECODE.spec(("experts", "expert_hidden", "embed")) == P(None, "model", None)
    assert TRAIN.spec(("experts", "expert_hidden", "embed")) == P("expert", "tensor", "data")
    assert TRAIN.spec(("batch", None)) == P(("data", "expert"), None)


def test_one_mesh_axis_cannot_cut_two_axes():
    with pytest.raises(ConfigError, match="'model' would cut both heads and vocab"):
        DECODE.spec(("heads", "vocab"))


def test_a_rule_for_an_unknown_mesh_axis_is_refused():
    with pytest.raises(ConfigError, match="'tensor', which is not a mesh axis; allowed: data"):
        AxisRules("mine", ("data",), {"heads": ("tensor",)})


def test_what_does_not_divide_is_named_with_what_would():
    with pytest.raises(ConfigError) as caught:
        check_divides("w_gate", (28, 40), ("embed", "hidden"), DECODE, {"data": 1, "model": 16})
    assert str(caught.value) == (
        "w_gate: axis hidden of 40 cannot be cut into 16 parts (rules decode: model=16); "
        "40 can be cut into 1, 2, 4, 5, 8, 10, 20, 40"
    )


def test_a_rows_axis_cut_twice_needs_the_product():
    sizes = {"data": 2, "expert": 3, "tensor": 1}
    assert check_divides("ids", (12, 5), ("batch", None), TRAIN, sizes) == P(
        ("data", "expert"), None
    )
    with pytest.raises(ConfigError, match="axis batch of 8 cannot be cut into 6"):
        check_divides("ids", (8, 5), ("batch", None), TRAIN, sizes)
    assert part_shape((12, 5), P(("data", "expert")), sizes) == (2, 5)


def test_every_weight_of_the_target_has_its_axes_also_transposed():
    graph, shapes = abstract(lambda: Target(tiny_target(), rngs=nnx.Rngs(0)))
    axes = logical_axes(shapes)
    assert axes["layers.1.experts_gate"] == ("embed", "experts", "expert_hidden")
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    _, turned = transpose_weights(graph, params)
    assert logical_axes(turned)["layers.0.w_out"] == axes["layers.0.w_out"][::-1]


def test_specs_of_a_whole_model_name_the_parameter_that_does_not_fit():
    _, shapes = abstract(lambda: Target(tiny_target(), rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="embedding: axis vocab of 61 cannot be cut into 2"):
        partition_specs(shapes, DECODE, {"data": 1, "model": 2})


def test_meshes():
    mesh = make_mesh(DECODE, (2, 4))
    assert mesh_sizes(mesh) == {"data": 2, "model": 4}
    with pytest.raises(ConfigError, match="mesh 4x4 needs 16 devices; there are 8"):
        make_mesh(DECODE, (4, 4))
    with pytest.raises(ConfigError, match="mesh 8 does not fit rules decode"):
        make_mesh(DECODE, (8,))


@pytest.mark.multi_device
def test_constrain_places_an_array():
    mesh = make_mesh(DECODE, (2, 4))
    placed = jax.jit(lambda x: constrain(x, ("batch", "vocab"), DECODE, mesh))(np.ones((4, 8)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    x = jax.numpy.ones((3,))
    assert constrain(x, ("batch",), DECODE, None) is x


def test_fp8_matrices_are_never_turned():
    """Codes lie [out, in] as it is; only the output projection and the head are turned."""
    a = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_dim=12, v_head_dim=10, rope_theta=1e4, rope_dim=4
    )
    config = TargetConfig(
        vocab_size=30, hidden_size=20, layer_kinds=("global",), attention={"global": a},
        dense_hidden_size=50, is_fp8=True,
    )  # fmt: skip
    graph, params = abstract(lambda: Target(config, rngs=nnx.Rngs(0)))
    _, turned = transpose_weights(graph, params)
    before = {name: leaf.shape for name, leaf in flatten(params).items()}
    after = {name: leaf.shape for name, leaf in flatten(turned).items()}
    assert before["layers.0.w_qkv"] == (92, 20)
    assert before["layers.0.w_qkv_scale"] == (2, 1)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"layers.0.w_out", "head"}


def test_chunks_without_whole_heads_are_refused():
    a = AttentionConfig(
        num_heads=4, num_kv_heads=4, head_dim=12, v_head_dim=10, rope_theta=1e4, rope_dim=4
    )
    sliding = dataclasses.replace(a, num_kv_heads=2, window=3)
    with pytest.raises(ConfigError, match="is_fp8: sliding heads .4 and 2. must divide into 4"):
        TargetConfig(
            vocab_size=30, hidden_size=20, layer_kinds=("global", "sliding"),
            attention={"global": a, "sliding": sliding}, dense_hidden_size=50, is_fp8=True,
        )  # fmt: skip


def test_packed_weights_and_their_scales_are_cut_in_whole_groups():
    """256 columns are 128 bytes and 8 scales; 16 parts would have 8 bytes and half a scale each."""
    rules = AxisRules("mine", ("model",), {"expert_hidden": ("model",)})
    shapes = abstract(lambda: Target(mesh_target(is_mxfp4=True), rngs=nnx.Rngs(0)))[1]
    specs = flatten(partition_specs(shapes, rules, {"model": 8}))
    assert specs["layers.1.experts_down"] == specs["layers.1.experts_down_scale"]
    assert specs["layers.1.experts_down"] == P(None, None, "model")
    with pytest.raises(ConfigError) as caught:
        partition_specs(shapes, rules, {"model": 16})
    assert str(caught.value) == (
        "layers.1.experts_down: axis expert_hidden of 256 cut into 16 parts would split MXFP4 "
        "groups of 32; it can be cut into 1, 2, 4, 8 parts"
    )
