"""Every attention mask of the system, as booleans (True = the query sees the key).

All masks are made from *absolute positions*, so one rule serves training rows, prefill, ring
caches and draft blocks alike:

  * causal:       key <= query
  * window W:     query - key < W        (W keys, the query itself included)
  * draft block:  every slot sees every active slot of its own block; context keys strictly
                  before the anchor, within the window counted from the slot's own position.

Example, window 3, five tokens (rows are queries):

    1 . . . .
    1 1 . . .
    1 1 1 . .
    . 1 1 1 .
    . . 1 1 1

Negative key positions mark slots that hold nothing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def causal_mask(
    query_pos: Int[Array, "b t"], key_pos: Int[Array, "b s"], window: int | None
) -> Bool[Array, "b t s"]:
    """Key at or before the query, within the window, and present (key_pos >= 0)."""
    query, key = query_pos[:, :, None], key_pos[:, None, :]
    seen = (key <= query) & (key >= 0)
    if window is not None:
        seen &= query - key < window
    return seen


def segment_mask(
    query_segment: Int[Array, "b t"], key_segment: Int[Array, "b s"]
) -> Bool[Array, "b t s"]:
    """Same packed document; segment 0 is padding and is seen by nobody but itself."""
    return query_segment[:, :, None] == key_segment[:, None, :]


def draft_context_mask(
    anchor_pos: Int[Array, "b"],
    draft_block_len: int,
    key_pos: Int[Array, "b s"],
    window: int | None,
) -> Bool[Array, "b m1 s"]:
    """Context keys that each slot of a draft block sees.

    Strictly before the anchor: the anchor's own feature does not exist yet when it is drafted
    from. Slot j stands at anchor_pos + j and its window is counted from there.

    Example: anchor 5, window 3, block of 3 -> slot 0 sees {3, 4}, slot 1 {4}, slot 2 nothing.

    Source: z-lab's published drafter class (the same rule as its sliding layers).
    """
    slot_pos = anchor_pos[:, None] + jnp.arange(draft_block_len, dtype=jnp.int32)[None, :]
    key = key_pos[:, None, :]
    seen = (key < anchor_pos[:, None, None]) & (key >= 0)
    seen = jnp.broadcast_to(seen, (key_pos.shape[0], draft_block_len, key_pos.shape[1]))
    if window is not None:
        seen &= slot_pos[:, :, None] - key < window
    return seen


def draft_block_mask(
    active_len: Int[Array, "b"], draft_block_len: int, is_causal: bool
) -> Bool[Array, "b m1 m1"]:
    """Slots of the block that each slot sees: the first active_len, all ways or only backwards.

    A slot always sees itself, so that inactive slots have a finite softmax.
    """
    slots = jnp.arange(draft_block_len, dtype=jnp.int32)
    seen = slots[None, None, :] < active_len[:, None, None]
    seen = jnp.broadcast_to(seen, (active_len.shape[0], draft_block_len, draft_block_len))
    if is_causal:
        seen &= (slots[None, :] <= slots[:, None])[None]
    return seen | jnp.eye(draft_block_len, dtype=bool)[None]


def tree_mask(
    depths: Int[Array, "b n"], sees: Bool[Array, "b n n"], window: int | None
) -> Bool[Array, "b n n"]:
    """Nodes of a draft tree that each node sees: its ancestors and itself, within the window.

    Example: a window of 2 hides the root from nodes of depth 2.
    """
    if window is None:
        return sees
    return sees & (depths[:, :, None] - depths[:, None, :] < window)
