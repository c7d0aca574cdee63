"""MXFP4 experts, run from their packed form: decoded piece by piece, each chosen expert once.

On a CPU the packed bytes are an eighth of float32's, and reading is what a decode step costs: on
two cores a layer of 16 experts [1024, 1024], top 2, takes 1.4 ms for one token against 3.0 in the
fastest float32 form, and 11 against 14 for eight tokens (BENCHMARKS.md). Three things make it so:

  * A tile of weights becomes float32 behind an optimization_barrier, then meets a plain product.
    Fused into one loop, decoding and reduction run at 0.5 G weights/s instead of 5.
  * The two nibbles of a byte are two matrices, of the even and the odd columns, and so are the
    tokens: nothing is interleaved. Interleaved tiles take 1.5 to 5 times as long (8 tokens, 1).
  * Tokens are sorted by expert and every expert is decoded once, for its own tokens, however many
    chose it. A NaN scale therefore reaches the tokens that chose its expert and no others, which
    "all tokens through each expert, weighted by zero" would not keep.

On a GPU XLA gathers one row per (token, expert) and fuses gather, decode and reduction into one
kernel; loops there would cost launches. Long prompts go one expert after the other.

Trap: a row tile that reaches past an expert's own rows writes rows of the next expert; experts run
in order, so those are written again. The last one writes into rows that nobody reads.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.formats import decode_mxfp4, decode_mxfp4_halves

# Up to a draft block of 8 with 8 experts each; past it, gathering would decode experts many times.
MAX_GATHERED_ROWS = 64
# Weights of a tile: 1 MB in float32, which stays in a core's L2. 65,536: 8 tokens take 1.2x.
_TILE_WEIGHTS = 1 << 18
# Rows of an expert that meet a tile at once, where it has more.
_MOST_ROWS, _FEWEST_ROWS = 64, 8


class PackedExperts(NamedTuple):
    """MXFP4 weights of one layer's experts as the files hold them: rows are outputs."""

    gate: UInt8[Array, "e f _"]
    gate_scale: UInt8[Array, "e f _"]
    up: UInt8[Array, "e f _"]
    up_scale: UInt8[Array, "e f _"]
    down: UInt8[Array, "e d _"]
    down_scale: UInt8[Array, "e d _"]


@jax.jit  # so that layers alike are traced once
def run_packed(
    x: Float[Array, "t d"],
    expert_ids: Int[Array, "t top_k"],
    weights: Float[Array, "t top_k"],
    experts: PackedExperts,
) -> Float[Array, "t d"]:
    """Weighted sum of the chosen experts' SwiGLU, as `moe.run_experts`; the platform decides how.

    Args:
      x: Tokens.
      expert_ids: int32; those of one token are distinct.
      weights: Of the experts.
      experts: Packed.
    """
    by_gathering = expert_ids.size <= MAX_GATHERED_ROWS
    return jax.lax.platform_dependent(
        x,
        expert_ids,
        weights,
        experts,
        cpu=run_by_tiles,
        default=_run_gathered if by_gathering else _run_one_by_one,
    )


def tile_rows(num_rows: int, width: int) -> int:
    """Rows of a weight matrix that are decoded at once: halved until a tile fits.

    Example: 1024 rows of 1024 -> 256; 96 rows of 192 -> 96; 300 of 4096 -> 75.
    """
    rows = num_rows
    while rows * width > _TILE_WEIGHTS and rows % 2 == 0:
        rows //= 2
    return rows


def _rows_at_once(num_tokens: int, top_k: int, num_experts: int) -> int:
    """A power of two near the rows that an expert may expect. 512 tokens, 2 of 16 -> 64; 1 -> 1."""
    expected = -(-num_tokens * top_k // num_experts)
    rows = max(_FEWEST_ROWS, min(_MOST_ROWS, 1 << (expected - 1).bit_length()))
    return min(rows, num_tokens)


def run_by_tiles(x, expert_ids, weights, experts):
    """As `run_packed`, on a CPU: loops over the chosen experts and over tiles of their weights."""
    (t, d), top_k = x.shape, expert_ids.shape[1]
    e, f, _ = experts.gate.shape
    if t == 0:
        return x
    flat_ids = expert_ids.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    rows_at_once = _rows_at_once(t, top_k, e)
    counts = jnp.bincount(flat_ids, length=e).astype(jnp.int32)
    ends = jnp.cumsum(counts)
    chosen = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)  # those with rows, in order
    num_chosen = (counts > 0).sum(dtype=jnp.int32)
    # Rows past the end, which the last tile of the last expert reads, repeat the last row.
    source = jnp.pad(order // top_k, (0, rows_at_once), mode="edge")
    rows = _halves(jnp.take(x.astype(jnp.float32), source, axis=0))
    most_tiles = -(-t // rows_at_once)  # of one expert: a token chooses it once
    tiles_of = functools.partial(_for_tiles, most_tiles=most_tiles, rows_at_once=rows_at_once)

    def run_expert(i, out):
        expert = chosen[i]
        first = ends[expert] - counts[expert]
        num_tiles = -(-counts[expert] // rows_at_once)
        pieces = functools.partial(_for_pieces, experts, expert)

        def into_hidden(row, tiles, hidden):
            gate, up = tiles

            def write(begin, hidden):
                own = _take_rows(rows, first + begin, rows_at_once)
                value = jax.nn.silu(_product(own, gate)) * _product(own, up)
                return jax.lax.dynamic_update_slice(hidden, value, (begin, row))

            return tiles_of(num_tiles, write, hidden)

        hidden = jnp.zeros((most_tiles * rows_at_once, f), jnp.float32)
        hidden = _halves(pieces(("gate", "up"), into_hidden, hidden))

        def out_of_hidden(row, tiles, out):
            def write(begin, out):
                value = _product(_take_rows(hidden, begin, rows_at_once), tiles[0])
                return jax.lax.dynamic_update_slice(out, value, (first + begin, row))

            return tiles_of(num_tiles, write, out)

        return pieces(("down",), out_of_hidden, out)

    out = jnp.zeros((t * top_k + rows_at_once, d), jnp.float32)
    out = jax.lax.fori_loop(0, num_chosen, run_expert, out)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(t * top_k, dtype=order.dtype))
    out = jnp.take(out, back, axis=0).reshape(t, top_k, d)
    return (out * weights[:, :, None].astype(jnp.float32)).sum(axis=1).astype(x.dtype)


def _for_tiles(num_tiles, body: Callable, carry, *, most_tiles: int, rows_at_once: int):
    """body(first row, carry) for every row tile of an expert; without a loop where one is most."""
    if most_tiles == 1:
        return body(0, carry)
    return jax.lax.fori_loop(0, num_tiles, lambda i, carry: body(i * rows_at_once, carry), carry)


def _for_pieces(experts: PackedExperts, expert, names, body: Callable, carry):
    """body(first weight row, decoded tiles, carry) over the weight rows of matrices alike."""
    packed = [(getattr(experts, n), getattr(experts, n + "_scale")) for n in names]
    _, num_rows, width = packed[0][0].shape
    rows = tile_rows(num_rows, 2 * width)

    def cut(array, first):
        return jax.lax.dynamic_slice(array, (expert, first, 0), (1, rows, array.shape[2]))[0]

    def run(first, carry):
        tiles = [decode_mxfp4_halves(cut(w, first), cut(s, first)) for w, s in packed]
        return body(first, jax.lax.optimization_barrier(tiles), carry)

    if rows == num_rows:
        return run(0, carry)
    return jax.lax.fori_loop(0, num_rows // rows, lambda i, carry: run(i * rows, carry), carry)


def _halves(x):
    """Even and odd columns."""
    return x[:, 0::2], x[:, 1::2]


def _take_rows(halves, first, count: int):
    return [jax.lax.dynamic_slice_in_dim(x, first, count) for x in halves]


def _product(rows, tile):
    """[r, in/2] twice by [out, in/2] twice -> [r, out]."""
    contract = (((1,), (1,)), ((), ()))
    even, odd = (jax.lax.dot_general(w, x, contract) for w, x in zip(tile, rows, strict=True))
    return (even + odd).T


def _run_gathered(x, expert_ids, weights, experts):
    """One row per (token, chosen expert): gather, decode and reduce fuse into one pass."""
    t, top_k = expert_ids.shape
    flat_ids = expert_ids.reshape(-1)

    def product(rows, packed, scale):
        chosen = (jnp.take(array, flat_ids, axis=0) for array in (packed, scale))
        return jnp.einsum("ri,roi->ro", rows, decode_mxfp4(*chosen).astype(rows.dtype))

    rows = jnp.repeat(x, top_k, axis=0)
    gate = product(rows, experts.gate, experts.gate_scale)
    hidden = jax.nn.silu(gate) * product(rows, experts.up, experts.up_scale)
    out = product(hidden, experts.down, experts.down_scale)
    out = out * weights.reshape(-1)[:, None].astype(x.dtype)
    return out.reshape(t, top_k, -1).sum(axis=1)


def run_expert(x: Float[Array, "r d"], expert: PackedExperts) -> Float[Array, "r d"]:
    """One expert's SwiGLU on all rows, its weights decoded whole to the dtype of x.

    Args:
      x: Rows.
      expert: Of one expert: the leading axis of every array is taken off.
    """
    decode = lambda w, scale: decode_mxfp4(w, scale).astype(x.dtype).T
    gate = x @ decode(expert.gate, expert.gate_scale)
    hidden = jax.nn.silu(gate) * (x @ decode(expert.up, expert.up_scale))
    return hidden @ decode(expert.down, expert.down_scale)


def _run_one_by_one(x, expert_ids, weights, experts):
    """All tokens through every expert, weighted by zero where not chosen; one decoded at a time."""
    e = experts.down.shape[0]
    chosen = jax.nn.one_hot(expert_ids, e, dtype=jnp.float32)
    weight_of_expert = jnp.einsum("tke,tk->et", chosen, weights).astype(x.dtype)

    def add(total, expert):
        weight, packed = expert
        return total + run_expert(x, packed) * weight[:, None], None

    return jax.lax.scan(add, jnp.zeros_like(x), (weight_of_expert, experts))[0]
