"""MXFP4 weights as the kernel reads them: tiles of 64 outputs, eight codes to a word.

The bytes are those of the files in another order, made once when a model is loaded. A tile is one
contiguous stretch, so that a copy engine fetches it whole; its scales lie beside each other, 64
outputs of one group in a row.

A word holds the codes of eight inputs, and their bits stand where bfloat16 wants them after one
shift of the whole word: the kernel then needs about two operations per weight, where taking nibbles
apart and looking them up costs ten (a step over 42B active weights is bound by that, not by bytes).
Of one half word, bits high to low, with codes 0..3 of sign s and magnitude bits e, f, m:

    s0  s3  e3  s1  f3  m3  s2  e0  f0  m0  e1  f1  m1  e2  f2  m2

bfloat16's sign is bit 15 and E2M1's magnitude falls on bits 8..6, which reads as value * 2**-126:
code 0 is in place, codes 1 and 2 after shifts by 3 and 6, code 3 takes three pieces.

Which input a code belongs to: word `i` of 16 (per 128 inputs), half `h`, code `q` hold input
32 q + 16 h + i, so that the two halves of a shifted word are the two K=16 operands of one scale
group.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats import MX_GROUP_LEN, pack_nibbles, unpack_nibbles

ROWS = 64  # outputs of a tile: what one matrix instruction of a warp group produces
WORD_INPUTS = 8  # codes of a word
BLOCK_INPUTS = 128  # inputs that 16 words of a row hold
MAX_TILE_INPUTS = 256

# Per code of a half word: (bit of the sign, bits of the magnitude from high to low).
_PLACES = ((15, (8, 7, 6)), (12, (5, 4, 3)), (9, (2, 1, 0)), (14, (13, 11, 10)))


class TiledWeights(NamedTuple):
    """A stack of matrices [layers, experts, n, k].

    Attributes:
      tiles: int32 [layers, experts, n/64, k/tile_inputs, 64, tile_inputs/8].
      scales: uint8 E8M0 [layers, experts, n/64, k/32, 64].
    """

    tiles: jax.Array
    scales: jax.Array


def tile_inputs(k: int) -> int:
    """Inputs of a tile: 256 where that divides k, else 128. 6144 -> 256, 384 -> 128."""
    return MAX_TILE_INPUTS if k % MAX_TILE_INPUTS == 0 else BLOCK_INPUTS


def why_not_tiles(n: int, k: int) -> str | None:
    """None if matrices [n, k] can be tiled, else the reason. (64, 96) -> "... 128 inputs"."""
    if n % ROWS:
        return f"{n} outputs do not divide into tiles of {ROWS}"
    if k % BLOCK_INPUTS:
        return f"{k} inputs do not divide into blocks of {BLOCK_INPUTS} inputs"
    return None


def tiled_shapes(shape: tuple[int, int, int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of tiles and scales of a stack [layers, experts, n, k].

    Example: (1, 4, 128, 256) -> (1, 4, 2, 1, 64, 32) and (1, 4, 2, 8, 64).
    """
    layers, e, n, k = shape
    width = tile_inputs(k)
    tiles = (layers, e, n // ROWS, k // width, ROWS, width // WORD_INPUTS)
    return tiles, (layers, e, n // ROWS, k // MX_GROUP_LEN, ROWS)


@functools.partial(jax.jit, static_argnames="width")
def tile_weights(
    packed: jax.Array, scale: jax.Array, width: int | None = None
) -> TiledWeights:
    """Tiles of a stack as the files hold it: [.., n, k/2] codes, [.., n, k/32] scales.

    Args:
      packed: Codes, the even input in the low nibble.
      scale: Of groups of 32 inputs.
      width: Inputs of a tile, 128 or 256; by default `tile_inputs(k)`. Where k will be cut over
        devices, that of one device's part.

    Raises:
      ValueError: If outputs or inputs do not divide into tiles, or scales do not fit the codes.

    Example: codes 0x21 everywhere (inputs 1, 2, 1, 2, ...) -> every word 0x00490092.
    """
    layers, e, n, half_k = packed.shape
    k = 2 * half_k
    reason = why_not_tiles(n, k)
    if reason is not None:
        raise ValueError(f"weights [{n}, {k}]: {reason}")
    if scale.shape != (layers, e, n, k // MX_GROUP_LEN):
        raise ValueError(
            f"scales {scale.shape} do not fit codes {packed.shape}: one scale per "
            f"{MX_GROUP_LEN} inputs is expected, {(layers, e, n, k // MX_GROUP_LEN)}"
        )
    codes = unpack_nibbles(packed).astype(jnp.uint32)
    # [.., q, h, i] of each block of 128 inputs; then words [.., i].
    codes = codes.reshape(layers, e, n, k // BLOCK_INPUTS, 4, 2, 16)
    words = jnp.zeros((layers, e, n, k // BLOCK_INPUTS, 16), jnp.uint32)
    for q, (sign_at, magnitude_at) in enumerate(_PLACES):
        for half in range(2):
            code = codes[..., q, half, :]
            for bit, at in zip((3, 2, 1, 0), (sign_at, *magnitude_at), strict=True):
                words |= ((code >> bit) & 1) << (at + 16 * half)
    width = tile_inputs(k) if width is None else width
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    words = words.reshape(layers, e, n // ROWS, ROWS, k // width, width // WORD_INPUTS)
    scales = scale.reshape(layers, e, n // ROWS, ROWS, k // MX_GROUP_LEN)
    return TiledWeights(words.swapaxes(3, 4), scales.swapaxes(3, 4))


@jax.jit
def untile_weights(weights: TiledWeights) -> tuple[jax.Array, jax.Array]:
    """The inverse of `tile_weights`: (codes, scales) as the files hold them."""
    layers, e, row_tiles, input_tiles, _, num_words = weights.tiles.shape
    n, k = row_tiles * ROWS, input_tiles * num_words * WORD_INPUTS
    words = jax.lax.bitcast_convert_type(weights.tiles.swapaxes(3, 4), jnp.uint32)
    words = words.reshape(layers, e, n, k // BLOCK_INPUTS, 16)
    parts = []
    for sign_at, magnitude_at in _PLACES:
        for half in range(2):
            code = jnp.zeros_like(words)
            for bit, at in zip((3, 2, 1, 0), (sign_at, *magnitude_at), strict=True):
                code |= ((words >> (at + 16 * half)) & 1) << bit
            parts.append(code)
    codes = jnp.stack(parts, axis=-2).reshape(layers, e, n, k).astype(jnp.uint8)
    scale = weights.scales.swapaxes(3, 4).reshape(layers, e, n, k // MX_GROUP_LEN)
    return pack_nibbles(codes), scale
