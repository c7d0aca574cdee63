"""Attention over one or several stretches of keys, with sinks, grouped heads and masks.

Keys and values are head-major, [b, k, s, h]: a step's scores are then plain matrix products per
KV head. A query may attend to several stretches (cache and chunk, or context and draft block)
without concatenating them: copying a cache to append 8 keys would cost more than reading it.

Whole training rows are cut into chunks of queries. In a sliding layer a chunk of one window sees
itself and the chunk before, so cost per token is constant in the length of the row; in a global
layer a chunk sees the row up to its own end, which skips the masked half of the scores.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Finite, so that a row that sees nothing gives an average and not NaN.
MASKED_SCORE = -1e30


class Stretch(NamedTuple):
    """Keys that a query may see: keys [b,k,s,h], values [b,k,s,hv], mask [b,t,s] (True = seen)."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s hv"]
    mask: Bool[Array, "b t s"]


class Sums(NamedTuple):
    """A softmax that is not finished: what part of the keys contributes to every query.

    Attributes:
      top: float32 [b, k, r, 1], the highest score; queries of a KV head lie in one axis r = g t.
      total: float32 [b, k, r, 1], of exp(score - top).
      weighted: float32 [b, k, r, hv], of exp(score - top) times the value.
    """

    top: Float[Array, "b k r 1"]
    total: Float[Array, "b k r 1"]
    weighted: Float[Array, "b k r hv"]


# Up to this many (row, KV head) pairs are multiplied one by one: XLA:CPU runs a small batched
# product 3x slower than the same plain ones (24x48x80 twice: 59 us against 20).
_MAX_UNROLLED = 8


def batched_matmul(
    left: Float[Array, "b k q i"], right: Float[Array, "b k i o"]
) -> Float[Array, "b k q o"]:
    """Products of the last two axes, accumulated in float32."""
    b, k = left.shape[:2]
    if b * k > _MAX_UNROLLED:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)
    left_pairs = left.reshape(b * k, *left.shape[2:])
    right_pairs = right.reshape(b * k, *right.shape[2:])
    products = [
        jnp.matmul(left_pairs[i], right_pairs[i], preferred_element_type=jnp.float32)
        for i in range(b * k)
    ]
    return jnp.stack(products).reshape(b, k, left.shape[2], right.shape[3])


def fold_queries(
    queries: Float[Array, "b t n h"], num_kv_heads: int
) -> Float[Array, "b k r h"]:
    """Scaled queries by KV head; r = g t, query t of head g at g * t + t."""
    b, t, n, h = queries.shape
    k, g = num_kv_heads, n // num_kv_heads
    folded = queries.reshape(b, t, k, g, h).transpose(0, 2, 3, 1, 4).reshape(b, k, g * t, h)
    return folded * jnp.asarray(h**-0.5, queries.dtype)


def attend(
    queries: Float[Array, "b t n h"],
    stretches: Sequence[Stretch],
    *,
    sink: Float[Array, "n"] | None = None,
    earlier: Sums | None = None,
) -> Float[Array, "b t n hv"]:
    """Softmax attention over the union of the stretches, in float32.

    Scores are scaled by 1/sqrt(h), h being the query/key width (not the value width). Keys and
    values in masked slots may hold anything finite. A sink is one more logit per query head with
    no value: rows then sum to less than one. `earlier` are the sums over yet more keys, which were
    read by other means (`pieces.py`).

    Returns:
      [b, t, n, hv] in the dtype of the values.

    Example: one query, one key with score 0 and a sink of 0 -> half of that key's value.

    Source: arXiv:2601.02780 eq. 2-3 (sinks); grouped heads as in arXiv:2305.13245.
    """
    b, t, n, _ = queries.shape
    k = stretches[0].keys.shape[1]
    g = n // k
    q_bkgth = fold_queries(queries, k)
    scores = []
    for keys, _, mask in stretches:
        s = keys.shape[2]
        part = batched_matmul(q_bkgth, keys.transpose(0, 1, 3, 2))
        seen = mask[:, None, None, :, :]
        part = jnp.where(seen, part.reshape(b, k, g, t, s), MASKED_SCORE)
        scores.append(part)
    top = scores[0].max(axis=-1, keepdims=True)
    for part in scores[1:]:
        top = jnp.maximum(top, part.max(axis=-1, keepdims=True))
    if sink is not None:
        sink_bkgt = sink.astype(jnp.float32).reshape(1, k, g, 1, 1)
        top = jnp.maximum(top, sink_bkgt)
    if earlier is not None:
        earlier = Sums(*(x.reshape(b, k, g, t, -1) for x in earlier))
        top = jnp.maximum(top, earlier.top)
    # The shift cancels; letting gradients through the max doubled a training step's attention.
    top = jax.lax.stop_gradient(top)
    weights = [jnp.exp(part - top) for part in scores]
    total = sum(w.sum(axis=-1, keepdims=True) for w in weights)
    if sink is not None:
        total = total + jnp.exp(sink_bkgt - top)
    parts = [
        batched_matmul(w.reshape(b, k, g * t, -1).astype(values.dtype), values)
        for w, (_, values, _) in zip(weights, stretches, strict=True)
    ]
    out = sum(parts[1:], parts[0]).reshape(b, k, g, t, -1)
    if earlier is not None:
        kept = jnp.exp(earlier.top - top)
        total, out = total + earlier.total * kept, out + earlier.weighted * kept
    out = out / total
    hv = out.shape[-1]
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, hv).astype(stretches[0].values.dtype)


def attend_in_causal_chunks(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b k t hv"],
    mask: Bool[Array, "b t t"],
    *,
    chunk_len: int,
    sink: Float[Array, "n"] | None = None,
) -> Float[Array, "b t n hv"]:
    """Global attention of whole rows: each chunk of queries against the keys up to its end.

    `mask` must be causal. Equal to `attend` over the whole row at 5/8 of the scores for 4 chunks.
    """
    out = []
    for start in range(0, queries.shape[1], chunk_len):
        end = min(start + chunk_len, queries.shape[1])
        seen = Stretch(keys[:, :, :end], values[:, :, :end], mask[:, start:end, :end])
        out.append(attend(queries[:, start:end], [seen], sink=sink))
    return jnp.concatenate(out, axis=1) if len(out) > 1 else out[0]


def attend_in_causal_sections(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b k t hv"],
    key_mask_fn,
    *,
    chunk_len: int,
    num_sections: int = 8,
    sink: Float[Array, "n"] | None = None,
) -> Float[Array, "b t n hv"]:
    """As `attend_in_causal_chunks` for rows so long that their mask and program would be, too.

    A loop over chunks in each of a few sections, against the keys up to the section's end: 9/16 of
    all scores for 8 sections, one chunk of them and of the mask at a time, and made again on the
    way back.

    Args:
      queries: [b, t, n, h] with t divisible by chunk_len * num_sections.
      keys: [b, k, t, h].
      values: [b, k, t, hv].
      key_mask_fn: Maps (query index [b,q], key index [b,s], both into the row) to a causal mask
        [b,q,s].
      chunk_len: Queries at a time.
      num_sections: Loops.
      sink: As in `attend`.
    """
    b, t, n, _ = queries.shape
    section_len = t // num_sections
    out = []
    for start in range(0, t, section_len):
        end = start + section_len
        keys_to_end, values_to_end = keys[:, :, :end], values[:, :, :end]
        key_idx = jnp.broadcast_to(jnp.arange(end, dtype=jnp.int32)[None], (b, end))

        @jax.checkpoint
        def of_chunk(chunk, keys=keys_to_end, values=values_to_end, key_idx=key_idx):
            queries, query_idx = chunk
            mask = key_mask_fn(jnp.broadcast_to(query_idx[None], (b, chunk_len)), key_idx)
            return attend(queries, [Stretch(keys, values, mask)], sink=sink)

        chunks = queries[:, start:end].reshape(b, -1, chunk_len, n, queries.shape[3])
        index = jnp.arange(start, end, dtype=jnp.int32).reshape(-1, chunk_len)
        found = jax.lax.map(of_chunk, (jnp.moveaxis(chunks, 1, 0), index))
        out.append(jnp.moveaxis(found, 0, 1).reshape(b, section_len, n, -1))
    return jnp.concatenate(out, axis=1)


def attend_in_window_chunks(
    queries: Float[Array, "b t n h"],
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b k t hv"],
    key_mask_fn,
    *,
    chunk_len: int,
    sink: Float[Array, "n"] | None = None,
) -> Float[Array, "b t n hv"]:
    """Sliding attention of whole rows: chunk c sees chunks c-1 and c.

    Exact for any window <= chunk_len.

    Args:
      queries: [b, t, n, h] with t divisible by chunk_len.
      keys: [b, k, t, h].
      values: [b, k, t, hv].
      key_mask_fn: Maps (query index [b,q], key index [b,s], both into the row, key index -1 =
        before the row) to a mask [b,q,s]; called once with the chunks folded into the batch.
      chunk_len: Length of a chunk.
      sink: As in `attend`.

    Returns:
      [b, t, n, hv].
    """
    b, t, n, h = queries.shape
    k, hv = keys.shape[1], values.shape[3]
    c = t // chunk_len

    def with_previous(x):
        chunks = x.reshape(b, k, c, chunk_len, -1)
        previous = jnp.pad(chunks[:, :, :-1], ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))
        both = jnp.concatenate([previous, chunks], axis=3)
        return both.transpose(0, 2, 1, 3, 4).reshape(b * c, k, 2 * chunk_len, -1)

    index = jnp.arange(t, dtype=jnp.int32).reshape(1, c, chunk_len)
    query_idx = jnp.broadcast_to(index, (b, c, chunk_len))
    key_idx = jnp.concatenate([index - chunk_len, index], axis=2)
    key_idx = jnp.broadcast_to(jnp.maximum(key_idx, -1), (b, c, 2 * chunk_len))
    mask = key_mask_fn(query_idx, key_idx)
    out = attend(
        queries.reshape(b * c, chunk_len, n, h),
        [
            Stretch(
                with_previous(keys),
                with_previous(values),
                mask.reshape(b * c, chunk_len, 2 * chunk_len),
            )
        ],
        sink=sink,
    )
    return out.reshape(b, t, n, hv)
