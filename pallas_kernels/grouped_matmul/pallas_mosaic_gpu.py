"""Hopper kernels of the experts' products, with E2M1 decoded into the matrix unit's registers.

`up`: one block of threads per (slot, 64 hidden values); blocks of slots that are not active end at
once. `down`: one per 64 outputs, over the active slots. A block's warpgroups take turns over the
tiles (64 outputs by 256 inputs), each with its own ring of tiles, which a copy engine fills, and
its own sums; at the end the first one adds up. In `up` half of them read the gate's tiles, half the
other's. Four warpgroups, because decoding is what binds: about 3.6 instructions of the vector
units per weight, which four warps of a multiprocessor could not keep busy.

A decoded tile lies in registers, the left operand of `wgmma`, the tokens being its N = 8, 16, ...
64 columns. E8M0 scales are applied to the float32 sums of a group of 32 inputs, where there is one
per output and group; on the weights there would be 32 times as many products.

Decoded weights are bfloat16 values times 2**-126 (tiles.py); one packed product by 2**126 makes
them whole. All sixteen codes are exact (PTX: products of bfloat16 keep subnormal numbers).

The interpreter cannot take a left operand from registers, and XLA:CPU flushes subnormal numbers:
there, and only there, operands go through shared memory and are widened by way of float16.

Trap: `commit_smem` after the products of a tile makes the four warps of a warpgroup agree that a
slot has been read before one of them lets the copy engine overwrite it.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import INTERPRET, interpret_params
from pallas_kernels.formats import MX_GROUP_LEN
from pallas_kernels.grouped_matmul.tiles import BLOCK_INPUTS, ROWS, WORD_INPUTS

MIN_TOKENS = 8  # columns of the smallest wgmma
NUM_GROUPS = 4  # warpgroups of a block
MAX_STAGES = 3  # tiles in flight of each: 96 KB of a multiprocessor; Little's law asks for 32
_STAGE_BYTES = 196_608  # of the 227 KB that a block may have
_WORDS = BLOCK_INPUTS // WORD_INPUTS
_GROUPS = BLOCK_INPUTS // MX_GROUP_LEN  # of a block, which is also the number of codes of a half
_LAYOUT = plgpu.Layout.WGMMA


def pad_tokens(x, choices, choice_weights):
    """Tokens up to a multiple of 8; those added want nothing."""
    added = -x.shape[0] % MIN_TOKENS
    if not added:
        return x, choices, choice_weights
    return (
        jnp.pad(x, ((0, added), (0, 0))),
        jnp.pad(choices, ((0, 0), (0, added)), constant_values=-1),
        jnp.pad(choice_weights, ((0, 0), (0, added))),
    )


def _signed(bits: int):
    return jnp.int32(bits - (1 << 32) if bits >> 31 else bits)


def _operand(words, code: int, keeps_subnormals: bool):
    """bfloat16 [64, 32], a scale group: the values of one code of both half words.

    Without keeps_subnormals, for the interpreter: XLA:CPU would read 0.5 * 2**-126 as 0.
    """
    right, left = jax.lax.shift_right_logical, jax.lax.shift_left
    mask = _signed(0x81C081C0)
    if code < 3:
        bits = words & mask if code == 0 else left(words, _signed(3 * code)) & mask
    else:
        bits = left(words, _signed(1)) & _signed(0x80008000)
        bits |= right(words, _signed(5)) & _signed(0x01000100)
        bits |= right(words, _signed(4)) & _signed(0x00C000C0)

    def values(half):
        half = half.astype(jnp.int16)
        if keeps_subnormals:
            return jax.lax.bitcast_convert_type(half, jnp.bfloat16) * jnp.bfloat16(2.0**126)
        as_half = (half & jnp.int16(-0x8000)) | left(half & jnp.int16(0x01C0), jnp.int16(3))
        small = jax.lax.bitcast_convert_type(as_half, jnp.float16)
        return small.astype(jnp.bfloat16) * jnp.bfloat16(2.0**14)

    return jnp.concatenate([values(bits), values(right(bits, _signed(16)))], axis=1)


def _scale(byte):
    """float32 of E8M0 bytes; 255 is NaN, 0 counts as 0 (2**-127 times a weight is as good as)."""
    byte = byte.astype(jnp.int32)
    bits = jnp.where(byte == 255, _signed(0x7FC00000), byte << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _product(tile, scales, x, through):
    """float32 [64, t]: one tile times the tokens' inputs, in shared memory.

    Args:
      tile: int32 [64, words].
      scales: uint8 [groups, 64].
      x: [t, inputs].
      through: Shared memory [64, 32] for the left operands; None = registers.
    """
    t = x.shape[0]

    def add_block(block, total):
        words = tile[:, pl.ds(block * _WORDS, _WORDS)]
        for group in range(_GROUPS):

            def multiply(acc, group=group):
                operand = _operand(words, group, through is None)
                if through is not None:
                    through[...] = operand
                    plgpu.commit_smem()
                    operand = through
                first = block * BLOCK_INPUTS + group * MX_GROUP_LEN
                columns = x.at[:, pl.ds(first, MX_GROUP_LEN)]
                plgpu.wgmma(acc, operand, columns.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return acc[...]

            part = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, t), jnp.float32))
            row = plgpu.load(scales.at[block * _GROUPS + group], layout=_LAYOUT.reduce(1))
            total += part * jax.lax.broadcast_in_dim(_scale(row), (ROWS, t), (0,))
        return total

    # Unrolled for few tokens; at 64 the sums of eight groups at once would not fit the registers.
    num_blocks = tile.shape[1] // _WORDS
    total = _zeros(t)
    if t <= 32:
        for block in range(num_blocks):
            total = add_block(block, total)
    else:
        total = jax.lax.fori_loop(0, num_blocks, add_block, total)
    return total


class Ring(NamedTuple):
    """How a block's warpgroups go through the tiles.

    Attributes:
      t: Tokens, a multiple of 8.
      width: Inputs of a tile.
      num_groups: Warpgroups.
      num_matrices: Matrices whose tiles they read, one or two.
      num_stages: Tiles of each warpgroup in flight.
    """

    t: int
    width: int
    num_groups: int
    num_matrices: int
    num_stages: int

    @property
    def lanes(self) -> int:
        """Warpgroups that share a matrix."""
        return self.num_groups // self.num_matrices


def ring_of(t: int, width: int, num_matrices: int, num_tiles: int) -> Ring:
    """A ring that fits shared memory; no more warpgroups than there are tiles.

    Example: 8 tokens, tiles of 256 inputs, gate and up of 24 tiles each -> 4 groups, 3 stages.
    """
    stage = ROWS * width // 2 + ROWS * width // MX_GROUP_LEN + 2 * t * width
    groups = num_matrices * min(NUM_GROUPS // num_matrices, num_tiles)
    stages = min(MAX_STAGES, _STAGE_BYTES // (groups * stage))
    while stages < 2 and groups > num_matrices:
        groups -= num_matrices
        stages = min(MAX_STAGES, _STAGE_BYTES // (groups * stage))
    return Ring(t, width, groups, num_matrices, stages)


def _scratch(ring: Ring, implementation: str, **more):
    shape, slots = (ring.num_groups, ring.num_stages), ring.num_groups * ring.num_stages
    scratch = {
        "tiles": plgpu.SMEM((*shape, ROWS, ring.width // WORD_INPUTS), jnp.int32),
        "scales": plgpu.SMEM((*shape, ring.width // MX_GROUP_LEN, ROWS), jnp.uint8),
        "inputs": plgpu.SMEM((*shape, ring.t, ring.width), jnp.bfloat16),
        "sums": plgpu.SMEM((ring.num_groups, ROWS, ring.t), jnp.float32),
        "staging": plgpu.SMEM((ring.t, ROWS), jnp.bfloat16),
        "landed": plgpu.Barrier(num_arrivals=3, num_barriers=slots),
        "done": plgpu.Barrier(num_arrivals=ring.num_groups),
        **more,
    }
    if implementation == INTERPRET:
        scratch["through"] = plgpu.SMEM((ring.num_groups, ROWS, MX_GROUP_LEN), jnp.bfloat16)
    return scratch


def _zeros(t: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, t), jnp.float32), _LAYOUT)


def _sum_tiles(ring: Ring, scratch, num_steps, sources, weigh, finish):
    """Goes through a block's tiles and hands the sums of each matrix to `finish`, once.

    Args:
      ring: Who reads what.
      scratch: Shared memory, see `_scratch`.
      num_steps: Tiles of one matrix; may be 0.
      sources: (step, matrix) -> tile, scales and inputs in memory.
      weigh: (step, product [64, t]) -> what of it is added.
      finish: (one float32 [64, t] per matrix); called by the first warpgroup.
    """
    group = jax.lax.axis_index("group")
    matrix, lane = jax.lax.rem(group, ring.num_matrices), jax.lax.div(group, ring.num_matrices)
    own_steps = jax.lax.div(num_steps - lane + ring.lanes - 1, ring.lanes)
    targets = [scratch[name] for name in ("tiles", "scales", "inputs")]

    def fetch(index, slot):
        for number in range(ring.num_matrices):

            @pl.when(matrix == number)
            def _(number=number):
                barrier = scratch["landed"].at[group * ring.num_stages + slot]
                found = sources(lane + index * ring.lanes, number)
                for source, target in zip(found, targets, strict=True):
                    plgpu.copy_gmem_to_smem(source, target.at[group, slot], barrier)

    def step(index, total):
        slot = jax.lax.rem(index, ring.num_stages)
        plgpu.barrier_wait(scratch["landed"].at[group * ring.num_stages + slot])
        through = scratch["through"].at[group] if "through" in scratch else None
        tile, scales, inputs = (target.at[group, slot] for target in targets)
        part = _product(tile, scales, inputs, through)
        plgpu.commit_smem()

        @pl.when(index + ring.num_stages < own_steps)
        def _():
            fetch(index + ring.num_stages, slot)

        return total + weigh(lane + index * ring.lanes, part)

    for slot in range(ring.num_stages):
        pl.when(slot < own_steps)(functools.partial(fetch, slot, slot))
    scratch["sums"][group] = jax.lax.fori_loop(0, own_steps, step, _zeros(ring.t))
    plgpu.barrier_arrive(scratch["done"])

    @pl.when(group == 0)
    def _():
        plgpu.barrier_wait(scratch["done"])
        wholes = [_zeros(ring.t)] * ring.num_matrices
        for other in range(ring.num_groups):
            sums = plgpu.layout_cast(scratch["sums"][other], _LAYOUT)
            wholes[other % ring.num_matrices] += sums
        finish(*wholes)


def _store(values, staging, destination):
    """A float32 [64, t] result into bfloat16 rows of `destination` [t, 64]."""
    staging.transpose((1, 0))[...] = values.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, destination)
    plgpu.wait_smem_to_gmem(0)


def _clipped(ref, index, size: int):
    return jnp.clip(ref[index], 0, size - 1)


def _call(body, ring: Ring, scratch, implementation: str, **where):
    return plgpu.kernel(
        body,
        num_threads=ring.num_groups,
        thread_name="group",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=interpret_params(implementation),
        **where,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def up(x, gate, up, layer, expert_ids, num_active, *, implementation: str):
    """bfloat16 [slots, t, f], silu(gate x) * (up x); slots that are not active are not written."""
    num_layers, e, row_tiles, input_tiles, _, words = gate.tiles.shape
    t, slots = x.shape[0], expert_ids.shape[0]
    ring = ring_of(t, words * WORD_INPUTS, 2, input_tiles)
    num_scales = ring.width // MX_GROUP_LEN

    def body(x, gate, gate_scale, up, up_scale, layer, ids, num, out, scratch):
        slot, row = jax.lax.axis_index("slot"), jax.lax.axis_index("row")

        @pl.when(slot < num[0])
        def _():
            at = (_clipped(layer, 0, num_layers), _clipped(ids, slot, e), row)

            def sources(step, number):
                tiles, scales = (gate, gate_scale) if number == 0 else (up, up_scale)
                groups = pl.ds(step * num_scales, num_scales)
                inputs = pl.ds(step * ring.width, ring.width)
                return tiles.at[(*at, step)], scales.at[(*at, groups)], x.at[:, inputs]

            def finish(gate_sum, up_sum):
                hidden = gate_sum / (1.0 + jnp.exp(-gate_sum)) * up_sum
                _store(hidden, scratch["staging"], out.at[slot, :, pl.ds(row * ROWS, ROWS)])

            _sum_tiles(ring, scratch, input_tiles, sources, lambda step, part: part, finish)

    return _call(
        body,
        ring,
        _scratch(ring, implementation),
        implementation,
        out_type=jax.ShapeDtypeStruct((slots, t, row_tiles * ROWS), jnp.bfloat16),
        grid=(slots, row_tiles),
        grid_names=("slot", "row"),
    )(x.astype(jnp.bfloat16), *gate, *up, layer, expert_ids, num_active)


@functools.partial(jax.jit, static_argnames="implementation")
def down(
    hidden, down, layer, expert_ids, num_active, choices, choice_weights, *, implementation: str
):
    """bfloat16 [t, d], the sum over active slots of the router's weight times down(hidden)."""
    num_layers, e, row_tiles, input_tiles, _, words = down.tiles.shape
    t, top_k = hidden.shape[1], choices.shape[0]
    ring = ring_of(t, words * WORD_INPUTS, 1, hidden.shape[0] * input_tiles)
    num_scales = ring.width // MX_GROUP_LEN

    def body(hidden, down, scale, layer, ids, num, choices, weights, out, scratch):
        row, group = jax.lax.axis_index("row"), jax.lax.axis_index("group")
        of_layer = _clipped(layer, 0, num_layers)

        @pl.when(group == 0)
        def _():
            for ref, copy in ((choices, scratch["choices"]), (weights, scratch["weights"])):
                plgpu.copy_gmem_to_smem(ref, copy, scratch["chosen"])

        plgpu.barrier_wait(scratch["chosen"])

        def place(step):
            return jax.lax.div(step, input_tiles), jax.lax.rem(step, input_tiles)

        def sources(step, _):
            slot, k = place(step)
            at = (of_layer, _clipped(ids, slot, e), row)
            groups = pl.ds(k * num_scales, num_scales)
            inputs = hidden.at[slot, :, pl.ds(k * ring.width, ring.width)]
            return down.at[(*at, k)], scale.at[(*at, groups)], inputs

        def weigh(step, part):
            expert = ids[place(step)[0]]
            wanted = plgpu.layout_cast(jnp.zeros((t,), jnp.float32), _LAYOUT.reduce(0))
            for j in range(top_k):
                chosen = plgpu.load(scratch["choices"].at[j], layout=_LAYOUT.reduce(0))
                weight = plgpu.load(scratch["weights"].at[j], layout=_LAYOUT.reduce(0))
                wanted += jnp.where(chosen == expert, weight, jnp.zeros_like(weight))
            wanted = jax.lax.broadcast_in_dim(wanted, (ROWS, t), (1,))
            # Selected, not only multiplied: a broken expert is its own tokens' business.
            return jnp.where(wanted != 0.0, part * wanted, jnp.zeros_like(part))

        def finish(total):
            _store(total, scratch["staging"], out.at[:, pl.ds(row * ROWS, ROWS)])

        _sum_tiles(ring, scratch, num[0] * input_tiles, sources, weigh, finish)

    scratch = _scratch(
        ring,
        implementation,
        choices=plgpu.SMEM((top_k, t), jnp.int32),
        weights=plgpu.SMEM((top_k, t), jnp.float32),
        chosen=plgpu.Barrier(num_arrivals=2),
    )
    return _call(
        body,
        ring,
        scratch,
        implementation,
        out_type=jax.ShapeDtypeStruct((t, row_tiles * ROWS), jnp.bfloat16),
        grid=(row_tiles,),
        grid_names=("row",),
    )(hidden, *down, layer, expert_ids, num_active, choices, choice_weights)
