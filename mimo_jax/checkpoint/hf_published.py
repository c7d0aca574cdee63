"""Writing a MiMo-V2 target as the published repositories store it: V2.5 and Pro, or V2-Flash.

Both come from as many training shards as the global layers have KV heads. V2.5 and Pro (model_type
`mimo_v2`) fuse the qkv of a layer, rows [Q_c | K_c | V_c] one shard after the other, FP8 block
scales starting anew with every shard. Flash (`mimo_v2_flash`) keeps q, k and v apart, but scales
keys and values as the stack [K_c | V_c] first, so that a block on the seam serves both. Dense
layers are FP8; packed experts stay as they are; the rest is bfloat16, the router's bias float32,
and in Flash its weight too.

What was read from such files is written bit for bit, in float32 (bfloat16 would have rounded FP8
products) and in the layout it came from (blocks of the other one are cut elsewhere); that is why
the caller names the layout. Codes that were kept (`is_fp8`) are written as they are. Those of what
was decoded (FP8 experts, MTP heads) are found again, with their scales, from the products: they are
those of the source where 448 is a block's largest code, as these files have it; a block that says
the same under two scales (all codes below 448, none rounded) may come back under the other.

`hf_target.save_target` writes the other layout, the one that transformers reads.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.decoded import FUSED, PROJECTION_LAYOUTS, QKV_PARTS, SPLIT, QkvLayout
from mimo_jax.checkpoint.hf_target import mtp_leaves, qkv_layouts, target_leaves
from mimo_jax.checkpoint.json_config import rotary_factor
from mimo_jax.checkpoint.name_map import FLOAT32, FP8, Leaf
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import GLOBAL, SLIDING, TargetConfig
from mimo_jax.models.params import flatten
from mimo_jax.quant import fp8

_FUSED_STYLE = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "attention_projection_layout": FUSED,
}
_FLASH_STYLE = {"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash"}
_BF16 = np.dtype(ml_dtypes.bfloat16)


def published_config(
    config: TargetConfig, projections: str, path: str | os.PathLike = "config.json"
) -> dict:
    """config.json in the style of the published files.

    Args:
      config: The model.
      projections: One of `PROJECTION_LAYOUTS`; "split" is Flash, whose config has no key for it.
      path: Where it will stand, for messages.

    Raises:
      CheckpointError: If the style cannot express the config; says what is in the way.
    """
    if projections not in PROJECTION_LAYOUTS:
        allowed = ", ".join(map(repr, PROJECTION_LAYOUTS))
        raise CheckpointError(f"{path}: projections {projections!r} unknown; allowed: {allowed}")
    used = {kind: config.attention[kind] for kind in dict.fromkeys(config.layer_kinds)}
    style = _FLASH_STYLE if projections == SPLIT else _FUSED_STYLE

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise CheckpointError(f"{path}: {style['model_type']} needs {message}")

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
    values = style | {
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


_Tensor = tuple[str, tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


def _is_fp8(source: str) -> bool:
    """Weights beside the attention that the published files hold as FP8."""
    return source.endswith(("gate_proj.weight", "up_proj.weight", "down_proj.weight"))


def _tensors_of(
    leaves: list[Leaf], flat: dict, layouts: dict[str, QkvLayout], projections: str
) -> Iterator[_Tensor]:
    """(name, shape, dtype, how to make it) of every tensor of some leaves."""
    for leaf in leaves:
        if projections == SPLIT and leaf.sources[0].endswith("qkv_proj.weight"):
            prefix = leaf.sources[0].removesuffix("qkv_proj.weight")
            codes, scale = (np.asarray(flat[leaf.name + end]) for end in ("", "_scale"))
            yield from _split_codes(prefix, codes, scale, layouts[prefix])
            continue
        if projections == SPLIT and leaf.name.endswith("w_qkv_scale"):
            continue  # written with the codes
        if leaf.name.endswith("w_qkv") and leaf.dtype != FP8:
            prefix = leaf.sources[0].removesuffix(f"{QKV_PARTS[0]}.weight")
            qkv_tensors = _split_qkv if projections == SPLIT else _fused_qkv
            yield from qkv_tensors(prefix, leaf, flat, layouts[prefix])
            continue
        for source_idx, source in enumerate(leaf.sources):
            shape = leaf.source_shape(source_idx)
            take = functools.partial(_take, leaf, flat, source_idx)
            if leaf.dtype is not None and (leaf.dtype != FLOAT32 or leaf.name.endswith("_scale")):
                yield source, shape, leaf.dtype, take
                continue
            if _is_fp8(source):
                yield from _fp8_pair(source, shape, take)
                continue
            # The router's bias is float32 everywhere, its weight only in Flash's files.
            is_float32 = leaf.dtype == FLOAT32 and (projections == SPLIT or len(shape) == 1)
            yield source, shape, FLOAT32 if is_float32 else _BF16, take


def _take(leaf: Leaf, flat: dict, source_idx: int) -> np.ndarray:
    return leaf.take_apart(np.asarray(flat[leaf.name]), source_idx)


def _fused_qkv(prefix: str, leaf: Leaf, flat: dict, layout: QkvLayout) -> Iterator[_Tensor]:
    def fuse() -> np.ndarray:
        fused = np.empty(leaf.stored_shape, np.float32)
        rows = np.concatenate([layout.rows_of(i) for i in range(3)])
        fused[rows] = np.asarray(flat[leaf.name], np.float32).T
        return fused

    return _fp8_pair(f"{prefix}qkv_proj.weight", leaf.stored_shape, fuse, layout.num_chunks)


def _split_codes(
    prefix: str, codes: np.ndarray, scale: np.ndarray, layout: QkvLayout
) -> Iterator[_Tensor]:
    """Kept codes as Flash stores them; every block's scale goes where its rows' codes go.

    Raises:
      CheckpointError: If q has blocks that it shares with keys: Flash has no place for those.
    """
    of_row = fp8.scale_rows(len(codes), layout.num_chunks)
    query, key, value = (layout.rows_of(i) for i in range(3))
    place_k, place_v, num_key_scales = fp8.split_kv_scale_rows(
        layout.num_chunks, len(key), len(value)
    )
    # Which scale of memory each scale of the files is; keys and values count as one stack.
    query_scales = _source_of(fp8.scale_rows(len(query)), of_row[query])
    both = _source_of(np.concatenate([place_k, place_v]), of_row[np.concatenate([key, value])])
    if query_scales is None or both is None:
        raise CheckpointError(f"{prefix}*: FP8 blocks of q and k meet; load with expands_fp8=True")
    parts = (
        ("q_proj", query, query_scales),
        ("k_proj", key, both[:num_key_scales]),
        ("v_proj", value, both[num_key_scales:]),
    )
    for part, rows, scales in parts:
        name = f"{prefix}{part}.weight"
        yield name, (len(rows), codes.shape[1]), FP8, functools.partial(np.take, codes, rows, 0)
        shape = (len(scales), scale.shape[1])
        yield name + "_scale_inv", shape, FLOAT32, functools.partial(np.take, scale, scales, 0)


def _source_of(place: np.ndarray, source: np.ndarray) -> np.ndarray | None:
    """For each place the source that all its rows name; None if they name several."""
    found = np.zeros(place.max() + 1, np.int64)
    found[place] = source
    return found if bool((found[place] == source).all()) else None


def _split_qkv(prefix: str, leaf: Leaf, flat: dict, layout: QkvLayout) -> Iterator[_Tensor]:
    query, key, value = (
        (f"{prefix}{part}.weight", leaf.source_shape(i), functools.partial(_take, leaf, flat, i))
        for i, part in enumerate(QKV_PARTS)
    )
    yield from _fp8_pair(*query)
    if not layout.has_stacked_kv:
        yield from _fp8_pair(*key)
        yield from _fp8_pair(*value)
        return
    (key_name, key_shape, take_keys), (value_name, value_shape, take_values) = key, value
    num_chunks, rows, columns = layout.num_chunks, key_shape[0] + value_shape[0], key_shape[1]
    num_scales, num_columns = fp8.scale_shape((rows, columns), num_chunks)
    _, _, num_key_scales = fp8.split_kv_scale_rows(num_chunks, key_shape[0], value_shape[0])

    def make() -> list[np.ndarray]:
        keys, values = (np.asarray(take(), np.float32) for take in (take_keys, take_values))
        pairs = fp8.quantize_split_kv(keys, values, num_chunks)
        return [array for pair in pairs for array in pair]

    yield from _fp8_tensors(
        {
            key_name: (key_shape, (num_key_scales, num_columns)),
            value_name: (value_shape, (num_scales - num_key_scales, num_columns)),
        },
        make,
    )


def _fp8_pair(
    name: str, shape: tuple[int, ...], take: Callable[[], np.ndarray], num_chunks: int = 1
) -> Iterator[_Tensor]:
    rows, columns = shape
    scale_shape = fp8.scale_shape((rows, columns), num_chunks)
    make = lambda: list(fp8.quantize(np.asarray(take(), np.float32), num_chunks))
    return _fp8_tensors({name: (shape, scale_shape)}, make)


def _fp8_tensors(
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], make: Callable[[], list]
) -> Iterator[_Tensor]:
    """Weights and their scales, all made when the first is asked for, each handed out once.

    Args:
      shapes: Name -> (shape of the codes, shape of the scales).
      make: Codes and scale of each name, one after the other.
    """
    made: dict[int, np.ndarray] = {}

    def part(idx: int) -> np.ndarray:
        if not made:
            made.update(enumerate(make()))
        return made.pop(idx)

    for i, (name, (shape, scale_shape)) in enumerate(shapes.items()):
        yield name, shape, FP8, functools.partial(part, 2 * i)
        yield name + "_scale_inv", scale_shape, FLOAT32, functools.partial(part, 2 * i + 1)


def save_published(
    directory: str | os.PathLike,
    config: TargetConfig,
    params,
    *,
    projections: str,
    mtp_params: Sequence = (),
    extra_config: dict | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Writes a target, and its MTP heads if given, in the published layout.

    Args:
      directory: Made if needed; an earlier model in it is replaced.
      config: The model.
      params: As `models.params.split` gives them.
      projections: "fused_qkv" as V2.5 and Pro, or "split" as Flash; see
        `hf_target.projection_layout`.
      mtp_params: Of each MTP head, as `load_mtp_heads` gives them.
      extra_config: More config.json keys, e.g. {"eos_token_id": 5}.
      max_shard_bytes: A file is cut before it would grow larger.

    Raises:
      CheckpointError: If the layout cannot express the model, a weight is not finite, or
        extra_config repeats a key that the model decides.
    """
    directory = Path(directory)
    path = directory / "config.json"
    values, extra = published_config(config, projections, path), dict(extra_config or {})
    for key in extra:
        if key in values:
            raise CheckpointError(f"{path}: extra_config must not set {key}")
    layouts = qkv_layouts(values, config, len(mtp_params))
    modules = [(target_leaves(config), params)]
    modules += [(mtp_leaves(config, i), head) for i, head in enumerate(mtp_params)]
    tensors = [
        tensor
        for leaves, module in modules
        for tensor in _tensors_of(leaves, flatten(module), layouts, projections)
    ]
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
