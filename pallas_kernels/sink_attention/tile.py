"""What is done to one 64-row tile in shared memory and registers (Mosaic GPU, Hopper).

Operands of wgmma lie swizzled in shared memory and are changed in place: a projection's columns
arrive raw, are normed and rotated where they lie, and are multiplied from there. The block's own
keys and values are one more tile of 64 keys, of which few are seen, so that one function serves
memory and block; the products of the unseen ones cost 1 us of nobody's time.

Softmax counts in powers of two: one instruction each, and log2(e) is part of the score's scale.

Traps: two operands of one wgmma need the same swizzle; a slice of a swizzled tile must start at a
multiple of its columns (so the rotation's half decides the swizzle of keys); weights go through
shared memory because the simulator cannot multiply from registers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sink_attention.block import HIGH_BITS, KEYS, LOW_BITS, ROWS
from pallas_kernels.sink_attention.reference import MASKED_SCORE

LOG2_E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)
PER_COLUMN = WGMMA.reduce(0)
BF16_MAX = float(jnp.finfo(jnp.bfloat16).max)


class Carry(NamedTuple):
    """A softmax that is not finished.

    Attributes:
      weighted: float32 [64, w], values times 2 ** (score - top).
      top: float32 [64], the highest score so far.
      total: float32 [64], of 2 ** (score - top).
    """

    weighted: jax.Array
    top: jax.Array
    total: jax.Array


def columns_of(*widths: int) -> int:
    """Columns of the widest swizzled tile that divides all widths. Example: 192, 32 -> 32."""
    return next(c for c in (64, 32, 16) if all(width % c == 0 for width in widths))


def operand(shape: tuple[int, ...], columns: int):
    """Shared memory for bfloat16 operands of wgmma, swizzled by tiles of 8 x columns."""
    tiling = plgpu.TilingTransform((8, columns))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * columns)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(tiling, swizzle))


def iota(axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), axis, layout=WGMMA)


def along_rows(x: jax.Array, width: int) -> jax.Array:
    """[64] -> [64, width]."""
    return lax.broadcast_in_dim(x, (ROWS, width), (0,))


def along_columns(x: jax.Array) -> jax.Array:
    """[w] -> [64, w]."""
    return lax.broadcast_in_dim(x, (ROWS, x.shape[0]), (1,))


def load_rows(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=PER_ROW)


def load_tile(ref: Any) -> jax.Array:
    return plgpu.load(ref, layout=WGMMA).astype(jnp.float32)


def norm(ref: Any, weight_ref: Any, eps: float) -> None:
    """RMS norm of every row, rounded before the weight as in `layers/norm.py`."""
    h = ref.shape[1]
    x = load_tile(ref)
    inverse = lax.rsqrt((x * x).sum(axis=1) * (1 / h) + eps)
    normed = (x * along_rows(inverse, h)).astype(jnp.bfloat16).astype(jnp.float32)
    weight = plgpu.load(weight_ref, layout=PER_COLUMN).astype(jnp.float32)
    ref[...] = (normed * along_columns(weight)).astype(jnp.bfloat16)


def rotate(ref: Any, cos_ref: Any, sin_ref: Any) -> None:
    """Rotates column i < r of every row against column i + r."""
    half = cos_ref.shape[1]
    rotated = ref.at[:, : 2 * half]
    x = load_tile(rotated)
    first, second = x[:, :half], x[:, half:]
    cos, sin = load_tile(cos_ref), load_tile(sin_ref)
    parts = [first * cos - second * sin, second * cos + first * sin]
    rotated[...] = jnp.concatenate(parts, axis=1).astype(jnp.bfloat16)


def clean_values(ref: Any, num_rows: int, value_scale: float) -> None:
    """Scales the first rows, takes NaN and infinities out of them, and zeroes the others."""
    width = ref.shape[1]
    x = load_tile(ref) * value_scale
    x = jnp.where(x != x, 0.0, jnp.minimum(jnp.maximum(x, -BF16_MAX), BF16_MAX))
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=WGMMA)
    ref[...] = jnp.where(row < num_rows, x, 0.0).astype(jnp.bfloat16)


def store_anyhow(ref: Any, x: jax.Array) -> None:
    """Stores where no fast way exists, which jax 0.12 wants to be told and 0.11 never asks."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def flatten(ref: Any, flat_ref: Any, columns: int) -> None:
    """Copies the first rows of a swizzled tile into a row-major one.

    Into memory they go from there: a transfer of swizzled tiles starts at multiples of 8 rows only.
    """
    tiling = plgpu.Tiling(((8, columns), (2, columns // 16)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    x = plgpu.load(ref.at[: flat_ref.shape[0]], layout=layout, optimized=False)
    store_anyhow(flat_ref, x)


def sees_block(rows_ref: Any) -> jax.Array:
    """Bool [64, 64]: which keys of the block each row sees."""
    low, high = (along_rows(load_rows(rows_ref.at[i]), KEYS) for i in (LOW_BITS, HIGH_BITS))
    word = jnp.where(iota(1) < 32, low, high)
    return ((word >> (iota(1) & 31)) & 1) != 0


def start_carry(width: int, logits: Sequence[jax.Array] | None, rows_per_head: int) -> Carry:
    """Before any key: nothing, or the sinks.

    Args:
      width: Columns of values.
      logits: Sink of each head of the tile.
      rows_per_head: Of the tile.
    """

    def full(value: float) -> jax.Array:
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), PER_ROW)

    weighted = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA)
    if logits is None:
        return Carry(weighted, full(MASKED_SCORE), full(0.0))
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    top = full(0.0)
    for i, logit in enumerate(logits):
        top = jnp.where(row >= i * rows_per_head, logit.astype(jnp.float32) * LOG2_E, top)
    return Carry(weighted, top, full(1.0))


def merge(carry: Carry, other: Carry) -> Carry:
    """Two parts of one softmax."""
    width = carry.weighted.shape[1]
    top = jnp.maximum(carry.top, other.top)
    kept, added = jnp.exp2(carry.top - top), jnp.exp2(other.top - top)
    weighted = carry.weighted * along_rows(kept, width) + other.weighted * along_rows(added, width)
    return Carry(weighted, top, carry.total * kept + other.total * added)


def attend(
    carry: Carry, queries: Any, keys: Any, values: Any, weights: Any, sees: jax.Array
) -> Carry:
    """The softmax with one more tile of keys.

    Args:
      carry: So far.
      queries: bfloat16 [64, h] in shared memory.
      keys: bfloat16 [64, h]; may hold NaN where nobody sees them.
      values: bfloat16 [64, w]; finite.
      weights: bfloat16 [64, 64], scratch.
      sees: bool [64, 64].
    """
    _, top, total = carry
    scale = queries.shape[1] ** -0.5 * LOG2_E

    def score(ref):
        plgpu.wgmma(ref, queries, keys.transpose((1, 0)))
        return ref[...]

    def weigh(ref):
        plgpu.wgmma(ref, weights, values)
        return ref[...]

    scores = pl.run_scoped(score, plgpu.WGMMAAccumulatorRef((ROWS, KEYS)))
    scores = jnp.where(sees, scores * scale, MASKED_SCORE)
    new_top = jnp.maximum(top, scores.max(axis=1))
    kept = jnp.exp2(top - new_top)
    part = jnp.exp2(scores - along_rows(new_top, KEYS))
    weights[...] = part.astype(jnp.bfloat16)
    plgpu.commit_smem()
    width = carry.weighted.shape[1]
    weighted = carry.weighted * along_rows(kept, width)
    weighted = weighted + pl.run_scoped(weigh, plgpu.WGMMAAccumulatorRef((ROWS, width)))
    return Carry(weighted, new_top, total * kept + part.sum(axis=1))


def stream[T](
    num_steps: int | jax.Array,
    fetch: Callable[[Any, Any], None],
    shared: Any,
    prepare: Callable[[], T],
    consume: Callable[[Any, Any, T], T],
) -> T:
    """Runs through tiles that come from global memory, several on their way at a time.

    Args:
      num_steps: Tiles; may be known to the device only, and 0.
      fetch: (step, slot): starts the copies of a tile; called by one warpgroup.
      shared: Has barriers per slot: `arrived`, and `used`, at which every warpgroup arrives.
      prepare: Gives the first carry, while the first tiles are on their way.
      consume: (step, slot, carry) -> carry.
    """
    num_slots = shared.arrived.shape[0]
    num_steps = jnp.asarray(num_steps, jnp.int32)
    warpgroup = lax.axis_index("warpgroup")
    for slot in range(num_slots):
        pl.when((warpgroup == 0) & (slot < num_steps))(
            lambda slot=slot: fetch(warpgroup * 0 + slot, slot)
        )

    def step_over(step, carry):
        slot = lax.rem(step, jnp.int32(num_slots))
        plgpu.barrier_wait(shared.arrived.at[slot])
        carry = consume(step, slot, carry)
        plgpu.barrier_arrive(shared.used.at[slot])

        @pl.when((warpgroup == 0) & (step + num_slots < num_steps))
        def _():
            plgpu.barrier_wait(shared.used.at[slot])
            fetch(step + num_slots, slot)

        return carry

    return lax.fori_loop(jnp.int32(0), num_steps, step_over, prepare())
