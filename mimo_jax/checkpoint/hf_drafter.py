"""Published DFlash drafters: config.json and tensor names, in both directions.

Reads the layout of the z-lab drafters and the extra keys of the MiMo ones (value width, partial
rotary, value scale, sinks, `use_swa`). Tap ids need no shift: `target_layer_ids` of these files
count decoder layers from 0 and mean a layer's output, as ours do. (Engines that store "input of
layer i + 1" add one; nothing here does.)

Causality inside the block, in order: top-level `is_causal`, `dflash_config.causal`, else a layer
that `layer_types` calls sliding is causal. Windows by `use_swa` are never causal by themselves.
Since that default surprises, written configs always say `is_causal`.

Traps: `backbone_rotary_base` of the MiMo files is not read (engines disagree; `rope_theta` is used
for context and block alike); `sliding_window` without sliding layers means nothing.
"""

import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.hf_target_config import LAYER_TYPES
from mimo_jax.checkpoint.json_config import (
    MAX_HEADS,
    MAX_LAYERS,
    Keys,
    read_json,
    read_rope,
    rope_to_json,
    rotary_factor,
)
from mimo_jax.checkpoint.layout import memory_layout
from mimo_jax.checkpoint.name_map import Leaf
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.checkpoint.torch_file import read_torch_file
from mimo_jax.config import SLIDING, AttentionConfig, ConfigError, DrafterConfig
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import flatten, unflatten

MASK_EMBEDDING = "mask_embedding"
_LAYER_TYPE = {True: "sliding_attention", False: "full_attention"}


def _refuse_unsupported(keys: Keys, dflash: Keys) -> None:
    keys.allow("hidden_act", "silu")
    keys.allow("attention_bias", False)
    for place in (keys, dflash):
        place.allow("input_embedding_scale", 1.0)
        place.allow("output_multiplier", 1.0)
        place.allow("final_logit_softcapping")
        place.allow("projector_type")
        place.allow("shift_label", False)
        place.allow("sample_from_anchor", False)
        place.allow("pure_draft_prefix_len", 0)
        place.allow("conv_kernel_size")
        place.allow("selector_rank")
        place.allow("draft_vocab_size")


def _windows(keys: Keys, dflash: Keys, num_layers: int):
    """(window or None per layer, whether layer_types call it sliding per layer)."""
    kinds = keys.layers("layer_types", LAYER_TYPES, num_layers, None)
    if kinds is None and keys.flag("use_sliding_window", False) and keys.has("sliding_window"):
        first = keys.integer("max_window_layers", 28)
        is_sliding = tuple(i >= first for i in range(num_layers))
    else:
        is_sliding = tuple(kind == SLIDING for kind in kinds or (None,) * num_layers)
    if any(is_sliding):
        window = keys.integer("sliding_window")
        return tuple(window if sliding else None for sliding in is_sliding), is_sliding
    use_swa = dflash.flag("use_swa", None)
    if keys.flag("use_swa", False) if use_swa is None else use_swa:
        place = dflash if dflash.has("swa_window_size") else keys
        key = "swa_window_size" if place.has("swa_window_size") else "sliding_window"
        return (place.integer(key),) * num_layers, is_sliding
    return (None,) * num_layers, is_sliding


def drafter_config_from_json(
    values: dict, path: str | os.PathLike = "config.json"
) -> DrafterConfig:
    """The drafter that a config.json describes; looks at no weights.

    Args:
      values: Parsed config.json.
      path: Where it came from, for messages.

    Raises:
      CheckpointError: If a key is missing or asks for something that is not supported.
    """
    keys = Keys(values, path)
    if not keys.has("model_type"):
        raise keys.error("model_type", "is missing; allowed: qwen3")
    keys.allow("model_type", "qwen3")
    architectures = keys.items("architectures", str, ("DFlashDraftModel",))
    if architectures != ("DFlashDraftModel",):
        raise keys.error(
            "architectures", f"{list(architectures)} is not supported; allowed: DFlashDraftModel"
        )
    dflash = keys.nested("dflash_config", {})
    _refuse_unsupported(keys, dflash)
    place_of = lambda key: dflash if dflash.has(key) else keys
    num_layers = keys.count("num_hidden_layers", MAX_LAYERS)
    windows, is_sliding = _windows(keys, dflash, num_layers)
    is_causal = keys.flag("is_causal", None)
    if is_causal is None:
        is_causal = dflash.flag("causal", None)
    theta, scaling, factor = read_rope(keys)
    if factor is None:
        factor = place_of("partial_rotary_factor").number("partial_rotary_factor", 1.0)
    num_heads = keys.count("num_attention_heads", MAX_HEADS)
    head_dim = keys.integer("head_dim", 128)
    sink_key = "attention_sink_bias"
    if not place_of(sink_key).has(sink_key):
        sink_key = "add_swa_attention_sink_bias"
    try:
        return DrafterConfig(
            hidden_size=keys.integer("hidden_size"),
            num_layers=num_layers,
            attention=AttentionConfig(
                num_heads=num_heads,
                num_kv_heads=keys.integer("num_key_value_heads", num_heads),
                head_dim=head_dim,
                v_head_dim=place_of("v_head_dim").integer("v_head_dim", head_dim),
                rope_theta=theta,
                rope_dim=int(head_dim * factor),
                has_sink=place_of(sink_key).flag(sink_key, False),
                rope_scaling=scaling,
            ),
            dense_hidden_size=keys.integer("intermediate_size"),
            target_layer_ids=place_of("target_layer_ids").items("target_layer_ids", int),
            num_target_layers=place_of("num_target_layers").integer("num_target_layers"),
            draft_block_len=place_of("block_size").integer("block_size"),
            mask_token_id=place_of("mask_token_id").integer("mask_token_id"),
            vocab_size=keys.integer("vocab_size"),
            windows=windows,
            is_causal=is_sliding if is_causal is None else (is_causal,) * num_layers,
            value_scale=place_of("attention_value_scale").number("attention_value_scale", 1.0),
            norm_eps=keys.number("rms_norm_eps", 1e-6),
            target_hidden_size=place_of("target_hidden_size").integer("target_hidden_size", 0),
            max_position=keys.integer("max_position_embeddings"),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def drafter_leaves(config: DrafterConfig) -> list[Leaf]:
    """The name map of a whole drafter, in the order of a file."""
    d, a, f = config.hidden_size, config.attention, config.dense_hidden_size
    q, k, v = a.qkv_widths
    leaves = [
        name_map.columns("w_fuse", config.context_width, {"fc.weight": d}),
        name_map.plain("context_norm", "hidden_norm.weight", d),
    ]
    for i in range(config.num_layers):
        layer = f"layers.{i}."
        attn, mlp = layer + "self_attn.", layer + "mlp."
        kv_parts = {attn + "k_proj.weight": k, attn + "v_proj.weight": v}
        leaves += [
            name_map.plain(layer + "attention_norm", layer + "input_layernorm.weight", d),
            name_map.columns(layer + "w_q", d, {attn + "q_proj.weight": q}),
            name_map.columns(layer + "w_kv", d, kv_parts),
            name_map.columns(layer + "w_out", a.out_width, {attn + "o_proj.weight": d}),
            name_map.plain(layer + "ffn_norm", layer + "post_attention_layernorm.weight", d),
            name_map.columns(layer + "w_gate", d, {mlp + "gate_proj.weight": f}),
            name_map.columns(layer + "w_up", d, {mlp + "up_proj.weight": f}),
            name_map.columns(layer + "w_down", f, {mlp + "down_proj.weight": d}),
        ]
        if config.use_qk_norm:
            leaves += [
                name_map.plain(layer + "q_norm", attn + "q_norm.weight", a.head_dim),
                name_map.plain(layer + "k_norm", attn + "k_norm.weight", a.head_dim),
            ]
        if a.has_sink:
            leaves.append(name_map.plain(layer + "sink", attn + "attention_sink_bias", a.num_heads))
    leaves.append(name_map.plain("final_norm", "norm.weight", d))
    return leaves


def load_drafter(
    directory: str | os.PathLike,
    dtype=None,
    *,
    mesh: Mesh | None = None,
    is_transposed: bool = False,
):
    """A drafter from a published checkpoint directory.

    Args:
      directory: Holds config.json and the safetensors.
      dtype: Of the parameters; default: that of the fusion matrix in the file.
      mesh: As `hf_target.load_target`.
      is_transposed: As `hf_target.load_target`.

    Returns:
      (DrafterConfig, graph, params) as `models.params.split` gives them.

    Raises:
      CheckpointError: One line naming file and key.
    """
    directory = Path(directory)
    path = directory / "config.json"
    config = drafter_config_from_json(read_json(path), path)
    mask_embedding = read_mask_embedding(directory, config)
    tensors = SafetensorsDir(directory, ignore_files=(MASK_EMBEDDING + ".safetensors",))
    if dtype is None:
        dtype = tensors.dtype("model.fc.weight" if "model.fc.weight" in tensors else "fc.weight")
    leaves = drafter_leaves(config)
    if mask_embedding is not None:
        config = dataclasses.replace(config, has_mask_embedding=True)
    make = lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype)
    layout = memory_layout(make, config, mesh=mesh, is_transposed=is_transposed)
    flat = name_map.read_leaves(
        tensors,
        leaves,
        dtype,
        prefix="model.",
        lay_out=layout.lay_out,
        sharding_of=layout.sharding_of,
    )
    if mask_embedding is not None:
        vector = jnp.array(mask_embedding, dtype)
        place = layout.sharding_of and layout.sharding_of("mask_embedding")
        flat["mask_embedding"] = jax.device_put(vector, place)
    return config, layout.graph, unflatten(layout.like, flat)


def read_mask_embedding(directory: Path, config: DrafterConfig) -> np.ndarray | None:
    """The vector of mask slots that some drafters bring beside their weights, or None.

    The target's own row of the mask id is then about zero, and drafting with it fails silently
    (accept length about 1). Of a .safetensors and a .pt file, the first is read.

    Raises:
      CheckpointError: If the file is damaged or belongs to another drafter; says what was expected.
    """
    safe, pickled = (directory / f"{MASK_EMBEDDING}{end}" for end in (".safetensors", ".pt"))
    if safe.is_file():
        path, tensors = safe, SafetensorsDir(safe)
        values = {name: tensors.get(name) for name in tensors.names()}
    elif pickled.is_file():
        path, values = pickled, read_torch_file(pickled)
    else:
        return None
    for key in ("embedding", "mask_token_id"):
        if key not in values:
            raise CheckpointError(f"{path}: has no {key!r}; it has {', '.join(sorted(values))}")
    mask_id = np.asarray(values["mask_token_id"]).reshape(-1).tolist()
    if mask_id != [config.mask_token_id]:
        raise CheckpointError(
            f"{path}: mask_token_id is {mask_id}, expected {config.mask_token_id} as in config.json"
        )
    embedding = np.asarray(values["embedding"])
    if embedding.shape != (config.hidden_size,) or not np.isfinite(
        embedding.astype(np.float32)
    ).all():
        raise CheckpointError(
            f"{path}: 'embedding' must be {config.hidden_size} finite numbers, has shape "
            f"{list(embedding.shape)}"
        )
    return embedding


def find_drafter(checkpoint_dir: str | os.PathLike) -> Path | None:
    """The drafter shipped inside a target's directory: DIR/dflash with a config.json, or None."""
    directory = Path(checkpoint_dir) / "dflash"
    return directory if (directory / "config.json").is_file() else None


def drafter_config_to_json(
    config: DrafterConfig, dtype, path: str | os.PathLike = "config.json"
) -> dict:
    """config.json of a drafter: a Qwen3 config with the DFlash keys.

    Keys of the MiMo drafters are written only where they say something.

    Raises:
      CheckpointError: If the format cannot express the config.
    """
    a = config.attention
    windows = {window for window in config.windows if window is not None}
    is_sliding = tuple(window is not None for window in config.windows)
    if len(windows) > 1:
        raise CheckpointError(f"{path}: sliding layers need one window, got {sorted(windows)}")
    if not config.use_qk_norm:
        raise CheckpointError(f"{path}: a qwen3 drafter needs norms on query and key heads")
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "rope_parameters": rope_to_json(a.rope_theta, a.rope_scaling),
        "layer_types": [_LAYER_TYPE[sliding] for sliding in is_sliding],
        "use_sliding_window": bool(windows),
        "sliding_window": windows.pop() if windows else None,
        "max_window_layers": config.num_layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.draft_block_len,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        "vocab_size": config.vocab_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_position,
        "dtype": jnp.dtype(dtype).name,
        "use_cache": True,
    }
    if len(set(config.is_causal)) == 1:
        values["is_causal"] = config.is_causal[0]
    elif config.is_causal != is_sliding:
        raise CheckpointError(
            f"{path}: is_causal {list(config.is_causal)} must be the same for all layers, or true "
            "for sliding layers and false for the others"
        )
    if a.v_head_dim != a.head_dim:
        values["v_head_dim"] = a.v_head_dim
    if a.rope_dim != a.head_dim:
        values["partial_rotary_factor"] = rotary_factor(a.rope_dim, a.head_dim)
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    if config.value_scale != 1.0:
        values["dflash_config"]["attention_value_scale"] = config.value_scale
    if a.has_sink:
        values["dflash_config"]["attention_sink_bias"] = True
    return values


def save_drafter(
    directory: str | os.PathLike,
    config: DrafterConfig,
    params,
    *,
    dtype=jnp.bfloat16,
    extra_config: dict | None = None,
    max_shard_bytes: int = 4_000_000,
) -> None:
    """Writes a drafter as a published checkpoint.

    Args:
      directory: Made if needed, usually TARGET/dflash; an earlier drafter in it is replaced.
      config: The drafter.
      params: As `models.params.split` gives them.
      dtype: Of the stored weights.
      extra_config: More config.json keys, e.g. {"bos_token_id": 0, "eos_token_id": 5}.
      max_shard_bytes: A file is cut before it would grow larger.

    Raises:
      CheckpointError: If the format cannot express the drafter, or extra_config repeats a key
        that the drafter decides.
    """
    path = Path(directory) / "config.json"
    values, extra = drafter_config_to_json(config, dtype, path), dict(extra_config or {})
    for key in extra:
        if key in values:
            raise CheckpointError(f"{path}: extra_config must not set {key}")
    flat = flatten(params)
    mask_embedding = flat.pop("mask_embedding", None)
    side_files: dict[str, bytes | None] = dict.fromkeys(
        (f"{MASK_EMBEDDING}.pt", f"{MASK_EMBEDDING}.safetensors")
    )
    if mask_embedding is not None:
        values_of_file = {
            "embedding": np.asarray(mask_embedding, np.dtype(dtype)),
            "mask_token_id": np.array([config.mask_token_id], np.int64),
        }
        side_files[f"{MASK_EMBEDDING}.safetensors"] = safetensors.numpy.save(values_of_file)
    name_map.write_model(
        directory,
        drafter_leaves(config),
        flat,
        dtype=dtype,
        json_files={"config.json": values | extra},
        side_files=side_files,
        max_shard_bytes=max_shard_bytes,
    )
