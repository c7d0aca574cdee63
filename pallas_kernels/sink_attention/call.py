"""One call: what its kernels read, what is known when they are compiled, who does what.

A warpgroup has one tile of queries: some heads of one KV head, times the tokens of the block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.sink_attention import tile
from pallas_kernels.sink_attention.block import ROWS, BlockTables, padded_tokens


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
        return tile.columns_of(self.h, 2 * self.half, self.hv)

    @property
    def value_columns(self) -> int:
        return tile.columns_of(self.width, self.h)

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
