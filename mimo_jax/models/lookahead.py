"""Drafters made of one-layer heads that look past a position: MTP heads and EAGLE-3.

A head reads, at position p, a state of p (features of the target) and the embedding of a later id,
and predicts the id after that one. Head k, counted from 0, reads the id at p + 1 + k. So one rule
places everything: what a verified block tells (features and ids of positions a, a + 1, ...) lets
head k write the keys of positions a - 1 - k, a - k, ..., with the block's own ids and with features
that begin 1 + k positions earlier. The memory keeps those few features back (the tail).

Two ways to draft several tokens from position p = anchor - 1:

  * apart: head k makes token k + 1 from the target's state at p and the tokens drafted so far. It
    runs over p - k .. p, since the ids of these positions are drafts of this very block.
  * chained: one head makes all. Step j stands at p + j and reads step j - 1's state and its token.
    EAGLE-3 trains this recurrence (train/eagle_step.py); an MTP head merely survives it.

Choice: rings only. A head's first keys belong to positions before the row's first (-1 - k), which a
ring takes like any other and every mask drops; a linear memory would have to be shifted.

Traps: a rejected block leaves keys of wrong ids behind, at or past the next block's first write:
`draft_context_mask` hides them until they are overwritten. Drafts of a chain are argmax choices;
under a rule that samples drafts, later slots have still seen the argmax (exact, accepted less).

Source: arXiv:2503.01840 (EAGLE-3); MTP conventions as served by the published engines.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mimo_jax import cache as kv
from mimo_jax.config import AttentionConfig, DraftConfig
from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch, attend
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.models.target import Target


class HeadOutput(NamedTuple):
    """What a head gives.

    Attributes:
      normed: [b, t, d], goes through the target's head.
      state: [b, t, d], its residual stream before its final norm: what a chain feeds back.
    """

    normed: Float[Array, "b t d"]
    state: Float[Array, "b t d"]


@runtime_checkable
class Head(Protocol):
    """One layer with its entry and its final norm."""

    @property
    def layer_attention(self) -> AttentionConfig:
        """Geometry of its layer; has a window."""
        ...

    def enter(self, features: Float[Array, "b t c"]) -> Float[Array, "b t d"]:
        """Its first state from context features."""
        ...

    def run(self, target: Target, state, next_ids, positions, mix: Callable) -> HeadOutput:
        """One layer; mix: (queries, keys, values, sink) -> attention output."""
        ...


class HeadMemory(NamedTuple):
    """Context memory of heads.

    Attributes:
      caches: One ring of one layer per head.
      tail: [b, n, c] context features of positions tail_start, tail_start + 1, ...
      tail_start: int32 [b].
    """

    caches: tuple[kv.KVCache, ...]
    tail: Float[Array, "b n c"]
    tail_start: Int[Array, "b"]


def keys_values(target: Target, head: Head, state, next_ids, positions):
    """Keys [b, k, t, h] and values of a head's layer; XLA drops the rest, which nobody reads."""
    kept = []

    def mix(queries, keys, values, sink):
        kept.extend((keys, values))
        return jnp.zeros((*queries.shape[:3], values.shape[3]), values.dtype)

    head.run(target, state, next_ids, positions, mix)
    return kept[0], kept[1]


def unroll(
    target: Target,
    head: Head,
    state: Float[Array, "b 1 d"],
    first_ids: Int[Array, "b 1"],
    first_pos: Int[Array, "b"],
    context: Stretch,
    choose: Callable,
) -> Float[Array, "b m d"]:
    """A head on its own states: what decoding does, and what its training must do.

    Args:
      target: Gives the embedding.
      head: The head.
      state: Its state at first_pos, from context features.
      first_ids: Ids at first_pos + 1.
      first_pos: Position of the first step.
      context: Keys before first_pos, with a mask [b, m, s] of every step.
      choose: (step, normed hidden [b, 1, d]) -> ids [b, 1] that the next step reads.

    Returns:
      [b, m, d] normed hidden states; step j predicts the id at first_pos + 2 + j.
    """
    num_steps = context.mask.shape[1]
    keys, values, outputs, ids = [], [], [], first_ids
    for step in range(num_steps):

        def mix(queries, new_keys, new_values, sink, step=step):
            keys.append(new_keys)
            values.append(new_values)
            seen = jnp.ones((queries.shape[0], 1, step + 1), bool)
            own = Stretch(jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2), seen)
            before = context._replace(mask=context.mask[:, step : step + 1])
            return attend(queries, [before, own], sink=sink)

        out = head.run(target, state, ids, (first_pos + step)[:, None], mix)
        outputs.append(out.normed)
        state = out.state
        if step + 1 < num_steps:
            ids = choose(step, out.normed)
    return jnp.concatenate(outputs, axis=1)


class LookaheadDrafter(nnx.Module):
    """Heads behind the interface of the decode loop (`decode.step.BlockDrafter`).

    Args:
      config: What the loop reads.
      heads: One for a chain; apart, one per draft token.
      is_chained: Which of the two ways (see the module).
    """

    def __init__(self, config: DraftConfig, heads: Sequence[nnx.Module], *, is_chained: bool):
        self.config = config
        self.heads: Any = nnx.List(heads)  # each a `Head`
        self.is_chained = is_chained

    def make_cache(self, batch_size: int, max_len: int, slack: int) -> HeadMemory:
        """Empty context memory for blocks of up to slack positions."""
        del max_len  # rings
        caches, dtype = [], jax.tree.leaves(nnx.state(self.heads))[0].dtype
        for head in self.heads:
            a = head.layer_attention
            geometry = [(a.num_kv_heads, a.head_dim, a.v_head_dim)]
            caches.append(
                kv.make_cache(batch_size, 0, geometry, (a.window,), slack=slack, dtype=dtype)
            )
        n = len(caches)
        tail = jnp.zeros((batch_size, n + slack, self.config.context_width), dtype)
        return HeadMemory(tuple(caches), tail, jnp.full((batch_size,), -n, jnp.int32))

    def _before(self, memory: HeadMemory, start: Int[Array, "b"]) -> Float[Array, "b n c"]:
        """Features of the positions before start, one per head."""
        n = len(self.heads)
        cut = lambda tail, first: jax.lax.dynamic_slice_in_dim(tail, first, n, axis=0)
        return jax.vmap(cut)(memory.tail, start - n - memory.tail_start)

    def _inject(self, target, memory: HeadMemory, features, token_ids, start, write):
        """(caches, features from start - heads on): write(cache, keys, values, first) -> cache."""
        n, t = len(self.heads), features.shape[1]
        features = jnp.concatenate([self._before(memory, start), features], axis=1)
        caches = []
        for k, (head, cache) in enumerate(zip(self.heads, memory.caches, strict=True)):
            first = start - 1 - k
            positions = first[:, None] + jnp.arange(t, dtype=jnp.int32)[None, :]
            state = head.enter(features[:, n - 1 - k : n - 1 - k + t])
            new = keys_values(target, head, state, token_ids, positions)
            caches.append(write(cache, *new, first))
        return tuple(caches), features

    def inject_context(
        self,
        target: Target,
        memory: HeadMemory,
        context_features: Float[Array, "b t c"],
        token_ids: Int[Array, "b t"],
        start: Int[Array, "b"],
    ) -> HeadMemory:
        """As `Drafter.inject_context`; the ids are those of positions start .. start+t-1."""
        t = token_ids.shape[1]

        def write(cache: kv.KVCache, keys, values, first):
            cache = kv.advance_ring_positions(cache, first, t)
            layer = kv.write_block(cache, 0, keys, values, first)
            return kv.KVCache((layer,), cache.ring_positions, cache.windows, cache.slack)

        caches, tail = self._inject(target, memory, context_features, token_ids, start, write)
        return HeadMemory(caches, _padded(tail, memory), start - len(self.heads))

    def inject_prompt(
        self,
        target: Target,
        memory: HeadMemory,
        context_features: Float[Array, "b t c"],
        token_ids: Int[Array, "b t"],
        start: Int[Array, "b"],
        num_valid: Int[Array, "b"],
    ) -> HeadMemory:
        """As `Drafter.inject_prompt`."""

        def write(cache: kv.KVCache, keys, values, first):
            layer = kv.write_chunk(cache, 0, keys, values, first, num_valid)
            cache = kv.KVCache((layer,), cache.ring_positions, cache.windows, cache.slack)
            return kv.finish_chunk(cache, first, num_valid)

        caches, features = self._inject(target, memory, context_features, token_ids, start, write)
        n = len(self.heads)
        cut = lambda x, first: jax.lax.dynamic_slice_in_dim(x, first, n, axis=0)
        tail = jax.vmap(cut)(features, num_valid)
        return HeadMemory(caches, _padded(tail, memory), start + num_valid - n)

    def draft_logits(
        self,
        target: Target,
        anchors: Int[Array, "b"],
        memory: HeadMemory,
        anchor_pos: Int[Array, "b"],
        active_len: Int[Array, "b"],
        draft_block_len: int,
    ) -> Float[Array, "b m v"]:
        """As `Drafter.draft_logits`; every token sees the earlier ones of its block only."""
        del active_len
        draft = self._draft_chained if self.is_chained else self._draft_apart
        return draft(target, anchors[:, None], memory, anchor_pos - 1, draft_block_len - 1)

    def _draft_chained(self, target, anchors, memory: HeadMemory, first_pos, m: int):
        (head,), (cache,) = self.heads, memory.caches
        window = head.layer_attention.window
        mask = masks.draft_context_mask(first_pos, m, cache.key_positions(0), window)
        logits = []

        def choose(step, normed):
            del step
            logits.append(target.unembed(normed))
            return argmax_lowest(logits[-1])

        state = head.enter(self._before(memory, first_pos + 1))
        context = _context(cache, mask)
        hidden = unroll(target, head, state, anchors, first_pos, context, choose)
        return jnp.concatenate([*logits, target.unembed(hidden[:, -1:])], axis=1)

    def _draft_apart(self, target, anchors, memory: HeadMemory, first_pos, m: int):
        features, ids, logits = self._before(memory, first_pos + 1), anchors, []
        for k in range(m):
            head, cache = self.heads[k], memory.caches[k]
            window = head.layer_attention.window
            first = first_pos - k
            positions = first[:, None] + jnp.arange(k + 1, dtype=jnp.int32)[None, :]
            before = masks.draft_context_mask(first, k + 1, cache.key_positions(0), window)
            own = masks.causal_mask(positions, positions, window)
            context = _context(cache, before)
            mix = lambda q, keys, values, sink, context=context, own=own: attend(
                q, [context, Stretch(keys, values, own)], sink=sink
            )
            state = head.enter(features[:, features.shape[1] - 1 - k :])
            out = head.run(target, state, ids, positions, mix)
            logits.append(target.unembed(out.normed[:, -1:]))
            ids = jnp.concatenate([ids, argmax_lowest(logits[-1])], axis=1)
        return jnp.concatenate(logits, axis=1)


def _context(cache: kv.KVCache, mask) -> Stretch:
    """The memory of a head's one layer."""
    held = cache.layers[0]
    assert isinstance(held, kv.LayerCache), "a head's memory is a ring"
    return Stretch(held.keys, held.values, mask)


def _padded(tail, memory: HeadMemory):
    """As long as the memory's tail; what is added is nobody's."""
    missing = memory.tail.shape[1] - tail.shape[1]
    return jnp.pad(tail, ((0, 0), (0, missing), (0, 0)))
