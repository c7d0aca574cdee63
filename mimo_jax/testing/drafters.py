"""Drafters that follow a script: the decode loop must be exact whatever they propose.

Each has the interface that the loop asks of `models.drafter.Drafter`, and as context memory a
cache of one dummy layer.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax import cache as kv
from mimo_jax.config import DrafterConfig
from mimo_jax.models.drafter import Drafter


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


class TableDrafter(Drafter):
    """Has a drafter's memory and injection, but proposes from a table by the anchor alone.

    Args:
      config: As a drafter's.
      table: float32 [v, m, v], logits of each slot after each anchor.
      rngs: Of the weights, which decide nothing but the contents of the memory.

    Example: `TableDrafter(config, table_of(texts, config), rngs=nnx.Rngs(0))` proposes what
      followed the anchor in some texts: right often enough to take every path of the loop.
    """

    def __init__(self, config: DrafterConfig, table, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.table = nnx.Param(jnp.asarray(table, jnp.float32), logical_axes=(None, None, None))

    def draft_logits(self, target, anchors, cache, anchor_pos, active_len, draft_block_len):
        return self.table[...][anchors][:, : draft_block_len - 1]


def table_of(texts: Sequence[Sequence[int]], config: DrafterConfig) -> np.ndarray:
    """Logits [v, m, v]: log of how often each id stood 1..m places after each anchor, plus .1."""
    v, m = config.vocab_size, config.num_draft_tokens
    counts = np.full((v, m, v), 0.1, np.float32)
    for text in texts:
        for i, anchor in enumerate(text):
            for j, token_id in enumerate(text[i + 1 : i + 1 + m]):
                counts[anchor, j, token_id] += 1
    return np.log(counts)
