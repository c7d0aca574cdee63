"""One device's part of a model: the decode program sees these shapes and no others.

The whole decode program runs inside one `shard_map` over the mesh of `sharding.DECODE`. There a
module is merged from the parameters that this device holds and from a graph whose config speaks of
this device alone (an eighth of the heads, of every width, of the vocabulary). The forward code is
the same as on one device, plus one sum per layer half (`mesh_axis`).

The fused projections are [Q | K | V] over all heads; a device must hold its own heads of all three,
so their columns are put in device order first: [Q0 K0 V0 | Q1 K1 V1 | ...]. Fewer KV heads than
devices are repeated: devices that share a head each keep a copy of it, in weights and cache. A
projection in FP8 lies in chunks [Q_c | K_c | V_c] already, whose blocks cannot be cut: every device
takes whole chunks.

Rejected: leaving the partition to XLA (Auto axes). It is free to gather a cache or the logits, and
the number of collectives per layer is then a discovery instead of a rule.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.config import AttentionConfig, ConfigError, DrafterConfig, TargetConfig
from mimo_jax.models.params import partition_specs
from mimo_jax.quant import fp8
from mimo_jax.sharding import DECODE, MODEL, fitting_parts, mesh_sizes


def _divide(name: str, size: int, num_parts: int) -> int:
    if size % num_parts:
        raise ConfigError(
            f"{name} {size} cannot be cut into {num_parts} parts (rules decode: "
            f"{MODEL}={num_parts}); it can be cut into {fitting_parts(size)}"
        )
    return size // num_parts


def attention_part(a: AttentionConfig, num_parts: int, name: str) -> AttentionConfig:
    """Geometry of one device: its share of the query heads and its KV heads, one at least.

    Raises:
      ConfigError: If heads do not divide; says what would fit.

    Example: 128 query and 8 KV heads over 8 devices -> 16 and 1; 64 and 4 over 8 -> 8 and 1 (a
      pair of devices shares a KV head).
    """
    num_heads = _divide(f"{name} num_heads", a.num_heads, num_parts)
    if a.num_kv_heads >= num_parts:
        num_kv_heads = _divide(f"{name} num_kv_heads", a.num_kv_heads, num_parts)
    elif num_parts % a.num_kv_heads:
        raise ConfigError(
            f"{name} num_kv_heads {a.num_kv_heads} cannot be repeated to {num_parts} parts "
            f"(rules decode: {MODEL}={num_parts}); a multiple of {a.num_kv_heads} would fit"
        )
    else:
        num_kv_heads = 1
    return dataclasses.replace(a, num_heads=num_heads, num_kv_heads=num_kv_heads)


def fp8_misfit(config: TargetConfig, num_parts: int) -> str | None:
    """Why FP8 weights cannot be cut into parts, in one line; None if they can or there are none.

    Example: 4 chunks over 8 devices -> "FP8 qkv of 4 chunks cannot be cut into 8 parts of whole
      chunks".
    """
    if not config.is_fp8:
        return None
    if config.num_fp8_chunks % num_parts:
        return (
            f"FP8 qkv of {config.num_fp8_chunks} chunks cannot be cut into {num_parts} parts of "
            "whole chunks"
        )
    has_dense = not all(config.is_moe_layer)
    if has_dense and num_parts > 1 and config.dense_hidden_size % (num_parts * fp8.BLOCK_LEN):
        return (
            f"FP8 dense_hidden_size {config.dense_hidden_size} cannot be cut into {num_parts} "
            f"parts of whole blocks of {fp8.BLOCK_LEN}"
        )
    return None


def as_loaded(config: TargetConfig, num_parts: int) -> TargetConfig:
    """The config that a loader gives for so many devices: without FP8 where it cannot be cut."""
    misfit = fp8_misfit(config, num_parts)
    return config if misfit is None else dataclasses.replace(config, is_fp8=False)


def target_part(config: TargetConfig, num_parts: int) -> TargetConfig:
    """Config of one device's part of a target.

    Raises:
      ConfigError: If an axis does not divide; says which, its size and what would fit.
    """
    misfit = fp8_misfit(config, num_parts)
    if misfit is not None:
        raise ConfigError(f"{misfit}; load the weights expanded (is_fp8=False)")
    moe = config.moe
    if moe is not None:
        hidden = _divide("moe hidden_size", moe.hidden_size, num_parts)
        moe = dataclasses.replace(moe, hidden_size=hidden)
    return dataclasses.replace(
        config,
        vocab_size=_divide("vocab_size", config.vocab_size, num_parts),
        attention={
            kind: attention_part(a, num_parts, kind) for kind, a in config.attention.items()
        },
        dense_hidden_size=_divide("dense_hidden_size", config.dense_hidden_size, num_parts)
        if not all(config.is_moe_layer)
        else config.dense_hidden_size,
        moe=moe,
    )


def drafter_part(config: DrafterConfig, num_parts: int) -> DrafterConfig:
    """Config of one device's part of a drafter; its draft vocabulary stays the whole one.

    Raises:
      ConfigError: As `target_part`.
    """
    _divide("drafter context_width", config.context_width, num_parts)
    return dataclasses.replace(
        config,
        attention=attention_part(config.attention, num_parts, "drafter"),
        dense_hidden_size=_divide(
            "drafter dense_hidden_size", config.dense_hidden_size, num_parts
        ),
    )


def device_order(groups: list[tuple[int, int]], num_parts: int) -> np.ndarray:
    """Columns of a fused projection in device order, KV heads repeated where they are few.

    Args:
      groups: (heads, width of a head) of each part, side by side in the fused matrix.
      num_parts: Devices.

    Returns:
      int32 column numbers; longer than the matrix is wide where heads are repeated.

    Example: queries 4 heads of 1 column, keys 1 of 1, two devices: [(4, 1), (1, 1)] ->
      0, 1, 4, 2, 3, 4.
    """
    columns = []
    for part in range(num_parts):
        first = 0
        for heads, width in groups:
            if heads >= num_parts:
                count = heads // num_parts
                begin = part * count
            else:
                count, begin = 1, part * heads // num_parts
            columns.append(np.arange(begin * width, (begin + count) * width) + first)
            first += heads * width
    return np.concatenate(columns).astype(np.int32)


def fused_groups(config: TargetConfig | DrafterConfig, name: str) -> list[tuple[int, int]] | None:
    """(heads, width) groups of a parameter that is a fused projection [Q | K | V]; else None."""
    leaf = name.split(".")[-1]
    if leaf not in ("w_qkv", "w_kv"):
        return None
    if isinstance(config, TargetConfig):
        if config.is_fp8:
            return None
        a = config.layer_attention(int(name.split(".")[1]))
    else:
        a = config.attention
    keys_values = [(a.num_kv_heads, a.head_dim), (a.num_kv_heads, a.v_head_dim)]
    return keys_values if leaf == "w_kv" else [(a.num_heads, a.head_dim), *keys_values]


def part_graph(graph, params, config: TargetConfig | DrafterConfig, num_parts: int):
    """The module graph of one device's part; `params` gives its structure only."""
    module = nnx.merge(graph, params)
    is_target = isinstance(config, TargetConfig)
    module.config = target_part(config, num_parts) if is_target else drafter_part(config, num_parts)
    module.mesh_axis = MODEL
    return nnx.split(module)[0]


def cut_shapes(params, config: TargetConfig | DrafterConfig, num_parts: int):
    """`params` as shapes (jax.ShapeDtypeStruct) with fused projections as wide as on the mesh."""
    entries = []
    for path, leaf in nnx.to_flat_state(params):
        shape = list(leaf.shape)
        groups = fused_groups(config, ".".join(str(part) for part in path))
        if groups is not None:
            axis = leaf.get_metadata("logical_axes").index("heads")
            shape[axis] = len(device_order(groups, num_parts))
        entries.append((path, leaf.replace(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))))
    return nnx.from_flat_state(entries)


def cut_model(graph, params, config: TargetConfig | DrafterConfig, mesh: Mesh) -> tuple[Any, Any]:
    """(graph of one device's part, parameters placed on the mesh) of a model in one memory.

    Args:
      graph: As `models.params.split` gives it.
      params: Whole arrays.
      config: Of the whole model.
      mesh: Of `sharding.DECODE`.

    Raises:
      ConfigError: If an axis does not divide.
    """
    num_parts = mesh_sizes(mesh)[MODEL]
    local = part_graph(graph, params, config, num_parts)
    specs = partition_specs(cut_shapes(params, config, num_parts), DECODE, mesh_sizes(mesh))
    flat_specs = dict(nnx.to_flat_state(specs))
    entries = []
    for path, leaf in nnx.to_flat_state(params):
        value = leaf[...]
        groups = fused_groups(config, ".".join(str(part) for part in path))
        if groups is not None:
            axis = leaf.get_metadata("logical_axes").index("heads")
            value = jnp.take(value, device_order(groups, num_parts), axis=axis)
        sharding = NamedSharding(mesh, flat_specs[path].get_value())
        entries.append((path, leaf.replace(jax.device_put(value, sharding))))
    return local, nnx.from_flat_state(entries)


def replicate_model(params, mesh: Mesh):
    """Parameters with a whole copy on every device of a mesh."""
    return jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
