"""Published target checkpoints: name map, config styles, strictness, round trips.

Run: .venv/bin/python -m pytest tests/checkpoint/test_hf_target.py

Whether the loaded model computes the right thing is the business of tests/models.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from mimo_jax.checkpoint.hf_target import load_target, save_target
from mimo_jax.checkpoint.hf_target_config import target_config_from_json
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    MoeConfig,
    RopeScaling,
    TargetConfig,
)
from mimo_jax.models.params import abstract, flatten, split, unflatten
from mimo_jax.models.target import Target
from tests.golden.files import DATA

MIMO = DATA / "mimo-tiny"


def read_config(name: str, file: str = "config.json") -> dict:
    return json.loads((DATA / name / file).read_text())


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
        assert value.dtype == right[name].dtype, name
        np.testing.assert_array_equal(value, right[name], err_msg=name)


@pytest.fixture(scope="module")
def mimo():
    return load_target(MIMO)


def test_both_config_styles_mean_one_target():
    expected = TargetConfig(
        vocab_size=256,
        hidden_size=64,
        layer_kinds=(GLOBAL, *[SLIDING] * 4, GLOBAL, SLIDING),
        attention={
            GLOBAL: AttentionConfig(8, 2, 24, 16, rope_theta=5e6, rope_dim=8),
            SLIDING: AttentionConfig(
                8, 4, 24, 16, rope_theta=1e4, rope_dim=8, window=8, has_sink=True
            ),
        },
        dense_hidden_size=128,
        moe=MoeConfig(num_experts=8, top_k=2, hidden_size=32),
        is_moe_layer=(False, *[True] * 6),
        value_scale=0.707,
        norm_eps=1e-5,
        max_position=512,
    )
    assert target_config_from_json(read_config("mimo-tiny")) == expected
    published = read_config("mimo-tiny", "config.published_style.json")
    assert target_config_from_json(published) == expected
    only_size = {key: value for key, value in published.items() if key != "sliding_window"}
    assert target_config_from_json(only_size) == expected


def test_the_published_style_of_the_large_model():
    """Equal KV heads on both kinds, and an irregular list of global layers."""
    published = read_config("mimo-tiny", "config.published_style.json") | {
        "model_type": "mimo_v2",
        "swa_num_key_value_heads": 2,
        "swa_v_head_dim": 20,
        "head_dim": 192,
        "swa_head_dim": 192,
        "add_full_attention_sink_bias": True,
        "routed_scaling_factor": 2.5,
    }
    config = target_config_from_json(published)
    assert config.attention[SLIDING].num_kv_heads == config.attention[GLOBAL].num_kv_heads == 2
    assert config.attention[SLIDING].v_head_dim == 20
    assert config.attention[GLOBAL].rope_dim == 64  # int(192 * 0.334)
    assert config.attention[GLOBAL].has_sink
    assert config.moe.routed_scale == 2.5


def test_qwen3():
    assert target_config_from_json(read_config("qwen3-tiny")) == TargetConfig(
        vocab_size=256,
        hidden_size=64,
        layer_kinds=(GLOBAL,) * 6,
        attention={GLOBAL: AttentionConfig(4, 2, 16, 16, rope_theta=1e4, rope_dim=16)},
        dense_hidden_size=128,
        use_qk_norm=True,
        norm_eps=1e-6,
        max_position=512,
    )
    sliding = read_config("qwen3-tiny") | {
        "layer_types": None,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 4,
    }
    config = target_config_from_json(sliding)
    assert config.layer_kinds == (GLOBAL,) * 4 + (SLIDING,) * 2
    assert config.attention[SLIDING].window == 9


def test_qwen3_moe():
    values = read_config("qwen3-tiny") | {
        "model_type": "qwen3_moe",
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 1,
    }
    config = target_config_from_json(values)
    assert config.moe == MoeConfig(5, 3, 24, scoring="softmax")
    assert config.is_moe_layer == (True, False, True, True, True, True)
    for bad in (False, None):
        refused(
            lambda bad=bad: target_config_from_json(values | {"norm_topk_prob": bad}),
            "norm_topk_prob",
            "allowed: True",
        )


LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 96,
    "tie_word_embeddings": True,
}


def test_llama_and_its_rope_scaling():
    config = target_config_from_json(LLAMA)
    assert config.attention[GLOBAL] == AttentionConfig(6, 3, 4, 4, rope_theta=5e5, rope_dim=4)
    assert config.tie_embeddings
    assert not config.use_qk_norm
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    old = target_config_from_json(LLAMA | {"rope_scaling": llama3})
    new = target_config_from_json(LLAMA | {"rope_parameters": llama3 | {"rope_theta": 5e5}})
    assert old == new
    assert old.attention[GLOBAL].rope_scaling == expected
    linear = target_config_from_json(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}})
    assert linear.attention[GLOBAL].rope_scaling == RopeScaling("linear", 2.0)
    yarn = LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2}}
    refused(lambda: target_config_from_json(yarn), "rope_scaling.rope_type", "'yarn'", "llama3")


STYLES = {"transformers": "config.json", "published": "config.published_style.json"}
REFUSED = [
    ("transformers", {"model_type": "gpt2"}, ["model_type", "'gpt2'", "mimo_v2_flash", "llama"]),
    ("transformers", {"model_type": None}, ["model_type is missing"]),
    ("transformers", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "silu"]),
    ("transformers", {"attention_bias": True}, ["attention_bias", "False"]),
    ("transformers", {"vocab_size": None}, ["vocab_size is missing"]),
    ("transformers", {"hidden_size": "64"}, ["hidden_size", "'64'", "an integer"]),
    ("transformers", {"norm_topk_prob": False}, ["norm_topk_prob"]),
    ("transformers", {"n_group": 2}, ["n_group 2"]),
    ("transformers", {"num_key_value_heads": 3}, ["num_heads 8", "num_kv_heads 3"]),
    ("transformers", {"sliding_window_size": 8}, ["sliding_window_size"]),
    ("transformers", {"attention_value_scale": None}, ["attention_value_scale is missing"]),
    ("transformers", {"layer_types": ["full_attention"]}, ["layer_types has 1 entries for 7"]),
    ("transformers", {"layer_types": ["chunked"] * 7}, ["layer_types", "'chunked'", "sliding_att"]),
    ("transformers", {"rope_parameters": {}}, ["rope_parameters.full_attention is missing"]),
    ("published", {"sliding_window_size": 9}, ["sliding_window is 8", "9"]),
    ("published", {"scoring_func": "softmax"}, ["scoring_func", "sigmoid"]),
    ("published", {"topk_method": "greedy"}, ["topk_method", "noaux_tc"]),
    ("published", {"n_shared_experts": 1}, ["n_shared_experts 1"]),
    ("published", {"rope_scaling": {"type": "yarn"}}, ["rope_scaling"]),
    ("published", {"hybrid_layer_pattern": [0, 1, 2, 1, 1, 0, 1]}, ["hybrid_layer_pattern has 2"]),
    ("published", {"moe_layer_freq": 1}, ["moe_layer_freq is 1, expected a list"]),
    ("published", {"swa_num_key_value_heads": None}, ["swa_num_key_value_heads is missing"]),
    ("published", {"layer_types": ["full_attention"] * 7}, ["layer_types", "hybrid_layer_pattern"]),
]


@pytest.mark.parametrize(("style", "change", "words"), REFUSED)
def test_what_is_not_supported_is_named(style, change, words):
    values = read_config("mimo-tiny", STYLES[style]) | change
    refused(lambda: target_config_from_json(values, "dir/config.json"), "dir/config.json", *words)


def test_one_weight_of_each_kind_by_value(mimo):
    _, _, params = mimo
    flat, file = flatten(params), {}
    for path in MIMO.glob("*.safetensors"):
        file |= safetensors.numpy.load_file(path)
    embedding = file["model.embed_tokens.weight"]
    np.testing.assert_array_equal(flat["embedding"][113], embedding[113])
    np.testing.assert_array_equal(flat["head"][:, 113], file["lm_head.weight"][113])
    np.testing.assert_array_equal(flat["final_norm"], file["model.norm.weight"])
    layer, attn = "model.layers.1.", "model.layers.1.self_attn."
    # Columns of w_qkv: 8 * 24 queries, then 4 * 24 keys, then 4 * 16 values.
    for column, name, row in ((5, "q", 5), (191, "q", 191), (192, "k", 0), (288, "v", 0)):
        expected = file[f"{attn}{name}_proj.weight"][row]
        np.testing.assert_array_equal(flat["layers.1.w_qkv"][:, column], expected)
    assert flat["layers.1.w_qkv"].shape == (64, 192 + 96 + 64)
    assert flat["layers.0.w_qkv"].shape == (64, 192 + 48 + 32)
    np.testing.assert_array_equal(flat["layers.1.w_out"][9], file[attn + "o_proj.weight"][:, 9])
    np.testing.assert_array_equal(flat["layers.1.sink"], file[attn + "attention_sink_bias"])
    assert "layers.0.sink" not in flat
    norm = file[layer + "input_layernorm.weight"]
    np.testing.assert_array_equal(flat["layers.1.attention_norm"], norm)
    norm = file[layer + "post_attention_layernorm.weight"]
    np.testing.assert_array_equal(flat["layers.1.ffn_norm"], norm)
    gate, up = (file[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    np.testing.assert_array_equal(flat["layers.0.w_gate"][:, 3], gate[3])
    np.testing.assert_array_equal(flat["layers.0.w_up"][:, 3], up[3])
    down = file["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(flat["layers.0.w_down"], down.T)
    expert = layer + "mlp.experts.6."
    up = file[expert + "up_proj.weight"]
    np.testing.assert_array_equal(flat["layers.1.experts_up"][:, 6, 3], up[3])
    gate = file[expert + "gate_proj.weight"]
    np.testing.assert_array_equal(flat["layers.1.experts_gate"][:, 6, 3], gate[3])
    down = file[expert + "down_proj.weight"]
    np.testing.assert_array_equal(flat["layers.1.experts_down"][6], down.T)
    router = file[layer + "mlp.gate.weight"]
    np.testing.assert_array_equal(flat["layers.1.w_router"], router.T)
    bias = file[layer + "mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(flat["layers.1.selection_bias"], bias)


def test_qk_norms_of_qwen3():
    _, _, params = load_target(DATA / "qwen3-tiny")
    file = safetensors.numpy.load_file(DATA / "qwen3-tiny" / "model.safetensors")
    for name in ("q_norm", "k_norm"):
        expected = file[f"model.layers.2.self_attn.{name}.weight"]
        np.testing.assert_array_equal(flatten(params)[f"layers.2.{name}"], expected)


def test_round_trip_is_bit_identical(mimo, tmp_path):
    config, graph, params = mimo
    save_target(tmp_path, config, params, dtype=jnp.float32, max_shard_bytes=300_000)
    again_config, again_graph, again = load_target(tmp_path)
    assert (again_config, again_graph) == (config, graph)
    same_params(again, params)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert max(file.stat().st_size for file in files) < 310_000
    # The same names, shapes and values as the file that we had read.
    ours, theirs = SafetensorsDir(tmp_path), SafetensorsDir(MIMO)
    assert ours.names() == theirs.names()
    for name in ours.names():
        np.testing.assert_array_equal(ours.get(name), theirs.get(name), err_msg=name)


def test_written_config_says_what_transformers_wrote(mimo, tmp_path):
    config, _, params = mimo
    extra = {"eos_token_id": [5, 7], "pad_token_id": 0}
    save_target(tmp_path, config, params, dtype=jnp.float32, extra_config=extra)
    ours = json.loads((tmp_path / "config.json").read_text())
    theirs = read_config("mimo-tiny")
    # 0.334 and 1/3 rotate the same eight of 24 dims.
    for kind in ours["rope_parameters"].values():
        assert int(24 * kind.pop("partial_rotary_factor")) == 8
    for kind in theirs["rope_parameters"].values():
        kind.pop("partial_rotary_factor")
    unneeded = {"bos_token_id", "initializer_range", "output_router_logits", "transformers_version"}
    assert ours.keys() == theirs.keys() - unneeded
    assert "sliding_window_size" not in ours
    for key, value in ours.items():
        assert value == extra.get(key, theirs[key]), key
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == extra


def test_bfloat16_keeps_the_router_in_float32(mimo, tmp_path):
    config, _, params = mimo
    save_target(tmp_path, config, params)
    tensors = SafetensorsDir(tmp_path)
    for name in tensors.names():
        is_router = ".mlp.gate." in name
        assert tensors.dtype(name) == (np.float32 if is_router else jnp.bfloat16), name
    _, graph, loaded = load_target(tmp_path)
    for name, value in flatten(loaded).items():
        is_router = name.endswith(("w_router", "selection_bias"))
        assert value.dtype == (jnp.float32 if is_router else jnp.bfloat16), name
    assert nnx.merge(graph, loaded).dtype == jnp.bfloat16
    _, _, wide = load_target(tmp_path, jnp.float32)
    for name, value in flatten(wide).items():
        same = np.asarray(flatten(loaded)[name]).astype(np.float32)
        np.testing.assert_array_equal(value, same, err_msg=name)
    rounded = np.asarray(flatten(params)["layers.3.w_qkv"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(flatten(loaded)["layers.3.w_qkv"], rounded)


def small(**changes) -> TargetConfig:
    a = AttentionConfig(6, 3, 4, 4, rope_theta=1e4, rope_dim=4)
    fields = {
        "vocab_size": 40,
        "hidden_size": 20,
        "layer_kinds": (GLOBAL, GLOBAL),
        "attention": {GLOBAL: a},
        "dense_hidden_size": 28,
    }
    return TargetConfig(**(fields | changes))


FAMILIES = {
    "llama": small(tie_embeddings=True),
    "qwen3": small(
        use_qk_norm=True,
        layer_kinds=(GLOBAL, SLIDING),
        attention={
            GLOBAL: AttentionConfig(6, 3, 4, 4, 1e4, 4, rope_scaling=RopeScaling("linear", 2.0)),
            SLIDING: AttentionConfig(
                6, 3, 4, 4, 1e4, 4, window=9, rope_scaling=RopeScaling("linear", 2.0)
            ),
        },
    ),
    "qwen3_moe": small(
        use_qk_norm=True,
        moe=MoeConfig(7, 2, 16, scoring="softmax"),
        is_moe_layer=(True, False),
    ),
    "mimo_v2_flash": small(
        layer_kinds=(SLIDING, SLIDING),
        attention={SLIDING: AttentionConfig(6, 2, 10, 4, 1e4, 6, window=9, has_sink=True)},
        moe=MoeConfig(7, 2, 16, routed_scale=2.5),
        is_moe_layer=(False, True),
        value_scale=0.6,
    ),
}


def random_target(config: TargetConfig, seed: int):
    """(graph, params) without the many small programs of a real initialization."""
    graph, like = abstract(lambda: Target(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    draw = lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype)
    return graph, jax.tree.map(draw, like)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_comes_back(model_type, tmp_path):
    config = FAMILIES[model_type]
    graph, params = random_target(config, 3)
    if model_type == "qwen3_moe":
        refused(
            lambda: save_target(tmp_path, config, params), "layers.0.selection_bias", "not zero"
        )
        flat = flatten(params)
        params = unflatten(params, flat | {"layers.0.selection_bias": jnp.zeros(7)})
    save_target(tmp_path, config, params, dtype=jnp.float32)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    again_config, again_graph, again = load_target(tmp_path)
    assert (again_config, again_graph) == (config, graph)
    same_params(again, params)


def test_load_gives_what_split_gives(tmp_path):
    config = FAMILIES["llama"]
    graph, params = split(Target(config, rngs=nnx.Rngs(0)))
    save_target(tmp_path, config, params, dtype=jnp.float32)
    _, again_graph, again = load_target(tmp_path)
    # One compiled program serves both: neither half of its key differs.
    assert again_graph == graph
    assert jax.tree.structure(again) == jax.tree.structure(params)
    same_params(again, params)


def change_sliding(config: TargetConfig, **changes) -> TargetConfig:
    sliding = dataclasses.replace(config.attention[SLIDING], **changes)
    return dataclasses.replace(config, attention=config.attention | {SLIDING: sliding})


def test_what_the_format_cannot_say_is_refused(mimo, tmp_path):
    config, _, params = mimo
    for bad, words in (
        (change_sliding(config, num_kv_heads=2), ["twice as many KV heads", "2 and 2"]),
        (change_sliding(config, has_sink=False), ["sinks on sliding layers"]),
        (change_sliding(config, v_head_dim=20), ["same v_head_dim"]),
        (dataclasses.replace(config, tie_embeddings=True), ["untied"]),
        (dataclasses.replace(config, use_qk_norm=True), ["qwen3_moe"]),
        (dataclasses.replace(config, hidden_size=65), ["parameter 'embedding'", "[256, 65]"]),
    ):
        refused(lambda bad=bad: save_target(tmp_path, bad, params), *words)
    extra = {"hidden_size": 3}
    refused(lambda: save_target(tmp_path, config, params, extra_config=extra), "hidden_size")
    assert not (tmp_path / "config.json").exists()


def test_a_second_save_replaces_the_first(mimo, tmp_path):
    config, _, params = mimo
    save_target(tmp_path, config, params, dtype=jnp.float32, max_shard_bytes=200_000)
    num_files = len(list(tmp_path.iterdir()))
    save_target(tmp_path, config, params)
    assert len(list(tmp_path.iterdir())) < num_files
    assert load_target(tmp_path)[2] is not None
    assert not list(tmp_path.glob("*.tmp"))


def test_an_interrupted_save_leaves_nothing_to_trust(mimo, tmp_path, monkeypatch):
    config, _, params = mimo
    save_target(tmp_path, config, params)
    calls = []

    def fail_late(tensors, metadata):
        calls.append(tensors)
        if len(calls) == 3:
            raise OSError("disk full")
        return real(tensors, metadata)

    real = safetensors.numpy.save
    monkeypatch.setattr(safetensors.numpy, "save", fail_late)
    with pytest.raises(OSError, match="disk full"):
        save_target(tmp_path, config, params, max_shard_bytes=200_000)
    refused(lambda: load_target(tmp_path), "config.json", "cannot be read")


def edited(tmp_path: Path, change) -> Path:
    """qwen3-tiny with its tensors changed."""
    directory = tmp_path / "edited"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    shutil.copy(DATA / "qwen3-tiny" / "config.json", directory)
    tensors = safetensors.numpy.load_file(DATA / "qwen3-tiny" / "model.safetensors")
    change(tensors)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    return directory


def test_strictness(tmp_path):
    norm, extra = "model.layers.2.input_layernorm.weight", "model.layers.9.input_layernorm.weight"

    def load(change):
        return lambda: load_target(edited(tmp_path, change))

    refused(
        load(lambda t: t.update({extra: t[norm]})),
        "model.safetensors",
        "1 tensors",
        extra,
        "nearest",
    )
    refused(load(lambda t: t.pop(norm)), "edited", "1 tensors are missing", norm)
    renamed = load(lambda t: t.update({norm + "s": t.pop(norm)}))
    refused(renamed, "missing", f"'{norm}' (nearest: {norm}s)")
    refused(load(lambda t: t.update({norm: t[norm][:-1]})), norm, "[63]", "[64]")
    transposed = load(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].T.copy()}))
    refused(transposed, "lm_head.weight", "[64, 256]", "[256, 64]")
    refused(
        load(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].astype(np.uint8)})),
        "lm_head.weight",
        "uint8; allowed: float32",
    )
    refused(load(lambda t: t.update({norm + "_scale_inv": t[norm]})), "_scale_inv", "of a float32")


def test_expected_leftovers(tmp_path):
    def change(tensors):
        tensors["model.mtp.layers.0.eh_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["visual.blocks.0.attn.sinks"] = np.zeros(3, np.float32)

    same_params(load_target(edited(tmp_path, change))[2], load_target(DATA / "qwen3-tiny")[2])


def test_an_unknown_projection_layout_is_refused(tmp_path):
    values = read_config("mimo-tiny") | {"attention_projection_layout": "fused_kv"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    refused(lambda: load_target(tmp_path), "config.json", "'fused_kv'", "'fused_qkv'")


def test_tied_head(tmp_path):
    config = FAMILIES["llama"]
    graph, params = random_target(config, 4)
    logits = nnx.merge(graph, params).unembed(jnp.ones((1, 1, config.hidden_size)))
    expected = np.asarray(flatten(params)["embedding"]).sum(-1)
    np.testing.assert_allclose(logits[0, 0], expected, atol=1e-5)
    save_target(tmp_path, config, params, dtype=jnp.float32)
    assert "lm_head.weight" not in SafetensorsDir(tmp_path)
