"""Attention of one block on Hopper, from the raw projection to the written memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sink_attention.reference import MASKED_SCORE

ROWS = 64  # of a wgmma tile: some heads times the tokens of the block
KEYS = 64  # read at once
SLOTS = 3  # key tiles on their way or in use
LOG2_E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)
PER_COLUMN = WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True)
class Shape:
    b: int
    t: int
    n: int
    k: int
    h: int
    hv: int
    half: int
    s: int

    @property
    def tokens(self) -> int:
        return -(-self.t // 8) * 8

    @property
    def heads_per_tile(self) -> int:
        g = self.n // self.k
        return max(p for p in range(1, ROWS // self.tokens + 1) if g % p == 0)

    @property
    def num_tiles(self) -> int:
        return self.n // self.k // self.heads_per_tile


def chunk(*divisors: int) -> int:
    return next(c for c in (64, 32, 16) if all(d % c == 0 for d in divisors))


def tiled(*divisors: int):
    """Layout of a bfloat16 operand of wgmma whose columns are cut at multiples of `divisors`."""
    columns = chunk(*divisors)
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(2 * columns)


def along_rows(x, width: int):
    return lax.broadcast_in_dim(x, (ROWS, width), (0,))


def along_columns(x):
    return lax.broadcast_in_dim(x, (ROWS, x.shape[0]), (1,))


def rms_norm_tile(ref, weight_ref, eps: float):
    h = ref.shape[1]
    x = plgpu.load(ref, layout=WGMMA).astype(jnp.float32)
    inverse = lax.rsqrt((x * x).sum(axis=1) * (1.0 / h) + eps)
    normed = (x * along_rows(inverse, h)).astype(jnp.bfloat16).astype(jnp.float32)
    weight = plgpu.load(weight_ref, layout=PER_COLUMN).astype(jnp.float32)
    ref[...] = (normed * along_columns(weight)).astype(jnp.bfloat16)


def rotate_tile(ref, cos_ref, sin_ref):
    half = cos_ref.shape[1]
    first_ref, second_ref = ref.at[:, :half], ref.at[:, half : 2 * half]
    first = plgpu.load(first_ref, layout=WGMMA).astype(jnp.float32)
    second = plgpu.load(second_ref, layout=WGMMA).astype(jnp.float32)
    cos, sin = plgpu.load(cos_ref, layout=WGMMA), plgpu.load(sin_ref, layout=WGMMA)
    first_ref[...] = (first * cos - second * sin).astype(jnp.bfloat16)
    second_ref[...] = (second * cos + first * sin).astype(jnp.bfloat16)


def clean_values_tile(ref, num_rows: int, value_scale: float):
    width = ref.shape[1]
    x = plgpu.load(ref, layout=WGMMA).astype(jnp.float32) * value_scale
    x = jnp.where(x != x, 0.0, x)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    x = jnp.minimum(jnp.maximum(x, -largest), largest)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS, width), 0, layout=WGMMA)
    ref[...] = jnp.where(row < num_rows, x, 0.0).astype(jnp.bfloat16)


def flatten(tiled_ref, flat_ref, columns: int):
    """Copies the first rows of a swizzled tile into a row-major one.

    Into memory they go from there: a transfer of whole tiles starts at multiples of 8 rows only.
    """
    tiling = plgpu.Tiling(((8, columns), (2, columns // 16)))
    layout = plgpu.Layout.TILED(tiling, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)
    x = plgpu.load(tiled_ref.at[: flat_ref.shape[0]], layout=layout, optimized=False)
    plgpu.store(flat_ref, x, optimized=False)


def attend_tile(q, keys, values, weights, seen, carry, scale: float):
    acc, top, total = carry

    def score(ref):
        plgpu.wgmma(ref, q, keys.transpose((1, 0)))
        return ref[...]

    scores = pl.run_scoped(score, plgpu.ACC((ROWS, KEYS), jnp.float32))
    scores = jnp.where(seen, scores * scale, MASKED_SCORE)
    new_top = jnp.maximum(top, scores.max(axis=1))
    kept = jnp.exp2(top - new_top)
    part = jnp.exp2(scores - along_rows(new_top, KEYS))
    weights[...] = part.astype(jnp.bfloat16)
    plgpu.commit_smem()

    def weigh(ref):
        plgpu.wgmma(ref, weights, values)
        return ref[...]

    acc = acc * along_rows(kept, acc.shape[1])
    acc = acc + pl.run_scoped(weigh, plgpu.ACC(acc.shape, jnp.float32))
    return acc, new_top, total * kept + part.sum(axis=1)


def iota(shape, axis):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def block_seen(rows_ref):
    column = iota((ROWS, KEYS), 1)
    low = along_rows(plgpu.load(rows_ref.at[1], layout=PER_ROW), KEYS)
    high = along_rows(plgpu.load(rows_ref.at[2], layout=PER_ROW), KEYS)
    word = jnp.where(column < 32, low, high)
    return ((word >> (column & 31)) & 1) != 0


def first_carry(sink, heads, tokens: int, width: int):
    """sink: ref [n] or None; heads: index of each head of the tile."""
    acc = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA)
    full = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), PER_ROW)
    if sink is None:
        return acc, full(MASKED_SCORE), full(0.0)
    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
    top = full(0.0)
    for i, head in enumerate(heads):
        logit = sink[head].astype(jnp.float32) * LOG2_E
        is_head = (row >= i * tokens) & (row < (i + 1) * tokens)
        top = jnp.where(is_head, logit, top)
    return acc, top, full(1.0)


@functools.partial(
    jax.jit, static_argnames=("value_scale", "norm_eps", "write", "interpret")
)
def attend_ring(
    qkv, keys, values, *, rows, cos, sin, positions, first_slot, sink, value_scale, write, interpret,
    q_norm=None, k_norm=None, norm_eps=0.0,
):
    """One launch."""
    b, k, s, h = keys.shape
    hv = values.shape[3]
    t = qkv.shape[1]
    n = (qkv.shape[2] - k * (h + hv)) // h
    half = cos.shape[2]
    shape = Shape(b, t, n, k, h, hv, half, s)
    tokens, p = shape.tokens, shape.heads_per_tile
    qk, pv = tiled(half, h), tiled(hv)
    num_steps = pl.cdiv(s, KEYS)
    slots = min(SLOTS, num_steps)
    scale = h**-0.5 * LOG2_E

    def body(
        qkv, cos, sin, rows, first_slot, positions, sink, keys, values, out,
        q, own_k, own_v, flat_k, flat_v, weights, cos_s, sin_s, rows_s, k_s, v_s, pos_s, arrived, ready,
    ):  # fmt: skip
        row, kv, tile = (lax.axis_index(name) for name in ("row", "kv", "tile"))
        # Traced: a slice that starts at a plain number may not reach past the end of an array.
        zero = row * 0
        block = pl.ds(zero, tokens)

        def fetch(step, slot):
            here = pl.ds(step * KEYS, KEYS)
            plgpu.copy_gmem_to_smem(keys.at[row, kv, here], k_s.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(values.at[row, kv, here], v_s.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(positions.at[row, here], pos_s.at[slot], ready.at[slot])

        for step in range(slots):
            fetch(zero + step, step)

        first_head = kv * (n // k) + tile * p
        heads = [first_head + i for i in range(p)]
        load = lambda source, target: plgpu.copy_gmem_to_smem(source, target, arrived)
        for i, head in enumerate(heads):
            load(qkv.at[row, block, pl.ds(head * h, h)], q.at[i * tokens : (i + 1) * tokens])
        load(qkv.at[row, block, pl.ds((n + kv) * h, h)], own_k.at[:tokens])
        load(qkv.at[row, block, pl.ds((n + k) * h + kv * hv, hv)], own_v.at[:tokens])
        load(cos.at[row], cos_s)
        load(sin.at[row], sin_s)
        load(rows.at[row], rows_s)
        plgpu.barrier_wait(arrived)
        rotate_tile(q, cos_s, sin_s)
        rotate_tile(own_k, cos_s, sin_s)
        clean_values_tile(own_v, t, value_scale)
        plgpu.commit_smem()

        @pl.when(tile == 0)
        def _():
            here = pl.ds(first_slot[row], t)
            flatten(own_k, flat_k, chunk(half, h))
            flatten(own_v, flat_v, chunk(hv))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(flat_k.at[:t], keys.at[row, kv, here])
            plgpu.copy_smem_to_gmem(flat_v.at[:t], values.at[row, kv, here])

        lowest = along_rows(plgpu.load(rows_s.at[0], layout=PER_ROW), KEYS)

        def step_over(step, carry):
            slot = lax.rem(step, jnp.int32(slots))
            plgpu.barrier_wait(ready.at[slot])
            position = along_columns(plgpu.load(pos_s.at[slot], layout=PER_COLUMN))
            seen = position >= lowest
            carry = attend_tile(q, k_s.at[slot], v_s.at[slot], weights, seen, carry, scale)

            @pl.when(step + slots < num_steps)
            def _():
                fetch(step + slots, slot)

            return carry

        carry = first_carry(sink, heads, tokens, hv)
        carry = lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), step_over, carry)
        acc, _, total = attend_tile(q, own_k, own_v, weights, block_seen(rows_s), carry, scale)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        own_v[...] = (acc / along_rows(total, hv)).astype(jnp.bfloat16)
        plgpu.commit_smem()
        for i, head in enumerate(heads):
            plgpu.copy_smem_to_gmem(
                own_v.at[i * tokens : (i + 1) * tokens],
                out.at[row, block, pl.ds(head * hv, hv)],
            )
        plgpu.wait_smem_to_gmem(0)

    bf16 = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16)
    scratch = dict(
        q=bf16((ROWS, h), transforms=qk),
        own_k=bf16((KEYS, h), transforms=qk),
        own_v=bf16((KEYS, hv), transforms=pv),
        flat_k=bf16((tokens, h)),
        flat_v=bf16((tokens, hv)),
        weights=bf16((ROWS, KEYS), transforms=pv),
        cos_s=plgpu.SMEM((ROWS, half), jnp.float32),
        sin_s=plgpu.SMEM((ROWS, half), jnp.float32),
        rows_s=plgpu.SMEM((3, ROWS), jnp.int32),
        k_s=bf16((slots, KEYS, h), transforms=qk),
        v_s=bf16((slots, KEYS, hv), transforms=pv),
        pos_s=plgpu.SMEM((slots, KEYS), jnp.int32),
        arrived=plgpu.Barrier(num_arrivals=p + 5),
        ready=plgpu.Barrier(num_arrivals=3, num_barriers=slots),
    )
    keys_ref, values_ref = jax.new_ref(keys), jax.new_ref(values)
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((b, t, n * hv), jnp.bfloat16),
        scratch_types=scratch,
        grid=(b, k, shape.num_tiles),
        grid_names=("row", "kv", "tile"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(qkv, cos, sin, rows, first_slot, positions, sink, keys_ref, values_ref)
    return out, jax.freeze(keys_ref), jax.freeze(values_ref)
