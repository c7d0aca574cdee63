"""A target's experts between float stacks and MXFP4 as the files hold it.

Float stacks are [d, e, f] and [e, f, d], packed ones [e, out, in / 2] with rows as outputs: groups
lie along the axis that the product sums over, so each matrix is turned before it is packed.
Decoding changes no value (scale bytes 2..252, which is what weights have), packing rounds.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx

from mimo_jax.config import TargetConfig, require
from mimo_jax.models.params import abstract, flatten, unflatten
from mimo_jax.models.target import Target
from mimo_jax.quant.mxfp4 import Packed, check_groups, dequantize, quantize_weights
from mimo_jax.quant.policy import mxfp4_axis

# Axes of a float stack in the order [e, out, in], by the axis that is summed over, and back.
_ROWS_ARE_OUTPUTS = {0: (1, 2, 0), 1: (0, 2, 1)}
_AS_FLOAT_STACK = {0: (2, 0, 1), 1: (0, 2, 1)}


def _with_format(config: TargetConfig, *, is_mxfp4: bool) -> TargetConfig:
    moe = config.moe
    require(moe is not None, "the target has no experts")
    assert moe is not None
    require(
        moe.is_mxfp4 != is_mxfp4,
        "the target's experts are packed already" if is_mxfp4 else "the target's experts are float",
    )
    return dataclasses.replace(config, moe=dataclasses.replace(moe, is_mxfp4=is_mxfp4))


def _like(config: TargetConfig, dtype):
    return abstract(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype))


def pack_experts(config: TargetConfig, params, rule: str) -> tuple[TargetConfig, Any, Any]:
    """A target with its experts rounded to MXFP4 and packed, on the host or one device.

    Args:
      config: With float experts.
      params: As `models.params.split` gives them.
      rule: One of `quant.mxfp4.RULES`.

    Returns:
      (config, graph, params) of the packed target; other parameters are the same arrays.

    Raises:
      ConfigError: If there are no float experts, a width is no multiple of 32, or a weight is not
        finite; names the parameter.

    Example: experts_gate [192, 4, 96] -> experts_gate uint8 [4, 96, 96], experts_gate_scale uint8
      [4, 96, 6].
    """
    packed_config = _with_format(config, is_mxfp4=True)
    flat: dict[str, Any] = {}
    for name, value in flatten(params).items():
        axis = mxfp4_axis(name)
        if axis is None:
            flat[name] = jnp.asarray(value)
            continue
        check_groups(name, "embed" if axis == 0 else "expert_hidden", value.shape[axis])
        rows = jnp.asarray(value, jnp.float32).transpose(_ROWS_ARE_OUTPUTS[axis])
        flat[name], flat[name + "_scale"] = quantize_weights(name, rows, rule)
    graph, like = _like(packed_config, flat["embedding"].dtype)
    return packed_config, graph, unflatten(like, flat)


def unpack_experts(config: TargetConfig, params) -> tuple[TargetConfig, Any, Any]:
    """A packed target with its experts decoded to float: training and other engines want them so.

    Args:
      config: With packed experts.
      params: As `models.params.split` gives them.

    Returns:
      (config, graph, params) of the float target; experts have the dtype of the embedding (bfloat16
      holds every value of the format exactly).

    Raises:
      ConfigError: If the experts are not packed.
    """
    float_config = _with_format(config, is_mxfp4=False)
    flat = flatten(params)
    dtype = flat["embedding"].dtype
    for name, axis in [(name, mxfp4_axis(name)) for name in flat]:
        if axis is None:
            continue
        values = dequantize(Packed(flat[name], flat.pop(name + "_scale")))
        flat[name] = values.transpose(_AS_FLOAT_STACK[axis]).astype(dtype)
    graph, like = _like(float_config, dtype)
    return float_config, graph, unflatten(like, flat)
