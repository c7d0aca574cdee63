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
from mimo_jax.train.block_rows import DraftBlocks, Rows, find_context, gather_blocks
from mimo_jax.train.block_step import BlockForward, make_block_step
from mimo_jax.train.config import DrafterTrainConfig


def eagle_forward(drafter_graph, config: EagleConfig) -> BlockForward:
    """Of the EAGLE-3 drafter; its trained pytree is {"drafter": params}.

    Later steps read the labels of the blocks. Logits of an anchor that begins its document, which
    no decoding meets, mean nothing.
    """
    window, m = config.attention.window, config.draft_block_len - 1
    assert window is not None, "an EAGLE-3 drafter's layer is a sliding one"

    def read(target, trained, rows: Rows):
        (head,) = nnx.merge(drafter_graph, trained["drafter"]).heads
        state = head.enter(rows.features)
        next_ids = jnp.roll(rows.batch.token_ids, -1, axis=1)
        return state, *keys_values(target, head, state, next_ids, rows.batch.positions)

    def draft(target, trained, rows: Rows, shared, blocks: DraftBlocks):
        (head,) = nnx.merge(drafter_graph, trained["drafter"]).heads
        state, keys, values = shared
        # One position more than a window: the last one, anchor - 1, is the first query.
        at = find_context(rows, blocks.anchor_pos, window + 1)
        before = at.index[:, :, :-1]
        first_pos = at.anchor_positions - 1
        mask = masks.draft_context_mask(first_pos, m, at.context_pos[:, :-1], window)
        context = Stretch(gather_blocks(keys, before), gather_blocks(values, before), mask)
        own_pos = at.index[:, :, -1:]
        first_state = jnp.take_along_axis(state, own_pos, axis=1).reshape(-1, 1, state.shape[2])
        ids = jnp.concatenate([at.anchor_ids[:, None], blocks.labels[:, :-1]], axis=1)
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

    return BlockForward(lambda row_len: window + 1, read, draft)


def make_eagle_step(
    target_graph, drafter_graph, optimizer, config: DrafterTrainConfig, model: EagleConfig
):
    """`make_block_step` of the EAGLE-3 drafter; trains {"drafter": params}."""
    forward = eagle_forward(drafter_graph, model)
    return make_block_step(target_graph, forward, optimizer, config, model)
