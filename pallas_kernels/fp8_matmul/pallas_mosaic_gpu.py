"""The product on Hopper: weights stream through shared memory, x rides along as 8 columns.

A block of threads owns 64 output rows, the height of wgmma, and multiplies them with x turned on
its side: the accumulator is [64, t] with t as small as 8, so nothing is spent on padding a draft
block to 64. Its warpgroups take turns over the columns, 128 at a time, each with its own ring of
tiles (TMA) and its own accumulator; at the end the first one adds them up and writes [t, 64]
through a transposed store, since XLA splits a norm over a [out, t] result into three launches.

e4m3 becomes bfloat16 by way of float16, exactly; there is no direct instruction. A tile of 64 rows
and 128 columns lies in one 128x128 block, so its scale is one number, put on the accumulator.

The norm costs no second pass over x: out = (x * weight) @ W.T / rms(x), and the sum of squares is a
product too, ones [64, 128] times the squares, which leaves each column's sum in all of its 64
rows, where the division needs it. Squares are rounded to bfloat16: over 6144 columns that moves the
root by 6e-5 (at most 1.2e-4 in 2000 draws), far below the rounding of the result, 2e-3.

Bandwidth: one block of threads per 64 rows is 53 of the 132 processors of an H200 for 3392 rows,
96 for 6144 and 32 for 2048. A processor has up to 100 KB of tiles in flight; it must take in
65-80 GB/s for 53 of them to keep the memory busy. (Estimates, not measured: decoding is about 220
issue slots per tile and warp scheduler, 6 us for the 20.8 MB of [3392, 6144].) Rejected for now:
cutting the columns over a cluster as well, since its shared-memory stores are not in the
interpreter; e4m3 wgmma with x split into two codes, whose accumulator keeps 14 bits.

The interpreter also looks for races between warpgroups and copies.

Trap: `commit_smem` after the products is not about writes. It makes all four warps of a warpgroup
agree that a slot has been read before one of them lets TMA overwrite it.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_matmul.api import TILE_IN, TILE_OUT
from pallas_kernels.fp8_matmul.reference import SCALE_BLOCK

SHARED_BYTES = 226 * 1024  # of 227 KB that a block may have; the rest is for barriers
RINGS = ((4, 4), (4, 3), (4, 2), (2, 3), (2, 2), (1, 2))  # (warpgroups, slots), the best first
ONES_LEN = 64  # columns of the matrix of ones: the narrowest that the swizzle allows


class _Call(NamedTuple):
    """What the body of the kernel knows when it is traced."""

    num_rows: int
    num_column_tiles: int
    is_fp8: bool
    eps: float | None
    num_groups: int
    num_slots: int

    @property
    def num_sums(self) -> int:
        return 1 if self.eps is None else 2


def _swizzled(shape, dtype):
    tiling = (8, 128 // jnp.dtype(dtype).itemsize)
    # Both classes inherit abstract methods that nobody calls.
    transforms = (
        plgpu.TilingTransform(tiling),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _scratch(call: _Call, weights_dtype, out_dtype, norm_dtype):
    """Shared memory of one block of threads, by name."""
    groups, ring = (call.num_groups,), (call.num_groups, call.num_slots)
    x_tile, w_tile = (call.num_rows, TILE_IN), (TILE_OUT, TILE_IN)
    sums = (max(call.num_groups - 1, 1), call.num_sums, TILE_OUT, call.num_rows)
    shared = {
        "w_ring": _swizzled(ring + w_tile, weights_dtype),
        "x_ring": _swizzled(ring + x_tile, jnp.bfloat16),
        "sums": plgpu.SMEM(sums, jnp.float32),
        "turned": plgpu.SMEM((call.num_rows, TILE_OUT), out_dtype),
    }
    if call.is_fp8:
        shared["decoded"] = _swizzled(groups + w_tile, jnp.bfloat16)
    if call.eps is not None:
        shared["norm_ring"] = plgpu.SMEM((*ring, TILE_IN), norm_dtype)
        shared["weighted"] = _swizzled(groups + x_tile, jnp.bfloat16)
        shared["squares"] = _swizzled(groups + x_tile, jnp.bfloat16)
        shared["ones"] = _swizzled((TILE_OUT, ONES_LEN), jnp.bfloat16)
    return shared


def _num_bytes(shared) -> int:
    return sum(math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in shared.values())


def _body(call: _Call, *refs, w_ring, x_ring, sums, turned, landed, done, **optional):
    """One block of threads; `refs` are x, weights, then scale and norm if there are, then out."""
    inputs = iter(refs)
    x, weights = next(inputs), next(inputs)
    scale = next(inputs) if call.is_fp8 else None
    norm = next(inputs) if call.eps is not None else None
    out = next(inputs)
    tile, group = lax.axis_index("tile"), lax.axis_index("group")
    out_rows = pl.ds(tile * TILE_OUT, TILE_OUT)
    num_steps = lax.div(call.num_column_tiles - group + call.num_groups - 1, call.num_groups)

    def fetch(step, slot):
        columns = pl.ds((group + step * call.num_groups) * TILE_IN, TILE_IN)
        barrier = landed.at[group * call.num_slots + slot]
        plgpu.copy_gmem_to_smem(weights.at[out_rows, columns], w_ring.at[group, slot], barrier)
        plgpu.copy_gmem_to_smem(x.at[:, columns], x_ring.at[group, slot], barrier)
        if norm is not None:
            norm_slot = optional["norm_ring"].at[group, slot]
            plgpu.copy_gmem_to_smem(norm.at[columns], norm_slot, barrier)

    def prepare(slot):
        """The operands of this step's products, in shared memory."""
        w_tile, x_tile = w_ring.at[group, slot], x_ring.at[group, slot]
        operands = []
        if call.is_fp8:
            decoded = optional["decoded"].at[group]
            decoded[...] = w_tile[...].astype(jnp.float16).astype(jnp.bfloat16)
            w_tile = decoded
        if norm is not None:
            # Turned, x is a matrix of 128 rows: a layout of wgmma, which a [8, 128] tile has not.
            columns = x_tile.transpose((1, 0))[...].astype(jnp.float32)
            by_column = plgpu.Layout.WGMMA.reduce(1)
            weight = plgpu.load(optional["norm_ring"].at[group, slot], layout=by_column)
            weight = lax.broadcast_in_dim(weight.astype(jnp.float32), columns.shape, (0,))
            weighted, squares = optional["weighted"].at[group], optional["squares"].at[group]
            weighted.transpose((1, 0))[...] = (columns * weight).astype(jnp.bfloat16)
            squares.transpose((1, 0))[...] = (columns * columns).astype(jnp.bfloat16)
            x_tile = weighted
            operands = [
                (optional["ones"], squares.at[:, pl.ds(start, ONES_LEN)])
                for start in range(0, TILE_IN, ONES_LEN)
            ]
        if call.is_fp8 or norm is not None:
            plgpu.commit_smem()
        return [[(w_tile, x_tile)], operands][: call.num_sums]

    def step(index, totals):
        slot = lax.rem(index, call.num_slots)
        plgpu.barrier_wait(landed.at[group * call.num_slots + slot])
        column_tile = group + index * call.num_groups
        factor = None if scale is None else scale[tile * TILE_OUT // SCALE_BLOCK, column_tile]
        products = prepare(slot)

        def multiply(*accumulators):
            for accumulator, pairs in zip(accumulators, products, strict=True):
                for left, right in pairs:
                    plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return [accumulator[...] for accumulator in accumulators]

        shape = plgpu.WGMMAAccumulatorRef((TILE_OUT, call.num_rows), jnp.float32)
        parts = pl.run_scoped(multiply, *[shape] * call.num_sums)
        plgpu.commit_smem()

        @pl.when(index + call.num_slots < num_steps)
        def _():
            fetch(index + call.num_slots, slot)

        if factor is not None:
            parts[0] = parts[0] * factor
        return [total + part for total, part in zip(totals, parts, strict=True)]

    for slot in range(call.num_slots):
        pl.when(slot < num_steps)(functools.partial(fetch, slot, slot))
    if norm is not None:

        @pl.when(group == 0)
        def _():
            optional["ones"][...] = jnp.ones((TILE_OUT, ONES_LEN), jnp.bfloat16)
            plgpu.commit_smem()

        plgpu.barrier_arrive(optional["has_ones"])
        plgpu.barrier_wait(optional["has_ones"])
    zeros = jnp.zeros((TILE_OUT, call.num_rows), jnp.float32)
    zeros = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    totals = lax.fori_loop(0, num_steps, step, [zeros] * call.num_sums)

    @pl.when(group > 0)
    def _():
        for number, total in enumerate(totals):
            sums[group - 1, number] = total

    plgpu.barrier_arrive(done)

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(done)
        whole = list(totals)
        for other in range(call.num_groups - 1):
            for number in range(call.num_sums):
                whole[number] += plgpu.layout_cast(sums[other, number], plgpu.Layout.WGMMA)
        result = whole[0]
        if call.eps is not None:
            result *= lax.rsqrt(whole[1] * (1 / (call.num_column_tiles * TILE_IN)) + call.eps)
        turned.transpose((1, 0))[...] = result.astype(turned.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned, out.at[:, out_rows])
        plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("eps", "out_dtype", "is_interpreted"))
def matmul(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None,
    norm_weight: jax.Array | None,
    *,
    eps: float | None,
    out_dtype: jnp.dtype,
    is_interpreted: bool,
) -> jax.Array:
    """One launch; shapes and dtypes as checked by api.py, rows of x a multiple of 8.

    A jitted function of its own, so that the same product in 70 layers is lowered once.
    """
    (num_rows, in_len), out_len = x.shape, weights.shape[0]
    num_column_tiles = in_len // TILE_IN

    def plan(num_groups, num_slots):
        call = _Call(
            num_rows, num_column_tiles, scale is not None, eps,
            min(num_groups, num_column_tiles), num_slots,
        )  # fmt: skip
        norm_dtype = None if norm_weight is None else norm_weight.dtype
        return call, _scratch(call, weights.dtype, out_dtype, norm_dtype)

    plans = (plan(*ring) for ring in RINGS)
    call, shared = next(one for one in plans if _num_bytes(one[1]) <= SHARED_BYTES)
    num_copies = 2 if norm_weight is None else 3
    barriers = {
        "landed": plgpu.Barrier(
            num_arrivals=num_copies, num_barriers=call.num_groups * call.num_slots
        ),
        "done": plgpu.Barrier(num_arrivals=call.num_groups),
    }
    if norm_weight is not None:
        barriers["has_ones"] = plgpu.Barrier(num_arrivals=call.num_groups)
    kernel = plgpu.kernel(
        functools.partial(_body, call),
        out_type=jax.ShapeDtypeStruct((num_rows, out_len), out_dtype),
        grid=(out_len // TILE_OUT,),
        grid_names=("tile",),
        num_threads=call.num_groups,
        thread_name="group",
        scratch_types=shared | barriers,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if is_interpreted else False,
    )
    operands = [one for one in (x, weights, scale, norm_weight) if one is not None]
    return kernel(*operands)
