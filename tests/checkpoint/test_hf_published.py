"""Writing the published layouts: FP8 recovered bit for bit, qkv fused or as Flash, MTP heads.

Run: .venv/bin/python -m pytest tests/checkpoint/test_hf_published.py
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.checkpoint.__main__ import main
from mimo_jax.checkpoint.audit import audit
from mimo_jax.checkpoint.decoded import FUSED, SPLIT
from mimo_jax.checkpoint.hf_published import published_config, save_published
from mimo_jax.checkpoint.hf_target import load_mtp_heads, load_target, projection_layout
from mimo_jax.checkpoint.hf_target_config import target_config_from_json
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import GLOBAL, SLIDING
from mimo_jax.models.params import abstract, flatten
from mimo_jax.models.target import Target
from mimo_jax.quant import fp8
from tests.checkpoint import flash_files
from tests.golden.files import DATA

PRO = DATA / "pro-tiny"


def same_params(got, expected):
    flat = flatten(got)
    for name, value in flatten(expected).items():
        np.testing.assert_array_equal(value, flat[name], err_msg=name)


def same_bytes(ours: SafetensorsDir, theirs: SafetensorsDir):
    """Names, dtypes, shapes and every byte; -0.0 and 0.0 are two things here."""
    assert ours.names() == theirs.names()
    for name in ours.names():
        got, expected = ours.get(name), theirs.get(name)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
        assert got.tobytes() == expected.tobytes(), name


@pytest.fixture(scope="module", params=["kept", "expanded"])
def pro(request):
    target = load_target(PRO, jnp.float32, expands_fp8=request.param == "expanded")
    return target, load_mtp_heads(PRO, jnp.float32)


def test_load_save_load_is_bit_identical(pro, tmp_path):
    (config, _, params), heads = pro
    heads_params = [head for _, head in heads]
    save_published(tmp_path, config, params, projections=FUSED, mtp_params=heads_params)
    again_config, _, again = load_target(tmp_path, jnp.float32, expands_fp8=not config.is_fp8)
    assert again_config == config
    same_params(again, params)
    again_heads = load_mtp_heads(tmp_path, jnp.float32)
    assert len(again_heads) == len(heads) == 2
    for (_, head), (_, again_head) in zip(heads, again_heads, strict=True):
        same_params(again_head, head)


def test_names_dtypes_and_shapes_are_the_published_ones(pro, tmp_path):
    (config, _, params), heads = pro
    heads_params = [head for _, head in heads]
    save_published(tmp_path, config, params, projections=FUSED, mtp_params=heads_params)
    ours, theirs = SafetensorsDir(tmp_path), SafetensorsDir(PRO)
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert (ours.dtype(name), ours.shape(name)) == (theirs.dtype(name), theirs.shape(name))
    kept = [name for name in ours.names() if ".experts." in name]
    if config.is_fp8:
        codes = [n for n in ours.names() if n.startswith("model.layers") and n.endswith("_inv")]
        assert len(codes) == 6 + 3  # qkv of every layer, the dense matrices of the first
        kept += codes + [name.removesuffix("_scale_inv") for name in codes]
    for name in kept:
        assert ours.get(name).tobytes() == theirs.get(name).tobytes(), name


def test_config_there_and_back(pro):
    # Whether projections are codes is said by the tensors, not by config.json.
    config = dataclasses.replace(pro[0][0], is_fp8=False)
    assert target_config_from_json(published_config(pro[0][0], FUSED)) == config
    bare = dataclasses.replace(
        config,
        layer_kinds=(GLOBAL,) * 6,
        attention={GLOBAL: config.attention[GLOBAL]},
        moe=None,
        is_moe_layer=(False,) * 6,
    )
    assert target_config_from_json(published_config(bare, FUSED)) == bare


def test_what_the_layout_cannot_say_is_refused(pro, tmp_path):
    config, _, params = pro[0]
    config = dataclasses.replace(config, is_fp8=False)
    sliding = dataclasses.replace(config.attention[SLIDING], num_kv_heads=2)
    for bad, word in (
        (dataclasses.replace(config, tie_embeddings=True), "mimo_v2 needs an untied head"),
        (dataclasses.replace(config, use_qk_norm=True), "without norms"),
        (
            dataclasses.replace(config, attention=config.attention | {SLIDING: sliding}),
            "divide into 4 shards",
        ),
    ):
        with pytest.raises(CheckpointError, match=word):
            published_config(bad, FUSED)
    with pytest.raises(CheckpointError, match="'chunked' unknown; allowed: 'split', 'fused_qkv'"):
        published_config(config, "chunked")
    with pytest.raises(CheckpointError, match="must not set hidden_size"):
        save_published(
            tmp_path, config, params, projections=FUSED, extra_config={"hidden_size": 1}
        )


def test_export_command(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(PRO), str(out), "--layout", "published"]) == 0
    audits = audit(out)
    assert [audits[part].problem for part in ("target", "drafter")] == [None, None]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 299
    capsys.readouterr()


# --- the layout of MiMo-V2-Flash ------------------------------------------------------------


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    return flash_files.write(tmp_path_factory.mktemp("flash"))


def test_flash_exported_is_the_file_it_came_from(flash, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(flash), str(out), "--layout", "published"]) == 0
    same_bytes(SafetensorsDir(out), SafetensorsDir(flash))
    written = json.loads((out / "config.json").read_text())
    assert {key: written.get(key) for key in flash_files.CONFIG} == flash_files.CONFIG | {
        "routed_scaling_factor": 1.0,  # what null means
        "partial_rotary_factor": written["partial_rotary_factor"],
        "quantization_config": written["quantization_config"],
    }
    assert "attention_projection_layout" not in written
    assert audit(out)["target"].problem is None
    config, _, params = load_target(flash, jnp.float32)
    again_config, _, again = load_target(out, jnp.float32)
    assert again_config == config
    assert config.is_fp8
    same_params(again, params)
    heads, again_heads = load_mtp_heads(flash, jnp.float32), load_mtp_heads(out, jnp.float32)
    assert len(heads) == len(again_heads) == 2
    for (_, head), (_, again_head) in zip(heads, again_heads, strict=True):
        same_params(again_head, head)
    capsys.readouterr()


def test_which_layout_a_config_speaks_of():
    key = "attention_projection_layout"
    for values, layout in (
        ({"model_type": "mimo_v2_flash"}, "split"),
        ({"model_type": "mimo_v2_flash", key: None}, "split"),
        ({"model_type": "mimo_v2_flash", key: "fused_qkv"}, "fused_qkv"),
        ({"model_type": "mimo_v2", key: "split"}, "split"),
        ({"model_type": "mimo_v2", key: "fused_qkv"}, "fused_qkv"),
    ):
        assert projection_layout(values, "config.json") == layout
    for values, word in (({"model_type": "mimo_v2"}, "missing"), ({key: "fused"}, "'fused'")):
        with pytest.raises(CheckpointError, match=f"config.json: {key} .*{word}.*'fused_qkv'"):
            projection_layout(values, "config.json")


def test_a_mimo_v2_that_does_not_say_is_not_exported(flash, tmp_path, capsys):
    """It is read all the same: what the files hold is in their names."""
    source = flash_files.write(tmp_path / "in", model_type="mimo_v2")
    assert main(["export", str(source), str(tmp_path / "out"), "--layout", "published"]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "attention_projection_layout is missing" in message
    assert not (tmp_path / "out").exists()
    same_params(load_target(source, jnp.float32)[2], load_target(flash, jnp.float32)[2])


def test_keys_and_values_within_one_block(pro, tmp_path):
    """48 key and 32 value rows a shard are one block, whose scale goes with the keys."""
    config = dataclasses.replace(
        pro[0][0],
        layer_kinds=(GLOBAL, SLIDING),
        moe=None,
        is_moe_layer=(False, False),
        is_fp8=False,
    )
    _, like = abstract(lambda: Target(config, rngs=nnx.Rngs(0), dtype=jnp.float32))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), like)
    first, second = tmp_path / "first", tmp_path / "second"
    save_published(first, config, params, projections=SPLIT)
    scales = [f"model.layers.1.self_attn.{part}_proj.weight_scale_inv" for part in "qkv"]
    assert [SafetensorsDir(first).shape(name) for name in scales] == [(6, 2), (4, 2), (0, 2)]
    again_config, _, again = load_target(first, jnp.float32)
    assert again_config == config
    # Random weights are rounded, once: half a step of 3 bits, and the step at zero.
    w_qkv, again_w_qkv = (flatten(p)["layers.1.w_qkv"] for p in (params, again))
    np.testing.assert_allclose(again_w_qkv, w_qkv, rtol=1 / 16, atol=2e-5)
    save_published(second, config, again, projections=SPLIT)
    same_bytes(SafetensorsDir(second), SafetensorsDir(first))


# --- the codes themselves -------------------------------------------------------------------


def test_a_block_keeps_its_codes():
    codes = np.array([[0.5, -1.0, 448.0, 0.0]], ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.37]], np.float32)
    got_codes, got_scale = fp8.quantize(fp8.dequantize(codes, scale))
    np.testing.assert_array_equal(got_codes.view(np.uint8), codes.view(np.uint8))
    np.testing.assert_array_equal(got_scale, scale)


def test_zero_and_wild_blocks():
    codes, scale = fp8.quantize(np.zeros((3, 130), np.float32))
    assert not codes.astype(np.float32).any()
    assert scale.tolist() == [[1.0, 1.0]]
    with pytest.raises(ValueError, match="not finite"):
        fp8.quantize(np.array([[np.nan]], np.float32))
    # No scale reproduces these: rounded to nearest, within half a code's step.
    values = np.array([[1.0, 1.23456, -0.777]], np.float32)
    codes, scale = fp8.quantize(values)
    np.testing.assert_allclose(fp8.dequantize(codes, scale), values, rtol=1 / 16)


@given(
    st.lists(st.integers(0, 255).filter(lambda byte: byte & 127 != 127), min_size=1, max_size=40),
    st.floats(2**-20, 2**14, width=32),
)
def test_any_codes_under_any_scale_come_back(codes, scale):
    """Values are reproduced; the codes too, unless another scale says the same."""
    stored = np.array([codes], np.uint8).view(ml_dtypes.float8_e4m3fn)
    values = fp8.dequantize(stored, np.array([[scale]], np.float32))
    np.testing.assert_array_equal(fp8.dequantize(*fp8.quantize(values)), values)


def test_chunks_have_blocks_of_their_own():
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 126, (272, 150)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    scale = rng.uniform(0.1, 3, fp8.scale_shape((272, 150), 2)).astype(np.float32)
    values = fp8.dequantize(stored, scale, 2)
    codes, got = fp8.quantize(values, 2)
    assert got.shape == (4, 2)
    np.testing.assert_array_equal(fp8.dequantize(codes, got, 2), values)
