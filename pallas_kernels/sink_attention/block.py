"""What a kernel has to know of a block, laid out by the rows of its tiles.

A tile holds 64 rows: some heads times the tokens of the block, rounded up to 8. Positions, masks
and rotations belong to tokens, so every head has the same; they are spread over 64 rows here, in
XLA, once per step: all layers of a kind ask for the same tables and the compiler makes them once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

ROWS = 64
KEYS = 64  # slots of memory read at once
MAX_TOKENS = ROWS
# Lines of `BlockTables.rows`.
LOWEST, LOW_BITS, HIGH_BITS = range(3)


class BlockTables(NamedTuple):
    """A block by the rows of a tile.

    Attributes:
      rows: int32 [b, 3, 64]: the lowest position that a row sees, and which tokens of the block
        it sees, as 2 x 32 bits, low bits first.
      cos: float32 [b, 64, r].
      sin: float32 [b, 64, r].
    """

    rows: jax.Array
    cos: jax.Array
    sin: jax.Array


def padded_tokens(t: int) -> int:
    """Tokens of a block rounded up to 8, the fewest that wgmma multiplies. Example: 3 -> 8."""
    return -(-t // 8) * 8


def spread(x: jax.Array) -> jax.Array:
    """[b, t, ...] -> [b, 64, ...]: row r holds token r modulo the padded tokens, or zero."""
    t = padded_tokens(x.shape[1])
    x = jnp.pad(x, ((0, 0), (0, t - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return jnp.concatenate([x] * -(-ROWS // t), axis=1)[:, :ROWS]


def pack_bits(sees: jax.Array) -> jax.Array:
    """Bool [b, t, t] -> int32 [b, t, ceil(t/32)], bit j of row i for [i, j], low bits first.

    Example: a row True, False, True -> the word 5.
    """
    b, t, _ = sees.shape
    padded = jnp.pad(sees, ((0, 0), (0, 0), (0, -t % 32))).reshape(b, t, -1, 32)
    weights = jnp.left_shift(jnp.int32(1), jnp.arange(32, dtype=jnp.int32))
    # Bit 31 is the sign; sums of different bits do not overflow.
    return jnp.where(padded, weights[None, None, None], 0).sum(axis=-1, dtype=jnp.int32)


def unpack_bits(words: jax.Array) -> jax.Array:
    """The inverse of `pack_bits`: bool [b, t, t]."""
    b, t, _ = words.shape
    bits = jnp.arange(32, dtype=jnp.int32)[None, None, None]
    return ((words[..., None] >> bits) & 1).reshape(b, t, -1)[:, :, :t] != 0


def make_tables(
    start: jax.Array,
    depths: jax.Array,
    sees: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    window: int | None,
) -> BlockTables:
    """Tables of a block; arguments as in `api.sink_attention`."""
    lowest = jnp.zeros_like(depths)
    if window is not None:
        lowest = jnp.maximum(start[:, None] + depths - window + 1, 0)
        sees &= pack_bits(depths[:, :, None] - depths[:, None, :] < window)
    words = jnp.pad(sees, ((0, 0), (0, 0), (0, 2 - sees.shape[2])))
    rows = jnp.stack([spread(x) for x in (lowest, words[..., 0], words[..., 1])], axis=1)
    return BlockTables(rows, spread(cos), spread(sin))


def readable_positions(slot_positions: jax.Array, start: jax.Array) -> jax.Array:
    """Positions of a ring's slots below `start`, -1 elsewhere; padded to whole tiles of keys.

    Example: 100 slots -> 128.
    """
    kept = jnp.where(slot_positions < start[:, None], slot_positions, -1)
    return jnp.pad(kept, ((0, 0), (0, -kept.shape[1] % KEYS)), constant_values=-1)
