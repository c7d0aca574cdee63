"""MXFP4: 32 numbers share a power of two; one implementation for converting and for training.

What the format leaves open is the rule by which a group gets its scale X = 2 ** e. Three are in
use, and they differ only in when the largest magnitude of a group takes the next power of two:

  * floor: never; e = floor(log2 amax) - 2. The text of the standard, and torchao's default. The
    largest lies in [4, 8) X: what is above 6 X is clipped.
  * even:  from 1.75 * 2**k on, as if amax were rounded to one bit of mantissa. [3.5, 7) X. Quark,
    compressed-tensors.
  * rceil: above 1.5 * 2**k, so that amax <= 6 X. (3, 6] X: nothing is clipped. gpt-oss, ModelOpt.

So a rule is a number that is added to the bits of amax before the exponent field is read. Exponents
come from bits, never from a logarithm: float32's log2 rounds up just below powers of two.

Elements are rounded to nearest, ties to even, and saturate at 6 X; the sign of zero is kept; a
group of zeros has scale byte 0. Everything is exact under jit, subnormal inputs included (XLA:CPU
would flush them; their bits are read as integers here). What the edges of the scale decode to is
written in `pallas_kernels/formats.py`.

A group that holds NaN or infinity gets scale byte 255, that is NaN throughout, under jit, where
nothing can be raised: an error then shows in the next loss. Outside, `quantize_weights` refuses it
by name.

Rejected: a second implementation in NumPy for the host. Bits are integers in both.

Source: OCP Microscaling Formats v1.0, sections 5.3.3, 5.4.1, 6.3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from mimo_jax.config import ConfigError, require
from mimo_jax.sharding import fitting_parts
from pallas_kernels.formats import (
    E2M1_VALUES,
    MX_GROUP_LEN,
    decode_mxfp4,
    e2m1_magnitude_codes,
    pack_nibbles,
)

FLOOR, EVEN, RCEIL = "floor", "even", "rceil"
# Added to amax's bits; the carry out of the 23 mantissa bits is the next power of two.
_CARRY = {FLOOR: 0, EVEN: 1 << 21, RCEIL: (1 << 22) - 1}
RULES = tuple(_CARRY)

_MANTISSA_BITS, _NAN_SCALE = 23, 255
_SIGN, _INFINITY = np.uint32(1 << 31), np.uint32(0x7F800000)
_E2M1_EMAX = 2  # 6 = 1.5 * 2**2
MAX_MAGNITUDE = E2M1_VALUES[-1]


class Packed(NamedTuple):
    """A matrix in MXFP4, groups along the last axis.

    Attributes:
      codes: uint8 [*b, n/2], two codes a byte, the even column low.
      scale: uint8 [*b, n/32], E8M0.
    """

    codes: UInt8[Array, "*b _"]
    scale: UInt8[Array, "*b _"]


def check_rule(rule: str) -> None:
    """Raises ConfigError for a rule that is not one of RULES."""
    require(rule in _CARRY, f"MXFP4 rule {rule!r} is unknown; allowed: {', '.join(RULES)}")


def check_groups(name: str, axis: str, size: int, num_parts: int = 1) -> None:
    """Raises ConfigError unless every part of a reduction axis holds whole groups.

    Args:
      name: Of the parameter.
      axis: Name of the axis along which groups lie.
      size: Numbers along it (twice the bytes, 32 times the scales).
      num_parts: Pieces that it is cut into.

    Example: ("experts_down", "expert_hidden", 128, 8) -> "experts_down: axis expert_hidden of 128
      cut into 8 parts would split MXFP4 groups of 32; it can be cut into 1, 2, 4 parts".
    """
    require(
        size > 0 and size % MX_GROUP_LEN == 0,
        f"{name}: axis {axis} of {size} is no multiple of {MX_GROUP_LEN}, the MXFP4 group",
    )
    require(
        size % (num_parts * MX_GROUP_LEN) == 0,
        f"{name}: axis {axis} of {size} cut into {num_parts} parts would split MXFP4 groups of "
        f"{MX_GROUP_LEN}; it can be cut into {fitting_parts(size // MX_GROUP_LEN)} parts",
    )


def scale_bytes(bits, rule: str):
    """E8M0 bytes uint8 [...] of groups of float32 bits [..., 32] (uint32)."""
    largest = jnp.max(bits & ~_SIGN, axis=-1)
    field = (largest + np.uint32(_CARRY[rule])) >> _MANTISSA_BITS
    byte = jnp.maximum(field, _E2M1_EMAX) - _E2M1_EMAX
    return jnp.where(largest >= _INFINITY, _NAN_SCALE, byte).astype(jnp.uint8)


def scaled_magnitudes(bits, scale):
    """|v| / X, float32 [..., 32], of float32 bits (uint32) under scale bytes [...].

    Below 2**-100 it may be zero instead, far under the first border, 0.25.
    """
    power = lambda field: jax.lax.bitcast_convert_type(
        jnp.maximum(field, 1).astype(jnp.uint32) << _MANTISSA_BITS, jnp.float32
    )
    byte = scale.astype(jnp.int32)[..., None]
    magnitude = bits & ~_SIGN
    normal = jax.lax.bitcast_convert_type(magnitude, jnp.float32) * power(254 - byte)
    # A subnormal is an integer times 2**-149.
    subnormal = magnitude.astype(jnp.float32) * power(127 - 22 - byte)
    return jnp.where(magnitude >> _MANTISSA_BITS == 0, subnormal, normal)


def quantize_groups(groups, rule: str):
    """(codes uint8 [..., 32], scale bytes [...], |v| / X) of float32 groups [..., 32]."""
    bits = jax.lax.bitcast_convert_type(groups, jnp.uint32)
    scale = scale_bytes(bits, rule)
    ratio = scaled_magnitudes(bits, scale)
    sign = (bits >> 31).astype(jnp.uint8) << 3
    return e2m1_magnitude_codes(ratio) | sign, scale, ratio


def quantize(x: Float[Array, "*b n"], rule: str = RCEIL) -> Packed:
    """Numbers to MXFP4, groups of 32 along the last axis; works under jit.

    Args:
      x: float32; n a multiple of 32.
      rule: One of RULES.

    Raises:
      ConfigError: If the rule is unknown or n is no multiple of 32.

    Example: 32 numbers 7, 1, 0, ... -> floor: byte 127, codes 7, 2 (6 and 1, clipped); rceil: byte
      128, codes 6, 1 (8 and 1: 3.5 X is a tie, to the even code).

    Source: see the module.
    """
    check_rule(rule)
    check_groups("quantize", "-1", x.shape[-1])
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, MX_GROUP_LEN)
    codes, scale, _ = quantize_groups(groups, rule)
    return Packed(pack_nibbles(codes.reshape(x.shape)), scale)


def dequantize(packed: Packed) -> Float[Array, "*b n"]:
    """float32 values; see `pallas_kernels.formats.decode_mxfp4`."""
    return decode_mxfp4(packed.codes, packed.scale)


def quantize_weights(name: str, x, rule: str = RCEIL) -> Packed:
    """As `quantize` outside jit, with a refusal of what has no MXFP4 form.

    Raises:
      ConfigError: If a value is NaN or infinite; names the parameter and the first such group.

    Example: NaN in column 70 of row 3 -> "w: group [3, 2] holds a value that is not finite ...".
    """
    packed = jax.jit(quantize, static_argnames="rule")(jnp.asarray(x), rule=rule)
    broken = np.argwhere(np.asarray(packed.scale) == _NAN_SCALE)
    if len(broken):
        raise ConfigError(
            f"{name}: group {broken[0].tolist()} holds a value that is not finite "
            f"({len(broken)} such groups); MXFP4 has no form for it"
        )
    return packed
