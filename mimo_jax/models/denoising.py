"""A DFlash drafter that fills its block in several passes, the most confident slots first.

DFlash is trained for one denoising step: every slot is a mask, all are filled at once. A diffusion
model would take more. Here the same drafter runs k times over a block: after each pass but the last
the most confident slots keep their proposal, the others are masked again and may now see it. That
costs k draft passes; what it buys is measured by `python -m mimo_jax.bench drafters`.

A slot's logits are those of the pass that filled it, so every acceptance rule judges what was
proposed. Which slots are filled is remembered as such: a proposal may well be the mask id itself.

Source: the row "diffusion drafting" follows DiffuSpec's idea of trading passes for quality, with
the drafter of arXiv:2602.06036 instead of a diffusion language model.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mimo_jax import cache as kv
from mimo_jax.config import DrafterConfig, require
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract
from mimo_jax.models.target import Target


class DenoisingDrafter(Drafter):
    """A drafter of several passes; weights and memory are those of `Drafter`.

    Args:
      config: As `Drafter`.
      num_passes: Draft passes over a block, >= 1; 1 is `Drafter`.
    """

    def __init__(
        self, config: DrafterConfig, num_passes: int, *, rngs: nnx.Rngs, dtype=jnp.float32
    ):
        require(num_passes >= 1, f"num_passes {num_passes} must be >= 1")
        super().__init__(config, rngs=rngs, dtype=dtype)
        self.num_passes = num_passes

    def draft_logits(
        self,
        target: Target,
        anchors: Int[Array, "b"],
        cache: kv.KVCache,
        anchor_pos: Int[Array, "b"],
        active_len: Int[Array, "b"],
        draft_block_len: int,
    ) -> Float[Array, "b m v"]:
        """As `Drafter.draft_logits`; each slot's logits come from the pass that filled it."""
        require(self.mesh_axis is None, "drafting in several passes runs on one device only")
        masked = self.embed_block(target, anchors, draft_block_len)
        m = draft_block_len - 1
        is_usable = jnp.arange(1, draft_block_len, dtype=jnp.int32)[None, :] < active_len[:, None]
        block, is_filled, kept = masked, jnp.zeros(is_usable.shape, bool), None
        for number in range(1, self.num_passes + 1):
            hidden = self.draft_hidden(block, cache, anchor_pos, active_len)
            logits = target.unembed(hidden[:, 1:], self.config.vocab_size)
            kept = logits if kept is None else jnp.where(is_filled[..., None], kept, logits)
            if number < self.num_passes:
                num_filled = -(-m * number // self.num_passes)
                is_filled = most_confident(kept, is_filled, is_usable, num_filled)
                proposals = target.embed(argmax_lowest(kept))
                slots = jnp.where(is_filled[..., None], proposals, masked[:, 1:])
                block = jnp.concatenate([masked[:, :1], slots], axis=1)
        assert kept is not None  # there is at least one pass
        return kept


def most_confident(
    logits: Float[Array, "b m v"],
    is_filled: Bool[Array, "b m"],
    is_usable: Bool[Array, "b m"],
    num_filled: int,
) -> Bool[Array, "b m"]:
    """Slots to be filled by now: those that are, and of the others the likeliest proposals.

    Args:
      logits: Of every slot.
      is_filled: Stay so.
      is_usable: The others are filled last.
      num_filled: How many there shall be.

    Example: largest probabilities (.5, .9, .7), none filled, all usable, num_filled 2 -> (F, T, T).
    """
    confidence = logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1)
    confidence = jnp.where(is_usable, confidence, -jnp.inf)
    confidence = jnp.where(is_filled, jnp.inf, confidence)
    rank = jnp.argsort(jnp.argsort(-confidence, axis=-1, stable=True), axis=-1)
    return rank < num_filled


def with_passes(config: DrafterConfig, graph, params, num_passes: int):
    """(config, graph, params) of the same drafter with several passes; for `Model`.

    Args:
      config: Of a DFlash drafter.
      graph: Its graph.
      params: Its parameters, shared and not copied.
      num_passes: Draft passes over a block.

    Example: `LLM(target, Model(*with_passes(d.config, d.graph, d.params, 2)))`.
    """
    dtype = jax.tree.leaves(params)[0].dtype
    make = lambda: DenoisingDrafter(config, num_passes, rngs=nnx.Rngs(0), dtype=dtype)
    new_graph, _ = abstract(make)
    module = nnx.merge(new_graph, params)
    module.is_transposed = nnx.merge(graph, params).is_transposed
    return config, nnx.split(module)[0], params
