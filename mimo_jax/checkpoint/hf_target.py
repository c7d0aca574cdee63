"""Weights of published targets, in both directions: the name map, strictness, formats.

Every tensor has a place or is on the ignore list, every parameter is filled. How tensors are
stored (FP8 blocks, a fused qkv) is the business of `decoded.py`. MXFP4 experts stay packed, and FP8
projections codes (`kept.py`) unless asked otherwise; config.json does not tell, the tensors do.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
from absl import logging
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.decoded import (
    PLAIN,
    PROJECTION_LAYOUTS,
    QKV_LAYOUTS,
    QKV_PARTS,
    SPLIT,
    DecodedTensors,
    QkvLayout,
)
from mimo_jax.checkpoint.hf_target_config import target_config_from_json, target_config_to_json
from mimo_jax.checkpoint.json_config import Keys, read_json
from mimo_jax.checkpoint.kept import KeptTensors, attention_prefix, keep
from mimo_jax.checkpoint.layout import memory_layout
from mimo_jax.checkpoint.name_map import FLOAT32, Leaf
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import SLIDING, ConfigError, TargetConfig
from mimo_jax.models.cut import fp8_misfit
from mimo_jax.models.mtp import MtpConfig, MtpHead, mtp_drafter, mtp_layer_config
from mimo_jax.models.params import abstract, flatten, unflatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import MODEL, mesh_sizes

# Tensors that a text-only load leaves aside: draft heads, other towers, derived tables.
MTP_PREFIX = "model.mtp.layers."
IGNORED_PREFIXES = (
    "model.mtp.",
    "visual.",
    "model.visual.",
    "vision_tower.",
    "audio_encoder.",
    "audio_tower.",
    "speech_embeddings.",
)
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def target_leaves(config: TargetConfig) -> list[Leaf]:
    """The name map of a whole target, in the order of a file."""
    d, v = config.hidden_size, config.vocab_size
    leaves = [name_map.plain("embedding", "model.embed_tokens.weight", v, d)]
    for i in range(config.num_layers):
        leaves += _layer_leaves(config, i)
    leaves.append(name_map.plain("final_norm", "model.norm.weight", d))
    if not config.tie_embeddings:
        leaves.append(name_map.columns("head", d, {"lm_head.weight": v}))
    return leaves


def mtp_leaves(config: TargetConfig, head_idx: int) -> list[Leaf]:
    """The name map of one MTP head."""
    d, theirs = config.hidden_size, f"{MTP_PREFIX}{head_idx}."
    layer = _layer_leaves(
        mtp_layer_config(config), 0, theirs=theirs, ffn_norm="pre_mlp_layernorm"
    )
    return layer + [
        name_map.plain("embedding_norm", theirs + "enorm.weight", d),
        name_map.plain("hidden_norm", theirs + "hnorm.weight", d),
        name_map.columns("w_combine", 2 * d, {theirs + "eh_proj.weight": d}),
        name_map.plain("final_norm", theirs + "final_layernorm.weight", d),
    ]


def _layer_leaves(
    config: TargetConfig,
    layer_idx: int,
    *,
    theirs: str | None = None,
    ffn_norm: str = "post_attention_layernorm",
) -> list[Leaf]:
    d, a = config.hidden_size, config.layer_attention(layer_idx)
    ours = f"layers.{layer_idx}."
    theirs = theirs or f"model.layers.{layer_idx}."
    attn, mlp = theirs + "self_attn.", theirs + "mlp."
    q, k, v = a.qkv_widths
    parts = {attn + "q_proj.weight": q, attn + "k_proj.weight": k, attn + "v_proj.weight": v}
    if config.is_fp8:
        fused, chunks = attn + "qkv_proj.weight", config.num_fp8_chunks
        qkv = name_map.fp8_blocks(ours + "w_qkv", fused, q + k + v, d, chunks)
    else:
        qkv = [name_map.columns(ours + "w_qkv", d, parts)]
    leaves = [
        name_map.plain(ours + "attention_norm", theirs + "input_layernorm.weight", d),
        *qkv,
        name_map.columns(ours + "w_out", a.out_width, {attn + "o_proj.weight": d}),
        name_map.plain(ours + "ffn_norm", f"{theirs}{ffn_norm}.weight", d),
    ]
    if config.use_qk_norm:
        leaves += [
            name_map.plain(ours + "q_norm", attn + "q_norm.weight", a.head_dim),
            name_map.plain(ours + "k_norm", attn + "k_norm.weight", a.head_dim),
        ]
    if a.has_sink:
        leaves.append(name_map.plain(ours + "sink", attn + "attention_sink_bias", a.num_heads))
    moe = config.moe
    if moe is None or not config.is_moe_layer[layer_idx]:
        f = config.dense_hidden_size
        if config.is_fp8:
            return leaves + [
                *name_map.fp8_blocks(ours + "w_gate", mlp + "gate_proj.weight", f, d),
                *name_map.fp8_blocks(ours + "w_up", mlp + "up_proj.weight", f, d),
                *name_map.fp8_blocks(ours + "w_down", mlp + "down_proj.weight", d, f),
            ]
        return leaves + [
            name_map.columns(ours + "w_gate", d, {mlp + "gate_proj.weight": f}),
            name_map.columns(ours + "w_up", d, {mlp + "up_proj.weight": f}),
            name_map.columns(ours + "w_down", f, {mlp + "down_proj.weight": d}),
        ]
    e, f = moe.num_experts, moe.hidden_size
    leaves.append(name_map.columns(ours + "w_router", d, {mlp + "gate.weight": e}, dtype=FLOAT32))
    bias = ours + "selection_bias"
    if moe.scoring == "sigmoid":
        source = mlp + "gate.e_score_correction_bias"
        leaves.append(name_map.plain(bias, source, e, dtype=FLOAT32))
    else:
        leaves.append(name_map.zeros(bias, e))
    theirs = mlp + "experts.{}."
    if moe.is_mxfp4:
        return leaves + [
            leaf
            for name, width_in, width_out in (("gate", d, f), ("up", d, f), ("down", f, d))
            for leaf in name_map.mxfp4_experts(
                f"{ours}experts_{name}", e, width_in, width_out, f"{theirs}{name}_proj.weight"
            )
        ]
    return leaves + [
        name_map.experts(ours + "experts_gate", e, d, f, theirs + "gate_proj.weight", stack_axis=1),
        name_map.experts(ours + "experts_up", e, d, f, theirs + "up_proj.weight", stack_axis=1),
        name_map.experts(ours + "experts_down", e, f, d, theirs + "down_proj.weight", stack_axis=0),
    ]


def projection_layout(values: dict, path: str | os.PathLike) -> str:
    """Which of `PROJECTION_LAYOUTS` a config.json speaks of.

    Flash's config and those of the other families lack the key: there q, k and v stand apart. A
    `mimo_v2` without it may hold either.

    Raises:
      CheckpointError: If the value is unknown, or a `mimo_v2` does not say.

    Example: {"model_type": "mimo_v2_flash"} -> "split".
    """
    keys, key = Keys(values, path), "attention_projection_layout"
    keys.allow(key, *PROJECTION_LAYOUTS)
    if not keys.has(key) and values.get("model_type") == "mimo_v2":
        raise keys.error(key, f"is missing; allowed: {', '.join(map(repr, PROJECTION_LAYOUTS))}")
    return values.get(key) or SPLIT


def qkv_layouts(
    values: dict, config: TargetConfig, num_mtp_heads: int, override: str | None = None
) -> dict[str, QkvLayout]:
    """How each layer's projections are stored, by prefix; see `decoded.py`.

    MiMo files come from as many training shards as num_key_value_heads says, which is nowhere
    written down beside the weights; re-exported files may hold a plain [Q; K; V] under the same
    names and shapes, so that is believed only when the caller says so (`override`).
    """
    num_chunks = 1
    if values.get("model_type") in ("mimo_v2", "mimo_v2_flash") and override != PLAIN:
        num_chunks = int(values["num_key_value_heads"])
    layouts = {
        f"model.layers.{i}.self_attn.": QkvLayout(config.layer_attention(i).qkv_widths, num_chunks)
        for i in range(config.num_layers)
    }
    if SLIDING in config.attention:
        widths = config.attention[SLIDING].qkv_widths
        for i in range(num_mtp_heads):
            layouts[f"{MTP_PREFIX}{i}.self_attn."] = QkvLayout(widths, num_chunks)
    return layouts


def num_mtp_layers(tensors: SafetensorsDir) -> int:
    """MTP heads in the files; the published configs do not count them."""
    numbers = {
        name.removeprefix(MTP_PREFIX).split(".")[0]
        for name in tensors.names()
        if name.startswith(MTP_PREFIX)
    }
    return len(numbers)


def open_target(
    directory: str | os.PathLike, *, qkv_layout: str | None = None
) -> tuple[TargetConfig, DecodedTensors]:
    """Config and tensors of a directory, every header checked, no weight read.

    Args:
      directory: Holds config.json and the safetensors.
      qkv_layout: "chunked" or "plain" instead of what the config implies; see `qkv_layouts`.

    Raises:
      CheckpointError: One line naming file and key.
    """
    path = Path(directory) / "config.json"
    values = read_json(path)
    config = target_config_from_json(values, path)
    if qkv_layout not in (None, *QKV_LAYOUTS):
        allowed = ", ".join(QKV_LAYOUTS)
        raise CheckpointError(f"qkv layout {qkv_layout!r} is unknown; allowed: {allowed}")
    Keys(values, path).allow("attention_projection_layout", *PROJECTION_LAYOUTS)
    tensors = SafetensorsDir(directory)
    layouts = qkv_layouts(values, config, num_mtp_layers(tensors), qkv_layout)
    return config, DecodedTensors(tensors, layouts)


def open_kept(
    directory: str | os.PathLike, *, qkv_layout: str | None = None, num_parts: int = 1
) -> tuple[TargetConfig, DecodedTensors | KeptTensors]:
    """As `open_target`, FP8 projections kept as codes where memory can hold them so.

    Where it cannot (files without FP8, blocks across chunks, devices that would share a chunk) the
    config says so, `is_fp8` False, and tensors are floats; a line is logged if there are codes.

    Args:
      directory: Holds config.json and the safetensors.
      qkv_layout: See `open_target`.
      num_parts: Devices along "model" of a decode mesh.

    Raises:
      CheckpointError: As `open_target`.
    """
    config, decoded = open_target(directory, qkv_layout=qkv_layout)
    first = f"{attention_prefix(0)}{QKV_PARTS[0]}.weight"
    if first not in decoded or not decoded.is_fp8(first):
        return config, decoded
    try:
        in_codes = dataclasses.replace(config, is_fp8=True)
    except ConfigError as error:
        reason = str(error)
    else:
        reason = fp8_misfit(in_codes, num_parts)
        kept = keep(decoded, in_codes) if reason is None else reason
        if isinstance(kept, KeptTensors):
            return in_codes, kept
        reason = kept
    logging.warning("%s: FP8 projections are expanded: %s", directory, reason)
    return config, decoded


def is_ignored(config: TargetConfig, name: str) -> bool:
    """Whether a tensor of the files is expected to have no place in the text backbone."""
    if config.tie_embeddings and name == "lm_head.weight":
        return True
    return name.startswith(IGNORED_PREFIXES) or name.endswith(IGNORED_SUFFIXES)


def load_target(
    directory: str | os.PathLike,
    dtype=None,
    *,
    qkv_layout: str | None = None,
    mesh: Mesh | None = None,
    is_transposed: bool = False,
    expands_fp8: bool = False,
    sharding_of: Callable[[str], NamedSharding] | None = None,
    on_progress: Callable[[int, int], object] = lambda done_bytes, total_bytes: None,
):
    """A target from a published checkpoint directory.

    FP8 projections stay codes and MXFP4 experts packed; FP8 experts are decoded. Every device's
    part is read directly.

    Args:
      directory: Holds config.json and the safetensors.
      dtype: Of the parameters; default: that of the embedding in the file. The router and its
        bias are float32 always.
      qkv_layout: See `open_target`.
      mesh: Of `sharding.DECODE`: every device's part is read directly; None = the default device.
      is_transposed: Keep matrices [out, in] as the files have them; see `layers/linear.py`.
      expands_fp8: Decode FP8 projections to dtype, as is done where memory cannot hold the codes;
        see `open_kept`.
      sharding_of: Parameter name -> NamedSharding on a mesh of `sharding.TRAIN`, instead of mesh;
        FP8 is expanded, for training's cuts know no blocks.
      on_progress: Called after each parameter with (bytes so far, bytes in all).

    Returns:
      (TargetConfig, graph, params) as `models.params.split` gives them; on a mesh the graph is
      that of one device's part.

    Raises:
      CheckpointError: One line naming file and key.
      ConfigError: If an axis does not divide over the mesh.
    """
    if expands_fp8 or sharding_of is not None:
        config, tensors = open_target(directory, qkv_layout=qkv_layout)
    else:
        num_parts = 1 if mesh is None else mesh_sizes(mesh)[MODEL]
        config, tensors = open_kept(directory, qkv_layout=qkv_layout, num_parts=num_parts)
    if dtype is None and "model.embed_tokens.weight" in tensors:
        dtype = tensors.dtype("model.embed_tokens.weight")
    make = lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype)
    layout = memory_layout(make, config, mesh=mesh, is_transposed=is_transposed)
    flat = name_map.read_leaves(
        tensors,
        target_leaves(config),
        dtype,
        is_ignored=lambda name: is_ignored(config, name),
        lay_out=layout.lay_out,
        sharding_of=sharding_of or layout.sharding_of,
        on_progress=on_progress,
    )
    return config, layout.graph, unflatten(layout.like, flat)


def load_mtp_heads(directory: str | os.PathLike, dtype=None, *, qkv_layout: str | None = None):
    """The MTP heads of a published checkpoint directory.

    Args:
      directory: As `load_target`.
      dtype: As `load_target`.
      qkv_layout: As `load_target`.

    Returns:
      (graph, params) per head, in order; empty when the files hold none.

    Raises:
      CheckpointError: One line naming file and key.
    """
    config, tensors = open_target(directory, qkv_layout=qkv_layout)
    if dtype is None and "model.embed_tokens.weight" in tensors:
        dtype = tensors.dtype("model.embed_tokens.weight")
    heads = []
    for i in range(num_mtp_layers(tensors.tensors)):
        others = lambda name, i=i: not name.startswith(f"{MTP_PREFIX}{i}.")
        flat = name_map.read_leaves(tensors, mtp_leaves(config, i), dtype, is_ignored=others)
        graph, like = abstract(lambda: MtpHead(config, rngs=nnx.Rngs(0), dtype=dtype))
        heads.append((graph, unflatten(like, flat)))
    return heads


def load_mtp_drafter(
    directory: str | os.PathLike,
    dtype=None,
    *,
    draft_block_len: int | None = None,
    is_chained: bool = False,
    qkv_layout: str | None = None,
):
    """The MTP heads of a published checkpoint directory as a drafter.

    Args:
      directory: As `load_target`.
      dtype: As `load_target`.
      draft_block_len: Anchor and drafts; default a draft for each head.
      is_chained: Draft with the first head alone, fed back its own state.
      qkv_layout: As `load_target`.

    Returns:
      (MtpConfig, graph, params).

    Raises:
      CheckpointError: One line naming file and key; also if the files hold no heads.
      ConfigError: If the block is longer than the heads draft.

    Example: `LLM(Model(*load_target(d)), Model(*load_mtp_drafter(d)))`.
    """
    heads = [params for _, params in load_mtp_heads(directory, dtype, qkv_layout=qkv_layout)]
    if not heads:
        raise CheckpointError(f"{directory}: holds no MTP heads ({MTP_PREFIX}*)")
    config, _ = open_target(directory, qkv_layout=qkv_layout)
    length = len(heads) + 1 if draft_block_len is None else draft_block_len
    return mtp_drafter(MtpConfig(config, length, is_chained), heads)


def save_target(
    directory: str | os.PathLike,
    config: TargetConfig,
    params,
    *,
    dtype=jnp.bfloat16,
    extra_config: dict | None = None,
    max_shard_bytes: int = 4_000_000,
) -> None:
    """Writes a target as a published checkpoint that transformers can load.

    Args:
      directory: Made if needed; an earlier model in it is replaced.
      config: The model.
      params: As `models.params.split` gives them.
      dtype: Of the stored weights; the router and its bias stay float32.
      extra_config: More config.json keys, e.g. {"eos_token_id": [5, 7], "pad_token_id": 0}; the
        token ids also go into generation_config.json.
      max_shard_bytes: A file is cut before it would grow larger.

    Raises:
      CheckpointError: If the family's format cannot express the model (FP8 codes: load expanded),
        or extra_config repeats a key that the model decides.
    """
    path = Path(directory) / "config.json"
    if config.is_fp8:
        raise CheckpointError(
            f"{path}: this layout holds no FP8 codes; load the target with expands_fp8=True, or "
            "save it as published"
        )
    values, extra = target_config_to_json(config, dtype, path), dict(extra_config or {})
    for key in extra:
        if key in values:
            raise CheckpointError(f"{path}: extra_config must not set {key}")
    generation = {key: extra[key] for key in ("bos_token_id", "pad_token_id") if key in extra}
    if extra.get("eos_token_id") is not None:
        eos = extra["eos_token_id"]
        generation["eos_token_id"] = [eos] if isinstance(eos, int) else list(eos)
    name_map.write_model(
        directory,
        target_leaves(config),
        flatten(params),
        dtype=dtype,
        json_files={"config.json": values | extra, "generation_config.json": generation},
        max_shard_bytes=max_shard_bytes,
    )
