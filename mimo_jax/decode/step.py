"""One decode step, draft -> verify -> accept -> commit, and the loop over steps on the device.

State goes in and comes out; nothing is read by the host in between. A row's invariant: `length`
tokens are committed, the last of them is the anchor, and target and drafter memory hold positions
0 .. length-2. Rolling back is a smaller `length`.

The number of steps per call is a runtime value, so one compiled program serves streaming (a few
steps) and batch jobs (until all rows are done).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.cache import KVCache
from mimo_jax.config import DraftConfig
from mimo_jax.decode import accept
from mimo_jax.decode.controller import Control
from mimo_jax.decode.sampling import (
    ADJUSTED,
    RowSampling,
    adjust_logits,
    coins,
    count_ids,
    probabilities,
    propose,
    sample,
    sample_by_weight,
    target_logits,
)
from mimo_jax.layers.linear import psum_over
from mimo_jax.layers.vocab import argmax_lowest, at_ids, first_id, log_total, top_over
from mimo_jax.models.target import Target


class Pending(NamedTuple):
    """Context features kept aside while a row decodes plainly; see `adaptive.py`.

    Attributes:
      features: [b, p, c] of the positions before the anchor, oldest first.
      num: int32 [b], how many are real.
    """

    features: Float[Array, "b p c"]
    num: Int[Array, "b"]


class SeenIds(NamedTuple):
    """Ids that a row has met; on a mesh of this device's stretch of the vocabulary.

    Attributes:
      num_emitted: int32 [b, v], how often each id stands in the output.
      is_in_prompt: bool [b, v].
    """

    num_emitted: Int[Array, "b v"]
    is_in_prompt: Bool[Array, "b v"]


class Logprobs(NamedTuple):
    """Log probabilities of the raw logits (no temperature, no filter), by position or by slot.

    Attributes:
      chosen: float32 [b, s], of the token that stands there.
      top_ids: int32 [b, s, n], the n likeliest ids, best first.
      top: float32 [b, s, n], theirs.
    """

    chosen: Float[Array, "b s"]
    top_ids: Int[Array, "b s n"]
    top: Float[Array, "b s n"]


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a batch of rows needs between two steps; donated to every call.

    Attributes:
      tokens: int32 [b, s] prompt and output; positions at or past `length` are meaningless.
      length: int32 [b] committed tokens, prompt included.
      max_len: int32 [b] length at which the row ends.
      finish: int32 [b] accept.RUNNING, STOPPED, LENGTH, FAILED or ENDED.
      stop_ids: int32 [b, n] padded with -1.
      sampling: Per-row parameters.
      seen: What penalties look at; None unless the program's mode adjusts logits.
      logprobs: Of the committed tokens; None unless asked for.
      num_steps: int32 [b] decode steps so far (prefill not counted).
      committed_per_step: int8 [b, s]; entry i = tokens committed by the row's step i; 0 at and
        past num_steps.
      accepted_per_step: int8 [b, s]; drafts accepted before cuts; 0 throughout in plain decoding.
      offered_per_step: int8 [b, s]; drafts that could have been accepted.
      control: Picks the block length; None where it is fixed.
      pending: Features not yet in the drafter's memory; None where there are none ever.
      target_cache: Memory of the target.
      drafter_cache: Context memory of the drafter; None in plain decoding.
    """

    tokens: Int[Array, "b s"]
    length: Int[Array, "b"]
    max_len: Int[Array, "b"]
    finish: Int[Array, "b"]
    stop_ids: Int[Array, "b n"]
    sampling: RowSampling
    seen: SeenIds | None
    logprobs: Logprobs | None
    num_steps: Int[Array, "b"]
    committed_per_step: Int[Array, "b s"]
    accepted_per_step: Int[Array, "b s"]
    offered_per_step: Int[Array, "b s"]
    control: Control | None
    pending: Pending | None
    target_cache: KVCache
    drafter_cache: Any

    @property
    def is_done(self) -> Bool[Array, "b"]:
        return self.finish != accept.RUNNING


@runtime_checkable
class BlockDrafter(Protocol):
    """What the loop asks of a drafter: `models.drafter.Drafter`, the baselines, scripts of tests.

    Context memory is any pytree of arrays [b, ...]; only its drafter looks inside.
    """

    config: DraftConfig

    def make_cache(self, batch_size: int, max_len: int, slack: int) -> Any:
        """Empty context memory."""
        ...

    def inject_prompt(
        self, target, cache, context_features, token_ids, start, num_valid
    ) -> Any:
        """Context memory with a prompt chunk's features and the ids of the same positions."""
        ...

    def inject_context(self, target, cache, context_features, token_ids, start) -> Any:
        """Context memory with a verified block's features and the ids of the same positions."""
        ...

    def draft_logits(
        self, target, anchors, cache, anchor_pos, active_len, draft_block_len
    ) -> Float[Array, "b m v"]:
        """Logits of the positions after the anchors, over the first ids of the vocabulary."""
        ...


class StepResult(NamedTuple):
    """A step's tokens before cuts: emitted int32 [b, m1] of which num_accepted + 1 are real."""

    emitted: Int[Array, "b m1"]
    num_accepted: Int[Array, "b"]
    num_offered: Int[Array, "b"]
    logprobs: Logprobs | None
    target_cache: KVCache
    drafter_cache: Any


def write_at(buffer, block, column):
    """buffer [b, s, ...] with block [b, t, ...] written from column[b] of each row."""
    zeros = (0,) * (buffer.ndim - 2)
    if buffer.shape[0] > 8:
        one_row = lambda r, x, c: jax.lax.dynamic_update_slice(r, x, (c, *zeros))
        return jax.vmap(one_row)(buffer, block, column)
    for row in range(buffer.shape[0]):
        start = (row, column[row], *zeros)
        buffer = jax.lax.dynamic_update_slice(buffer, block[row : row + 1], start)
    return buffer


class Draft(NamedTuple):
    """A proposed block.

    Attributes:
      block: int32 [b, m1] = [anchor, proposals].
      active_len: int32 [b]; near the length limit the block shrinks to the tokens that may still
        be emitted.
      probs: [b, m, v] that the proposals were sampled from; None where they are the argmax.
    """

    block: Int[Array, "b m1"]
    active_len: Int[Array, "b"]
    probs: Float[Array, "b m v"] | None


def block_logits(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    draft_block_len: int,
    most_active: Int[Array, "b"] | None,
):
    """(anchors [b], active_len [b], logits of the positions after them): one pass of the drafter.

    Near the length limit a block shrinks to the tokens that may still be emitted.
    """
    anchor_pos = state.length - 1
    anchors = jnp.take_along_axis(state.tokens, anchor_pos[:, None], axis=1)[:, 0]
    active_len = jnp.clip(state.max_len - anchor_pos, 1, draft_block_len)
    if most_active is not None:
        active_len = jnp.minimum(active_len, most_active)
    logits = drafter.draft_logits(
        target, anchors, state.drafter_cache, anchor_pos, active_len, draft_block_len
    )
    return anchors, active_len, logits


def draft(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    *,
    mode: str,
    rule: str,
    draft_block_len: int,
    most_active: Int[Array, "b"] | None = None,
) -> Draft:
    """Proposes one block per row, by argmax or, for the rules that judge samples, by sampling."""
    anchors, active_len, logits = block_logits(target, drafter, state, draft_block_len, most_active)
    if rule == accept.MATCH:
        ids, probs = argmax_lowest(logits, target.mesh_axis), None
    else:
        if target.mesh_axis is None:  # a smaller draft vocabulary: the other ids are not proposed
            missing = target.config.vocab_size - logits.shape[-1]
            pad = ((0, 0), (0, 0), (0, missing))
            logits = jnp.pad(logits, pad, constant_values=-jnp.inf)
        slots = jnp.arange(draft_block_len - 1, dtype=jnp.int32)[None, :]
        positions = state.length[:, None] + slots
        ids, probs = propose(logits, state.sampling, positions, mode, target.mesh_axis)
    ids = jnp.maximum(ids, 0)  # vocab.NO_ID: a drafter may be broken, the target must not see it
    return Draft(jnp.concatenate([anchors[:, None], ids], axis=1), active_len, probs)


def adjusted(
    logits: Float[Array, "b t v"],
    state: DecodeState,
    drafts: Int[Array, "b m"],
    mode: str,
    mesh_axis: str | None,
    sees: Bool[Array, "b t m"] | None = None,
) -> Float[Array, "b t v"]:
    """Logits with penalties and biases, each position seeing the drafts before it.

    Args:
      logits: Raw, of the anchor and of each draft.
      state: Says what was met before the anchor, the anchor included.
      drafts: Tokens after the anchor.
      mode: Sampling mode, of sampling.MODES.
      mesh_axis: Over which the vocabulary is cut, or None.
      sees: Which drafts stand at or before each position; None = each those up to its own.
    """
    if mode != ADJUSTED:
        return logits
    assert state.seen is not None, "a program of this mode counts ids"
    v = logits.shape[-1]
    ids = first_id(v, mesh_axis) + jnp.arange(v, dtype=jnp.int32)
    is_draft = (drafts[:, :, None] == ids[None, None, :]).astype(jnp.int32)
    if sees is None:
        before = jnp.pad(jnp.cumsum(is_draft, axis=1), ((0, 0), (1, 0), (0, 0)))
    else:
        before = sees.astype(jnp.int32) @ is_draft
    counts = state.seen.num_emitted[:, None, :] + before
    return adjust_logits(logits, state.sampling, counts, state.seen.is_in_prompt, mesh_axis)


def logprobs_of(
    logits: Float[Array, "b t v"], ids: Int[Array, "b t"], num_top: int, mesh_axis: str | None
) -> Logprobs:
    """Log probabilities of the given ids and of the num_top likeliest, from raw logits."""
    total = log_total(logits, mesh_axis)
    top, top_ids = top_over(logits, num_top, mesh_axis)
    chosen = at_ids(logits, ids, mesh_axis) - total
    return Logprobs(chosen, top_ids, top - total[..., None])


def speculative_step(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    *,
    mode: str,
    draft_block_len: int,
    rule: str = accept.MATCH,
    most_active: Int[Array, "b"] | None = None,
) -> StepResult:
    """Draft, verify and accept one block; memory is written for the whole block.

    Args:
      target: Merged target.
      drafter: Its drafter.
      state: Its drafter's memory holds every position before the anchor.
      mode: Sampling mode, of sampling.MODES.
      draft_block_len: Slots of the block.
      rule: Acceptance rule, of accept.RULES.
      most_active: Slots that a row may use, 1..draft_block_len; None = all.
    """
    axis = target.mesh_axis
    drafted = draft(
        target,
        drafter,
        state,
        mode=mode,
        rule=rule,
        draft_block_len=draft_block_len,
        most_active=most_active,
    )
    block, active_len = drafted.block, drafted.active_len
    start = state.length - 1
    out = target.step(
        block, state.target_cache, start, tap_layer_ids=drafter.config.target_layer_ids
    )
    slots = jnp.arange(1, draft_block_len + 1, dtype=jnp.int32)[None, :]
    positions = start[:, None] + slots
    logits = adjusted(out.logits, state, block[:, 1:], mode, axis)
    if drafted.probs is None:
        emitted = sample(logits, state.sampling, positions, mode, axis)
        num_accepted = accept.accept_by_match(block[:, 1:], emitted, active_len)
    else:
        judge = accept.accept_by_block if rule == accept.BLOCK else accept.accept_by_rejection
        probs = probabilities(
            target_logits(logits, state.sampling, mode, axis), state.sampling, axis
        )
        uniform = coins(state.sampling, positions[:, :-1])
        verdict = judge(block[:, 1:], drafted.probs, probs, uniform, active_len, axis)
        num_accepted = verdict.num_accepted
        bonus_pos = state.length + num_accepted
        bonus = sample_by_weight(verdict.bonus_weights, state.sampling, bonus_pos, axis)
        is_bonus = slots - 1 == num_accepted[:, None]
        drafts = jnp.pad(block[:, 1:], ((0, 0), (0, 1)))
        emitted = jnp.where(is_bonus, bonus[:, None], drafts)
    assert out.cache is not None
    assert out.context_features is not None  # taps were asked for
    drafter_cache = drafter.inject_context(
        target, state.drafter_cache, out.context_features, block, start
    )
    logprobs = noted_logprobs(out.logits, emitted, state, axis)
    return StepResult(emitted, num_accepted, active_len - 1, logprobs, out.cache, drafter_cache)


def noted_logprobs(logits, emitted, state: DecodeState, mesh_axis) -> Logprobs | None:
    """What the state wants to know of the emitted tokens; None if it keeps no record."""
    if state.logprobs is None:
        return None
    return logprobs_of(logits, emitted, state.logprobs.top_ids.shape[-1], mesh_axis)


def plain_step(
    target: Target, state: DecodeState, *, mode: str, tap_layer_ids: tuple[int, ...] = ()
) -> tuple[StepResult, Float[Array, "b 1 c"] | None]:
    """One token per row, without drafting.

    Returns:
      (result, context features of the anchor, where layers are tapped).
    """
    start = state.length - 1
    anchors = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    out = target.step(anchors, state.target_cache, start, tap_layer_ids=tap_layer_ids)
    assert out.cache is not None  # a step always returns its memory
    axis = target.mesh_axis
    logits = adjusted(out.logits, state, anchors[:, :0], mode, axis)
    emitted = sample(logits, state.sampling, state.length[:, None], mode, axis)
    logprobs = noted_logprobs(out.logits, emitted, state, axis)
    none = jnp.zeros_like(start)
    result = StepResult(emitted, none, none, logprobs, out.cache, state.drafter_cache)
    return result, out.context_features


def commit(
    state: DecodeState, result: StepResult, mesh_axis: str | None = None
) -> DecodeState:
    """Makes the accepted tokens and the bonus permanent, cut by stop ids and length."""
    was_done = state.is_done
    committed = accept.cut_at_stop_and_limit(
        result.emitted,
        result.num_accepted + 1,
        state.stop_ids,
        state.max_len - state.length,
        was_done,
    )
    has_stepped = committed.num_committed > 0  # neither rows that were done nor a failed token

    def note(record, values):
        # One element: a pass over the record grew with the capacity (0.5 ms a step at 262,144).
        values = jnp.where(has_stepped, values, 0).astype(record.dtype)
        return write_at(record, values[:, None], state.num_steps)

    seen, logprobs = state.seen, state.logprobs
    if seen is not None:
        slot = jnp.arange(result.emitted.shape[1], dtype=jnp.int32)[None, :]
        is_committed = slot < committed.num_committed[:, None]
        v = seen.num_emitted.shape[1]
        counts = count_ids(result.emitted, is_committed, v, mesh_axis)
        seen = seen._replace(num_emitted=seen.num_emitted + counts)
    if logprobs is not None and result.logprobs is not None:
        logprobs = Logprobs(
            *(write_at(a, b, state.length) for a, b in zip(logprobs, result.logprobs, strict=True))
        )
    return dataclasses.replace(
        state,
        seen=seen,
        logprobs=logprobs,
        tokens=write_at(state.tokens, result.emitted, state.length),
        length=state.length + committed.num_committed,
        finish=jnp.where(was_done, state.finish, committed.finish),
        num_steps=state.num_steps + has_stepped.astype(jnp.int32),
        committed_per_step=note(state.committed_per_step, committed.num_committed),
        accepted_per_step=note(state.accepted_per_step, result.num_accepted),
        offered_per_step=note(state.offered_per_step, result.num_offered),
        target_cache=result.target_cache,
        drafter_cache=result.drafter_cache,
    )


def num_running(state: DecodeState, row_axis: str | None) -> Int[Array, ""]:
    """Rows that still decode, those of other devices included."""
    return psum_over((~state.is_done).sum(dtype=jnp.int32), row_axis)


def run_steps(
    step: Callable[[DecodeState], StepResult],
    state: DecodeState,
    num_steps: Int[Array, ""],
    *,
    mesh_axis: str | None = None,
    row_axis: str | None = None,
) -> DecodeState:
    """Up to num_steps steps, stopping when every row is done. One dispatch, no host traffic.

    Args:
      step: What one step does, before its result is committed.
      state: Donated by the caller.
      num_steps: int32 scalar.
      mesh_axis: That the vocabulary is cut over, or None.
      row_axis: Mesh axis that the rows are cut over, or None: devices leave the loop together.
    """

    def body(carry):
        num_done, _, state = carry
        state = commit(state, step(state), mesh_axis)
        return num_done + 1, num_running(state, row_axis), state

    def is_open(carry):
        num_done, running, _ = carry
        return (num_done < num_steps) & (running > 0)

    start = (jnp.zeros((), jnp.int32), num_running(state, row_axis), state)
    return jax.lax.while_loop(is_open, body, start)[2]
