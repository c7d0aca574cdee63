"""Writing the published layout: FP8 recovered bit for bit, fused qkv, packed experts, MTP heads.

Run: .venv/bin/python -m pytest tests/checkpoint/test_hf_published.py
"""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.checkpoint.__main__ import main
from mimo_jax.checkpoint.audit import audit
from mimo_jax.checkpoint.hf_published import published_config, save_published
from mimo_jax.checkpoint.hf_target import load_mtp_heads, load_target
from mimo_jax.checkpoint.hf_target_config import target_config_from_json
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import GLOBAL, SLIDING
from mimo_jax.models.params import flatten
from mimo_jax.quant import fp8
from tests.golden.files import DATA

PRO = DATA / "pro-tiny"


@pytest.fixture(scope="module")
def pro():
    return load_target(PRO, jnp.float32), load_mtp_heads(PRO, jnp.float32)


def test_load_save_load_is_bit_identical(pro, tmp_path):
    (config, _, params), heads = pro
    save_published(tmp_path, config, params, mtp_params=[head for _, head in heads])
    again_config, _, again = load_target(tmp_path, jnp.float32)
    assert again_config == config
    flat = flatten(again)
    for name, value in flatten(params).items():
        np.testing.assert_array_equal(value, flat[name], err_msg=name)
    again_heads = load_mtp_heads(tmp_path, jnp.float32)
    assert len(again_heads) == len(heads) == 2
    for (_, head), (_, again_head) in zip(heads, again_heads, strict=True):
        for name, value in flatten(head).items():
            np.testing.assert_array_equal(value, flatten(again_head)[name], err_msg=name)


def test_names_dtypes_and_shapes_are_the_published_ones(pro, tmp_path):
    (config, _, params), heads = pro
    save_published(tmp_path, config, params, mtp_params=[head for _, head in heads])
    ours, theirs = SafetensorsDir(tmp_path), SafetensorsDir(PRO)
    assert ours.names() == theirs.names()
    for name in ours.names():
        assert (ours.dtype(name), ours.shape(name)) == (theirs.dtype(name), theirs.shape(name))
    packed = [name for name in ours.names() if ".experts." in name]
    for name in packed:
        np.testing.assert_array_equal(ours.get(name), theirs.get(name), err_msg=name)


def test_config_there_and_back(pro):
    config = pro[0][0]
    assert target_config_from_json(published_config(config)) == config
    bare = dataclasses.replace(
        config,
        layer_kinds=(GLOBAL,) * 6,
        attention={GLOBAL: config.attention[GLOBAL]},
        moe=None,
        is_moe_layer=(False,) * 6,
    )
    assert target_config_from_json(published_config(bare)) == bare


def test_what_the_layout_cannot_say_is_refused(pro, tmp_path):
    config, _, params = pro[0]
    sliding = dataclasses.replace(config.attention[SLIDING], num_kv_heads=2)
    for bad, word in (
        (dataclasses.replace(config, tie_embeddings=True), "untied head"),
        (dataclasses.replace(config, use_qk_norm=True), "without norms"),
        (
            dataclasses.replace(config, attention=config.attention | {SLIDING: sliding}),
            "divide into 4 shards",
        ),
    ):
        with pytest.raises(CheckpointError, match=word):
            published_config(bad)
    with pytest.raises(CheckpointError, match="must not set hidden_size"):
        save_published(tmp_path, config, params, extra_config={"hidden_size": 1})


def test_export_command(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(PRO), str(out), "--layout", "published"]) == 0
    audits = audit(out)
    assert [audits[part].problem for part in ("target", "drafter")] == [None, None]
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 299
    capsys.readouterr()


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
