"""Published drafters: name map, where config keys may stand, causality, round trips.

Run: .venv/bin/python -m pytest tests/checkpoint/test_hf_drafter.py
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import (
    drafter_config_from_json,
    find_drafter,
    load_drafter,
    save_drafter,
)
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import AttentionConfig, DrafterConfig
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, flatten
from tests.golden.files import DATA

QWEN3 = DATA / "qwen3-tiny-dflash"
EXPECTED = DrafterConfig(
    hidden_size=64,
    num_layers=2,
    attention=AttentionConfig(4, 2, 16, 16, rope_theta=1e4, rope_dim=16),
    dense_hidden_size=128,
    target_layer_ids=(1, 3),
    num_target_layers=6,
    draft_block_len=8,
    mask_token_id=255,
    vocab_size=256,
    max_position=512,
)


def values(**changes) -> dict:
    return json.loads((QWEN3 / "config.json").read_text()) | changes


def dflash(**changes) -> dict:
    return {"dflash_config": {"mask_token_id": 255, "target_layer_ids": [1, 3]} | changes}


def refused(call, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def same_params(left, right) -> None:
    left, right = flatten(left), flatten(right)
    assert left.keys() == right.keys()
    for name, value in left.items():
        np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_a_published_config():
    assert drafter_config_from_json(values()) == EXPECTED


def test_keys_may_stand_in_either_place_and_dflash_config_wins():
    top = values(mask_token_id=255, target_layer_ids=[1, 3])
    del top["dflash_config"]
    assert drafter_config_from_json(top) == EXPECTED
    both = values(mask_token_id=9, target_layer_ids=[0, 2], **dflash(block_size=5))
    expected = dataclasses.replace(EXPECTED, draft_block_len=5)
    assert drafter_config_from_json(both) == expected


def test_old_rope_keys():
    old = values(rope_parameters=None, rope_theta=1e6)
    assert drafter_config_from_json(old).attention.rope_theta == 1e6


SLIDING_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 11,
}


@pytest.mark.parametrize(
    ("changes", "windows", "is_causal"),
    [
        ({}, (None, None), (False, False)),
        ({"sliding_window": 11}, (None, None), (False, False)),
        (SLIDING_LAYERS, (11, None), (True, False)),
        (SLIDING_LAYERS | {"is_causal": False}, (11, None), (False, False)),
        (SLIDING_LAYERS | {"is_causal": True}, (11, None), (True, True)),
        (SLIDING_LAYERS | dflash(causal=False), (11, None), (False, False)),
        (SLIDING_LAYERS | dflash(causal=False) | {"is_causal": True}, (11, None), (True, True)),
        (dflash(use_swa=True, swa_window_size=12), (12, 12), (False, False)),
        (dflash(use_swa=True) | {"sliding_window": 13}, (13, 13), (False, False)),
        (dflash(use_swa=True, swa_window_size=12, causal=True), (12, 12), (True, True)),
        (
            {"layer_types": None, "use_sliding_window": True, "sliding_window": 11}
            | {"max_window_layers": 1},
            (None, 11),
            (False, True),
        ),
    ],
)
def test_windows_and_causality(changes, windows, is_causal):
    config = drafter_config_from_json(values(**changes))
    assert config.windows == windows
    assert config.is_causal == is_causal


def test_keys_of_the_mimo_drafter():
    config, _, params = load_drafter(DATA / "pro-tiny-dflash")
    assert config == DrafterConfig(
        hidden_size=160,
        num_layers=2,
        attention=AttentionConfig(4, 2, 32, 32, rope_theta=1e4, rope_dim=16, has_sink=True),
        dense_hidden_size=128,
        target_layer_ids=(0, 3, 5),
        num_target_layers=6,
        draft_block_len=8,
        mask_token_id=300,
        vocab_size=304,
        windows=(16, 16),
        value_scale=0.612,
        norm_eps=1e-5,
        max_position=1024,
    )
    assert flatten(params)["layers.1.sink"].dtype == jnp.bfloat16
    moved = values(attention_value_scale=0.5, attention_sink_bias=True, v_head_dim=12)
    moved |= dflash(partial_rotary_factor=0.5)
    config = drafter_config_from_json(moved)
    assert config.value_scale == 0.5
    expected = AttentionConfig(4, 2, 16, 12, rope_theta=1e4, rope_dim=8, has_sink=True)
    assert config.attention == expected
    assert drafter_config_from_json(values(add_swa_attention_sink_bias=True)).attention.has_sink


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "qwen3"]),
        ({"model_type": None}, ["model_type is missing"]),
        ({"architectures": ["DFlash2DraftModel"]}, ["architectures", "allowed: DFlashDraftModel"]),
        ({"block_size": None}, ["block_size is missing"]),
        ({"num_target_layers": None}, ["num_target_layers is missing"]),
        ({"num_target_layers": 3}, ["target_layer_ids [1, 3]", "0..2"]),
        ({"attention_bias": True}, ["attention_bias"]),
        ({"block_size": 1}, ["draft_block_len 1"]),
        (dflash(mask_token_id=256), ["mask_token_id 256"]),
        (dflash(target_layer_ids="1,3"), ["target_layer_ids", "a list of int"]),
        (dflash(target_layer_ids=[1, 1]), ["duplicates"]),
        (dflash(output_multiplier=0.5), ["dflash_config.output_multiplier 0.5"]),
        (dflash(final_logit_softcapping=30.0), ["final_logit_softcapping"]),
        (dflash(projector_type="domino"), ["projector_type", "'domino'"]),
        (dflash(sample_from_anchor=True), ["sample_from_anchor"]),
        (SLIDING_LAYERS | {"sliding_window": None}, ["sliding_window is missing"]),
    ],
)
def test_what_is_not_supported_is_named(changes, words):
    bad = values(**changes)
    refused(lambda: drafter_config_from_json(bad, "d/config.json"), "d/config.json", *words)


def test_one_weight_of_each_kind_by_value():
    _, _, params = load_drafter(QWEN3)
    flat, file = flatten(params), safetensors.numpy.load_file(QWEN3 / "model.safetensors")
    np.testing.assert_array_equal(flat["w_fuse"], file["fc.weight"].T)
    np.testing.assert_array_equal(flat["context_norm"], file["hidden_norm.weight"])
    np.testing.assert_array_equal(flat["final_norm"], file["norm.weight"])
    layer, attn = "layers.1.", "layers.1.self_attn."
    np.testing.assert_array_equal(flat[layer + "w_q"], file[attn + "q_proj.weight"].T)
    key, value = file[attn + "k_proj.weight"], file[attn + "v_proj.weight"]
    np.testing.assert_array_equal(flat[layer + "w_kv"][:, 3], key[3])
    np.testing.assert_array_equal(flat[layer + "w_kv"][:, 32 + 3], value[3])
    np.testing.assert_array_equal(flat[layer + "w_out"], file[attn + "o_proj.weight"].T)
    for name in ("q_norm", "k_norm"):
        np.testing.assert_array_equal(flat[layer + name], file[f"{attn}{name}.weight"])
    norm = file[layer + "input_layernorm.weight"]
    np.testing.assert_array_equal(flat[layer + "attention_norm"], norm)
    norm = file[layer + "post_attention_layernorm.weight"]
    np.testing.assert_array_equal(flat[layer + "ffn_norm"], norm)
    gate, up = (file[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(flat[layer + "w_gate"][:, 3], gate[3])
    np.testing.assert_array_equal(flat[layer + "w_up"][:, 3], up[3])
    np.testing.assert_array_equal(flat[layer + "w_down"], file[layer + "mlp.down_proj.weight"].T)
    assert len(file) == 2 * 11 + 3


@pytest.mark.parametrize("name", ["qwen3-tiny-dflash", "mimo-tiny-dflash", "pro-tiny-dflash"])
def test_round_trip_is_bit_identical(name, tmp_path):
    config, graph, params = load_drafter(DATA / name)
    dtype = flatten(params)["w_fuse"].dtype
    save_drafter(tmp_path, config, params, dtype=dtype, max_shard_bytes=100_000)
    again_config, again_graph, again = load_drafter(tmp_path)
    assert (again_config, again_graph) == (config, graph)
    same_params(again, params)
    ours, theirs = SafetensorsDir(tmp_path), SafetensorsDir(DATA / name)
    assert ours.names() == theirs.names()
    for key in ours.names():
        np.testing.assert_array_equal(ours.get(key), theirs.get(key), err_msg=key)


def test_written_config_says_what_the_published_class_reads(tmp_path):
    config, _, params = load_drafter(QWEN3)
    extra = {"bos_token_id": 1, "eos_token_id": None}
    save_drafter(tmp_path, config, params, dtype=jnp.float32, extra_config=extra)
    ours = json.loads((tmp_path / "config.json").read_text())
    unneeded = {"initializer_range", "pad_token_id", "transformers_version"}
    assert ours.keys() - {"is_causal"} == values().keys() - unneeded
    for key, value in ours.items():
        if key not in ("is_causal", "max_window_layers"):
            assert value == values()[key], key
    assert ours["is_causal"] is False
    sliding = dataclasses.replace(config, windows=(None, 11), is_causal=(False, False))
    save_drafter(tmp_path, sliding, params, dtype=jnp.float32)
    ours = json.loads((tmp_path / "config.json").read_text())
    assert ours["layer_types"] == ["full_attention", "sliding_attention"]
    assert (ours["use_sliding_window"], ours["sliding_window"]) == (True, 11)
    assert ours["is_causal"] is False
    assert load_drafter(tmp_path)[0] == sliding


def with_fields(**changes) -> DrafterConfig:
    return dataclasses.replace(EXPECTED, **changes)


def test_what_the_format_can_and_cannot_say(tmp_path):
    a, rng = EXPECTED.attention, np.random.default_rng(1)
    for config in (
        with_fields(windows=(11, None), is_causal=(True, False)),
        with_fields(windows=(11, 11), is_causal=(True, True)),
        with_fields(attention=dataclasses.replace(a, rope_dim=6, v_head_dim=12, has_sink=True)),
        with_fields(value_scale=0.6, target_hidden_size=40),
    ):
        graph, like = abstract(lambda config=config: Drafter(config, rngs=nnx.Rngs(0)))
        draw = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
        params = jax.tree.map(draw, like)
        save_drafter(tmp_path, config, params, dtype=jnp.float32)
        again_config, again_graph, again = load_drafter(tmp_path)
        assert (again_config, again_graph) == (config, graph)
        same_params(again, params)
    for config, word in (
        (with_fields(windows=(11, 12)), "one window"),
        (with_fields(windows=(11, None), is_causal=(False, True)), "is_causal"),
        (with_fields(use_qk_norm=False), "norms on query and key"),
    ):
        refused(lambda config=config: save_drafter(tmp_path, config, None), "config.json", word)
    refused(
        lambda: save_drafter(tmp_path, EXPECTED, None, extra_config={"block_size": 4}),
        "block_size",
    )


def test_prefixes_and_strictness(tmp_path):
    shutil.copy(QWEN3 / "config.json", tmp_path)
    tensors = safetensors.numpy.load_file(QWEN3 / "model.safetensors")

    def load(changed: dict):
        safetensors.numpy.save_file(changed, tmp_path / "draft.safetensors")
        return load_drafter(tmp_path)

    expected = load_drafter(QWEN3)[2]
    same_params(load({f"model.{name}": value for name, value in tensors.items()})[2], expected)
    norm = tensors["norm.weight"]
    refused(lambda: load(tensors | {"model.norm.weight": norm}), "model.norm.weight", "both")
    refused(lambda: load(tensors | {"lm_head.weight": norm}), "lm_head.weight", "no place")
    refused(
        lambda: load({k: v for k, v in tensors.items() if k != "hidden_norm.weight"}),
        "missing",
        "hidden_norm.weight",
    )


def test_a_damaged_mask_embedding_is_refused(tmp_path):
    directory = tmp_path / "dflash"
    assert find_drafter(tmp_path) is None
    shutil.copytree(QWEN3, directory)
    assert find_drafter(tmp_path) == directory
    load_drafter(directory)
    (directory / "mask_embedding.pt").write_bytes(b"x")
    refused(lambda: load_drafter(directory), "mask_embedding.pt", "torch file")
