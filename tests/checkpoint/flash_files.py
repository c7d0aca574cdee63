"""A tiny checkpoint as MiMo-V2-Flash stores one, made of random codes; no code of ours in it.

Real head widths (192 and 128), so that one KV head per shard puts the seam of its keys and values
inside a block: the global layers. The sliding ones have two heads per shard, 384 and 256 rows.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

D, DENSE, F, VOCAB = 160, 136, 144, 40
HEADS, KV, SLIDING_KV, QK, V = 4, 2, 4, 192, 128
LAYERS, EXPERTS, MTP = (0, 1, 0), 3, 2

CONFIG = {
    "architectures": ["MiMoV2FlashForCausalLM"],
    "model_type": "mimo_v2_flash",
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": DENSE,
    "moe_intermediate_size": F,
    "num_hidden_layers": len(LAYERS),
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": QK,
    "v_head_dim": V,
    "swa_num_attention_heads": HEADS,
    "swa_num_key_value_heads": SLIDING_KV,
    "swa_head_dim": QK,
    "swa_v_head_dim": V,
    "hybrid_layer_pattern": list(LAYERS),
    "moe_layer_freq": [0, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 0.707,
    "attention_bias": False,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "layernorm_epsilon": 1e-5,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": None,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 39,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def tensors() -> dict[str, np.ndarray]:
    """Every tensor by name. Scale rows of k and v are literals: 2 + 1 a head where they share."""
    rng = np.random.default_rng(3)
    out = {}

    def put(name: str, dtype, *shape: int) -> None:
        out[name] = rng.normal(size=shape).astype(dtype)

    def put_fp8(name: str, rows: int, columns: int, num_scales: int) -> None:
        codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
        codes[codes % 128 == 127] = 126  # not a number -> 448
        out[f"{name}.weight"] = codes.view(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(1e-4, 3e-4, (num_scales, -(-columns // 128)))
        out[f"{name}.weight_scale_inv"] = scales.astype(np.float32)

    def put_attention(prefix: str, is_sliding: bool) -> None:
        kv, k_scales, v_scales = (SLIDING_KV, 6, 4) if is_sliding else (KV, 4, 2)
        put_fp8(prefix + "q_proj", HEADS * QK, D, 6)
        put_fp8(prefix + "k_proj", kv * QK, D, k_scales)
        put_fp8(prefix + "v_proj", kv * V, D, v_scales)
        put(prefix + "o_proj.weight", ml_dtypes.bfloat16, D, HEADS * V)
        if is_sliding:
            put(prefix + "attention_sink_bias", ml_dtypes.bfloat16, HEADS)

    def put_dense(prefix: str, width: int) -> None:
        put_fp8(prefix + "gate_proj", width, D, 2)
        put_fp8(prefix + "up_proj", width, D, 2)
        put_fp8(prefix + "down_proj", D, width, 2)

    put("model.embed_tokens.weight", ml_dtypes.bfloat16, VOCAB, D)
    put("lm_head.weight", ml_dtypes.bfloat16, VOCAB, D)
    put("model.norm.weight", ml_dtypes.bfloat16, D)
    for i, is_sliding in enumerate(LAYERS):
        layer = f"model.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            put(f"{layer}{norm}.weight", ml_dtypes.bfloat16, D)
        put_attention(layer + "self_attn.", bool(is_sliding))
        if i == 0:
            put_dense(layer + "mlp.", DENSE)
            continue
        put(layer + "mlp.gate.weight", np.float32, EXPERTS, D)
        put(layer + "mlp.gate.e_score_correction_bias", np.float32, EXPERTS)
        for e in range(EXPERTS):
            put_dense(f"{layer}mlp.experts.{e}.", F)
    for i in range(MTP):
        head = f"model.mtp.layers.{i}."
        for norm in ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"):
            put(f"{head}{norm}.weight", ml_dtypes.bfloat16, D)
        put(f"{head}eh_proj.weight", ml_dtypes.bfloat16, D, 2 * D)
        put_attention(head + "self_attn.", is_sliding=True)
        put_dense(head + "mlp.", DENSE)
    return out


def write(directory: Path, **changed_keys) -> Path:
    """Writes the checkpoint, keys of its config.json changed; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changed_keys))
    safetensors.numpy.save_file(tensors(), directory / "model.safetensors")
    return directory
