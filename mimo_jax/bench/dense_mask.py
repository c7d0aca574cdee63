"""The loss of draft blocks by one mask over a row and all of its blocks: what ours is measured by.

Trainers without a gather lay the blocks behind the row, [S context keys | N * B block keys], and
let one boolean mask say which query sees which key. Scores are then [N * B, S + N * B] per head
and layer, most of them masked out: with 512 blocks of 8 in a row of 4,096 a query sees 128 + 8 of
8,192 keys. It is plain to read and easy to trust, which is its use here: a test holds our step
equal to it, the bench tells what the difference costs.

Context keys ask nothing, so their rows of the square mask are left out, as the public trainers
leave them out: the whole square would take this form twice the time.

Layers are those of the package; what is written again is who sees whom, and what stands where.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mimo_jax.layers.attention import Stretch, attend
from mimo_jax.layers.moe import swiglu
from mimo_jax.layers.norm import rms_norm
from mimo_jax.layers.rope import apply_rope, inverse_frequencies, rope_tables
from mimo_jax.models.drafter import Drafter, DrafterLayer
from mimo_jax.models.target import Target
from mimo_jax.train.block_rows import DraftBlocks
from mimo_jax.train.losses import draft_position_weights
from mimo_jax.train.step import Batch


def dense_mask(
    batch: Batch, blocks: DraftBlocks, block_len: int, window: int | None, is_causal: bool
) -> Bool[Array, "b q s_and_q"]:
    """Who sees whom: queries are the slots of all blocks of a row, keys the row and the slots.

    Example: a row of 6, one block of 2 at 4, window 3 -> slot 0 sees 2, 3 and both slots, slot 1
      sees 3 and both slots.
    """
    b, s = batch.token_ids.shape
    num_blocks = blocks.anchor_pos.shape[1]
    anchor = jnp.repeat(blocks.anchor_pos, block_len, axis=1)[:, :, None]
    slot = jnp.tile(jnp.arange(block_len, dtype=jnp.int32), num_blocks)[None, :, None]
    key = jnp.arange(s, dtype=jnp.int32)[None, None, :]
    document = jnp.take_along_axis(batch.segment_ids, anchor[:, :, 0], axis=1)[:, :, None]
    sees_row = (key < anchor) & (batch.segment_ids[:, None, :] == document)
    if window is not None:
        sees_row &= anchor + slot - key < window
    block = jnp.arange(num_blocks * block_len, dtype=jnp.int32) // block_len
    sees_slots = block[:, None] == block[None, :]
    if is_causal:
        sees_slots &= slot[0] >= slot[0].T
    sees_slots = jnp.broadcast_to(sees_slots[None], (b, *sees_slots.shape))
    return jnp.concatenate([sees_row, sees_slots], axis=2)


def _keys_values(drafter: Drafter, layer: DrafterLayer, x, tables):
    config, a = drafter.config, drafter.config.attention
    keys, values = jnp.split(x @ layer.w_kv[...], [a.qkv_widths[1]], axis=-1)
    keys = keys.reshape(*x.shape[:2], a.num_kv_heads, a.head_dim)
    if config.use_qk_norm:
        keys = rms_norm(keys, layer.k_norm[...], eps=config.norm_eps)
    values = values.reshape(*x.shape[:2], a.num_kv_heads, a.v_head_dim) * config.value_scale
    return apply_rope(keys, *tables), values


def dense_logits(
    target: Target,
    drafter: Drafter,
    mask_embedding: Float[Array, "d"],
    batch: Batch,
    features: Float[Array, "b s c"],
    blocks: DraftBlocks,
) -> Float[Array, "blocks m v"]:
    """Logits of the draft slots of all blocks, float32, row by row.

    Args:
      target: Gives embedding and head.
      drafter: Merged, float32.
      mask_embedding: At mask slots.
      batch: Rows.
      features: Context features of the rows.
      blocks: Their anchors.
    """
    config, a = drafter.config, drafter.config.attention
    b, num_blocks = blocks.anchor_pos.shape
    m1, eps = config.draft_block_len, config.norm_eps
    at_anchors = lambda x: jnp.take_along_axis(x, blocks.anchor_pos, axis=1)
    slots = jnp.arange(m1, dtype=jnp.int32)[None, None, :]
    positions = (at_anchors(batch.positions)[:, :, None] + slots).reshape(b, -1)
    anchors = jax.lax.stop_gradient(target.embed(at_anchors(batch.token_ids)))[:, :, None]
    masks_shape = (b, num_blocks, m1 - 1, config.hidden_size)
    masks = jnp.broadcast_to(mask_embedding[None, None, None], masks_shape)
    x = jnp.concatenate([anchors, masks], axis=2).reshape(b, num_blocks * m1, -1)
    fused = rms_norm(features @ drafter.w_fuse[...], drafter.context_norm[...], eps=eps)
    inv_freq = inverse_frequencies(a.rope_dim, a.rope_theta, a.rope_scaling)
    of_row, of_slots = (rope_tables(p, inv_freq) for p in (batch.positions, positions))
    seen = {}
    for i, layer in enumerate(drafter.layers):
        rule = (config.windows[i], config.is_causal[i])
        if rule not in seen:
            seen[rule] = dense_mask(batch, blocks, m1, *rule)
        normed = rms_norm(x, layer.attention_norm[...], eps=eps)
        queries = (normed @ layer.w_q[...]).reshape(b, -1, a.num_heads, a.head_dim)
        if config.use_qk_norm:
            queries = rms_norm(queries, layer.q_norm[...], eps=eps)
        queries = apply_rope(queries, *of_slots)
        pairs = zip(
            _keys_values(drafter, layer, fused, of_row),
            _keys_values(drafter, layer, normed, of_slots),
            strict=True,
        )
        keys, values = (jnp.concatenate(p, axis=1).transpose(0, 2, 1, 3) for p in pairs)
        sink = layer.sink[...] if a.has_sink else None
        mixed = attend(queries, [Stretch(keys, values, seen[rule])], sink=sink)
        x = x + mixed.reshape(b, -1, a.out_width) @ layer.w_out[...]
        normed = rms_norm(x, layer.ffn_norm[...], eps=eps)
        x = x + swiglu(normed, layer.w_gate[...], layer.w_up[...], layer.w_down[...])
    hidden = rms_norm(x, drafter.final_norm[...], eps=eps).reshape(b * num_blocks, m1, -1)
    return target.unembed(hidden[:, 1:], config.vocab_size)


def dense_loss(
    target: Target,
    drafter: Drafter,
    mask_embedding: Float[Array, "d"],
    batch: Batch,
    features: Float[Array, "b s c"],
    blocks: DraftBlocks,
    gamma: float,
) -> Float[Array, ""]:
    """Position-weighted cross-entropy of all slots at once; arguments as `dense_logits`."""
    logits = dense_logits(target, drafter, mask_embedding, batch, features, blocks)
    labels = jnp.where(blocks.is_valid, blocks.labels, 0)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    losses = -jnp.take_along_axis(log_q, labels[:, :, None], axis=2)[:, :, 0]
    weights = jnp.where(blocks.is_valid, draft_position_weights(labels.shape[1], gamma)[None], 0.0)
    return jnp.sum(weights * losses) / jnp.sum(weights)
