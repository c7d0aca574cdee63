"""Declaring weights: shape, dtype, logical axes and initializer, once.

Hot paths never see a module: `split` gives the static graph and the array pytree, programs take
the pytree and `nnx.merge` inside the trace (nnx.jit costs 4 ms a call at 120 leaves, this 0.15).
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.quant.mxfp4 import check_groups
from mimo_jax.sharding import AxisRules, check_divides, mesh_sizes, num_parts
from pallas_kernels.formats import MX_GROUP_LEN


def weight(rngs: nnx.Rngs, shape, axes, *, scale: float | None = None, fill=None, dtype):
    """A parameter with logical axis names, normal(0, scale) or constant.

    Args:
      rngs: Source of the initial values.
      shape: Dimensions.
      axes: One logical axis name (or None) per dimension; sharding rules map them to a mesh.
      scale: Standard deviation; default 1/sqrt(second-to-last dimension).
      fill: Constant instead of random values.
      dtype: Of the stored array.
    """
    if fill is not None:
        value = jnp.full(shape, fill, dtype)
    else:
        scale = shape[-2] ** -0.5 if scale is None else scale
        value = (jax.random.normal(rngs.params(), shape, jnp.float32) * scale).astype(dtype)
    return nnx.Param(value, logical_axes=tuple(axes))


def split(module: nnx.Module):
    """(graph, params): hashable structure and a pytree of arrays for `jax.jit`."""
    return nnx.split(module)


def abstract(make_module):
    """(graph, params) of a module that is never allocated: leaves are jax.ShapeDtypeStruct."""
    return nnx.split(nnx.eval_shape(make_module))


def flatten(params) -> dict[str, Any]:
    """Pytree of a model -> {"layers.0.w_qkv": array}, sorted by name.

    Leaves may be anything that stands in an array's place: shapes, specs, shardings.
    """
    flat = {}
    for path, leaf in nnx.to_flat_state(params):
        flat[".".join(str(part) for part in path)] = leaf.get_value()
    return dict(sorted(flat.items()))


def unflatten(params_like, flat: dict[str, jax.Array]):
    """The inverse of `flatten`: leaves of `params_like` replaced by name.

    Raises:
      ValueError: If a name is missing, unexpected, or has another shape.
    """
    entries = {".".join(str(part) for part in path): (path, leaf) for path, leaf in
               nnx.to_flat_state(params_like)}
    missing = sorted(set(entries) - set(flat))
    extra = sorted(set(flat) - set(entries))
    if missing or extra:
        raise ValueError(f"parameters do not match: missing {missing[:3]}, unexpected {extra[:3]}")
    new = []
    for name, (path, leaf) in entries.items():
        if tuple(flat[name].shape) != tuple(leaf.shape):
            raise ValueError(f"{name} has shape {flat[name].shape}, expected {leaf.shape}")
        new.append((path, leaf.replace(flat[name])))
    return nnx.from_flat_state(new)


def logical_axes(params) -> dict[str, tuple[str | None, ...]]:
    """Parameter name -> logical axes, as declared. Example: "layers.0.w_qkv" -> embed, heads."""
    return {
        ".".join(str(part) for part in path): leaf.get_metadata("logical_axes")
        for path, leaf in nnx.to_flat_state(params)
    }


def partition_specs(params, rules: AxisRules, sizes: Mapping[str, int]):
    """The pytree of `params` (arrays or shapes) with each leaf's PartitionSpec in its place.

    Packed weights and their scales are cut together, in whole MXFP4 groups.

    Raises:
      ConfigError: If an axis does not divide; names parameter, axis and what would fit.
    """
    entries = []
    scales = {
        ".".join(str(part) for part in path).removesuffix("_scale"): leaf
        for path, leaf in nnx.to_flat_state(params)
        if str(path[-1]).endswith("_scale") and leaf.dtype == jnp.uint8
    }
    for path, leaf in nnx.to_flat_state(params):
        name = ".".join(str(part) for part in path)
        axes = leaf.get_metadata("logical_axes")
        if name in scales:
            parts = num_parts(rules.spec(axes)[-1], sizes)
            check_groups(name, axes[-1], scales[name].shape[-1] * MX_GROUP_LEN, parts)
        spec = check_divides(name, leaf.shape, axes, rules, sizes)
        entries.append((path, leaf.replace(spec)))
    return nnx.from_flat_state(entries)


def named_shardings(params, rules: AxisRules, mesh: Mesh):
    """As `partition_specs`, with a NamedSharding on the mesh in each leaf's place."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        partition_specs(params, rules, mesh_sizes(mesh)),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def transpose_weights(graph, params):
    """(graph, params) with every matrix stored [out, in]; for models larger than the cache.

    Parameters may be shapes (jax.ShapeDtypeStruct).

    The module's `is_transposed` tells its forward. Embeddings, expert stacks and FP8 codes with
    their scales are stored that way already and stay. Each matrix is copied once; the given params
    may be dropped.

    Example: w_qkv [192, 448] -> [448, 192].
    """
    module = nnx.merge(graph, params)
    if any(getattr(part, "is_transposed", False) for _, part in nnx.iter_modules(module)):
        return graph, params
    holder: Any
    for _, holder in nnx.iter_modules(module):
        if hasattr(holder, "is_transposed"):
            holder.is_transposed = True
        for name, leaf in list(vars(holder).items()):
            is_matrix = isinstance(leaf, nnx.Param) and len(leaf.shape) == 2
            is_fp8 = hasattr(holder, f"{name}_scale") or name.endswith("_scale")
            if is_matrix and not is_fp8 and name not in ("embedding", "w_router"):
                axes, value = leaf.get_metadata("logical_axes")[::-1], leaf.get_value()
                if isinstance(value, jax.ShapeDtypeStruct):
                    turned = jax.ShapeDtypeStruct(value.shape[::-1], value.dtype)
                else:
                    turned = value.T
                setattr(holder, name, nnx.Param(turned, logical_axes=axes))
    return nnx.split(module)
