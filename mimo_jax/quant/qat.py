"""Quantization-aware training: the forward sees MXFP4 weights, the gradient reaches float masters.

`fake_quantize` gives exactly the values that packing and decoding would give (the same code makes
them), so what was trained is what is shipped. Backward it is the identity (straight through), save
where the scale's rule clips: a weight beyond 6 X would not change the output if it moved. Only
`floor` and `even` clip. Scales are made anew from the masters in every step and get no gradient.

No optimizer and no loss here: see `train/step.py`.

Rejected: v + stop_gradient(q - v), the usual spelling: it has no place for the mask of clipped
weights, and turns -0 into 0.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mimo_jax.quant.mxfp4 import MAX_MAGNITUDE, check_groups, check_rule, quantize_groups
from mimo_jax.quant.policy import mxfp4_axis
from pallas_kernels.formats import MX_GROUP_LEN, decode_e8m0, e2m1_values


def _grouped(x, axis: int):
    """The axis cut into groups, a group's 32 numbers last."""
    shape = (*x.shape[:axis], x.shape[axis] // MX_GROUP_LEN, MX_GROUP_LEN, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, -1)


def _ungrouped(groups, axis: int, shape):
    return jnp.moveaxis(groups, -1, axis + 1).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fake_quantize(x, axis: int, rule: str):
    return _fake_quantize_fwd(x, axis, rule)[0]


def _fake_quantize_fwd(x, axis: int, rule: str):
    codes, scale, ratio = quantize_groups(_grouped(x, axis), rule)
    values = e2m1_values(codes) * decode_e8m0(scale)[..., None]
    is_within = ratio <= MAX_MAGNITUDE
    back = lambda groups: _ungrouped(groups, axis, x.shape)
    return back(values), back(is_within)


def _fake_quantize_bwd(axis: int, rule: str, is_within, grad):
    del axis, rule
    return (jnp.where(is_within, grad, 0.0),)


_fake_quantize.defvjp(_fake_quantize_fwd, _fake_quantize_bwd)


def fake_quantize(x: Float[Array, "*n"], axis: int, rule: str) -> Float[Array, "*n"]:
    """Weights as MXFP4 would hold them, with a straight-through gradient.

    Args:
      x: float32 masters.
      axis: Along which groups of 32 lie, >= 0.
      rule: One of `mxfp4.RULES`.

    Returns:
      float32 values of the same shape, each one of a code times its group's scale.

    Raises:
      ConfigError: If the rule is unknown or the axis is no multiple of 32.

    Example: 7, 1, 0, ... under floor -> 6, 1, 0, ..., gradient passed except for the 7; under rceil
      -> 8, 1, 0, ..., gradient passed for all.
    """
    check_rule(rule)
    check_groups("fake_quantize", str(axis), x.shape[axis])
    return _fake_quantize(x, axis, rule)


def fake_quantize_params(flat: dict[str, Array], rule: str) -> dict[str, Array]:
    """Parameters by name, those that the policy quantizes as MXFP4 would hold them."""
    return {
        name: value if (axis := mxfp4_axis(name)) is None else fake_quantize(value, axis, rule)
        for name, value in flat.items()
    }
