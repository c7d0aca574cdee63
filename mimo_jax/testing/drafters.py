"""Drafters that follow a script: the decode loop must be exact whatever they propose.

Each has the interface that the loop asks of `models.drafter.Drafter`, and as context memory a
cache of one dummy layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from mimo_jax import cache as kv
from mimo_jax.config import DrafterConfig


class ScriptedDrafter(nnx.Module):
    """Proposes from a script of token ids by absolute position.

    Args:
      config: Only its lengths, taps and vocab_size are used.
      script: int32 [s]; the proposal for position p is script[p].
      is_right: False proposes (script[p] + 1) % vocab_size instead: always wrong when the script
        is what the target says.
    """

    def __init__(self, config: DrafterConfig, script, *, is_right: bool = True):
        self.config = config
        self.layers = nnx.List([])
        self.is_transposed = False
        self.is_right = is_right
        self.script = nnx.Param(jnp.asarray(script, jnp.int32))

    def make_cache(self, batch_size: int, max_len: int, slack: int) -> kv.KVCache:
        return kv.make_cache(
            batch_size, max_len, [(1, 1, 1)], (None,), slack=slack, dtype=jnp.float32
        )

    def inject_prompt(self, target, cache, context_features, token_ids, start, num_valid):
        return cache

    def inject_context(self, target, cache, context_features, token_ids, start):
        return cache

    def draft_logits(self, target, anchors, cache, anchor_pos, active_len, draft_block_len):
        offsets = jnp.arange(1, draft_block_len, dtype=jnp.int32)[None, :]
        script = self.script[...]
        ids = jnp.take(script, anchor_pos[:, None] + offsets, mode="clip")
        ids = ids if self.is_right else (ids + 1) % self.config.vocab_size
        return jax.nn.one_hot(ids, self.config.vocab_size, dtype=jnp.float32)


class RandomDrafter(ScriptedDrafter):
    """Proposes pseudo-random ids that depend on the position only."""

    def __init__(self, config: DrafterConfig, *, seed: int = 0, max_len: int = 1024):
        script = jax.random.randint(jax.random.key(seed), (max_len,), 0, config.vocab_size)
        super().__init__(config, script)
