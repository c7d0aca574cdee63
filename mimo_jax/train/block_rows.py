"""Rows as the draft blocks of one device read them: drawn anchors, their context, their targets.

On a mesh a device draws the anchors of its own rows, reads their labels and gathers their context
without a word from another. Where the mesh cuts the sequence as well, a device has a stretch of
positions (a whole number of anchor chunks) and lacks, for its first anchors, the `window - 1`
features before the stretch: one halo exchange brings them. Features are exchanged, not K/V: they
are frozen, so the exchange has no way back, and there is one of them and not one per layer. The
states from which the target's own distribution is read lack the block's length after the stretch
in the same way. Ids, segments and positions are a few bytes each and lie whole along the sequence
everywhere.

Everything but `draw_blocks` speaks of one device's part and, on a mesh, runs inside
`placement.on_own`. What belongs to blocks is flat, [blocks, ...], row by row of the device.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mimo_jax.sharding import SEQUENCE
from mimo_jax.train import block_mask
from mimo_jax.train.placement import BLOCKS, ROWS, num_sequence_parts, on_own
from mimo_jax.train.step import Batch


class DraftBlocks(NamedTuple):
    """Anchors int32 [b, N] of rows; labels int32 and is_valid bool [blocks, m] of their slots."""

    anchor_pos: Array
    labels: Array
    is_valid: Array


# How the fields of DraftBlocks are cut over a mesh.
BLOCK_SPECS = DraftBlocks._make((P(ROWS, SEQUENCE), P(BLOCKS), P(BLOCKS)))


def draw_blocks(
    seed, step, batch: Batch, num_anchors: int, draft_block_len: int, mesh: Mesh | None = None
) -> DraftBlocks:
    """Random draft blocks of a batch and their labels; the same on any mesh, without a collective.

    Args:
      seed: Of the run.
      step: Of the run; each step draws anew.
      batch: Rows.
      num_anchors: Per row.
      draft_block_len: Anchor included.
      mesh: Where rows lie, inside a jitted step.
    """

    def draw(batch: Batch, sequence_ids):
        key = jax.random.fold_in(jax.random.key(seed), step)
        anchor_pos, keep = block_mask.choose_anchors(
            key, batch.loss_mask, num_anchors, batch.segment_ids, sequence_ids
        )
        if num_sequence_parts(mesh) > 1:
            anchor_pos, keep = (_own_stretch(x) for x in (anchor_pos, keep))
        labels, is_valid = block_mask.draft_block_labels(
            batch.token_ids,
            batch.loss_mask,
            batch.segment_ids,
            anchor_pos,
            keep,
            draft_block_len,
        )
        flat = lambda x: x.reshape(-1, x.shape[-1])
        return DraftBlocks(anchor_pos, flat(labels), flat(is_valid))

    sequence_ids = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
    return on_own(draw, mesh, (P(ROWS), P(ROWS)), BLOCK_SPECS)(batch, sequence_ids)


def _own_stretch(x):
    """This device's part of axis 1, which holds the chunks of the sequence in order."""
    num_own = x.shape[1] // jax.lax.axis_size(SEQUENCE)
    first = jax.lax.axis_index(SEQUENCE) * num_own
    return jax.lax.dynamic_slice_in_dim(x, first, num_own, axis=1)


def cut_blocks(blocks: DraftBlocks, chunk_len: int | None) -> DraftBlocks:
    """The blocks of a device in equal chunks, one more axis in front of every field.

    A chunk takes the same number of anchors from every row, in order, so that what it reads of a
    row lies close together. The last is filled up with blocks in which no slot is valid.

    Args:
      blocks: Of one device.
      chunk_len: Most blocks per chunk, rounded up to one per row; None: all in one chunk.

    Example: 2 rows of 7 anchors, chunk_len 6 -> 3 chunks of 2 x 3 anchors, 2 x 2 of them filling.
    """
    b, num_anchors = blocks.anchor_pos.shape
    most = num_anchors if chunk_len is None else max(1, chunk_len // b)
    num_chunks = max(1, -(-num_anchors // most))
    per_row = -(-num_anchors // num_chunks)

    def cut(x, *rest):
        x = x.reshape(b, num_anchors, *rest)
        missing = num_chunks * per_row - num_anchors
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0) for _ in rest)))
        return jnp.moveaxis(x.reshape(b, num_chunks, per_row, *rest), 1, 0)

    m = blocks.labels.shape[1]
    flat = lambda x: cut(x, m).reshape(num_chunks, b * per_row, m)
    return DraftBlocks(cut(blocks.anchor_pos), flat(blocks.labels), flat(blocks.is_valid))


class Rows(NamedTuple):
    """What the blocks of one device read.

    Attributes:
      batch: Whole along the sequence.
      features: [b, s, c], with the halo in front where the sequence is cut.
      positions: int32 [b, s], of the features.
      first: int32, where in its row the first feature stands; before the row for the first halo.
      states: [b, s2, d], the target's stream after its last layer, with a halo behind it where the
        sequence is cut; None where nothing asks for the target's distribution.
      states_first: int32, where in its row the first state stands.
    """

    batch: Batch
    features: Array
    positions: Array
    first: Array | int
    states: Array | None
    states_first: Array | int


def read_rows(
    batch: Batch, features, states, window: int, draft_block_len: int, mesh: Mesh | None = None
) -> Rows:
    """A device's rows; one halo exchange each way where the mesh cuts the sequence.

    Args:
      batch: Rows, whole along the sequence.
      features: [b, s, c], this device's.
      states: [b, s, d] likewise, or None.
      window: Largest window of the drafter's layers.
      draft_block_len: Anchor included.
      mesh: Where rows lie.
    """
    if num_sequence_parts(mesh) == 1:
        return Rows(batch, features, batch.positions, 0, states, 0)
    halo_len, num_own = window - 1, features.shape[1]
    first = jax.lax.axis_index(SEQUENCE) * num_own
    padded = jnp.pad(batch.positions, ((0, 0), (halo_len, 0)))
    positions = jax.lax.dynamic_slice_in_dim(padded, first, halo_len + num_own, axis=1)
    features = block_mask.with_left_halo(features, halo_len, SEQUENCE)
    if states is not None:
        states = block_mask.with_right_halo(states, draft_block_len - 2, SEQUENCE)
    return Rows(batch, features, positions, first - halo_len, states, first)


class BlockContext(NamedTuple):
    """Where blocks read.

    Attributes:
      index: int32 [b, N, w] into the features of `Rows`.
      context_pos: int32 [blocks, w], absolute position of each, -1 = nothing there.
      anchor_ids: int32 [blocks].
      anchor_positions: int32 [blocks].
    """

    index: Array
    context_pos: Array
    anchor_ids: Array
    anchor_positions: Array


def find_context(rows: Rows, anchor_pos, window: int) -> BlockContext:
    """Where the context of each block lies.

    Args:
      rows: From `read_rows`, for this window or a larger one.
      anchor_pos: int32 [b, N] indices into the row.
      window: Largest window of the drafter's layers.
    """
    batch, blocks = rows.batch, anchor_pos.size
    index, is_valid = block_mask.gather_context_index(
        anchor_pos, window=window, segment_ids=batch.segment_ids
    )
    at = lambda x, i: jnp.take_along_axis(x, i.reshape(i.shape[0], -1), axis=1)
    context_pos = jnp.where(is_valid, at(batch.positions, index).reshape(index.shape), -1)
    return BlockContext(
        jnp.maximum(index - rows.first, 0),
        context_pos.reshape(blocks, -1),
        at(batch.token_ids, anchor_pos).reshape(blocks),
        at(batch.positions, anchor_pos).reshape(blocks),
    )


def gather_blocks(x, index):
    """x [b, k, s, h] at positions index [b, N, w] -> [b*N, k, w, h]."""
    b, k, s, h = x.shape
    n, w = index.shape[1:]
    rows = x.transpose(0, 2, 1, 3).reshape(b * s, k * h)
    flat = (index + (jnp.arange(b, dtype=index.dtype) * s)[:, None, None]).reshape(-1)
    return jnp.take(rows, flat, axis=0).reshape(b * n, w, k, h).transpose(0, 2, 1, 3)


def states_before_slots(rows: Rows, anchor_pos, num_draft_tokens: int):
    """The target's states from which slots 1..m are predicted: of positions a .. a + m - 1.

    Args:
      rows: With states.
      anchor_pos: int32 [b, N] indices into the row.
      num_draft_tokens: m.

    Returns:
      [blocks, m, d]; past the row's end, where no slot is valid, they mean nothing.
    """
    assert rows.states is not None, "the states were not kept"
    offset = jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, None, :]
    index = anchor_pos[:, :, None] + offset - rows.states_first
    index = jnp.minimum(index, rows.states.shape[1] - 1)
    return gather_blocks(rows.states[:, None], index)[:, 0]
