"""Key/value memory in 8, 4 or 2 bits: a group of tokens of one KV head becomes codes and scales.

Two recipes. `int8` is plain: every token has its own range, in 255 equal steps. KVarN, for 4 and 2
bits, first makes a group even: a Hadamard rotation of the channels spreads outliers over all of
them, then channels and tokens are divided by their spread in turns until both are even, and only
then are numbers rounded, keys by the range of a channel, values by the range of a token. What the
paper found to matter is the scale of tokens: errors there add up over a long generation, though
one forward over known text hardly shows them. So its cost is measured on generated text
(`python -m mimo_jax.bench context`).

A rotation applies to queries and keys alike, after RoPE, so that scores stay what they were; values
come back by rotating the attention's output once (the matrix is its own inverse).

Differs: the published rotation is over a power of two; other widths (192 = 3 x 64) are rotated in
blocks of the largest power of two that divides them. The spread is a root mean square: that is
Sinkhorn's iteration on the squares and converges, where one with means removed ran away on a group
of 8 x 8. One width of code for keys and values.

Codes of a byte lie a half or a quarter of the group apart, so that unpacking joins whole rows.

Source: arXiv:2606.03458 (KVarN); group of 128, 16 rounds and float16 scales as in its reference,
github.com/huawei-csl/KVarN. Names: glossary, "Long contexts".
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from mimo_jax.config import ConfigError

_NUM_ROUNDS = 16  # of evening out; the spread moves by less than 1e-3 from the eighth on
_TINY = 1e-6  # a spread or a range below is that of a constant


class Sealed(NamedTuple):
    """Groups of tokens: value = (code * step + low) * scale.

    Attributes:
      codes: uint8 [*b, G * bits / 8, h].
      step: float16, by channel [*b, 1, h] or by token [*b, G, 1].
      low: float16, as step: the lowest value that a code means.
      scale: float16, by the other of the two; None where there is none.
    """

    codes: UInt8[Array, "*b rows h"]
    step: Float[Array, "*b _ _"]
    low: Float[Array, "*b _ _"]
    scale: Float[Array, "*b _ _"] | None


@dataclasses.dataclass(frozen=True)
class KVFormat:
    """How a group is written.

    Attributes:
      bits: Of a code: 8, 4 or 2.
      is_evened: KVarN's rotation and scales; False = a range per token and nothing else.
      group_len: Tokens that share statistics.
    """

    bits: int
    is_evened: bool
    group_len: int = 128

    def __post_init__(self):
        if self.bits not in (8, 4, 2):
            raise ConfigError(f"bits {self.bits} of a KV format are unknown; allowed: 8, 4, 2")
        if self.group_len < 1 or self.group_len % 8:
            raise ConfigError(
                f"group_len {self.group_len} of a KV format is out of range; allowed: 8, 16, 24 ..."
            )

    def bytes_per_token(self, width: int, *, is_by_token: bool) -> float:
        """Bytes of one token of one KV head, scales included.

        Example: KVarN of 2 bits, width 192, keys -> 48 + 6 + 2 = 56.0; bfloat16 takes 384.
        """
        token, channel = 2, 2 * width / self.group_len  # float16, per token
        by_range, by_other = (token, channel) if is_by_token else (channel, token)
        scales = 2 * by_range + (by_other if self.is_evened else 0)
        return width * self.bits / 8 + scales


NONE = "none"
FORMATS: dict[str, KVFormat | None] = {
    NONE: None,
    "int8": KVFormat(8, is_evened=False),
    "kvarn4": KVFormat(4, is_evened=True),
    "kvarn2": KVFormat(2, is_evened=True),
}


def format_named(name: str) -> KVFormat | None:
    """The format of a name, None for "none".

    Raises:
      ConfigError: If there is no such format.
    """
    if name not in FORMATS:
        raise ConfigError(f"kv_format {name!r} is unknown; allowed: {', '.join(FORMATS)}")
    return FORMATS[name]


def hadamard(width: int) -> np.ndarray:
    """Orthonormal, symmetric, float32 [width, width]; blocks of the largest power of two in it.

    Example: width 2 -> [[1, 1], [1, -1]] / sqrt(2); width 6 -> three of these.
    """
    size = width & -width
    index = np.arange(size)
    signs = np.array([[(i & j).bit_count() & 1 for j in index.tolist()] for i in index.tolist()])
    block = (1.0 - 2.0 * signs) / np.sqrt(size)
    return np.kron(np.eye(width // size), block).astype(np.float32)


def rotate(x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
    """x times the Hadamard matrix of its last axis; twice is nothing."""
    return jnp.matmul(x, jnp.asarray(hadamard(x.shape[-1]), x.dtype))


def _spread(x, axis: int):
    spread = jnp.sqrt(jnp.square(x).mean(axis=axis, keepdims=True))
    return jnp.where(spread > _TINY, spread, 1.0)


def spreads(x: Float[Array, "*b G h"]) -> tuple[Float[Array, "*b 1 h"], Float[Array, "*b G 1"]]:
    """(of channels, of tokens): divided by both, every row and column has root mean square 1."""

    def even_out(_, both):
        channel, token = both
        channel = channel * _spread(x / (channel * token), -2)
        return channel, token * _spread(x / (channel * token), -1)

    ones = (jnp.ones_like(x[..., :1, :]), jnp.ones_like(x[..., :, :1]))
    return jax.lax.fori_loop(0, _NUM_ROUNDS, even_out, ones)


def pack(codes: UInt8[Array, "*b G h"], bits: int) -> UInt8[Array, "*b rows h"]:
    """Codes into bytes; the first share of the group has the lowest bits.

    Example: 4 bits, group of 2, one channel: 5, 9 -> 0x95.
    """
    parts = jnp.split(codes, 8 // bits, axis=-2)
    packed = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        packed = packed | (part << np.uint8(bits * number))
    return packed


def unpack(packed: UInt8[Array, "*b rows h"], bits: int) -> UInt8[Array, "*b G h"]:
    """The inverse of `pack`."""
    if bits == 8:
        return packed
    mask = np.uint8(2**bits - 1)
    parts = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    return jnp.concatenate(parts, axis=-2)


def seal(x: Float[Array, "*b G h"], form: KVFormat, *, is_by_token: bool) -> Sealed:
    """A group in codes.

    Args:
      x: A group of tokens, rotated if the format wants that.
      form: The format.
      is_by_token: Whether a token's range sets the steps, as for values; else a channel's, as for
        keys. A format that evens nothing out goes by token always.
    """
    x = x.astype(jnp.float32)
    by_token = is_by_token or not form.is_evened
    scale = None
    if form.is_evened:
        # The spread along the other axis stays in x: step and low carry it.
        scale = _as_half(spreads(x)[0 if by_token else 1])
        x = x / scale
    axis = -1 if by_token else -2
    low = x.min(axis=axis, keepdims=True)
    step = (x.max(axis=axis, keepdims=True) - low) / (2**form.bits - 1)
    step, low = _as_half(jnp.where(step > _TINY, step, 1.0)), _as_half(low)
    codes = jnp.clip(jnp.round((x - low) / step), 0, 2**form.bits - 1).astype(jnp.uint8)
    step, low = step.astype(jnp.float16), low.astype(jnp.float16)
    scale = None if scale is None else scale.astype(jnp.float16)
    return Sealed(pack(codes, form.bits), step, low, scale)


def _as_half(x):
    """Rounded to float16's grid; a cast there and back may be optimised away."""
    return jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10)


def unseal(sealed: Sealed, form: KVFormat, dtype) -> Float[Array, "*b G h"]:
    """The group that the codes mean."""
    f32 = jnp.float32
    x = unpack(sealed.codes, form.bits).astype(f32)
    x = x * sealed.step.astype(f32) + sealed.low.astype(f32)
    if sealed.scale is not None:
        x = x * sealed.scale.astype(f32)
    return x.astype(dtype)
