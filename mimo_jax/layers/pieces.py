"""Attention over a long memory, read piece by piece up to the live length.

Cost and scratch follow what a row has, not what its memory could hold: a row of 100 positions reads
one piece of a memory of 262,144, and a prompt chunk never holds scores against all of it. The
softmax is the running one: a new top rescales what was summed before.

Two forms, because two compilers read memory differently (`jax.lax.platform_dependent` picks):

  * XLA:CPU. A loop per row, whose cost is then the row's own. A product with a matrix of queries
    copies the piece first; a product with one query reads it in place, and a loop of nothing else
    is compiled into one function. For 131,072 positions of 2 heads of 64 (134 MB), processor time
    at 1, 2, 6 and 16 queries: 10, 11, 18 and 31 ms one by one, 20, 20, 26 and 33 ms as a matrix;
    summing the same bytes takes 7. Reductions over one axis of a matrix go to a library call and
    undo it (20 ms again), so each query has its own.
  * Others. All rows together: a step in one product with the whole memory, since a loop's launches
    and the copies of its pieces would cost more than what is read for nothing (a kernel that knows
    the lengths would need neither); prompt chunks and codes in large pieces.

Rejected: products with the whole memory on a CPU (cost by capacity: 574 ms a step for a row of 100
in 262,144, and the keys copied, transposed); a switch over capacities (a program per power of two,
and up to twice the bytes).

Source: running softmax as in arXiv:2205.14135.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.layers.attention import MASKED_SCORE, Sums, batched_matmul, fold_queries

_MAX_ONE_BY_ONE = 12  # queries per KV head; from there a matrix product is faster, see above
_MAX_UNROLLED_ROWS = 8  # loops of their own; the program would grow with the batch
_SCORES_AT_ONCE = 1 << 25  # of one row and KV head, where pieces may be large: 134 MB


class Pieces(NamedTuple):
    """A long memory.

    Attributes:
      read: (first row, rows, first slot, slots) -> keys [rows, k, slots, h] and values
        [rows, k, slots, hv]; rows and slots are Python numbers.
      num_slots: Of the memory, at least piece_len.
      piece_len: Slots read at once on a CPU.
      limit: Query t of a row sees slots 0 .. limit[b, t] - 1.
      whole: Keys and values of all slots, where they need no decoding.
    """

    read: Callable
    num_slots: int
    piece_len: int
    limit: Int[Array, "b t"]
    whole: tuple[Float[Array, "b k s h"], Float[Array, "b k s hv"]] | None = None


def sum_pieces(queries: Float[Array, "b t n h"], pieces: Pieces, num_kv_heads: int) -> Sums:
    """Softmax sums of every query over the slots that it sees.

    Example: limit 5 for every query and piece_len 4 -> two pieces are read, whatever num_slots is.
    """
    folded = fold_queries(queries, num_kv_heads)
    by_row = functools.partial(_by_row, pieces=pieces)
    together = functools.partial(_together, pieces=pieces)
    return jax.lax.platform_dependent(folded, cpu=by_row, default=together)


def _by_row(folded: Float[Array, "b k r h"], *, pieces: Pieces) -> Sums:
    b = folded.shape[0]
    if b > _MAX_UNROLLED_ROWS:
        return _loop(folded, 0, pieces, pieces.piece_len)
    rows = [_loop(folded[row : row + 1], row, pieces, pieces.piece_len) for row in range(b)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows)


def _together(folded: Float[Array, "b k r h"], *, pieces: Pieces) -> Sums:
    num_at_once = _SCORES_AT_ONCE // folded.shape[2]
    # The slots behind the longest row, a block's length, shall not make the difference.
    if pieces.whole is not None and pieces.num_slots - pieces.piece_len <= num_at_once:
        keys, values = pieces.whole
        slots = jnp.arange(pieces.num_slots, dtype=jnp.int32)[None, None, :]
        seen = slots < pieces.limit[:, :, None]
        return _as_matrices(folded, keys, values, seen, _nothing(folded, values.shape[-1]))
    num_at_once = min(num_at_once, 64 * pieces.piece_len, pieces.num_slots)
    return _loop(folded, 0, pieces, max(num_at_once // pieces.piece_len, 1) * pieces.piece_len)


def _nothing(folded: Float[Array, "b k r h"], v_head_dim: int) -> Sums:
    b, k, r, _ = folded.shape
    return Sums(
        jnp.full((b, k, r, 1), MASKED_SCORE, jnp.float32),
        jnp.zeros((b, k, r, 1), jnp.float32),
        jnp.zeros((b, k, r, v_head_dim), jnp.float32),
    )


def _loop(folded: Float[Array, "b k r h"], first_row: int, pieces: Pieces, piece_len: int) -> Sums:
    """Sums over all pieces below the highest limit of these rows."""
    b, _, r, _ = folded.shape
    limit = pieces.limit[first_row : first_row + b]
    end = limit.max()
    # The width of values is told by a piece that is never read.
    _, values = jax.eval_shape(lambda: pieces.read(first_row, b, jnp.int32(0), piece_len))
    dots = _one_by_one if r <= _MAX_ONE_BY_ONE and b == 1 else _as_matrices

    def piece(carry):
        begin, sums = carry
        # The last piece begins early where it would pass the end; what it repeats is masked.
        first = jnp.minimum(begin, pieces.num_slots - piece_len)
        keys, values = pieces.read(first_row, b, first, piece_len)
        slots = first + jnp.arange(piece_len, dtype=jnp.int32)[None, None, :]
        seen = (slots >= begin) & (slots < limit[:, :, None])
        return begin + piece_len, dots(folded, keys, values, seen, sums)

    start = (jnp.zeros((), jnp.int32), _nothing(folded, values.shape[-1]))
    return jax.lax.while_loop(lambda carry: carry[0] < end, piece, start)[1]


def _one_by_one(folded, keys, values, seen: Bool[Array, "1 t p"], sums: Sums) -> Sums:
    """Every query on its own: vectors only."""
    _, k, r, _ = folded.shape
    t = seen.shape[1]
    out: list[tuple[Array, Array, Array]] = []
    for head in range(k):
        for query in range(r):
            old_top, old_total, old_out = (x[0, head, query] for x in sums)
            scores = jnp.matmul(
                folded[0, head, query], keys[0, head].T, preferred_element_type=jnp.float32
            )
            # Held: fused into their readers, scores and weights would be made once per reader.
            scores = jax.lax.optimization_barrier(scores)
            scores = jnp.where(seen[0, query % t], scores, MASKED_SCORE)
            top = jnp.maximum(old_top[0], scores.max())
            weights = jax.lax.optimization_barrier(jnp.exp(scores - top))
            kept = jnp.exp(old_top[0] - top)
            mixed = jnp.matmul(
                weights.astype(values.dtype), values[0, head], preferred_element_type=jnp.float32
            )
            total = old_total[0] * kept + weights.sum()
            out.append((top[None], total[None], old_out * kept + mixed))
    shaped = lambda parts: jnp.stack(parts).reshape(1, k, r, -1)
    return Sums(*(shaped(parts) for parts in zip(*out, strict=True)))


def _as_matrices(folded, keys, values, seen: Bool[Array, "b t p"], sums: Sums) -> Sums:
    """All queries of a KV head in one product."""
    b, k, r, _ = folded.shape
    t, p = seen.shape[1:]
    scores = batched_matmul(folded, keys.transpose(0, 1, 3, 2)).reshape(b, k, r // t, t, p)
    scores = jnp.where(seen[:, None, None], scores, MASKED_SCORE).reshape(b, k, r, p)
    top = jnp.maximum(sums.top, scores.max(axis=-1, keepdims=True))
    weights, kept = jnp.exp(scores - top), jnp.exp(sums.top - top)
    mixed = batched_matmul(weights.astype(values.dtype), values)
    total = sums.total * kept + weights.sum(axis=-1, keepdims=True)
    return Sums(top, total, sums.weighted * kept + mixed)
