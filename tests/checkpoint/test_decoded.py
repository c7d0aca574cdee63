"""Published storage formats: FP8 blocks, fused qkv, MXFP4 experts, MTP heads, mask vectors.

Run: .venv/bin/python -m pytest tests/checkpoint/test_decoded.py

The goldens come from a plain NumPy program that reads the same bytes; beside the right answer they
hold the answers of seven wrong readings, which must stay apart.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from mimo_jax.checkpoint import hf_target
from mimo_jax.checkpoint.decoded import DecodedTensors, QkvLayout
from mimo_jax.checkpoint.hf_drafter import load_drafter, save_drafter
from mimo_jax.checkpoint.hf_target import load_mtp_heads, load_target, save_target
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.models.params import flatten
from tests.golden.files import ATOL, DATA, arrays

PRO = DATA / "pro-tiny"
# The README beside the goldens: float32 against float64 with products of 160 terms.
PRO_ATOL = 1e-4
ATTENTION = [f"model.layers.{i}.self_attn." for i in range(6)] + [
    f"model.mtp.layers.{i}.self_attn." for i in range(2)
]


@pytest.fixture(scope="module")
def pro():
    return load_target(PRO, jnp.float32)


@pytest.fixture(scope="module")
def golden():
    return arrays("pro_tiny")


def forward(graph, params, ids, taps=()):
    return jax.jit(lambda p, x: nnx.merge(graph, p)(x, tap_layer_ids=taps))(params, ids)


def edited(tmp_path, change, name="pro-tiny"):
    """A copy of a golden checkpoint in one file, with its tensors changed."""
    source = SafetensorsDir(DATA / name)
    tensors = {key: source.get(key) for key in source.names()}
    change(tensors)
    tmp_path.mkdir(exist_ok=True)
    shutil.copy(DATA / name / "config.json", tmp_path / "config.json")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_fused_fp8_qkv_and_packed_experts(pro, golden):
    config, graph, params = pro
    out = forward(graph, params, golden["input_ids"], (0, 3, 5))
    np.testing.assert_allclose(out.logits, golden["logits"], atol=PRO_ATOL)
    features = np.asarray(out.context_features)[0, :27]
    np.testing.assert_allclose(features, golden["context_features"], atol=PRO_ATOL)
    long = forward(graph, params, golden["input_ids_long"][None])
    at = golden["long_positions"]
    np.testing.assert_allclose(long.logits[0][at], golden["long_logits"], atol=PRO_ATOL)
    np.testing.assert_array_equal(np.argmax(long.logits[0], -1), golden["long_argmax"])
    assert config.moe.is_mxfp4
    flat = flatten(params)
    assert flat["layers.1.experts_gate"].dtype == jnp.uint8
    assert flat["layers.1.experts_gate"].shape == (12, 64, 80)
    assert flat["layers.1.experts_down_scale"].shape == (12, 160, 2)
    assert config.is_fp8
    assert flat["layers.1.w_qkv"].dtype == flat["layers.0.w_down"].dtype == jnp.float8_e4m3fn
    # 4 chunks of 272 rows: three rows of scales each.
    assert flat["layers.1.w_qkv"].shape == (1088, 160)
    assert flat["layers.1.w_qkv_scale"].shape == (12, 2)
    assert flat["layers.1.w_out"].shape == (512, 160)


def test_wrong_readings_stay_apart(pro, golden, tmp_path):
    """Each fault moves the last logits by about 1; ours must be none of them."""
    _, graph, params = pro
    ours = np.asarray(forward(graph, params, golden["input_ids"][:1]).logits)[0, -1]
    faults = [key for key in golden if key.startswith("fault_")]
    assert len(faults) == 7
    for fault in faults:
        assert np.abs(ours - golden[fault]).max() > 0.9, fault


def test_plain_override_reads_q_k_v_in_order(golden, tmp_path):
    """The fingerprint of the wrong reading is what the override gives on the chunked file."""

    with pytest.raises(CheckpointError, match=r"\[12, 2\], expected \[9, 2\].*1 chunk"):
        load_target(PRO, jnp.float32, qkv_layout="plain")
    with pytest.raises(CheckpointError, match="'fused' is unknown; allowed: chunked, plain"):
        load_target(PRO, qkv_layout="fused")

    def decoded(tensors):
        """The rows where they are, as floats: what a re-export without FP8 looks like."""
        layout = QkvLayout((768, 192, 128), 4)
        for name in [n for n in tensors if n.endswith("qkv_proj.weight")]:
            prefix = name.removesuffix("qkv_proj.weight")
            view = DecodedTensors(SafetensorsDir(PRO), dict.fromkeys(ATTENTION, layout))
            rows = np.empty((1088, 160), np.float32)
            for part_idx, part in enumerate(("q_proj", "k_proj", "v_proj")):
                rows[layout.rows_of(part_idx)] = view.get(f"{prefix}{part}.weight")
            tensors[name] = rows
            del tensors[name + "_scale_inv"]

    _, graph, params = load_target(
        edited(tmp_path / "float", decoded), jnp.float32, qkv_layout="plain"
    )
    logits = forward(graph, params, golden["input_ids"][:1]).logits
    np.testing.assert_allclose(logits[0, -1], golden["fault_plain_qkv_split"], atol=PRO_ATOL)
    _, graph, params = load_target(tmp_path / "float", jnp.float32)
    logits = forward(graph, params, golden["input_ids"][:1]).logits
    np.testing.assert_allclose(logits[0, -1], golden["logits"][0, -1], atol=PRO_ATOL)


def test_dequantized_samples(golden):
    flat = flatten(load_target(PRO, jnp.float32, expands_fp8=True)[2])
    rows = golden["qkv_layer1_dequant_rows"] if "qkv_layer1_dequant_rows" in golden else None
    layout = QkvLayout((768, 192, 128), 4)
    stored = np.empty((1088, 160), np.float32)
    w = np.asarray(flat["layers.1.w_qkv"]).T
    first = 0
    for part_idx, width in enumerate(layout.widths):
        stored[layout.rows_of(part_idx)] = w[first : first + width]
        first += width
    expected = golden["qkv_layer1_dequant"]
    got = stored if rows is None else stored[rows]
    np.testing.assert_array_equal(got[: len(expected)], expected)
    np.testing.assert_array_equal(
        np.asarray(flat["layers.1.w_out"]).T[:4], golden["o_proj_layer1_rows0_3"]
    )


def test_mxfp4_experts_in_a_float32_model():
    golden = arrays("mimo_tiny_mxfp4")
    _, graph, params = load_target(DATA / "mimo-tiny-mxfp4")
    out = forward(graph, params, golden["input_ids"])
    np.testing.assert_allclose(out.logits, golden["logits"], atol=ATOL)


def test_few_tokens_and_many_take_different_ways_to_the_same_logits(pro, golden):
    """8 tokens with 3 experts each are gathered, 40 run expert by expert."""
    _, graph, params = pro
    few = forward(graph, params, golden["input_ids"][:1, :8]).logits
    np.testing.assert_allclose(few[0], golden["logits"][0, :8], atol=PRO_ATOL)


def test_mtp_heads(pro, golden):
    _, graph, params = pro
    features = forward(graph, params, golden["input_ids"][:1], (5,)).context_features
    heads = load_mtp_heads(PRO, jnp.float32)
    assert len(heads) == 2
    for number, (head_graph, head_params) in enumerate(heads):
        out = jax.jit(
            lambda hp, p, ids, h, g=head_graph: nnx.merge(g, hp)(nnx.merge(graph, p), ids, h)
        )(head_params, params, golden["input_ids"][:1, 1:], features[:, :-1])
        at = golden["mtp0_positions"]
        np.testing.assert_allclose(out.logits[0][at], golden[f"mtp{number}_logits"], atol=PRO_ATOL)
        if number == 0:
            np.testing.assert_allclose(out.hidden[0][at], golden["mtp0_hidden"], atol=PRO_ATOL)
            wrong = golden["mtp0_fault_hidden_first"]
            assert np.abs(np.asarray(out.logits[0]) - wrong.reshape(-1, 320)[-1]).max() > 0.1


def test_scaled_together_keys_and_values(tmp_path):
    golden = arrays("fp8_flash_gaqkv")
    prefix = "model.layers.0.self_attn."
    tensors = {}
    for part in ("k_proj", "v_proj"):
        codes = golden[f"{part}_weight"].view("uint8")
        tensors[f"{prefix}{part}.weight"] = codes
        tensors[f"{prefix}{part}.weight_scale_inv"] = golden[f"{part}_weight_scale_inv"]
    path = tmp_path / "flash.safetensors"
    safetensors.numpy.save_file(tensors, path)
    data = path.read_bytes().replace(b'"U8"', b'"F8_E4M3"')
    grown = len(data) - path.stat().st_size
    path.write_bytes((int.from_bytes(data[:8], "little") + grown).to_bytes(8, "little") + data[8:])
    view = DecodedTensors(SafetensorsDir(path), {prefix: QkvLayout((12288, 768, 512), 4)})
    keys, values = (view.get(f"{prefix}{part}.weight") for part in ("k_proj", "v_proj"))
    columns = golden["columns"]
    np.testing.assert_array_equal(keys[:, columns], golden["k_dequant"])
    np.testing.assert_array_equal(values[:, columns], golden["v_dequant"])
    x = golden["x"].astype(np.float64)
    np.testing.assert_allclose(x @ keys.astype(np.float64).T, golden["k_out"], rtol=1e-6)
    np.testing.assert_allclose(x @ values.astype(np.float64).T, golden["v_out"], rtol=1e-6)
    naive = golden["v_naive_dequant"]
    assert np.abs(values[golden["v_naive_rows"]][:, columns] - naive).max() > 0.1


def test_the_published_pair_speculates_as_the_golden_loop(pro, golden):
    target, drafter = Model(*pro), Model(*load_drafter(PRO / "dflash", jnp.float32))
    assert drafter.config.has_mask_embedding
    engine = Engine(target, drafter, max_len=64)
    for row in (0, 1):
        ids = golden[f"spec{row}_output_ids"]
        (completion,) = generate_all(engine, [Request(ids[:16].tolist(), 48)])
        assert completion.token_ids == ids[16:].tolist()
        per_step = golden[f"spec{row}_produced_per_step"].tolist()
        assert completion.num_committed_per_step == per_step


def test_without_its_mask_vector_the_drafter_collapses(pro, golden, tmp_path):
    """The silent fault: 44 steps instead of 15, same text."""
    shutil.copytree(PRO / "dflash", tmp_path / "dflash")
    for side_file in (tmp_path / "dflash").glob("mask_embedding.*"):
        side_file.unlink()
    drafter = Model(*load_drafter(tmp_path / "dflash", jnp.float32))
    engine = Engine(Model(*pro), drafter, max_len=64)
    ids = golden["spec0_output_ids"]
    (completion,) = generate_all(engine, [Request(ids[:16].tolist(), 48)])
    per_step = golden["spec0_produced_no_mask_embedding"].tolist()
    assert completion.num_committed_per_step == per_step


def test_mask_vector_from_either_file_and_back(tmp_path):
    whole = load_drafter(PRO / "dflash")
    only_pt = tmp_path / "pt"
    shutil.copytree(PRO / "dflash", only_pt)
    (only_pt / "mask_embedding.safetensors").unlink()
    vector = flatten(whole[2])["mask_embedding"]
    np.testing.assert_array_equal(flatten(load_drafter(only_pt)[2])["mask_embedding"], vector)
    save_drafter(only_pt, whole[0], whole[2])
    assert not (only_pt / "mask_embedding.pt").exists()
    (only_pt / "dflash_draft_model-00001-of-00001.safetensors").unlink()
    again = load_drafter(only_pt)
    assert again[0].has_mask_embedding
    np.testing.assert_array_equal(flatten(again[2])["mask_embedding"], vector)


def test_mask_vector_of_another_drafter(tmp_path):
    shutil.copytree(PRO / "dflash", tmp_path / "dflash")
    path = tmp_path / "dflash" / "mask_embedding.safetensors"
    vector = np.ones(160, np.float32)

    def refused(tensors, *words):
        safetensors.numpy.save_file(tensors, path)
        with pytest.raises(CheckpointError) as caught:
            load_drafter(tmp_path / "dflash")
        for word in ("mask_embedding.safetensors", *words):
            assert word in str(caught.value)

    one = np.array([301], np.int64)
    refused({"embedding": vector, "mask_token_id": one}, "[301]", "expected 300")
    refused({"embedding": vector}, "mask_token_id")
    right = np.array([300], np.int64)
    refused({"embedding": vector[:-1], "mask_token_id": right}, "160", "[159]")
    refused({"embedding": vector * np.nan, "mask_token_id": right}, "finite")


def test_packed_experts_survive_a_round_trip(tmp_path):
    config, _, params = load_target(DATA / "mimo-tiny-mxfp4")
    save_target(tmp_path, config, params, dtype=jnp.float32)
    again_config, _, again = load_target(tmp_path)
    assert again_config == config
    for name, value in flatten(params).items():
        np.testing.assert_array_equal(value, flatten(again)[name], err_msg=name)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["store_dtype"] == "mxfp4"


def test_damaged_formats(tmp_path):
    attn, expert = "model.layers.1.self_attn.", "model.layers.1.mlp.experts.0."

    def refused(change, *words):
        with pytest.raises(CheckpointError) as caught:
            load_target(edited(tmp_path, change))
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value), str(caught.value)

    qkv = attn + "qkv_proj.weight"
    refused(lambda t: t.pop(qkv + "_scale_inv"), qkv, "is missing")
    refused(lambda t: t.pop(qkv), qkv, "scale without a weight")
    short = lambda t: t.update({qkv + "_scale_inv": t[qkv + "_scale_inv"][:-1]})
    refused(short, "_scale_inv", "[11, 2]", "[12, 2]")
    refused(lambda t: t.update({qkv: t[qkv][:-1]}), qkv, "1087", "1088")
    q = attn + "q_proj.weight"
    refused(lambda t: t.update({q: np.zeros((768, 160), np.float32)}), q, "beside the fused")
    down = expert + "down_proj.weight"
    refused(lambda t: t.pop(down + "_scale"), "missing", down + "_scale")
    refused(lambda t: t.update({down: t[down].astype(np.float32)}), down, "float32", "uint8")
    odd = lambda t: t.update({down + "_scale": t[down + "_scale"][:, :-1]})
    refused(odd, down + "_scale", "[160, 1]", "[160, 2]")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("quant_method", "awq", ("quant_method", "'awq'", "fp8")),
        ("fmt", "e5m2", ("fmt", "e5m2", "e4m3")),
        ("weight_block_size", [64, 64], ("weight_block_size", "[128, 128]")),
        ("store_dtype", "nvfp4", ("store_dtype", "nvfp4", "mxfp4")),
        ("mxfp4_block_size", 16, ("mxfp4_block_size", "32")),
        ("quant_method", None, ("quant_method", "missing")),
    ],
)
def test_other_quantizations_are_refused(tmp_path, key, value, words):
    values = json.loads((PRO / "config.json").read_text())
    values["quantization_config"][key] = value
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError) as caught:
        hf_target.open_target(tmp_path)
    for word in ("quantization_config.", *words):
        assert word in str(caught.value)
