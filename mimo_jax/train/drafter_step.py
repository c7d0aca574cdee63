"""The drafter's train step: position-weighted cross-entropy of draft blocks at random anchors.

A step costs the same per anchor whatever the row length: context K/V is projected once per row and
each block gathers the `window - 1` positions before its anchor.

On a mesh a device draws the anchors of its own rows, reads their labels and gathers their context
without a word from another. Where the mesh cuts the sequence as well, a device has a stretch of
positions (a whole number of anchor chunks) and lacks, for its first anchors, the `window - 1`
features before the stretch: one halo exchange brings them. Features are exchanged, not K/V: they
are frozen, so the exchange has no way back, and there is one of them and not one per layer. Ids,
segments and positions are a few bytes each and lie whole along the sequence everywhere.

What belongs to blocks is flat, [blocks, ...], in one order throughout; the order is of no account.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mimo_jax.config import DraftConfig, DrafterConfig
from mimo_jax.layers.dispatch import PADDED
from mimo_jax.sharding import SEQUENCE
from mimo_jax.train import block_mask, losses
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.placement import (
    BLOCKS,
    ROWS,
    hold_state,
    num_sequence_parts,
    on_own,
    whole_over_data,
)
from mimo_jax.train.step import Batch, TrainState, apply_gradients, run_target, sparse_layer


class DraftBlocks(NamedTuple):
    """Anchors int32 [b, N] of rows; labels int32 and is_valid bool [blocks, m] of their slots."""

    anchor_pos: Array
    labels: Array
    is_valid: Array


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
    out_specs = DraftBlocks._make((P(ROWS, SEQUENCE), P(BLOCKS), P(BLOCKS)))
    return on_own(draw, mesh, (P(ROWS), P(ROWS)), out_specs)(batch, sequence_ids)


def _own_stretch(x):
    """This device's part of axis 1, which holds the chunks of the sequence in order."""
    num_own = x.shape[1] // jax.lax.axis_size(SEQUENCE)
    first = jax.lax.axis_index(SEQUENCE) * num_own
    return jax.lax.dynamic_slice_in_dim(x, first, num_own, axis=1)


class BlockContext(NamedTuple):
    """What blocks read, on one device or for one stretch of positions.

    Attributes:
      features: [b, s, c], with the halo in front where the sequence is cut.
      positions: int32 [b, s], of the features.
      index: int32 [b, N, w] into the features.
      context_pos: int32 [blocks, w], absolute position of each, -1 = nothing there.
      anchor_ids: int32 [blocks].
      anchor_positions: int32 [blocks].
    """

    features: Array
    positions: Array
    index: Array
    context_pos: Array
    anchor_ids: Array
    anchor_positions: Array


def read_context(
    context_features, batch: Batch, anchor_pos, window: int, mesh: Mesh | None = None
) -> BlockContext:
    """Where each block's context lies; one halo exchange where the mesh cuts the sequence.

    Args:
      context_features: [b, s, c] of the rows.
      batch: Rows.
      anchor_pos: int32 [b, N] indices into the row.
      window: Largest window of the drafter's layers.
      mesh: Where rows lie, inside a jitted step.
    """

    def read(features, batch: Batch, anchor_pos):
        blocks = anchor_pos.size
        index, is_valid = block_mask.gather_context_index(
            anchor_pos, window=window, segment_ids=batch.segment_ids
        )
        at = lambda x, i: jnp.take_along_axis(x, i.reshape(i.shape[0], -1), axis=1)
        context_pos = jnp.where(is_valid, at(batch.positions, index).reshape(index.shape), -1)
        positions = batch.positions
        if num_sequence_parts(mesh) > 1:
            halo_len, num_own = window - 1, features.shape[1]
            first = jax.lax.axis_index(SEQUENCE) * num_own
            features = block_mask.with_left_halo(features, halo_len, SEQUENCE)
            padded = jnp.pad(positions, ((0, 0), (halo_len, 0)))
            positions = jax.lax.dynamic_slice_in_dim(padded, first, halo_len + num_own, axis=1)
            index = jnp.maximum(index - first + halo_len, 0)
        return BlockContext(
            features,
            positions,
            index,
            context_pos.reshape(blocks, -1),
            at(batch.token_ids, anchor_pos).reshape(blocks),
            at(batch.positions, anchor_pos).reshape(blocks),
        )

    cut, blocks = P(ROWS, SEQUENCE), P(BLOCKS)
    out_specs = BlockContext._make((cut, cut, cut, blocks, blocks, blocks))
    return on_own(read, mesh, (cut, P(ROWS), cut), out_specs)(context_features, batch, anchor_pos)


def gather_blocks(x, index):
    """x [b, k, s, h] at positions index [b, N, w] -> [b*N, k, w, h]."""
    b, k, s, h = x.shape
    n, w = index.shape[1:]
    rows = x.transpose(0, 2, 1, 3).reshape(b * s, k * h)
    flat = (index + (jnp.arange(b, dtype=index.dtype) * s)[:, None, None]).reshape(-1)
    return jnp.take(rows, flat, axis=0).reshape(b * n, w, k, h).transpose(0, 2, 1, 3)


def draft_logits_at_anchors(
    target,
    drafter,
    batch: Batch,
    context_features,
    anchor_pos,
    mask_embedding,
    mesh: Mesh | None = None,
):
    """Logits of the draft slots 1..m of every anchor, as the decode loop would compute them.

    Args:
      target: Merged target (its embedding and head are shared).
      drafter: Merged drafter.
      batch: Rows.
      context_features: [b, s, c] of the rows.
      anchor_pos: int32 [b, N] indices into the row.
      mask_embedding: [d], the vector at mask slots.
      mesh: Where rows lie, inside a jitted step.

    Returns:
      float32 [blocks, m, v]; blocks = b * N, row by row unless the mesh cuts the sequence.
    """
    config = drafter.config
    s = batch.token_ids.shape[1]
    m1, d = config.draft_block_len, config.hidden_size
    window = min(max(w if w is not None else s + 1 for w in config.windows), s + 1)
    read = read_context(context_features, batch, anchor_pos, window, mesh)
    context = drafter.project_context(read.features, read.positions)
    anchors = target.embed(read.anchor_ids[:, None])
    masks_shape = (anchor_pos.size, m1 - 1, d)
    block = jnp.concatenate(
        [
            jax.lax.stop_gradient(anchors),
            jnp.broadcast_to(mask_embedding[None, None, :], masks_shape),
        ],
        axis=1,
    )
    gather = on_own(
        gather_blocks, mesh, (P(ROWS, None, SEQUENCE), P(ROWS, SEQUENCE)), P(BLOCKS)
    )
    hidden = drafter.train_hidden(
        block,
        tuple(gather(x, read.index) for x in context.keys),
        tuple(gather(x, read.index) for x in context.values),
        read.context_pos,
        read.anchor_positions,
    )
    return target.unembed(hidden[:, 1:], config.vocab_size)


def make_block_step(
    target_graph,
    logits_at: Callable,
    optimizer,
    config: DrafterTrainConfig,
    model: DraftConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """The train step of any drafter that is taught by draft blocks at random anchors.

    Args:
      target_graph: Frozen, with its embedding and its head.
      logits_at: (target, trained, batch, context features, DraftBlocks) -> logits of the blocks'
        draft slots, float32 [blocks, m, v].
      optimizer: From `make_optimizer`.
      config: Of the training.
      model: Of the drafter.
      mesh: Where rows lie.
      dispatch: How tokens travel to experts.

    Returns:
      step(state, target_params, batch, seed) -> (state, metrics); donates the state. Anchors are
      drawn from (seed, step).
    """
    num_draft_tokens = model.draft_block_len - 1
    position_weights = losses.draft_position_weights(num_draft_tokens, config.gamma)

    def step(state: TrainState, target_params, batch: Batch, seed):
        target = nnx.merge(target_graph, whole_over_data(target_params, mesh))
        out = run_target(
            target,
            batch,
            mesh,
            tap_layer_ids=model.target_layer_ids,
            run_sparse=sparse_layer(mesh, None, dispatch),
        )
        features = jax.lax.stop_gradient(out.context_features)
        blocks = draw_blocks(
            seed, state.step, batch, config.num_anchors, model.draft_block_len, mesh
        )
        weights = jnp.where(blocks.is_valid, position_weights[None, :], 0.0)

        def loss_fn(trained):
            logits = logits_at(target, whole_over_data(trained, mesh), batch, features, blocks)
            return losses.weighted_cross_entropy(logits, blocks.labels, weights)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state, metrics = apply_gradients(state, grads, loss, optimizer, config)
        metrics |= {
            "expected_accept_length": losses.expected_accept_length(
                aux.is_correct, blocks.is_valid
            ),
            "num_signals": blocks.is_valid.sum(),
        }
        return hold_state(state, mesh), metrics

    return jax.jit(step, donate_argnums=0)


def make_drafter_step(
    target_graph,
    drafter_graph,
    optimizer,
    config: DrafterTrainConfig,
    model: DrafterConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """`make_block_step` of the DFlash drafter.

    The trained pytree is {"drafter": params, "mask_embedding": [d]}; the target, its embedding
    and its head are frozen.
    """

    def logits_at(target, trained, batch: Batch, features, blocks: DraftBlocks):
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        mask_embedding = trained["mask_embedding"]
        return draft_logits_at_anchors(
            target, drafter, batch, features, blocks.anchor_pos, mask_embedding, mesh
        )

    return make_block_step(target_graph, logits_at, optimizer, config, model, mesh, dispatch)
