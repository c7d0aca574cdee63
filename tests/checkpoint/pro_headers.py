"""A headers-only copy of MiMo-V2.5-Pro-FP4-DFlash's target: right names, shapes and sizes, no data.

Files are sparse: 570 GB long, a few megabytes on disk.
"""

import json
from collections.abc import Iterator
from pathlib import Path

GLOBAL_LAYERS = (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)
D, LAYERS, HEADS, KV, QK, V, VOCAB = 6144, 70, 128, 8, 192, 128, 152576
DENSE, EXPERTS, F, MTP = 16384, 384, 2048, 3
ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}

CONFIG = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": DENSE,
    "moe_intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": QK,
    "v_head_dim": V,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": KV,
    "swa_head_dim": QK,
    "swa_v_head_dim": V,
    "hybrid_layer_pattern": [int(i not in GLOBAL_LAYERS) for i in range(LAYERS)],
    "moe_layer_freq": [int(i > 0) for i in range(LAYERS)],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_projection_layout": "fused_qkv",
    "attention_value_scale": 0.612,
    "attention_bias": False,
    "sliding_window": 128,
    "sliding_window_size": 128,
    "partial_rotary_factor": 0.334,
    "rope_theta": 10000000,
    "swa_rope_theta": 10000,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": None,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": None,
    "max_position_embeddings": 1048576,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "store_dtype": "mxfp4",
        "mxfp4_block_size": 32,
    },
}


def _fp8(name: str, rows: int, columns: int, scale_rows: int | None = None):
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    scales = (-(-rows // 128) if scale_rows is None else scale_rows, -(-columns // 128))
    yield f"{name}.weight_scale_inv", "F32", scales


def _attention(prefix: str, is_sliding: bool):
    chunk = HEADS // KV * QK + QK + V
    yield from _fp8(f"{prefix}qkv_proj", KV * chunk, D, KV * -(-chunk // 128))
    yield f"{prefix}o_proj.weight", "BF16", (D, HEADS * V)
    if is_sliding:
        yield f"{prefix}attention_sink_bias", "BF16", (HEADS,)


def _dense(prefix: str):
    for part in ("gate_proj", "up_proj"):
        yield from _fp8(prefix + part, DENSE, D)
    yield from _fp8(prefix + "down_proj", D, DENSE)


def tensors() -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of every tensor."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, D)
    yield "lm_head.weight", "BF16", (VOCAB, D)
    yield "model.norm.weight", "BF16", (D,)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{norm}.weight", "BF16", (D,)
        yield from _attention(layer + "self_attn.", i not in GLOBAL_LAYERS)
        if i == 0:
            yield from _dense(layer + "mlp.")
            continue
        yield f"{layer}mlp.gate.weight", "BF16", (EXPERTS, D)
        yield f"{layer}mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
        for e in range(EXPERTS):
            for part, rows, columns in (
                ("gate_proj", F, D), ("up_proj", F, D), ("down_proj", D, F)
            ):
                expert = f"{layer}mlp.experts.{e}.{part}.weight"
                yield expert, "U8", (rows, columns // 2)
                yield f"{expert}_scale", "U8", (rows, columns // 32)
    for i in range(MTP):
        head = f"model.mtp.layers.{i}."
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            yield f"{head}{norm}.weight", "BF16", (D,)
        yield f"{head}eh_proj.weight", "BF16", (D, 2 * D)
        yield from _attention(head + "self_attn.", True)
        yield from _dense(head + "mlp.")


def write(directory: Path, num_files: int = 100) -> int:
    """Writes config, index and sparse shards; returns the number of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    everything = list(tensors())
    per_file = -(-len(everything) // num_files)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        header, position = {}, 0
        for name, dtype, shape in everything[number * per_file : (number + 1) * per_file]:
            num_bytes = ITEM_BYTES[dtype]
            for size in shape:
                num_bytes *= size
            offsets = [position, position + num_bytes]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
            position += num_bytes
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as handle:
            handle.write(len(text).to_bytes(8, "little") + text)
            handle.truncate(8 + len(text) + position)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(everything)
