"""Bit layouts of the four- and eight-bit formats: the one owner of "which nibble comes first".

E2M1 (4 bits): sign, two exponent bits, one mantissa bit; the magnitudes are E2M1_VALUES.
E8M0 (8 bits): a power of two, 2 ** (byte - 127); byte 255 is NaN.
E4M3 (8 bits): sign, four exponent bits of bias 7, three mantissa bits; no infinities, 0x7F and 0xFF
are NaN.
MXFP4: E2M1 codes in groups of 32 along the reduction axis, one E8M0 scale per group. A byte holds
two codes, the even column in the low nibble.

Policy at the edges of E8M0, where float32 ends: bytes 2..252 decode exactly, for every code and
under jit. Byte 0 is itself subnormal, which XLA:CPU flushes: all codes become zero. With byte 1
that happens to code 1 alone. With 253 the magnitudes 4 and 6 overflow to infinity, with 254 all
from 2 on; 255 gives NaN for every code, zero included.

Source: OCP Microscaling Formats v1.0, sections 5.3.3 and 5.4.1.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

MX_GROUP_LEN = 32
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_TABLE = np.array(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), np.float32)


def e2m1_values(codes: jax.Array) -> jax.Array:
    """uint8 codes 0..15, one each -> float32 values; exact. Example: 1, 9, 15 -> 0.5, -0.5, -6.0.

    The three magnitude bits are placed under float16's exponent and mantissa, where they read as
    value * 2**-14, code 1 as a subnormal. (A float32 or bfloat16 route loses that code on XLA:CPU,
    which flushes their subnormals; a table decodes 2.6 G weights/s on two cores, this 7.2.)
    """
    codes = codes.astype(jnp.uint16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**14


def e2m1_magnitude_codes(magnitudes: jax.Array) -> jax.Array:
    """float32 >= 0 -> uint8 codes 0..7 of the nearest magnitudes, ties to the even code.

    Saturates at 6; the seven borders lie halfway between neighbours and fall to the code whose
    mantissa bit is 0.

    Example: 0.25, 0.75, 2.5, 2.6, 5.0, 7.9 -> codes 0, 2, 4, 5, 6, 7 -> 0, 1, 2, 3, 4, 6.
    """
    code = jnp.zeros(magnitudes.shape, jnp.uint8)
    for upper, (below, above) in enumerate(itertools.pairwise(E2M1_VALUES), start=1):
        border = (below + above) / 2
        is_past = magnitudes >= border if upper % 2 == 0 else magnitudes > border
        code += is_past.astype(jnp.uint8)
    return code


def pack_nibbles(codes: jax.Array) -> jax.Array:
    """uint8 codes [..., n] -> bytes [..., n/2], the even column low. Example: 1, 9 -> 0x91."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """The inverse of `pack_nibbles`. Example: 0x91 -> 1, 9."""
    codes = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def decode_e2m1(packed: jax.Array) -> jax.Array:
    """uint8 [..., n/2] -> float32 [..., n], low nibble first; exact.

    Example: 0x91 -> codes 1 and 9 -> 0.5, -0.5.
    """
    return e2m1_values(unpack_nibbles(packed))


def decode_e8m0(scale: jax.Array) -> jax.Array:
    """uint8 -> float32 powers of two; byte 255 -> NaN. Example: 127 -> 1.0, 130 -> 8.0."""
    bits = scale.astype(jnp.uint32) << 23
    # The exponent field of float32 is biased by 127 too; its field 0 would read as 0, not 2**-127.
    value = jax.lax.bitcast_convert_type(jnp.where(scale == 0, 0x00400000, bits), jnp.float32)
    return jnp.where(scale == 255, jnp.nan, value)


def decode_mxfp4(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """MXFP4 -> float32.

    Args:
      packed: uint8 [..., n/2].
      scale: uint8 [..., n/32].

    Returns:
      float32 [..., n].

    Example: a group of bytes 0x21 under scale byte 128 -> 1.0, 2.0, 1.0, 2.0, ...
    """
    values = decode_e2m1(packed)
    groups = values.reshape(*scale.shape, MX_GROUP_LEN) * decode_e8m0(scale)[..., None]
    return groups.reshape(values.shape)


def decode_mxfp4_halves(packed: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `decode_mxfp4`, the even and the odd columns apart: float32 [..., n/2] twice.

    For products, which may take their two halves one after the other: bringing the columns
    together costs XLA:CPU more than decoding them.

    Example: a group of bytes 0x21 under scale byte 128 -> 1.0, 1.0, ... and 2.0, 2.0, ...
    """
    factor = decode_e8m0(scale)[..., None]

    def half(codes):
        groups = e2m1_values(codes).reshape(*scale.shape, MX_GROUP_LEN // 2) * factor
        return groups.reshape(packed.shape)

    return half(packed & 0xF), half(packed >> 4)


def decode_e4m3(codes: jax.Array) -> jax.Array:
    """uint8 -> float32; exact, subnormals and NaN included.

    By way of float16, as E2M1: seven bits under its exponent and mantissa read as value * 2**-8.
    On XLA:CPU that is 5.3 G weights/s with the product behind it, its own conversion 0.3.

    Example: 0x38 -> 1.0, 0x01 -> 2**-9, 0xFE -> -448.0, 0x7F -> NaN.
    """
    wide = codes.astype(jnp.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    values = jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32) * 2.0**8
    return jnp.where((wide & 0x7F) == 0x7F, jnp.nan, values)
