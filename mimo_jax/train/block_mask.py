"""Masked draft blocks for drafter training: anchors, labels, and where their context lies.

A block is (anchor token, mask, mask, ...) placed at absolute positions a, a+1, ...; slot k predicts
the token at its own position a + k. At decode time the anchor has not been through the target, so
the target's features exist for positions < a only. The one rule that keeps training honest:

    query at position q (in the block anchored at a) sees context key p
        iff  p < a  and  q - p < window  and  p is in the anchor's document,
    and every slot of its own block, both ways (non-causal).

Letting p = a through gives a tiny training loss and a drafter that is worthless (the feature of the
anchor has seen its successor's logits). The window is counted from each slot, including the slot
itself, so later slots see less context: a=5, window=3, 3 slots -> {3,4}, {4}, {}.

Choices: anchors are sampled per fixed chunk of 1,024 positions without replacement, in ascending
order, padded to a static count with `keep` False and position 0. The noise of a chunk depends on
(seed, step, sequence, chunk) and nothing else, so the anchors are the same on any mesh, and a
device draws those of its own rows without asking another. (One draw over a whole batch, as it was,
ties every anchor to the shape of the batch; one over a whole row would tie it to the row's length,
and its top-k cannot be taken where a row is cut.) A padded anchor sees no context, but its own
block, so its softmax is finite. The context is gathered, window - 1 features per anchor, so that a
block costs the same in a row of any length; the mask over it is `layers/masks.draft_context_mask`,
the one that decoding uses.

Source: DFlash, arXiv:2602.06036, section on training; anchor validity as in sgl-project/SpecForge.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

ANCHOR_CHUNK_LEN = 1024


def choose_anchors(
    key: Key[Array, ""],
    loss_mask: Bool[Array, "b s"],
    num_anchors: int,
    segment_ids: Int[Array, "b s"],
    sequence_ids: Int[Array, "b"],
    *,
    chunk_len: int = ANCHOR_CHUNK_LEN,
) -> tuple[Int[Array, "b a"], Bool[Array, "b a"]]:
    """Samples anchor positions whose first successor can be learned.

    Position i is valid iff tokens i and i + 1 are both to be learned and in one document.

    Args:
      key: Of (seed, step); a fresh one per step resamples the anchors every epoch.
      loss_mask: True on tokens to be learned.
      num_anchors: Static number of anchors per row; may exceed the row's length.
      segment_ids: 0 is padding, 1.. number the documents.
      sequence_ids: What tells rows apart: their index in the whole batch.
      chunk_len: Positions that are drawn from together; a shorter row is one chunk.

    Returns:
      (anchor_pos, keep): int32 positions, chunk by chunk, each chunk having
      ceil(num_anchors / chunks) entries (a in all): ascending where kept, 0 where not; keep is True
      for the first min(entries, number of valid positions) of the chunk.

    Example: loss_mask (F, T, T, T, F), one document, num_anchors=3
      -> positions (1, 2, 0), keep (T, T, F).
    """
    b, s = loss_mask.shape
    chunk_len = min(chunk_len, s)
    num_chunks = -(-s // chunk_len)
    per_chunk = -(-num_anchors // num_chunks)
    is_same = (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] > 0)
    is_valid = loss_mask[:, :-1] & loss_mask[:, 1:] & is_same
    is_valid = jnp.pad(is_valid, ((0, 0), (0, num_chunks * chunk_len - s + 1)))
    is_valid = is_valid.reshape(b, num_chunks, chunk_len)

    def draw(sequence_id, chunk):
        chunk_key = jax.random.fold_in(jax.random.fold_in(key, sequence_id), chunk)
        return jax.random.uniform(chunk_key, (chunk_len,), jnp.float32)

    chunks = jnp.arange(num_chunks, dtype=jnp.int32)
    noise = jax.vmap(jax.vmap(draw, (None, 0)), (0, None))(sequence_ids, chunks)
    num_picked = min(per_chunk, chunk_len)
    top_score, top_pos = jax.lax.top_k(jnp.where(is_valid, noise, -1.0), num_picked)
    order = jnp.sort(jnp.where(top_score >= 0, top_pos.astype(jnp.int32), chunk_len), axis=-1)
    order = jnp.pad(
        order, ((0, 0), (0, 0), (0, per_chunk - num_picked)), constant_values=chunk_len
    )
    keep = order < chunk_len
    anchor_pos = jnp.where(keep, order + (chunks * chunk_len)[None, :, None], 0)
    return anchor_pos.reshape(b, -1), keep.reshape(b, -1)


def draft_block_labels(
    token_ids: Int[Array, "b s"],
    loss_mask: Bool[Array, "b s"],
    segment_ids: Int[Array, "b s"],
    anchor_pos: Int[Array, "b a"],
    keep: Bool[Array, "b a"],
    draft_block_len: int,
) -> tuple[Int[Array, "b a m"], Bool[Array, "b a m"]]:
    """Reads the label of every draft slot and says where it counts.

    Gives no label to the anchor slot and applies no position weights (see `losses.py`).

    Args:
      token_ids: Packed ids.
      loss_mask: True on tokens to be learned.
      segment_ids: 0 is padding, 1.. number the documents.
      anchor_pos: From `choose_anchors`.
      keep: From `choose_anchors`.
      draft_block_len: Anchor included; m = draft_block_len - 1.

    Returns:
      (labels, is_valid): slot k in 1..m sits at index k - 1 and holds the token at anchor + k;
      valid iff anchor + k < s, that token is to be learned and in the anchor's document, and the
      anchor is kept. Invalid labels are 0.

    Example: ids (10, 11, 12, 13), all learned, one document, anchor 2, draft_block_len 4
      -> labels (13, 0, 0), valid (T, F, F).
    """
    b, s = token_ids.shape
    num_anchors = anchor_pos.shape[1]
    offset = jnp.arange(1, draft_block_len, dtype=jnp.int32)[None, None, :]
    label_pos = anchor_pos[:, :, None] + offset
    flat_pos = jnp.minimum(label_pos, s - 1).reshape(b, -1)

    def read(values: jax.Array) -> jax.Array:
        return jnp.take_along_axis(values, flat_pos, axis=1).reshape(b, num_anchors, -1)

    anchor_segment = jnp.take_along_axis(segment_ids, anchor_pos, axis=1)[:, :, None]
    is_valid = (
        (label_pos < s) & read(loss_mask) & (read(segment_ids) == anchor_segment) & keep[:, :, None]
    )
    return jnp.where(is_valid, read(token_ids), 0), is_valid


def gather_context_index(
    anchor_pos: Int[Array, "b a"],
    *,
    window: int,
    segment_ids: Int[Array, "b s"] | None = None,
) -> tuple[Int[Array, "b a c"], Bool[Array, "b a c"]]:
    """Positions of the window - 1 features before each anchor, for a gather.

    The anchor's own position is never among them.

    Args:
      anchor_pos: From `choose_anchors`.
      window: Keys a query sees including itself, >= 2.
      segment_ids: If given, features of other documents are marked invalid too.

    Returns:
      (index, is_valid): entry i is position anchor - window + 1 + i, clipped to 0 where it would
      be negative and then invalid. c = window - 1; the last entry is anchor - 1.

    Raises:
      ValueError: If window < 2 (there is no context to gather).

    Example: anchor 2, window 5 -> index (0, 0, 0, 1), valid (F, F, T, T).
    """
    if window < 2:
        raise ValueError(f"window must be at least 2 to hold any context, got {window}")
    offset = jnp.arange(1 - window, 0, dtype=jnp.int32)[None, None, :]
    index = anchor_pos[:, :, None] + offset
    is_valid = index >= 0
    index = jnp.maximum(index, 0)
    if segment_ids is not None:
        b, num_anchors, _ = index.shape
        flat = jnp.take_along_axis(segment_ids, index.reshape(b, -1), axis=1)
        anchor_segment = jnp.take_along_axis(segment_ids, anchor_pos, axis=1)
        is_valid &= flat.reshape(b, num_anchors, -1) == anchor_segment[:, :, None]
    return index, is_valid


def with_left_halo(
    features: Float[Array, "b s c"], halo_len: int, mesh_axis: str
) -> Float[Array, "b halo_and_s c"]:
    """A stretch of positions with the end of the stretch to its left in front.

    Inside `shard_map`, where each device of mesh_axis has one stretch of the sequence, in order:
    one exchange, of halo_len positions. The first stretch gets zeros, which nothing reads.

    Args:
      features: This device's stretch.
      halo_len: Positions from the left; at most s, since it is one neighbour that is asked.
      mesh_axis: Over which the sequence is cut.

    Raises:
      ValueError: If halo_len reaches past the left neighbour.

    Example: two devices with (1, 2, 3) and (4, 5, 6), halo_len 2 -> (0, 0, 1, 2, 3) and
      (2, 3, 4, 5, 6).
    """
    s = features.shape[1]
    _check_halo(halo_len, s)
    num_devices = jax.lax.axis_size(mesh_axis)
    to_the_right = [(i, i + 1) for i in range(num_devices - 1)]
    halo = jax.lax.ppermute(features[:, s - halo_len :], mesh_axis, to_the_right)
    return jnp.concatenate([halo, features], axis=1)


def with_right_halo(
    states: Float[Array, "b s d"], halo_len: int, mesh_axis: str
) -> Float[Array, "b s_and_halo d"]:
    """As `with_left_halo`, with the start of the stretch to its right behind.

    Example: two devices with (1, 2, 3) and (4, 5, 6), halo_len 2 -> (1, 2, 3, 4, 5) and
      (4, 5, 6, 0, 0).
    """
    _check_halo(halo_len, states.shape[1])
    num_devices = jax.lax.axis_size(mesh_axis)
    to_the_left = [(i + 1, i) for i in range(num_devices - 1)]
    halo = jax.lax.ppermute(states[:, :halo_len], mesh_axis, to_the_left)
    return jnp.concatenate([states, halo], axis=1)


def _check_halo(halo_len: int, s: int) -> None:
    if halo_len > s:
        raise ValueError(f"a halo of {halo_len} positions reaches past a stretch of {s}")
