"""Experts in the tiles of the Hopper kernel: two launches for all that a step's tokens chose.

A prompt chunk has more tokens than the kernel takes; it reads the same tiles back into the order of
the files and goes the way of packed experts (`moe.run_experts`), which costs 2 bytes of traffic per
byte of a layer and is small beside a chunk's own work.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from mimo_jax.config import MoeConfig
from mimo_jax.layers import moe
from pallas_kernels.grouped_matmul.api import MAX_TOKENS, swiglu_experts
from pallas_kernels.grouped_matmul.tiles import TiledWeights, untile_weights
from pallas_kernels.router_top_k.api import router_top_k


class TiledExperts(NamedTuple):
    """Weights of one layer's experts; every stack holds one layer."""

    gate: TiledWeights
    up: TiledWeights
    down: TiledWeights


def packed(experts: TiledExperts) -> moe.PackedExperts:
    """The same in the order of the files."""
    parts = (untile_weights(weights) for weights in experts)
    return moe.PackedExperts(*(array[0] for part in parts for array in part))


def route_and_run(
    x: Float[Array, "b t d"],
    w_router: Float[Array, "d e"],
    selection_bias: Float[Array, "e"],
    experts: TiledExperts,
    config: MoeConfig,
    implementation: str,
) -> Float[Array, "b t d"]:
    """Weighted sum of the experts that the router chose for each token.

    Args:
      x: Tokens, b * t at most 64.
      w_router: As in `moe.route`.
      selection_bias: As in `moe.route`.
      experts: Of this device.
      config: top_k, scale and scoring.
      implementation: Of pallas_kernels.dispatch.
    """
    flat = x.reshape(-1, x.shape[-1])
    # One column per token: the choice is then a maximum over rows.
    logits = w_router.astype(jnp.float32).T @ flat.astype(jnp.float32).T
    choice = router_top_k(
        logits,
        selection_bias.astype(jnp.float32),
        top_k=config.top_k,
        routed_scale=config.routed_scale,
        scoring=config.scoring,
        implementation=implementation,
    )
    first_layer = jnp.zeros((1,), jnp.int32)
    out = swiglu_experts(flat, *experts, choice, first_layer, implementation=implementation)
    return out.reshape(x.shape)


def fits(num_tokens: int) -> bool:
    """Whether the kernel takes that many tokens at once. 64 -> True, 65 -> False."""
    return num_tokens <= MAX_TOKENS
