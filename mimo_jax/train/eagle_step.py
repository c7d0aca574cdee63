"""The EAGLE-3 drafter's train step: training-time test at the anchors of draft blocks.

From each anchor the layer is unrolled on its own states for as many steps as it will draft, by the
very function that decoding uses (`lookahead.unroll`). Tokens are the text's, states its own: fed
true features instead, it would never meet its own errors before it is deployed.

The published code unrolls every position of a row at once, with a mask that grows by a diagonal per
step. Unrolled from random anchors a step costs the same per anchor as a DFlash block does, so both
drafters get the same batches, anchors, labels and weights: what differs is the drafter.

Source: arXiv:2503.01840 section 3.1 (training-time test).
"""

import jax.numpy as jnp
from flax import nnx

from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch
from mimo_jax.models.eagle import EagleConfig
from mimo_jax.models.lookahead import keys_values, unroll
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.drafter_step import (
    DraftBlocks,
    gather_blocks,
    make_block_step,
    read_context,
)
from mimo_jax.train.step import Batch


def eagle_logits_at_anchors(target, drafter, batch: Batch, features, blocks: DraftBlocks):
    """Logits of the draft slots of every anchor, each step on the state of the one before.

    Args:
      target: Merged target (its embedding and head are shared).
      drafter: Merged `EagleDrafter`.
      batch: Rows.
      features: [b, s, c] context features of the rows.
      blocks: Anchors; their labels are the ids that later steps read.

    Returns:
      float32 [blocks, m, v], blocks row by row. Of an anchor that begins its document, which no
      decoding meets, they mean nothing.
    """
    (head,) = drafter.heads
    window, m = head.layer_attention.window, drafter.config.draft_block_len - 1
    # One position more than a window: the last one, anchor - 1, is the first query.
    read = read_context(features, batch, blocks.anchor_pos, window + 1)
    state = head.enter(features)
    next_ids = jnp.roll(batch.token_ids, -1, axis=1)
    keys, values = keys_values(target, head, state, next_ids, batch.positions)
    before = read.index[:, :, :-1]
    first_pos = read.anchor_positions - 1
    mask = masks.draft_context_mask(first_pos, m, read.context_pos[:, :-1], window)
    context = Stretch(gather_blocks(keys, before), gather_blocks(values, before), mask)
    own_pos = read.index[:, :, -1:]
    first_state = jnp.take_along_axis(state, own_pos, axis=1).reshape(-1, 1, state.shape[2])
    ids = jnp.concatenate([read.anchor_ids[:, None], blocks.labels[:, :-1]], axis=1)
    hidden = unroll(
        target,
        head,
        first_state,
        ids[:, :1],
        first_pos,
        context,
        lambda step, normed: ids[:, step + 1 : step + 2],
    )
    return target.unembed(hidden)


def make_eagle_step(
    target_graph, drafter_graph, optimizer, config: DrafterTrainConfig, model: EagleConfig
):
    """`make_block_step` of the EAGLE-3 drafter; trains {"drafter": params}."""

    def logits_at(target, trained, batch: Batch, features, blocks: DraftBlocks):
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        return eagle_logits_at_anchors(target, drafter, batch, features, blocks)

    return make_block_step(target_graph, logits_at, optimizer, config, model)
