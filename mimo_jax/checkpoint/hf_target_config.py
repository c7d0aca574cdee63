"""config.json of published targets, in both directions.

Reads MiMo-V2 in the style of the published files (`hybrid_layer_pattern`, `swa_*`) and in the
style that transformers writes (`layer_types`, `rope_parameters` per kind), and Qwen3, Qwen3-MoE
and Llama. A setting that would change the mathematics and is not supported is refused by name.

Traps: the two MiMo styles mean the same window (keys that a query sees, itself included), but
transformers reads the published `sliding_window_size` as one more, so it is never written;
transformers derives the sliding KV heads as twice the global ones, so other models cannot be
written in its style; `attention_value_scale` has no safe default.
"""

import os

import jax.numpy as jnp

from mimo_jax.checkpoint.json_config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    Keys,
    read_rope,
    rope_to_json,
    rotary_factor,
)
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    ConfigError,
    MoeConfig,
    TargetConfig,
)

LAYER_TYPES = {"full_attention": GLOBAL, "sliding_attention": SLIDING}
_TYPE_OF_KIND = {kind: name for name, kind in LAYER_TYPES.items()}

def _refuse_unsupported(keys: Keys) -> None:
    """Settings of all families that would change the forward pass."""
    keys.allow("hidden_act", "silu")
    keys.allow("attention_bias", False)
    keys.allow("mlp_bias", False)


def _has_mxfp4_experts(keys: Keys) -> bool:
    """Reads quantization_config, whose quant_method says "fp8" also where experts are MXFP4."""
    if not keys.has("quantization_config"):
        return False
    quantization = keys.nested("quantization_config")
    if not quantization.has("quant_method"):
        raise quantization.error("quant_method", "is missing; allowed: 'fp8'")
    quantization.allow("quant_method", "fp8")
    quantization.allow("fmt", "e4m3")
    quantization.allow("weight_block_size", [128, 128])
    quantization.allow("store_dtype", "mxfp4")
    quantization.allow("mxfp4_block_size", 32)
    return quantization.has("store_dtype")


def _mimo_moe(keys: Keys, is_moe_layer: tuple[bool, ...]) -> MoeConfig | None:
    if not any(is_moe_layer):
        return None
    keys.allow("scoring_func", "sigmoid")
    keys.allow("topk_method", "noaux_tc")
    keys.allow("norm_topk_prob", True)
    keys.allow("n_group", 1)
    keys.allow("topk_group", 1)
    keys.allow("n_shared_experts", 0)
    return MoeConfig(
        num_experts=keys.count("n_routed_experts", MAX_EXPERTS),
        top_k=keys.integer("num_experts_per_tok"),
        hidden_size=keys.integer("moe_intermediate_size"),
        routed_scale=keys.number("routed_scaling_factor", 1.0),
        is_mxfp4=_has_mxfp4_experts(keys),
    )


def _published_geometry(keys: Keys, kind: str) -> AttentionConfig:
    """Attention of one kind from the flat keys of the published files."""
    is_sliding = kind == SLIDING
    head_dim = keys.integer("head_dim")
    v_head_dim = keys.integer("v_head_dim", head_dim)
    num_heads = keys.count("num_attention_heads", MAX_HEADS)
    window = None
    if is_sliding:
        head_dim = keys.integer("swa_head_dim", head_dim)
        v_head_dim = keys.integer("swa_v_head_dim", v_head_dim)
        num_heads = keys.integer("swa_num_attention_heads", num_heads)
        window = keys.integer("sliding_window", None)
        same = keys.integer("sliding_window_size", window)
        window = same if window is None else window
        if window is None or same != window:
            raise keys.error("sliding_window", f"is {window}, but sliding_window_size is {same}")
    return AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=keys.integer(
            "swa_num_key_value_heads" if is_sliding else "num_key_value_heads"
        ),
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        rope_theta=keys.number("swa_rope_theta" if is_sliding else "rope_theta"),
        rope_dim=int(head_dim * keys.number("partial_rotary_factor", 1.0)),
        window=window,
        has_sink=keys.flag(
            "add_swa_attention_sink_bias" if is_sliding else "add_full_attention_sink_bias", False
        ),
    )


def _transformers_geometry(keys: Keys, kind: str) -> AttentionConfig:
    """Attention of one kind from the keys that transformers writes."""
    is_sliding = kind == SLIDING
    if keys.has("sliding_window_size"):
        raise keys.error(
            "sliding_window_size", "is not supported beside layer_types; allowed: sliding_window"
        )
    rope = keys.nested("rope_parameters").nested(_TYPE_OF_KIND[kind])
    rope.allow("rope_type", "default")
    factor = rope.number("partial_rotary_factor", None)
    factor = keys.number("partial_rotary_factor") if factor is None else factor
    head_dim = keys.integer("head_dim")
    return AttentionConfig(
        num_heads=keys.count("num_attention_heads", MAX_HEADS),
        num_kv_heads=keys.integer("num_key_value_heads") * (2 if is_sliding else 1),
        head_dim=head_dim,
        v_head_dim=keys.integer("v_head_dim", head_dim),
        rope_theta=rope.number("rope_theta"),
        rope_dim=int(head_dim * factor),
        window=keys.integer("sliding_window") if is_sliding else None,
        has_sink=is_sliding,
    )


def _mimo_config(keys: Keys) -> TargetConfig:
    num_layers = keys.count("num_hidden_layers", MAX_LAYERS)
    if keys.has("hybrid_layer_pattern"):
        if keys.has("layer_types"):
            raise keys.error("layer_types", "stands beside hybrid_layer_pattern; allowed: one")
        keys.allow("rope_scaling")
        kinds = keys.layers("hybrid_layer_pattern", {0: GLOBAL, 1: SLIDING}, num_layers)
        is_moe_layer = keys.layers("moe_layer_freq", {0: False, 1: True}, num_layers)
        norm_eps, geometry_of = keys.number("layernorm_epsilon"), _published_geometry
    else:
        kinds = keys.layers("layer_types", LAYER_TYPES, num_layers)
        is_moe_layer = keys.layers("mlp_layer_types", {"dense": False, "sparse": True}, num_layers)
        norm_eps, geometry_of = keys.number("rms_norm_eps"), _transformers_geometry
    return TargetConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layer_kinds=kinds,
        attention={kind: geometry_of(keys, kind) for kind in sorted(set(kinds))},
        dense_hidden_size=keys.integer("intermediate_size"),
        moe=_mimo_moe(keys, is_moe_layer),
        is_moe_layer=is_moe_layer,
        value_scale=keys.number("attention_value_scale"),
        norm_eps=norm_eps,
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        max_position=keys.integer("max_position_embeddings"),
    )


def _dense_kinds(keys: Keys, num_layers: int) -> tuple[str, ...]:
    """Layer kinds of a Qwen3: an explicit list, or the layers from max_window_layers on."""
    kinds = keys.layers("layer_types", LAYER_TYPES, num_layers, None)
    if kinds is not None:
        return kinds
    if not keys.flag("use_sliding_window", False) or not keys.has("sliding_window"):
        return (GLOBAL,) * num_layers
    first = min(keys.integer("max_window_layers", 28), num_layers)
    return (GLOBAL,) * first + (SLIDING,) * (num_layers - first)


def _simple_config(keys: Keys, model_type: str) -> TargetConfig:
    """Qwen3, Qwen3-MoE and Llama: one geometry, plain RoPE over whole heads by default."""
    num_layers = keys.count("num_hidden_layers", MAX_LAYERS)
    num_heads = keys.count("num_attention_heads", MAX_HEADS)
    default_head_dim = keys.integer("hidden_size") // num_heads
    head_dim = keys.integer("head_dim", 128 if model_type == "qwen3" else default_head_dim)
    theta, scaling, factor = read_rope(keys)
    factor = keys.number("partial_rotary_factor", 1.0) if factor is None else factor
    kinds = (GLOBAL,) * num_layers
    if model_type == "qwen3":
        kinds = _dense_kinds(keys, num_layers)
    else:
        keys.allow("use_sliding_window", False)
        if SLIDING in (keys.layers("layer_types", LAYER_TYPES, num_layers, None) or ()):
            raise keys.error("layer_types", f"of a {model_type} allow only 'full_attention'")
    moe, is_moe_layer = None, (False,) * num_layers
    if model_type == "qwen3_moe":
        keys.allow("norm_topk_prob", True)
        if not keys.has("norm_topk_prob"):
            raise keys.error("norm_topk_prob", "is missing (means false); allowed: True")
        dense = keys.items("mlp_only_layers", int, ())
        step = keys.integer("decoder_sparse_step", 1)
        if step < 1:
            raise keys.error("decoder_sparse_step", f"is {step}, must be >= 1")
        is_moe_layer = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
        moe = MoeConfig(
            num_experts=keys.count("num_experts", MAX_EXPERTS),
            top_k=keys.integer("num_experts_per_tok"),
            hidden_size=keys.integer("moe_intermediate_size"),
            scoring="softmax",
        )
    attention = {
        kind: AttentionConfig(
            num_heads=num_heads,
            num_kv_heads=keys.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            v_head_dim=head_dim,
            rope_theta=theta,
            rope_dim=int(head_dim * factor),
            window=keys.integer("sliding_window") if kind == SLIDING else None,
            rope_scaling=scaling,
        )
        for kind in sorted(set(kinds))
    }
    return TargetConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        layer_kinds=kinds,
        attention=attention,
        dense_hidden_size=keys.integer("intermediate_size"),
        moe=moe,
        is_moe_layer=is_moe_layer,
        use_qk_norm=model_type != "llama",
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        max_position=keys.integer("max_position_embeddings"),
    )


def target_config_from_json(values: dict, path: str | os.PathLike = "config.json") -> TargetConfig:
    """The target that a config.json describes; looks at no weights.

    Args:
      values: Parsed config.json.
      path: Where it came from, for messages.

    Raises:
      CheckpointError: On an unknown model_type, a missing key, or a value that is not supported.

    Example: {"model_type": "mimo_v2", "quantization_config": {"store_dtype": "mxfp4", ...}, ...}
      -> a TargetConfig whose `moe.is_mxfp4` is True.
    """
    keys = Keys(values, path)
    allowed = ("mimo_v2_flash", "mimo_v2", "qwen3", "qwen3_moe", "llama")
    keys.allow("model_type", *allowed)
    model_type = values.get("model_type")
    if model_type is None:
        raise keys.error("model_type", f"is missing; allowed: {', '.join(allowed)}")
    _refuse_unsupported(keys)
    _has_mxfp4_experts(keys)
    try:
        if model_type in ("mimo_v2_flash", "mimo_v2"):
            return _mimo_config(keys)
        return _simple_config(keys, model_type)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _model_type(config: TargetConfig) -> str:
    if config.use_qk_norm:
        return "qwen3" if config.moe is None else "qwen3_moe"
    a = config.attention.get(GLOBAL)
    is_llama = (
        a is not None
        and SLIDING not in config.layer_kinds
        and config.moe is None
        and a.v_head_dim == a.head_dim == a.rope_dim
        and not a.has_sink
        and config.value_scale == 1.0
    )
    return "llama" if is_llama else "mimo_v2_flash"


def _require(condition: bool, path, message: str) -> None:
    if not condition:
        raise CheckpointError(f"{path}: {message}")


def _mimo_json(config: TargetConfig, path) -> dict:
    """Keys that transformers' MiMoV2FlashForCausalLM reads."""
    used = {kind: config.attention[kind] for kind in dict.fromkeys(config.layer_kinds)}
    first = next(iter(used.values()))
    for name in ("num_heads", "head_dim", "v_head_dim"):
        _require(
            len({getattr(a, name) for a in used.values()}) == 1,
            path,
            f"mimo_v2_flash needs the same {name} on global and sliding layers",
        )
    num_kv_heads = used[GLOBAL].num_kv_heads if GLOBAL in used else first.num_kv_heads // 2
    if SLIDING in used:
        _require(
            used[SLIDING].num_kv_heads == 2 * num_kv_heads,
            path,
            f"mimo_v2_flash needs twice as many KV heads on sliding layers as on global ones, got "
            f"{used[SLIDING].num_kv_heads} and {num_kv_heads}",
        )
    for kind, a in used.items():
        _require(
            a.has_sink == (kind == SLIDING),
            path,
            "mimo_v2_flash needs sinks on sliding layers and only there",
        )
        _require(a.rope_scaling is None, path, "mimo_v2_flash has no RoPE scaling")
    _require(not config.tie_embeddings, path, "mimo_v2_flash needs an untied head")
    values = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "layer_types": [_TYPE_OF_KIND[kind] for kind in config.layer_kinds],
        "mlp_layer_types": ["sparse" if is_moe else "dense" for is_moe in config.is_moe_layer],
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": first.head_dim,
        "v_head_dim": first.v_head_dim,
        "attention_value_scale": config.value_scale,
        "rope_parameters": {
            _TYPE_OF_KIND[kind]: {
                "rope_theta": float(a.rope_theta),
                "rope_type": "default",
                "partial_rotary_factor": rotary_factor(a.rope_dim, a.head_dim),
            }
            for kind, a in used.items()
        },
    }
    if SLIDING in used:
        values["sliding_window"] = used[SLIDING].window
    if config.moe is not None:
        _require(config.moe.scoring == "sigmoid", path, "mimo_v2_flash needs sigmoid scores")
        values |= {
            "n_routed_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.top_k,
            "moe_intermediate_size": config.moe.hidden_size,
            "routed_scaling_factor": config.moe.routed_scale,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        }
        if config.moe.is_mxfp4:
            values["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
                "store_dtype": "mxfp4",
                "mxfp4_block_size": 32,
            }
    return values


def _simple_json(config: TargetConfig, model_type: str, path) -> dict:
    """Keys of Qwen3, Qwen3-MoE and Llama."""
    used = {kind: config.attention[kind] for kind in dict.fromkeys(config.layer_kinds)}
    a = next(iter(used.values()))
    for other in used.values():
        for name in ("num_heads", "num_kv_heads", "head_dim", "rope_theta", "rope_dim"):
            _require(
                getattr(other, name) == getattr(a, name),
                path,
                f"{model_type} needs the same {name} on global and sliding layers",
            )
        _require(not other.has_sink, path, f"{model_type} has no sinks")
        _require(
            other.v_head_dim == other.head_dim == other.rope_dim,
            path,
            f"{model_type} needs head_dim == v_head_dim == rope_dim",
        )
        _require(other.rope_scaling == a.rope_scaling, path, f"{model_type} needs one RoPE scaling")
    _require(config.value_scale == 1.0, path, f"{model_type} has no value scale")
    architecture = {"qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}[model_type]
    values = {
        "architectures": [f"{architecture}ForCausalLM"],
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "rope_parameters": rope_to_json(a.rope_theta, a.rope_scaling),
    }
    is_sliding = SLIDING in used
    if model_type == "qwen3":
        values |= {
            "layer_types": [_TYPE_OF_KIND[kind] for kind in config.layer_kinds],
            "use_sliding_window": is_sliding,
            "sliding_window": used[SLIDING].window if is_sliding else None,
        }
    else:
        _require(not is_sliding, path, f"{model_type} has no sliding layers")
    if model_type == "llama":
        values["mlp_bias"] = False
    moe = config.moe
    if moe is not None:
        _require(moe.scoring == "softmax", path, "qwen3_moe needs softmax scores")
        _require(moe.routed_scale == 1.0, path, "qwen3_moe has no routed scale")
        dense = [i for i, is_moe in enumerate(config.is_moe_layer) if not is_moe]
        values |= {
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.top_k,
            "moe_intermediate_size": moe.hidden_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "use_sliding_window": False,
        }
    return values


def target_config_to_json(
    config: TargetConfig, dtype, path: str | os.PathLike = "config.json"
) -> dict:
    """config.json of a target in the family that its features ask for.

    Raises:
      CheckpointError: If no published family can express it; says what is in the way.
    """
    model_type = _model_type(config)
    if model_type == "mimo_v2_flash":
        values = _mimo_json(config, path)
    else:
        values = _simple_json(config, model_type, path)
    return values | {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_hidden_size,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_position,
        "dtype": jnp.dtype(dtype).name,
        "use_cache": True,
    }
