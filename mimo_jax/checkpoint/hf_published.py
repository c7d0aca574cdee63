"""Writing a MiMo-V2 target as the published repositories store it (model_type `mimo_v2`).

The qkv of a layer is fused from as many training shards as the global layers have KV heads, rows
[Q_c | K_c | V_c] one shard after the other; projections and dense layers are FP8 with block scales
that start anew with every shard; packed experts stay as they are; the rest is bfloat16, the
router's bias float32. What was read from such files is written bit for bit when it was kept in
float32 (bfloat16 would have rounded FP8 products).

`hf_target.save_target` writes the other layout, the one that transformers reads.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.decoded import QKV_PARTS, QkvLayout
from mimo_jax.checkpoint.hf_target import mtp_leaves, target_leaves
from mimo_jax.checkpoint.json_config import rotary_factor
from mimo_jax.checkpoint.name_map import FLOAT32, UINT8, Leaf
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import GLOBAL, SLIDING, TargetConfig
from mimo_jax.models.params import flatten
from mimo_jax.quant import fp8

_BF16, _FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def published_config(config: TargetConfig, path: str | os.PathLike = "config.json") -> dict:
    """config.json in the style of the published files.

    Raises:
      CheckpointError: If the style cannot express the config; says what is in the way.
    """
    used = {kind: config.attention[kind] for kind in dict.fromkeys(config.layer_kinds)}

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise CheckpointError(f"{path}: mimo_v2 needs {message}")

    require(GLOBAL in used, "global layers")
    require(not config.use_qk_norm, "heads without norms")
    require(not config.tie_embeddings, "an untied head")
    factors = {rotary_factor(a.rope_dim, a.head_dim) for a in used.values()}
    require(len(factors) == 1, "one rotary factor on all layers")
    require(all(a.rope_scaling is None for a in used.values()), "RoPE without scaling")
    chunks = used[GLOBAL].num_kv_heads
    for kind, a in used.items():
        require(
            a.num_heads % chunks == 0 and a.num_kv_heads % chunks == 0,
            f"{kind} heads that divide into {chunks} shards (global KV heads), got "
            f"{a.num_heads} and {a.num_kv_heads}",
        )
    first = used[GLOBAL]
    values = {
        "architectures": ["MiMoV2ForCausalLM"],
        "model_type": "mimo_v2",
        "attention_projection_layout": "fused_qkv",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "hybrid_layer_pattern": [int(kind == SLIDING) for kind in config.layer_kinds],
        "moe_layer_freq": [int(is_moe) for is_moe in config.is_moe_layer],
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "v_head_dim": first.v_head_dim,
        "rope_theta": first.rope_theta,
        "partial_rotary_factor": factors.pop(),
        "add_full_attention_sink_bias": first.has_sink,
        "attention_value_scale": config.value_scale,
        "attention_bias": False,
        "layernorm_epsilon": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [fp8.BLOCK_LEN, fp8.BLOCK_LEN],
            "ignored_layers": [
                f"model.layers.{i}.self_attn.o_proj" for i in range(config.num_layers)
            ]
            + ["model.decoder.self_attn.o_proj"],
        },
    }
    if SLIDING in used:
        a = used[SLIDING]
        values |= {
            "swa_num_attention_heads": a.num_heads,
            "swa_num_key_value_heads": a.num_kv_heads,
            "swa_head_dim": a.head_dim,
            "swa_v_head_dim": a.v_head_dim,
            "swa_rope_theta": a.rope_theta,
            "sliding_window": a.window,
            "sliding_window_size": a.window,
            "add_swa_attention_sink_bias": a.has_sink,
        }
    moe = config.moe
    if moe is not None:
        require(moe.scoring == "sigmoid", "sigmoid scores")
        values |= {
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden_size,
            "routed_scaling_factor": moe.routed_scale,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": None,
        }
        if moe.is_mxfp4:
            values["quantization_config"] |= {"store_dtype": "mxfp4", "mxfp4_block_size": 32}
    return values


def _is_fp8(source: str) -> bool:
    """Weights that the published files quantize: qkv, dense layers and unpacked experts."""
    return source.endswith(
        ("qkv_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
    )


def _tensors_of(
    leaves: list[Leaf], flat: dict, layouts: Callable[[str], QkvLayout]
) -> Iterator[tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]]:
    """(name, shape, dtype, how to make it) of every tensor of some leaves."""
    for leaf in leaves:
        if leaf.name.endswith("w_qkv"):
            prefix = leaf.sources[0].removesuffix(f"{QKV_PARTS[0]}.weight")
            layout = layouts(leaf.name)
            rows = np.concatenate([layout.rows_of(i) for i in range(3)])
            shape = leaf.stored_shape

            def fuse(leaf=leaf, rows=rows) -> np.ndarray:
                fused = np.empty(leaf.stored_shape, np.float32)
                fused[rows] = np.asarray(flat[leaf.name], np.float32).T
                return fused

            yield from _fp8_pair(f"{prefix}qkv_proj.weight", shape, fuse, layout.num_chunks)
            continue
        for source_idx, source in enumerate(leaf.sources):
            shape = leaf.source_shape(source_idx)

            def take(leaf=leaf, source_idx=source_idx) -> np.ndarray:
                return leaf.take_apart(np.asarray(flat[leaf.name]), source_idx)

            if _is_fp8(source) and leaf.dtype != UINT8:
                yield from _fp8_pair(source, shape, take)
                continue
            # The router's weight is bfloat16 in these files, its bias float32.
            is_bias = leaf.dtype == FLOAT32 and len(shape) == 1
            dtype = UINT8 if leaf.dtype == UINT8 else FLOAT32 if is_bias else _BF16
            yield source, shape, dtype, take


def _fp8_pair(name: str, shape: tuple[int, ...], take: Callable, num_chunks: int = 1):
    rows, columns = shape
    cached: dict[str, np.ndarray] = {}

    def part(key: str) -> np.ndarray:
        if not cached:
            codes, scale = fp8.quantize(np.asarray(take(), np.float32), num_chunks)
            cached.update(codes=codes, scale=scale)
        return cached.pop(key)

    yield name, shape, _FP8, lambda: part("codes")
    scales = fp8.scale_shape((rows, columns), num_chunks)
    yield name + "_scale_inv", scales, FLOAT32, lambda: part("scale")


def save_published(
    directory: str | os.PathLike,
    config: TargetConfig,
    params,
    *,
    mtp_params: Sequence = (),
    extra_config: dict | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes a target, and its MTP heads if given, in the published layout.

    Args:
      directory: Made if needed; an earlier model in it is replaced.
      config: The model.
      params: As `models.params.split` gives them.
      mtp_params: Of each MTP head, as `load_mtp_heads` gives them.
      extra_config: More config.json keys, e.g. {"eos_token_id": 5}.
      max_shard_bytes: A file is cut before it would grow larger.

    Raises:
      CheckpointError: If the layout cannot express the model, a weight is not finite, or
        extra_config repeats a key that the model decides.
    """
    directory = Path(directory)
    path = directory / "config.json"
    values, extra = published_config(config, path), dict(extra_config or {})
    for key in extra:
        if key in values:
            raise CheckpointError(f"{path}: extra_config must not set {key}")
    chunks = config.attention[GLOBAL].num_kv_heads

    def layout_of_layer(name: str) -> QkvLayout:
        return QkvLayout(config.layer_attention(int(name.split(".")[1])).qkv_widths, chunks)

    tensors = list(_tensors_of(target_leaves(config), flatten(params), layout_of_layer))
    for i, head in enumerate(mtp_params):
        sliding = QkvLayout(config.attention[SLIDING].qkv_widths, chunks)
        leaves = mtp_leaves(config, i)
        tensors += _tensors_of(leaves, flatten(head), lambda name, sliding=sliding: sliding)
    made = {name: (dtype, take) for name, _, dtype, take in tensors}

    def make(name: str) -> np.ndarray:
        dtype, take = made[name]
        try:
            return np.ascontiguousarray(take(), dtype)
        except ValueError as error:
            raise CheckpointError(f"{directory}: {name!r}: {error}") from error

    name_map.write_tensors(
        directory,
        {name: math.prod(shape) * dtype.itemsize for name, shape, dtype, _ in tensors},
        make,
        json_files={"config.json": json.loads(json.dumps(values | extra))},
        max_shard_bytes=max_shard_bytes,
    )
