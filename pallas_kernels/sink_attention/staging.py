"""What a block of threads holds in shared memory while it works out one tile of queries.

Three things come in and are made ready in place: the tile's queries, the block's own keys and
values, and tiles of memory. Each has the same parts here: its scratch, the start of its copies, and
what is done once they have arrived.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sink_attention import tile
from pallas_kernels.sink_attention.block import KEYS, ROWS, BlockTables, padded_tokens

MAX_SLOTS = 4  # tiles of keys on their way
SHARED_BYTES = 222 * 1024  # of 227 KB that a block of threads may have


class Inputs(NamedTuple):
    """What every kernel of a call reads; see `api.sink_attention`."""

    qkv: jax.Array
    tables: BlockTables
    start: jax.Array
    first_slot: jax.Array
    sink: jax.Array | None
    q_norm: jax.Array | None
    k_norm: jax.Array | None


class Call(NamedTuple):
    """What is known when a kernel is compiled: sizes and numbers of one call.

    Attributes:
      b: Rows.
      t: Tokens of a block.
      n: Query heads.
      k: KV heads.
      h: Width of queries and keys.
      hv: Width of values.
      half: Half of the rotated dims.
      width: Columns of values that one block of threads works out.
      num_warpgroups: Of a block of threads; each has a tile of queries, and they share keys.
      norm_eps: Of the norms.
      value_scale: Of the block's values.
      interpret: Simulate.
    """

    b: int
    t: int
    n: int
    k: int
    h: int
    hv: int
    half: int
    width: int
    num_warpgroups: int
    norm_eps: float
    value_scale: float
    interpret: bool

    @property
    def tokens(self) -> int:
        return padded_tokens(self.t)

    @property
    def heads_per_tile(self) -> int:
        """Query heads of one KV head in a tile. Example: 16 heads, 8 tokens -> 8."""
        group = self.n // self.k
        return max(p for p in range(1, ROWS // self.tokens + 1) if group % p == 0)

    @property
    def num_tiles(self) -> int:
        """Of query heads per KV head; one where there are keys and values only."""
        return max(1, self.n // self.k // self.heads_per_tile)

    @property
    def key_columns(self) -> int:
        return tile.columns_of(self.h, 2 * self.half)

    @property
    def value_columns(self) -> int:
        return tile.columns_of(self.width)

    def launch(self, body: Callable, out_type: Any, scratch: dict[str, Any], last: tuple[str, int]):
        """The kernel `body` over rows, KV heads, tiles of query heads and one more axis."""
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=(self.b, self.k, self.num_tiles // self.num_warpgroups, last[1]),
            grid_names=("row", "kv", "group", last[0]),
            num_threads=self.num_warpgroups,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=plgpu.InterpretGPUParams() if self.interpret else None,
        )


def index(*names: str) -> list[Any]:
    return [lax.axis_index(name) for name in names]


def tile_index(call: Call) -> Any:
    """Which tile of its KV head's queries this warpgroup has."""
    group, warpgroup = index("group", "warpgroup")
    return group * call.num_warpgroups + warpgroup


def is_leader() -> Any:
    """Whether this warpgroup fetches what the block of threads shares."""
    return lax.axis_index("warpgroup") == 0


def heads(call: Call) -> list[Any]:
    """Query heads of this warpgroup's tile."""
    first = lax.axis_index("kv") * (call.n // call.k) + tile_index(call) * call.heads_per_tile
    return [first + i for i in range(call.heads_per_tile)]


def rows_of(call: Call, i: int) -> slice:
    """Rows of a tile that hold its head i."""
    return slice(i * call.tokens, (i + 1) * call.tokens)


def table_scratch(call: Call) -> dict[str, Any]:
    return {name: plgpu.SMEM((ROWS, call.half), jnp.float32) for name in ("cos", "sin")}


def query_scratch(call: Call, inputs: Inputs) -> dict[str, Any]:
    num_copies = call.num_warpgroups * call.heads_per_tile + 3 + (inputs.q_norm is not None)
    scratch = table_scratch(call) | {
        "queries": tile.operand((call.num_warpgroups, ROWS, call.h), call.key_columns),
        "weights": tile.operand((call.num_warpgroups, ROWS, KEYS), call.value_columns),
        "rows": plgpu.SMEM((3, ROWS), jnp.int32),
        "queries_arrived": plgpu.Barrier(num_arrivals=num_copies),
    }
    if inputs.q_norm is not None:
        scratch["q_norm"] = plgpu.SMEM((call.h,), inputs.q_norm.dtype)
    return scratch


def fetch_queries(call: Call, inputs: Inputs, shared: SimpleNamespace) -> None:
    (row,) = index("row")

    def fetch(source, target):
        plgpu.copy_gmem_to_smem(source, target, shared.queries_arrived)

    # Traced: a slice that starts at a plain number may not reach past the end of an array.
    tokens = pl.ds(row * 0, call.tokens)
    for i, head in enumerate(heads(call)):
        columns = pl.ds(head * call.h, call.h)
        fetch(inputs.qkv.at[row, tokens, columns], shared.queries.at[rows_of(call, i)])

    @pl.when(is_leader())
    def _():
        fetch(inputs.tables.rows.at[row], shared.rows)
        fetch(inputs.tables.cos.at[row], shared.cos)
        fetch(inputs.tables.sin.at[row], shared.sin)
        if inputs.q_norm is not None:
            fetch(inputs.q_norm, shared.q_norm)


def prepare_queries(call: Call, inputs: Inputs, shared: SimpleNamespace) -> None:
    plgpu.barrier_wait(shared.queries_arrived)
    if inputs.q_norm is not None:
        tile.norm(shared.queries, shared.q_norm, call.norm_eps)
    tile.rotate(shared.queries, shared.cos, shared.sin)
    plgpu.commit_smem()


def block_scratch(call: Call, k_norm: Any) -> dict[str, Any]:
    scratch = {
        "own_keys": tile.operand((KEYS, call.h), call.key_columns),
        "own_values": tile.operand((KEYS, call.width), call.value_columns),
        "flat_keys": plgpu.SMEM((call.tokens, call.h), jnp.bfloat16),
        "flat_values": plgpu.SMEM((call.tokens, call.width), jnp.bfloat16),
        "block_arrived": plgpu.Barrier(num_arrivals=2 + (k_norm is not None)),
    }
    if k_norm is not None:
        scratch["k_norm"] = plgpu.SMEM((call.h,), k_norm.dtype)
    return scratch


def fetch_block(call: Call, qkv: Any, k_norm: Any, shared: SimpleNamespace) -> None:
    row, kv, part = index("row", "kv", "part")

    def fetch(source, target):
        plgpu.copy_gmem_to_smem(source, target, shared.block_arrived)

    tokens, first = pl.ds(row * 0, call.tokens), slice(0, call.tokens)
    columns = pl.ds((call.n + kv) * call.h, call.h)
    fetch(qkv.at[row, tokens, columns], shared.own_keys.at[first])
    columns = pl.ds((call.n + call.k) * call.h + kv * call.hv + part * call.width, call.width)
    fetch(qkv.at[row, tokens, columns], shared.own_values.at[first])
    if k_norm is not None:
        fetch(k_norm, shared.k_norm)


def prepare_block(call: Call, k_norm: Any, shared: SimpleNamespace) -> None:
    plgpu.barrier_wait(shared.block_arrived)
    if k_norm is not None:
        tile.norm(shared.own_keys, shared.k_norm, call.norm_eps)
    tile.rotate(shared.own_keys, shared.cos, shared.sin)
    tile.clean_values(shared.own_values, call.t, call.value_scale)
    plgpu.commit_smem()


def store_block(call: Call, shared: SimpleNamespace, keys: Any, values: Any, first: Any) -> None:
    """Starts writing the block's keys and values, by one block of threads each.

    Args:
      call: The call.
      shared: Shared memory.
      keys: [b, k, s, h].
      values: [b, k, s, hv].
      first: Slot of the first token.
    """
    row, kv, part = index("row", "kv", "part")
    which = tile_index(call)
    here = pl.ds(first, call.t)

    @pl.when((which == 0) & (part == 0))
    def _():
        tile.flatten(shared.own_keys, shared.flat_keys, call.key_columns)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(shared.flat_keys.at[: call.t], keys.at[row, kv, here])

    @pl.when(which == 0)
    def _():
        tile.flatten(shared.own_values, shared.flat_values, call.value_columns)
        plgpu.commit_smem()
        target = values.at[row, kv, here, pl.ds(part * call.width, call.width)]
        plgpu.copy_smem_to_gmem(shared.flat_values.at[: call.t], target)


def first_carry(call: Call, sink: Any) -> tile.Carry:
    logits = None if sink is None else [sink[head] for head in heads(call)]
    return tile.start_carry(call.width, logits, call.tokens)


def finish(call: Call, shared: SimpleNamespace, carry: tile.Carry, out: Any) -> None:
    """Adds the block itself and stores the output."""
    row, part = index("row", "part")
    sees = tile.sees_block(shared.rows)
    carry = tile.attend(
        carry, shared.queries, shared.own_keys, shared.own_values, shared.weights, sees
    )
    # The block's values are read and on their way into memory: their place is free.
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    mean = carry.weighted / tile.along_rows(carry.total, call.width)
    shared.own_values[...] = mean.astype(jnp.bfloat16)
    plgpu.commit_smem()
    tokens = pl.ds(row * 0, call.tokens)
    for i, head in enumerate(heads(call)):
        columns = pl.ds(head * call.hv + part * call.width, call.width)
        source = shared.own_values.at[rows_of(call, i)]
        plgpu.copy_smem_to_gmem(source, out.at[row, tokens, columns])
    plgpu.wait_smem_to_gmem(0)


def slot_barriers(call: Call, num_slots: int, num_copies: int) -> dict[str, Any]:
    """What `tile.stream` waits for: the copies of a slot, and the warpgroups that have used it."""
    return {
        "arrived": plgpu.Barrier(num_arrivals=num_copies, num_barriers=num_slots),
        "used": plgpu.Barrier(num_arrivals=call.num_warpgroups, num_barriers=num_slots),
    }


def views(scratch: dict[str, Any]) -> SimpleNamespace:
    """Scratch by name, with this warpgroup's own queries and weights."""
    shared = SimpleNamespace(**scratch)
    warpgroup = lax.axis_index("warpgroup")
    shared.queries = shared.queries.at[warpgroup]
    shared.weights = shared.weights.at[warpgroup]
    return shared


def key_scratch(
    call: Call, beside: dict[str, Any], num_steps: int, *, has_positions: bool
) -> dict[str, Any]:
    """Places for tiles of memory.

    Args:
      call: The call.
      beside: The rest of the scratch; the places take what it leaves.
      num_steps: Most tiles that are read.
      has_positions: Whether every slot has a position of its own.
    """
    held = 0
    for one in beside.values():
        if not isinstance(one, plgpu.Barrier):
            held += math.prod(one.shape) * jnp.dtype(one.dtype).itemsize
    per_slot = KEYS * (2 * (call.h + call.width) + 4)
    slots = min(num_steps, MAX_SLOTS, (SHARED_BYTES - held) // per_slot)
    places = {
        "keys": tile.operand((slots, KEYS, call.h), call.key_columns),
        "values": tile.operand((slots, KEYS, call.width), call.value_columns),
    }
    places |= slot_barriers(call, slots, num_copies=2 + has_positions)
    if has_positions:
        places["positions"] = plgpu.SMEM((slots, KEYS), jnp.int32)
    return places


def fetch_keys(memory: Any, shared: SimpleNamespace, step: Any, slot: Any) -> None:
    """Starts the copies of one tile of memory; of positions they are the caller's business."""
    row, kv = index("row", "kv")
    here, arrived = pl.ds(step * KEYS, KEYS), shared.arrived.at[slot]
    keys, values = memory
    plgpu.copy_gmem_to_smem(keys.at[row, kv, here], shared.keys.at[slot], arrived)
    plgpu.copy_gmem_to_smem(values.at[row, kv, here], shared.values.at[slot], arrived)


def attend_keys(shared: SimpleNamespace, slot: Any, carry: tile.Carry, sees: Any) -> tile.Carry:
    """The softmax with the tile of memory in a slot."""
    keys, values = shared.keys.at[slot], shared.values.at[slot]
    return tile.attend(carry, shared.queries, keys, values, shared.weights, sees)
