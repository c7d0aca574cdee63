"""What a checkpoint computes on given ids, as plain arrays to compare with another engine."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError


def forward_arrays(
    directory: str | os.PathLike,
    token_ids: np.ndarray,
    *,
    with_hidden: bool = False,
    drafter_dir: str | os.PathLike | None = None,
    anchor_pos: int | None = None,
    qkv_layout: str | None = None,
) -> dict[str, np.ndarray]:
    """Float32 forward of whole rows, and of one draft block per row.

    Args:
      directory: A target.
      token_ids: int32 [rows, tokens].
      with_hidden: Also the residual stream after every layer.
      drafter_dir: Also the logits of a draft block.
      anchor_pos: Position of the block's anchor; default the last token.
      qkv_layout: See `hf_target.open_target`.

    Returns:
      logits [rows, tokens, v]; per sparse layer i router_idx_i int32 (rising) and router_w_i in
      the same order, [rows, tokens, top_k]; layer_out [l, rows, tokens, d]; block_logits
      [rows, m1, v of the drafter], whose slot 0 (the anchor) predicts nothing.

    Raises:
      ConfigError: If an id, the length or the anchor is out of range; CheckpointError on loading.
    """
    config, graph, params = load_target(directory, jnp.float32, qkv_layout=qkv_layout)
    rows, num_tokens = token_ids.shape
    if token_ids.min() < 0 or token_ids.max() >= config.vocab_size:
        raise ConfigError(
            f"token ids {token_ids.min()}..{token_ids.max()}; allowed: 0..{config.vocab_size - 1}"
        )
    if num_tokens > config.max_position:
        raise ConfigError(f"{num_tokens} tokens are beyond the context of {config.max_position}")
    all_layers = tuple(range(config.num_layers))
    forward = jax.jit(lambda p, ids: nnx.merge(graph, p)(ids, tap_layer_ids=all_layers))
    out = forward(params, token_ids)
    layer_out = np.stack(np.split(np.asarray(out.context_features), config.num_layers, axis=-1))
    arrays = {"logits": np.asarray(out.logits)}
    sparse = [i for i in all_layers if config.is_moe_layer[i]]
    for layer_idx, (expert_ids, weights) in zip(sparse, out.routing, strict=True):
        order = np.argsort(np.asarray(expert_ids), axis=-1)
        arrays[f"router_idx_{layer_idx}"] = np.take_along_axis(np.asarray(expert_ids), order, -1)
        arrays[f"router_w_{layer_idx}"] = np.take_along_axis(np.asarray(weights), order, -1)
    if with_hidden:
        arrays["layer_out"] = layer_out
    if drafter_dir is None:
        return arrays

    draft_config, draft_graph, draft_params = load_drafter(drafter_dir, jnp.float32)
    draft_config.check_fits(config)
    anchor = num_tokens - 1 if anchor_pos is None else anchor_pos
    if not 1 <= anchor < num_tokens:
        raise ConfigError(f"anchor {anchor} is out of range; allowed: 1..{num_tokens - 1}")
    m1 = draft_config.draft_block_len
    features = np.concatenate([layer_out[i] for i in draft_config.target_layer_ids], axis=-1)

    @jax.jit
    def draft(params, draft_params, context_features, ids, anchors):
        target, drafter = nnx.merge(graph, params), nnx.merge(draft_graph, draft_params)
        here = jnp.full((rows,), anchor, jnp.int32)
        cache = drafter.make_cache(rows, num_tokens + m1, m1)
        cache = drafter.inject_prompt(
            target, cache, context_features, ids, jnp.zeros_like(here), here
        )
        block = drafter.embed_block(target, anchors, m1)
        hidden = drafter.draft_hidden(block, cache, here, jnp.full((rows,), m1, jnp.int32))
        return target.unembed(hidden, draft_config.vocab_size)

    logits = draft(
        params, draft_params, features[:, :anchor], token_ids[:, :anchor], token_ids[:, anchor]
    )
    return arrays | {"block_logits": np.asarray(logits)}
