"""One decode step, draft -> verify -> accept -> commit, and the loop over steps on the device.

State goes in and comes out; nothing is read by the host in between. A row's invariant: `length`
tokens are committed, the last of them is the anchor, and target and drafter memory hold positions
0 .. length-2. Rolling back is a smaller `length`.

The number of steps per call is a runtime value, so one compiled program serves streaming (a few
steps) and batch jobs (until all rows are done).
"""

import dataclasses
from typing import NamedTuple, Protocol, no_type_check, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mimo_jax.cache import KVCache
from mimo_jax.config import DrafterConfig
from mimo_jax.decode import accept
from mimo_jax.decode.sampling import RowSampling, sample
from mimo_jax.layers.linear import psum_over
from mimo_jax.models.target import Target


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything a batch of rows needs between two steps; donated to every call.

    Attributes:
      tokens: int32 [b, s] prompt and output; positions at or past `length` are meaningless.
      length: int32 [b] committed tokens, prompt included.
      max_len: int32 [b] length at which the row ends.
      finish: int32 [b] accept.RUNNING, STOPPED or LENGTH.
      stop_ids: int32 [b, n] padded with -1.
      sampling: Per-row parameters.
      num_steps: int32 [b] decode steps so far (prefill not counted).
      committed_per_step: int8 [b, s]; entry i = tokens committed by the row's step i.
      accepted_per_step: int8 [b, s]; drafts accepted before cuts; 0 throughout in plain decoding.
      target_cache: Memory of the target.
      drafter_cache: Context memory of the drafter; None in plain decoding.
    """

    tokens: Int[Array, "b s"]
    length: Int[Array, "b"]
    max_len: Int[Array, "b"]
    finish: Int[Array, "b"]
    stop_ids: Int[Array, "b n"]
    sampling: RowSampling
    num_steps: Int[Array, "b"]
    committed_per_step: Int[Array, "b s"]
    accepted_per_step: Int[Array, "b s"]
    target_cache: KVCache
    drafter_cache: KVCache | None

    @property
    def is_done(self) -> Bool[Array, "b"]:
        return self.finish != accept.RUNNING


@runtime_checkable
class BlockDrafter(Protocol):
    """What the loop asks of a drafter; `models.drafter.Drafter` is the one, tests script others."""

    config: DrafterConfig

    def make_cache(self, batch_size: int, max_len: int, slack: int) -> KVCache:
        """Empty context memory."""
        ...

    def inject_prompt(self, cache, context_features, start, num_valid) -> KVCache:
        """Context memory with a prompt chunk's features."""
        ...

    def inject_context(self, cache, context_features, start) -> KVCache:
        """Context memory with a verified block's features."""
        ...

    def propose(
        self, target, anchors, cache, anchor_pos, active_len, draft_block_len
    ) -> Int[Array, "b m"]:
        """Draft tokens for the positions after the anchors."""
        ...


class StepResult(NamedTuple):
    """A step's tokens before cuts: emitted int32 [b, m1] of which num_accepted + 1 are real."""

    emitted: Int[Array, "b m1"]
    num_accepted: Int[Array, "b"]
    target_cache: KVCache
    drafter_cache: KVCache | None


def _write_at(buffer, block, column):
    """buffer [b, s] with block [b, t] written from column[b] of each row."""
    for row in range(buffer.shape[0] if buffer.shape[0] <= 8 else 0):
        buffer = jax.lax.dynamic_update_slice(buffer, block[row : row + 1], (row, column[row]))
    if buffer.shape[0] > 8:
        one_row = lambda r, x, c: jax.lax.dynamic_update_slice(r, x, (c,))
        buffer = jax.vmap(one_row)(buffer, block, column)
    return buffer


def draft(
    target: Target, drafter: BlockDrafter, state: DecodeState, draft_block_len: int
) -> tuple[Int[Array, "b m1"], Int[Array, "b"]]:
    """Proposes one block per row.

    Returns:
      block ids [b, m1] = [anchor, proposals], and active_len [b]: near the length limit the block
      shrinks to the tokens that may still be emitted.
    """
    anchor_pos = state.length - 1
    anchors = jnp.take_along_axis(state.tokens, anchor_pos[:, None], axis=1)[:, 0]
    active_len = jnp.clip(state.max_len - anchor_pos, 1, draft_block_len)
    proposals = drafter.propose(
        target, anchors, state.drafter_cache, anchor_pos, active_len, draft_block_len
    )
    return jnp.concatenate([anchors[:, None], proposals], axis=1), active_len


def speculative_step(
    target: Target, drafter: BlockDrafter, state: DecodeState, *, mode: str, draft_block_len: int
) -> StepResult:
    """Draft, verify and accept one block; memory is written for the whole block."""
    block, active_len = draft(target, drafter, state, draft_block_len)
    start = state.length - 1
    out = target.step(
        block, state.target_cache, start, tap_layer_ids=drafter.config.target_layer_ids
    )
    slots = jnp.arange(1, draft_block_len + 1, dtype=jnp.int32)[None, :]
    positions = start[:, None] + slots
    emitted = sample(out.logits, state.sampling, positions, mode, target.mesh_axis)
    num_accepted = accept.accept_by_match(block[:, 1:], emitted, active_len)
    assert out.cache is not None
    assert out.context_features is not None  # taps were asked for
    drafter_cache = drafter.inject_context(state.drafter_cache, out.context_features, start)
    return StepResult(emitted, num_accepted, out.cache, drafter_cache)


def plain_step(target: Target, state: DecodeState, *, mode: str) -> StepResult:
    """One token per row, without drafting."""
    start = state.length - 1
    anchors = jnp.take_along_axis(state.tokens, start[:, None], axis=1)
    out = target.step(anchors, state.target_cache, start)
    assert out.cache is not None  # a step always returns its memory
    emitted = sample(out.logits, state.sampling, state.length[:, None], mode, target.mesh_axis)
    return StepResult(emitted, jnp.zeros_like(start), out.cache, state.drafter_cache)


def commit(state: DecodeState, result: StepResult) -> DecodeState:
    """Makes the accepted tokens and the bonus permanent, cut by stop ids and length."""
    was_done = state.is_done
    committed = accept.cut_at_stop_and_limit(
        result.emitted,
        result.num_accepted + 1,
        state.stop_ids,
        state.max_len - state.length,
        was_done,
    )
    column = jnp.arange(state.committed_per_step.shape[1], dtype=jnp.int32)[None, :]
    is_now = (column == state.num_steps[:, None]) & ~was_done[:, None]

    def note(record, values):
        return jnp.where(is_now, values[:, None].astype(record.dtype), record)

    return dataclasses.replace(
        state,
        tokens=_write_at(state.tokens, result.emitted, state.length),
        length=state.length + committed.num_committed,
        finish=jnp.where(was_done, state.finish, committed.finish),
        num_steps=state.num_steps + (~was_done).astype(jnp.int32),
        committed_per_step=note(state.committed_per_step, committed.num_committed),
        accepted_per_step=note(state.accepted_per_step, result.num_accepted),
        target_cache=result.target_cache,
        drafter_cache=result.drafter_cache,
    )


def run_steps(
    target: Target,
    drafter: BlockDrafter | None,
    state: DecodeState,
    num_steps: Int[Array, ""],
    *,
    mode: str,
    draft_block_len: int,
    row_axis: str | None = None,
) -> DecodeState:
    """Up to num_steps steps, stopping when every row is done. One dispatch, no host traffic.

    Args:
      target: Merged target.
      drafter: Its drafter, or None for plain decoding.
      state: Donated by the caller.
      num_steps: int32 scalar.
      mode: Sampling mode of the program.
      draft_block_len: Slots of a draft block.
      row_axis: Mesh axis that the rows are cut over, or None: devices leave the loop together.
    """

    def num_running(state):
        return psum_over((~state.is_done).sum(dtype=jnp.int32), row_axis)

    def body(carry):
        step, _, state = carry
        if drafter is None:
            result = plain_step(target, state, mode=mode)
        else:
            result = speculative_step(
                target, drafter, state, mode=mode, draft_block_len=draft_block_len
            )
        state = commit(state, result)
        return step + 1, num_running(state), state

    def is_open(carry):
        step, running, _ = carry
        return (step < num_steps) & (running > 0)

    start = (jnp.zeros((), jnp.int32), num_running(state), state)
    return jax.lax.while_loop(is_open, body, start)[2]
