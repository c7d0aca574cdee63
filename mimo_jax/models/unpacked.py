"""Packed experts made floats once, for models that stay in a CPU's cache even so.

Running experts from MXFP4 saves reading memory (layers/packed.py). A model that lies in the cache
reads none: there a step pays for decoding and gains nothing. One layer of the embedded default (4
experts of [96, 192], top 2) takes 92 us packed and 22 as float32 for one token, 200 and 50 for
eight (2 cores). Engines decide by size (`decode/engine.py`), as they do for transposed matrices.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mimo_jax.models.params import flatten
from mimo_jax.models.target import TargetLayer
from pallas_kernels.formats import decode_mxfp4

_INTO, _OUT_OF = ("embed", "experts", "expert_hidden"), ("experts", "expert_hidden", "embed")


def has_packed_experts(params) -> bool:
    """Whether a model's experts are in MXFP4."""
    return any(name.endswith("experts_gate_scale") for name in flatten(params))


def unpacked_bytes(params) -> int:
    """Bytes of a model with its packed experts in float32; of one without any, its own."""
    total = 0
    for name, leaf in flatten(params).items():
        if leaf.dtype != jnp.uint8:
            total += leaf.nbytes
        elif not name.endswith("_scale"):
            total += 8 * leaf.size  # two weights a byte
    return total


def unpack_experts(graph, params):
    """(graph, params) with packed experts as float32 stacks; values are exactly those of the codes.

    Example: experts_gate uint8 [4, 96, 96] and its scale [4, 96, 6] -> float32 [192, 4, 96].
    """
    module = nnx.merge(graph, params)
    for _, layer in nnx.iter_modules(module):
        if not (isinstance(layer, TargetLayer) and hasattr(layer, "experts_gate_scale")):
            continue
        packed = layer.experts()
        for name, order, axes in (
            ("gate", (2, 0, 1), _INTO),
            ("up", (2, 0, 1), _INTO),
            ("down", (0, 2, 1), _OUT_OF),
        ):
            codes, scale = getattr(packed, name), getattr(packed, f"{name}_scale")
            decode = lambda w, s, order=order: decode_mxfp4(w, s).transpose(order)
            values = jax.jit(decode)(codes, scale)
            setattr(layer, f"experts_{name}", nnx.Param(values, logical_axes=axes))
            delattr(layer, f"experts_{name}_scale")
    return nnx.split(module)
