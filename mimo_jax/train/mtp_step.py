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
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.drafter_step import DraftBlocks, make_block_step
from mimo_jax.train.step import Batch


def mtp_logits_at_anchors(target, drafter, batch: Batch, features, blocks: DraftBlocks):
    """Logits of the draft slots of every anchor, one head each.

    Args:
      target: Merged target (its embedding and head are shared).
      drafter: Merged `MtpDrafter` whose heads draft apart.
      batch: Rows.
      features: [b, s, d], the target's residual stream after its last layer.
      blocks: Anchors.

    Returns:
      float32 [blocks, m, v], blocks row by row. Of an anchor that begins its document, which no
      decoding meets, they mean nothing.
    """
    before = jnp.maximum(blocks.anchor_pos - 1, 0)[:, :, None]
    slots = []
    for k, head in enumerate(drafter.heads):
        next_ids = jnp.roll(batch.token_ids, -1 - k, axis=1)
        out = head.run_rows(target, features, next_ids, batch.positions, batch.segment_ids)
        slots.append(jnp.take_along_axis(out.normed, before, axis=1))
    hidden = jnp.stack(slots, axis=2)
    return target.unembed(hidden.reshape(-1, *hidden.shape[2:]))


def make_mtp_step(
    target_graph, drafter_graph, optimizer, config: DrafterTrainConfig, model: MtpConfig
):
    """`make_block_step` of MTP heads; trains {"drafter": params}.

    Raises:
      ConfigError: For a chain: it is made of a trained first head (`mtp.chain_first_head`).
    """
    require(not model.is_chained, "MTP heads are trained apart; the first is chained afterwards")

    def logits_at(target, trained, batch: Batch, features, blocks: DraftBlocks):
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        return mtp_logits_at_anchors(target, drafter, batch, features, blocks)

    return make_block_step(target_graph, logits_at, optimizer, config, model)
