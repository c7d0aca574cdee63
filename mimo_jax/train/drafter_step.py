"""The DFlash drafter's train step: what its blocks read of a row, and how they draft.

Context K/V is projected once per row; a block gathers the `window - 1` positions before its anchor.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.config import DrafterConfig
from mimo_jax.layers.dispatch import PADDED
from mimo_jax.models.drafter import ContextKV
from mimo_jax.models.params import split
from mimo_jax.train.block_rows import DraftBlocks, Rows, find_context, gather_blocks
from mimo_jax.train.block_step import BlockForward, block_logits, make_block_step
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.step import Batch


def drafter_forward(drafter_graph, config: DrafterConfig) -> BlockForward:
    """Of the DFlash drafter; its trained pytree is {"drafter": params, "mask_embedding": [d]}."""
    m1, d = config.draft_block_len, config.hidden_size

    def window_of(row_len: int) -> int:
        return min(max(row_len + 1 if w is None else w for w in config.windows), row_len + 1)

    def read(target, trained, rows: Rows) -> ContextKV:
        del target
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        return drafter.project_context(rows.features, rows.positions)

    def draft(target, trained, rows: Rows, context: ContextKV, blocks: DraftBlocks):
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        window = window_of(rows.batch.token_ids.shape[1])
        at = find_context(rows, blocks.anchor_pos, window)
        anchors = jax.lax.stop_gradient(target.embed(at.anchor_ids[:, None]))
        masks_shape = (blocks.anchor_pos.size, m1 - 1, d)
        masks = jnp.broadcast_to(trained["mask_embedding"][None, None, :], masks_shape)
        hidden = drafter.train_hidden(
            jnp.concatenate([anchors, masks], axis=1),
            tuple(gather_blocks(x, at.index) for x in context.keys),
            tuple(gather_blocks(x, at.index) for x in context.values),
            at.context_pos,
            at.anchor_positions,
        )
        return target.unembed(hidden[:, 1:], config.vocab_size)

    return BlockForward(window_of, read, draft)


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
    graph, params = split(drafter)
    trained = {"drafter": params, "mask_embedding": mask_embedding}
    no_labels = jnp.zeros((anchor_pos.size, drafter.config.draft_block_len - 1), jnp.int32)
    blocks = DraftBlocks(anchor_pos, no_labels, no_labels > 0)
    forward = drafter_forward(graph, drafter.config)
    return block_logits(forward, target, trained, batch, context_features, blocks, mesh)


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
    forward = drafter_forward(drafter_graph, model)
    return make_block_step(target_graph, forward, optimizer, config, model, mesh, dispatch)
