"""The MTP heads' train step: all heads at once over whole rows, judged at the anchors.

Head k reads the target's state at every position and the id k + 1 positions later, as it does in
decoding, and predicts the id after that. At the position before an anchor that is the label of
draft slot k + 1, so the heads share anchors, labels and weights with the other drafters; the layer
runs over every position (its keys are needed anyway), the target's head only where a label is read.

Source: arXiv:2601.02780 section 2.3 (heads trained jointly, each on the target's hidden state).
"""

import jax.numpy as jnp
from flax import nnx

from mimo_jax.config import require
from mimo_jax.models.mtp import MtpConfig
from mimo_jax.train.block_rows import DraftBlocks, Rows
from mimo_jax.train.block_step import BlockForward, make_block_step
from mimo_jax.train.config import DrafterTrainConfig


def mtp_forward(drafter_graph) -> BlockForward:
    """Of MTP heads that draft apart, one slot each; their trained pytree is {"drafter": params}.

    Features are the target's residual stream after its last layer. Logits of an anchor that begins
    its document, which no decoding meets, mean nothing.
    """

    def read(target, trained, rows: Rows):
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        batch, normed = rows.batch, []
        for k, head in enumerate(drafter.heads):
            next_ids = jnp.roll(batch.token_ids, -1 - k, axis=1)
            out = head.run_rows(target, rows.features, next_ids, batch.positions, batch.segment_ids)
            normed.append(out.normed)
        return tuple(normed)

    def draft(target, trained, rows: Rows, shared, blocks: DraftBlocks):
        del trained, rows
        before = jnp.maximum(blocks.anchor_pos - 1, 0)[:, :, None]
        slots = [jnp.take_along_axis(normed, before, axis=1) for normed in shared]
        hidden = jnp.stack(slots, axis=2)
        return target.unembed(hidden.reshape(-1, *hidden.shape[2:]))

    return BlockForward(lambda row_len: 2, read, draft)


def make_mtp_step(
    target_graph, drafter_graph, optimizer, config: DrafterTrainConfig, model: MtpConfig
):
    """`make_block_step` of MTP heads; trains {"drafter": params}.

    Raises:
      ConfigError: For a chain: it is made of a trained first head (`mtp.chain_first_head`).
    """
    require(not model.is_chained, "MTP heads are trained apart; the first is chained afterwards")

    forward = mtp_forward(drafter_graph)
    return make_block_step(target_graph, forward, optimizer, config, model)
