"""Acceptance and commit rules as pure functions: no model, no cache, no clock.

Three rules, each of which leaves the target's distribution as it is:

  * match      proposals are the drafter's argmax. A draft counts while it equals the target's own
               token (greedy, or sampled with noise keyed by position): a committed token is always
               the target's, so this is exact by construction.
  * rejection  proposals are sampled from the drafter's distribution q. A draft counts with
               probability min(1, p/q), one after the other; the first that does not is replaced by
               a sample of max(p - q, 0).
  * block      the same proposals, judged together: a later draft may make up for an earlier one,
               so that the expected number of accepted drafts is never smaller.

With one-hot q the last two coincide with the first in distribution. Which is better is a question
of the drafter: DFlash's slots are marginals, and sampling them independently breaks the coherence
of a block (accept length 1.2 instead of 3.0 in one report), so match is the default.

Stop ids and the length limit cut afterwards. Where the target's logits are not finite there is no
token (vocab.NO_ID): its row ends there, as FAILED. A draft whose probability is NaN compares as not
accepted, in every rule: a drafter's faults cost speed only.

Source: arXiv:2211.17192 (rejection); arXiv:2403.10444, algorithm 2 (block).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.layers.linear import psum_over
from mimo_jax.layers.vocab import NO_ID, at_ids

MATCH, REJECTION, BLOCK = "match", "rejection", "block"
RULES = (MATCH, REJECTION, BLOCK)

# ENDED is for the host alone: a stop string was found, or the row is empty.
RUNNING, STOPPED, LENGTH, FAILED, ENDED = 0, 1, 2, 3, 4


class Committed(NamedTuple):
    """What a step makes permanent, per row.

    Attributes:
      num_committed: int32 [b], tokens emitted: accepted + bonus, cut by stop ids and the limit.
      finish: int32 [b], RUNNING, STOPPED (the last emitted token is a stop id), LENGTH, or FAILED
        (the next token cannot be known).
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


class Verdict(NamedTuple):
    """What a rule says about sampled proposals.

    Attributes:
      num_accepted: int32 [b].
      bonus_weights: [b, v] >= 0, not normalised: the token after the accepted prefix follows them.
        On a mesh this device's stretch of the vocabulary.
    """

    num_accepted: Int[Array, "b"]
    bonus_weights: Float[Array, "b v"]


def _offered(draft_probs, active_len):
    """Draft probabilities with a slot of zeros behind, and zeros where nothing is offered."""
    b, m, v = draft_probs.shape
    slot = jnp.arange(1, m + 1, dtype=jnp.int32)[None, :]
    is_offered = slot < active_len[:, None]
    offered = jnp.where(is_offered[:, :, None], draft_probs, 0.0)
    return is_offered, jnp.concatenate([offered, jnp.zeros((b, 1, v), draft_probs.dtype)], axis=1)


def _bonus(target_probs, draft_probs, num_accepted, factor, mesh_axis):
    """max(factor * p - q, 0) after the accepted prefix; p itself where nothing is left."""
    pick = lambda x: jnp.take_along_axis(x, num_accepted[:, None, None], axis=1)[:, 0]
    p, q = pick(target_probs), pick(draft_probs)
    rest = jnp.maximum(factor[:, None] * p - q, 0.0)
    has_rest = psum_over(rest.sum(axis=-1, keepdims=True), mesh_axis) > 0
    return jnp.where(has_rest, rest, p)


def accept_by_rejection(
    draft_tokens: Int[Array, "b m"],
    draft_probs: Float[Array, "b m v"],
    target_probs: Float[Array, "b m1 v"],
    uniform: Float[Array, "b m"],
    active_len: Int[Array, "b"],
    mesh_axis: str | None = None,
) -> Verdict:
    """Accepts drafts one by one, each with probability min(1, p/q).

    Args:
      draft_tokens: Proposals for block positions 1..m, each sampled from its row of draft_probs.
      draft_probs: Distribution that each was drawn from; float32, rows sum to 1.
      target_probs: Target's distribution after block positions 0..m (m1 = m + 1), float32.
      uniform: Numbers in [0, 1), one per proposal.
      active_len: Block slots in use, 1..m1; proposals at or past it are never accepted.
      mesh_axis: Over which the vocabulary is cut, or None.

    Example: one proposal, id 0 with q=.8, p=.4, uniform .5 -> 0.5 * .8 = p: rejected; the bonus
      follows max(p - q, 0).

    Source: arXiv:2211.17192, algorithm 1.
    """
    is_offered, q = _offered(draft_probs, active_len)
    p_of_draft = at_ids(target_probs[:, :-1], draft_tokens, mesh_axis)
    q_of_draft = at_ids(draft_probs, draft_tokens, mesh_axis)
    is_good = (uniform * q_of_draft < p_of_draft) & is_offered
    num_accepted = jnp.cumprod(is_good.astype(jnp.int32), axis=1).sum(axis=1)
    one = jnp.ones(num_accepted.shape, target_probs.dtype)
    return Verdict(num_accepted, _bonus(target_probs, q, num_accepted, one, mesh_axis))


def accept_by_block(
    draft_tokens: Int[Array, "b m"],
    draft_probs: Float[Array, "b m v"],
    target_probs: Float[Array, "b m1 v"],
    uniform: Float[Array, "b m"],
    active_len: Int[Array, "b"],
    mesh_axis: str | None = None,
) -> Verdict:
    """Accepts the longest prefix that the block as a whole allows ("block verification").

    c_i, the capped product of p/q over the first i drafts, is how much of the prefix's mass may
    be kept; prefix i is kept with h_i = s_i / (s_i + 1 - c_i), s_i the mass of max(c_i p - q, 0)
    after it, and the longest kept prefix counts even if a shorter one failed.

    Args:
      draft_tokens: As `accept_by_rejection`.
      draft_probs: As `accept_by_rejection`.
      target_probs: As `accept_by_rejection`.
      uniform: As `accept_by_rejection`.
      active_len: As `accept_by_rejection`.
      mesh_axis: As `accept_by_rejection`.

    Example: two proposals with p/q = .5 and 4: the product is capped at min(1, .5 * 4) = 1, so the
      whole block is kept for certain, where token by token the first had failed half the time.

    Source: arXiv:2403.10444, algorithm 2.
    """
    is_offered, q = _offered(draft_probs, active_len)
    p_of_draft = at_ids(target_probs[:, :-1], draft_tokens, mesh_axis)
    q_of_draft = at_ids(draft_probs, draft_tokens, mesh_axis)
    ratio = jnp.where(is_offered, p_of_draft / jnp.maximum(q_of_draft, 1e-30), 0.0)
    kept = [jnp.ones(ratio.shape[:1], ratio.dtype)]
    for i in range(ratio.shape[1]):
        kept.append(jnp.minimum(kept[-1] * ratio[:, i], 1.0))
    c = jnp.stack(kept, axis=1)  # [b, m1]
    rest = jnp.maximum(c[:, :, None] * target_probs - q, 0.0)
    s = psum_over(rest.sum(axis=-1), mesh_axis)
    s = jnp.where(jnp.isnan(s), c, s)  # p or q is NaN there: the block ends, as if q were 0
    h = s / jnp.maximum(s + 1.0 - c, 1e-30)
    is_kept = (uniform < h[:, 1:]) & is_offered
    slot = jnp.arange(1, ratio.shape[1] + 1, dtype=jnp.int32)[None, :]
    num_accepted = jnp.max(jnp.where(is_kept, slot, 0), axis=1)
    factor = jnp.take_along_axis(c, num_accepted[:, None], axis=1)[:, 0]
    return Verdict(num_accepted, _bonus(target_probs, q, num_accepted, factor, mesh_axis))


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
      emitted: Tokens of the step; NO_ID where there is none, which fails the row.
      num_emitted: How many are real, 1..m1.
      stop_ids: Stop ids of each row, padded with -1.
      room: Tokens the row may still emit, >= 1 unless done.
      is_done: Rows that finished earlier commit nothing.

    Returns:
      Committed; a stop id that is the last token allowed by the limit gives STOPPED.

    Example: emitted (4, 2, 8), num_emitted 3, stop ids (2,), room 9 -> 2 tokens, STOPPED; emitted
      (4, NO_ID, 8) -> 1 token, FAILED.
    """
    m1 = emitted.shape[1]
    slot = jnp.arange(m1, dtype=jnp.int32)[None, :]
    allowed = jnp.minimum(num_emitted, room)
    is_missing = emitted == NO_ID  # stop ids are padded with the same value
    is_end = is_missing | (emitted[:, :, None] == stop_ids[:, None, :]).any(axis=2)
    first_of = lambda mask: jnp.min(jnp.where(mask & (slot < allowed[:, None]), slot, m1), axis=1)
    first_end = first_of(is_end)
    has_end, has_failed = first_end < m1, first_of(is_missing) == first_end
    num_committed = jnp.where(has_end, first_end + jnp.where(has_failed, 0, 1), allowed)
    ended = jnp.where(has_failed, FAILED, STOPPED)
    finish = jnp.where(has_end, ended, jnp.where(num_committed >= room, LENGTH, RUNNING))
    num_committed = jnp.where(is_done, 0, num_committed)
    return Committed(num_committed, jnp.where(is_done, RUNNING, finish))
