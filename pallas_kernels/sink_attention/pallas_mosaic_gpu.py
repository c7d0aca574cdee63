"""The kernels: attention of one block on Hopper, from the raw projection to the written memory.

A ring is short: one launch, in which every 64-row tile of queries reads all of it. A linear memory
may hold 262,144 positions, more than a few multiprocessors can read in time: a first launch cuts
what lies below `start` into splits and leaves a softmax per split, a second one merges them. Both
ways end alike, with the block itself, which never comes from memory: its slots may be written at
any moment, by one of the readers.

Rejected: one launch with a grid-wide wait (all splits would have to be resident at once); merging
in the multiprocessor of each tile (2 MB at about 0.1 TB/s: 20 us for each of ten layers), hence
`MERGE_COLUMNS`.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sink_attention import staging, tile
from pallas_kernels.sink_attention.block import KEYS, LOWEST, ROWS
from pallas_kernels.sink_attention.staging import Call, Inputs, index

NUM_BLOCKS = 128  # blocks of threads that splits may occupy; an H200 has 132 multiprocessors
MIN_STEPS = 4  # tiles of keys per split: fewer cost more to merge than to read
MERGE_COLUMNS = 16  # of values, that one block of threads merges
MERGE_SLOTS = 4  # partial sums on their way

type Memory = tuple[jax.Array, jax.Array]
type Results = tuple[jax.Array, jax.Array, jax.Array]


def _outputs(call: Call, *, write: bool) -> list[jax.ShapeDtypeStruct]:
    """The output, and the block's keys and values where they do not go into memory."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    out = [of((call.b, call.t, call.n * call.hv))]
    if write:
        return out
    block = (call.b, call.k, call.t)
    return [*out, of((*block, call.h)), of((*block, call.hv))]


def _finishing_kernel(call: Call, inputs: Inputs, memory, write: bool, extra, scratch, carry_from):
    """Runs a kernel that ends with the block.

    Args:
      call: The call.
      inputs: Of the call.
      memory: (keys, values).
      write: Whether the block is written into them.
      extra: More operands.
      scratch: More shared memory.
      carry_from: (inputs, memory, extra, shared, prepare) -> the softmax of what comes before the
        block; calls prepare once its own copies are under way.

    Returns:
      (output, keys, values), see `api.sink_attention`.
    """
    base = staging.query_scratch(call, inputs) | staging.block_scratch(call, inputs.k_norm)

    def body(inputs, memory, extra, out, *new_block, **scratch):
        shared = staging.views(scratch)
        (row,) = index("row")
        staging.fetch_queries(call, inputs, shared)
        staging.fetch_block(call, inputs.qkv, inputs.k_norm, shared)

        def prepare() -> tile.Carry:
            staging.prepare_queries(call, inputs, shared)
            staging.prepare_block(call, inputs.k_norm, shared)
            keys, values = memory if write else new_block
            first = inputs.first_slot[row] if write else row * 0
            staging.store_block(call, shared, keys, values, first)
            return staging.first_carry(call, inputs.sink)

        staging.finish(call, shared, carry_from(inputs, memory, extra, shared, prepare), out)

    kernel = call.launch(
        body,
        _outputs(call, write=write),
        base | scratch(call, base),
        ("part", call.hv // call.width),
    )
    if not write:
        out, keys, values = kernel(inputs, memory, extra)
        return out, keys, values
    keys_ref, values_ref = (jax.new_ref(x) for x in memory)
    (out,) = kernel(inputs, (keys_ref, values_ref), extra)
    return out, jax.freeze(keys_ref), jax.freeze(values_ref)


@functools.partial(jax.jit, static_argnames=("call", "write"))
def attend_ring(
    call: Call, inputs: Inputs, memory: Memory, positions: jax.Array, *, write: bool
) -> Results:
    """Attention over a ring and the block: one launch.

    Args:
      call: The call; its width is hv.
      inputs: Of the call.
      memory: Keys and values.
      positions: See `block.readable_positions`.
      write: Whether the block is written.
    """
    num_steps = positions.shape[1] // KEYS

    def carry_from(inputs, memory, positions, shared, prepare):
        (row,) = index("row")

        def fetch(step, slot):
            staging.fetch_keys(memory, shared, step, slot)
            here = pl.ds(step * KEYS, KEYS)
            target, arrived = shared.positions.at[slot], shared.arrived.at[slot]
            plgpu.copy_gmem_to_smem(positions.at[row, here], target, arrived)

        def consume(step, slot, carry):
            del step
            position = plgpu.load(shared.positions.at[slot], layout=tile.PER_COLUMN)
            lowest = tile.load_rows(shared.rows.at[LOWEST])
            sees = tile.along_columns(position) >= tile.along_rows(lowest, KEYS)
            return staging.attend_keys(shared, slot, carry, sees)

        return tile.stream(num_steps, fetch, shared, prepare, consume)

    scratch = functools.partial(staging.key_scratch, num_steps=num_steps, has_positions=True)
    return _finishing_kernel(call, inputs, memory, write, positions, scratch, carry_from)


def cut(start: Any, num_splits: int) -> tuple[Any, Any]:
    """(tiles of memory per split, splits in use) of a row. Example: 1,000 tiles, 64 -> 16, 63."""
    num_tiles = lax.div(start + (KEYS - 1), jnp.int32(KEYS))
    per_split = lax.div(num_tiles + (num_splits - 1), jnp.int32(num_splits))
    per_split = jnp.maximum(per_split, MIN_STEPS)
    return per_split, lax.div(num_tiles + per_split - 1, per_split)


def _attend_splits(call: Call, inputs: Inputs, memory: Memory, num_splits: int) -> tile.Carry:
    """What each split of a linear memory contributes; splits that are not in use stay unwritten."""
    num_steps = pl.cdiv(memory[0].shape[2], KEYS)

    def body(inputs, memory, sums, tops, totals, **scratch):
        shared = staging.views(scratch)
        row, kv, split = index("row", "kv", "split")
        here = staging.tile_index(call)
        start = inputs.start[row]
        per_split, num_used = cut(start, num_splits)
        first = split * per_split

        def fetch(step, slot):
            staging.fetch_keys(memory, shared, first + step, slot)

        def prepare():
            staging.prepare_queries(call, inputs, shared)
            return tile.start_carry(call.width, None, call.tokens)

        def consume(step, slot, carry):
            position = (first + step) * KEYS + tile.iota(1)
            lowest = tile.load_rows(shared.rows.at[LOWEST])
            sees = (position >= tile.along_rows(lowest, KEYS)) & (position < start)
            return staging.attend_keys(shared, slot, carry, sees)

        @pl.when(split < num_used)
        def _():
            staging.fetch_queries(call, inputs, shared)
            last = lax.div(start + (KEYS - 1), jnp.int32(KEYS))
            steps = jnp.minimum(per_split, last - first)
            carry = tile.stream(steps, fetch, shared, prepare, consume)
            for target, part in zip((sums, tops, totals), carry, strict=True):
                tile.store_anyhow(target.at[row, kv, here, split], part)

    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    parts = (call.b, call.k, call.num_tiles, num_splits, ROWS)
    scratch = staging.query_scratch(call, inputs)
    scratch |= staging.key_scratch(call, scratch, num_steps, has_positions=False)
    out_type = [of((*parts, call.width)), of(parts), of(parts)]
    return tile.Carry(*call.launch(body, out_type, scratch, ("split", num_splits))(inputs, memory))


@functools.partial(jax.jit, static_argnames=("call", "write"))
def attend_linear(call: Call, inputs: Inputs, memory: Memory, *, write: bool) -> Results:
    """Attention over a linear memory and the block: two launches.

    Args:
      call: The call; its width is hv.
      inputs: Of the call.
      memory: Keys and values; slot i holds position i.
      write: Whether the block is written.
    """
    pairs = call._replace(num_warpgroups=2 if call.num_tiles % 2 == 0 else 1)
    num_splits = NUM_BLOCKS * pairs.num_warpgroups // (call.b * call.k * call.num_tiles)
    num_splits = max(1, min(num_splits, pl.cdiv(memory[0].shape[2], KEYS * MIN_STEPS)))
    parts = _attend_splits(pairs, inputs, memory, num_splits)
    call = call._replace(width=min(call.width, MERGE_COLUMNS))

    def carry_from(inputs, memory, parts, shared, prepare):
        del memory
        row, kv, part = index("row", "kv", "part")
        here = staging.tile_index(call)
        columns = pl.ds(part * call.width, call.width)

        def fetch(step, slot):
            arrived = shared.arrived.at[slot]
            of_split = row, kv, here, step
            source = parts.weighted.at[*of_split, :, columns]
            plgpu.copy_gmem_to_smem(source, shared.sums.at[slot], arrived)
            plgpu.copy_gmem_to_smem(parts.top.at[*of_split], shared.tops.at[slot], arrived)
            plgpu.copy_gmem_to_smem(parts.total.at[*of_split], shared.totals.at[slot], arrived)

        def consume(step, slot, carry):
            del step
            rows = [tile.load_rows(x.at[slot]) for x in (shared.tops, shared.totals)]
            return tile.merge(carry, tile.Carry(tile.load_tile(shared.sums.at[slot]), *rows))

        _, num_used = cut(inputs.start[row], num_splits)
        return tile.stream(num_used, fetch, shared, prepare, consume)

    def scratch(*_):
        return {
            "sums": plgpu.SMEM((MERGE_SLOTS, ROWS, call.width), jnp.float32),
            "tops": plgpu.SMEM((MERGE_SLOTS, ROWS), jnp.float32),
            "totals": plgpu.SMEM((MERGE_SLOTS, ROWS), jnp.float32),
        } | staging.slot_barriers(call, MERGE_SLOTS, num_copies=3)

    return _finishing_kernel(call, inputs, memory, write, parts, scratch, carry_from)


@functools.partial(jax.jit, static_argnames=("call",))
def write_context(
    call: Call,
    kv: jax.Array,
    memory: Memory,
    cos: jax.Array,
    sin: jax.Array,
    first_slot: jax.Array,
    k_norm: jax.Array | None,
) -> Memory:
    """Norm and rotation of keys that are nobody's queries' own, and the writing: one launch.

    Args:
      call: The call, with no query heads.
      kv: The raw projection.
      memory: Keys and values.
      cos: See `block.BlockTables`.
      sin: As cos.
      first_slot: Of each row.
      k_norm: Weight, or None.
    """

    def body(kv, tables, first_slot, norm, memory, **scratch):
        shared = SimpleNamespace(**scratch)
        (row,) = index("row")
        for source, target in zip(tables, (shared.cos, shared.sin), strict=True):
            plgpu.copy_gmem_to_smem(source.at[row], target, shared.tables_arrived)
        staging.fetch_block(call, kv, norm, shared)
        plgpu.barrier_wait(shared.tables_arrived)
        staging.prepare_block(call, norm, shared)
        keys, values = memory
        staging.store_block(call, shared, keys, values, first_slot[row])
        plgpu.wait_smem_to_gmem(0)

    scratch = staging.block_scratch(call, k_norm) | staging.table_scratch(call)
    scratch["tables_arrived"] = plgpu.Barrier(num_arrivals=2)
    keys_ref, values_ref = (jax.new_ref(x) for x in memory)
    call.launch(body, [], scratch, ("part", 1))(
        kv, (cos, sin), first_slot, k_norm, (keys_ref, values_ref)
    )
    return jax.freeze(keys_ref), jax.freeze(values_ref)
