"""Acceptance and commit rules as pure functions: no model, no cache, no clock.

`match` is exact for greedy decoding and, since the target *samples* its token at every position,
also for sampling: a committed token is always the target's own sample given an accepted prefix
(the drafter's argmax is a one-hot proposal). Stop ids and the length limit cut afterwards.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

RUNNING, STOPPED, LENGTH = 0, 1, 2


class Committed(NamedTuple):
    """What a step makes permanent, per row.

    Attributes:
      num_committed: int32 [b], tokens emitted: accepted + bonus, cut by stop ids and the limit.
      finish: int32 [b], RUNNING, STOPPED (the last emitted token is a stop id) or LENGTH.
    """

    num_committed: Int[Array, "b"]
    finish: Int[Array, "b"]


def accept_by_match(
    draft_tokens: Int[Array, "b m"], target_tokens: Int[Array, "b m1"], active_len: Int[Array, "b"]
) -> Int[Array, "b"]:
    """Length of the drafted prefix that equals the target's own tokens.

    Args:
      draft_tokens: Proposals for block positions 1..m.
      target_tokens: The target's token after block positions 0..m; m1 = m + 1.
      active_len: Block slots in use, 1..m1; proposals at or past it are never accepted.

    Returns:
      num_accepted int32 in 0..active_len-1. The emitted tokens are
      target_tokens[:num_accepted + 1]: accepted drafts equal them, the last is the bonus.

    Raises:
      ValueError: If target_tokens does not have one more position than draft_tokens.

    Example: drafts (5, 6, 7), target (5, 6, 9, 1), active 4 -> 2; emitted 5, 6, 9.
    """
    m = draft_tokens.shape[1]
    if target_tokens.shape[1] != m + 1:
        raise ValueError(
            f"target_tokens has {target_tokens.shape[1]} positions, expected {m + 1} "
            f"(one more than draft_tokens)"
        )
    slot = jnp.arange(1, m + 1, dtype=jnp.int32)[None, :]
    is_match = (draft_tokens == target_tokens[:, :m]) & (slot < active_len[:, None])
    return jnp.cumprod(is_match.astype(jnp.int32), axis=1).sum(axis=1)


def cut_at_stop_and_limit(
    emitted: Int[Array, "b m1"],
    num_emitted: Int[Array, "b"],
    stop_ids: Int[Array, "b n"],
    room: Int[Array, "b"],
    is_done: Bool[Array, "b"],
) -> Committed:
    """Cuts a step's tokens after the first stop id and at the length limit.

    Only the first num_emitted tokens are looked at: what lies behind them is not output, even if
    it equals a stop id (a mask id may be one).

    Args:
      emitted: Tokens of the step.
      num_emitted: How many are real, 1..m1.
      stop_ids: Stop ids of each row, padded with -1.
      room: Tokens the row may still emit, >= 1 unless done.
      is_done: Rows that finished earlier commit nothing.

    Returns:
      Committed; a stop id that is the last token allowed by the limit gives STOPPED.

    Example: emitted (4, 2, 8), num_emitted 3, stop ids (2,), room 9 -> 2 tokens, STOPPED.
    """
    m1 = emitted.shape[1]
    slot = jnp.arange(m1, dtype=jnp.int32)[None, :]
    allowed = jnp.minimum(num_emitted, room)
    is_stop = (emitted[:, :, None] == stop_ids[:, None, :]).any(axis=2)
    is_stop &= slot < allowed[:, None]
    first_stop = jnp.min(jnp.where(is_stop, slot, m1), axis=1)
    has_stop = first_stop < m1
    num_committed = jnp.where(has_stop, first_stop + 1, allowed)
    finish = jnp.where(has_stop, STOPPED, jnp.where(num_committed >= room, LENGTH, RUNNING))
    num_committed = jnp.where(is_done, 0, num_committed)
    return Committed(num_committed, jnp.where(is_done, RUNNING, finish))
