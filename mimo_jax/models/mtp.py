"""Multi-token prediction heads of MiMo-V2: one sliding layer that looks two tokens ahead.

A head sees, at position t, the target's residual stream h_t (before its final norm) and the next
token, and predicts the token after that. Embedding and head are the target's. Speculating with
heads is not here; heads are loaded, run over whole rows and compared.

Trap: the embedding half comes first in the concatenation; exchanged halves still run.

Source: arXiv:2601.02780 section 2.3; the half order as served by the published engines.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mimo_jax.config import SLIDING, TargetConfig
from mimo_jax.layers.linear import linear
from mimo_jax.layers.norm import rms_norm
from mimo_jax.models.params import weight
from mimo_jax.models.target import Target, TargetLayer, mix_whole_rows, run_layers


def mtp_layer_config(config: TargetConfig) -> TargetConfig:
    """The target's geometry with the one dense sliding layer of a head."""
    return dataclasses.replace(
        config,
        layer_kinds=(SLIDING,),
        attention={SLIDING: config.attention[SLIDING]},
        moe=None,
        is_moe_layer=(False,),
    )


class MtpOutput(NamedTuple):
    """What a head gives.

    Attributes:
      logits: float32 [b, t, v], for the token two after each position.
      hidden: [b, t, d], the head's residual stream before its final norm.
    """

    logits: Float[Array, "b t v"]
    hidden: Float[Array, "b t d"]


class MtpHead(nnx.Module):
    """One head.

    Args:
      config: Of the target it belongs to.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs, dtype=jnp.float32):
        self.config = mtp_layer_config(config)
        self.is_transposed = False
        self.mesh_axis = None
        d = config.hidden_size
        self.embedding_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        self.hidden_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)
        self.w_combine = weight(rngs, (2 * d, d), ("context", "embed"), dtype=dtype)
        self.layers = nnx.List([TargetLayer(self.config, 0, rngs=rngs, dtype=dtype)])
        self.final_norm = weight(rngs, (d,), ("embed",), fill=1.0, dtype=dtype)

    def __call__(
        self, target: Target, next_ids: Int[Array, "b t"], hidden: Float[Array, "b t d"]
    ) -> MtpOutput:
        """Forward over whole rows.

        Args:
          target: Gives embedding and head.
          next_ids: Id at position p + 1, for each position p.
          hidden: The target's residual stream at position p, before its final norm.

        Example: ids (5, 6, 7) read by the target -> next_ids (6, 7), hidden h_0, h_1; the logits
          are for the ids at positions 2 and 3.
        """
        b, t, _ = hidden.shape
        eps = self.config.norm_eps
        embedded = rms_norm(target.embed(next_ids), self.embedding_norm[...], eps=eps)
        hidden = rms_norm(hidden, self.hidden_norm[...], eps=eps)
        x = linear(jnp.concatenate([embedded, hidden], axis=-1), self.w_combine[...])
        positions = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
        mix = mix_whole_rows(self.config, jnp.ones((b, t), jnp.int32))
        normed, _, _, residual = run_layers(self, x, positions, mix, ())
        return MtpOutput(target.unembed(normed), residual)
