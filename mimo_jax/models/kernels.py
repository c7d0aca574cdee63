"""Switching a model to the Pallas kernels: expert weights in tiles, a drafter's q, k, v in one.

The forward code asks the module's `implementation` and takes either way; this is the one place that
sets it and puts the weights into the order that goes with it. Done once when an engine is made, on
arrays or on shapes alone (to compile for devices nobody has).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from mimo_jax.config import DrafterConfig, TargetConfig
from mimo_jax.layers.tiled_experts import TiledExperts
from mimo_jax.sharding import DECODE, MODEL, check_divides, mesh_sizes
from pallas_kernels.dispatch import XLA, why_not_mosaic
from pallas_kernels.grouped_matmul.tiles import (
    TiledWeights,
    tile_inputs,
    tile_weights,
    why_not_tiles,
)

_TILE_AXES = {
    "gate": ("experts", "expert_hidden", "embed"),
    "up": ("experts", "expert_hidden", "embed"),
    "down": ("experts", "embed", "expert_hidden"),
}


def why_not(config: TargetConfig | DrafterConfig, dtype, mesh: Mesh | None) -> str | None:
    """None if a model can run on the kernels, else the reason.

    Args:
      config: Of the whole model.
      dtype: Of its activations; None for a model that has none, which a test may bring.
      mesh: Where it is, or None: on the default device.

    Example: float32 activations -> "activations are float32, the kernels take bfloat16".
    """
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    reason = why_not_mosaic(device)
    if reason is None and dtype != jnp.bfloat16:
        reason = f"activations are {dtype}, the kernels take bfloat16"
    return reason or _why_not_shapes(config, 1 if mesh is None else mesh_sizes(mesh)[MODEL])


def _why_not_shapes(config: TargetConfig | DrafterConfig, num_parts: int) -> str | None:
    geometries = [config.attention] if isinstance(config, DrafterConfig) else [
        *config.attention.values()
    ]
    for a in geometries:
        if a.head_dim % 16 or a.v_head_dim % 16 or a.rope_dim % 16:
            return f"heads of {a.head_dim} and {a.v_head_dim} are not multiples of 16"
    if isinstance(config, DrafterConfig) or config.moe is None or not config.moe.is_mxfp4:
        return None
    d, f = config.hidden_size, config.moe.hidden_size // num_parts
    return why_not_tiles(f, d) or why_not_tiles(d, f)


def use_kernels(
    graph,
    params,
    implementation: str,
    mesh: Mesh | None = None,
    num_parts: int | None = None,
    consumes: bool = False,
):
    """(graph, params) of a target or drafter that runs on the kernels; as given for XLA.

    Tiles are made layer by layer.

    Args:
      graph: Of the module; on a mesh that of one device's part.
      params: Arrays or jax.ShapeDtypeStruct; on a mesh placed there.
      implementation: Of pallas_kernels.dispatch.
      mesh: Of sharding.DECODE, or None.
      num_parts: Devices that widths are, or will be, cut over; default those of the mesh.
      consumes: Delete each layer's packed experts once its tiles are made: both forms of a large
        model do not fit a device.
    """
    module = nnx.merge(graph, params)
    if implementation == XLA or module.implementation == implementation:
        return graph, params
    module.implementation = implementation
    if num_parts is None:
        num_parts = 1 if mesh is None else mesh_sizes(mesh)[MODEL]
    for layer in module.layers:
        if hasattr(layer, "experts_gate_scale"):
            _tile_experts(layer, num_parts, mesh, consumes)
        if hasattr(layer, "w_kv"):
            axis = layer.w_q.get_metadata("logical_axes").index("heads")
            join = functools.partial(_side_by_side, axis=axis, num_parts=num_parts)
            layer.w_qkv = _made(join, (layer.w_q, layer.w_kv), [_axes(layer.w_q)], mesh)[0]
            del layer.w_q  # w_kv stays: the context is projected by it alone
    return nnx.split(module)


def _axes(param: nnx.Param) -> tuple[str | None, ...]:
    return param.get_metadata("logical_axes")


def _tile_experts(layer, num_parts: int, mesh: Mesh | None, consumes: bool) -> None:
    for name in TiledExperts._fields:
        packed, scale = (getattr(layer, f"experts_{name}{end}") for end in ("", "_scale"))
        inputs = 2 * packed.shape[2]
        cut_inputs = inputs // num_parts if name == "down" else inputs
        tile = functools.partial(_tile_one_layer, width=tile_inputs(cut_inputs))
        experts, row_axis, input_axis = _TILE_AXES[name]
        axes = [
            (None, experts, row_axis, input_axis, None, None),
            (None, experts, row_axis, input_axis, None),
        ]
        made = _made(tile, (packed, scale), axes, mesh)
        for field, array in zip(TiledWeights._fields, made, strict=True):
            setattr(layer, f"experts_{name}_{field}", array)
        if consumes:
            for param in (packed, scale):
                param.get_value().delete()
        delattr(layer, f"experts_{name}")
        delattr(layer, f"experts_{name}_scale")


def _tile_one_layer(packed, scale, *, width: int):
    return tuple(tile_weights(packed[None], scale[None], width))


def _side_by_side(left, right, *, axis: int, num_parts: int):
    """Both parts of each device beside each other."""

    def by_part(x):
        shape = (*x.shape[:axis], num_parts, x.shape[axis] // num_parts, *x.shape[axis + 1 :])
        return x.reshape(shape)

    joined = jnp.concatenate([by_part(left), by_part(right)], axis=axis + 1)
    shape = (*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return (joined.reshape(shape),)


def _made(make: Callable, params, axes, mesh: Mesh | None) -> list[nnx.Param]:
    """Parameters that `make` computes from others, where these are: arrays, or shapes of them."""
    values = [param.get_value() for param in params]
    shapes = jax.eval_shape(make, *values)
    where: list[NamedSharding | None] = [None] * len(shapes)
    if mesh is not None:
        where = [
            NamedSharding(mesh, check_divides("tiles", s.shape, a, DECODE, mesh_sizes(mesh)))
            for s, a in zip(shapes, axes, strict=True)
        ]
    if isinstance(values[0], jax.ShapeDtypeStruct):
        made = [
            jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=w)
            for s, w in zip(shapes, where, strict=True)
        ]
    else:
        compute = jax.jit(make) if mesh is None else jax.jit(make, out_shardings=tuple(where))
        made = compute(*values)
    return [nnx.Param(x, logical_axes=a) for x, a in zip(made, axes, strict=True)]
