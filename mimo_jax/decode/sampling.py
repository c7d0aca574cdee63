"""Logits -> token ids: greedy, temperature, top-k, top-p, per row and without a host.

Noise is Gumbel-max, keyed by (row's seed, absolute position of the sampled token). A token's
choice then depends on nothing but its own logits, seed and position: sampled speculation with
argmax drafts equals plain sampling token for token, and a row's text does not depend on the batch
around it (float32, up to near ties). Rejected: one key stream per loop step, which would tie the
text to how many tokens each step accepted.

Ties: the lowest id wins, in every mode.
"""

import dataclasses
from typing import no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mimo_jax.layers.vocab import argmax_lowest

# Static choice of program: filters cost a sort of the vocabulary, noise costs v random numbers.
GREEDY, SAMPLED, FILTERED = "greedy", "sampled", "filtered"


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of each row of a batch.

    Attributes:
      temperature: float32 [b]; 0 = greedy.
      top_p: float32 [b] in (0, 1]; 1 = off.
      top_k: int32 [b]; 0 = off.
      seed: int32 [b].
    """

    temperature: Float[Array, "b"]
    top_p: Float[Array, "b"]
    top_k: Int[Array, "b"]
    seed: Int[Array, "b"]


def filter_logits(
    logits: Float[Array, "b t v"], top_k: Int[Array, "b"], top_p: Float[Array, "b"]
) -> Float[Array, "b t v"]:
    """Sets logits outside top-k, then outside the nucleus, to -inf.

    A token stays in the nucleus while the mass before it (larger logits) is below top_p; the
    largest always stays. Ties at the border are cut by sort order.

    Example: probabilities (.5, .3, .2), top_k=0, top_p=.6 -> the first two stay.
    """
    v = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(v, dtype=jnp.int32)[None, None, :]
    limit = jnp.where(top_k > 0, top_k, v)[:, None, None]
    ranked = jnp.where(rank < limit, ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    mass_before = jnp.cumsum(probs, axis=-1) - probs
    ranked = jnp.where((mass_before < top_p[:, None, None]) | (rank == 0), ranked, -jnp.inf)
    back = jnp.argsort(order, axis=-1)
    return jnp.take_along_axis(ranked, back, axis=-1)


def target_logits(logits, params: RowSampling, mode: str):
    """Logits of the distribution that output follows: scaled by temperature, then filtered."""
    # A row at temperature 0 takes the argmax of unscaled logits.
    scale = jnp.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits / scale[:, None, None]
    if mode == FILTERED:
        scaled = filter_logits(scaled, params.top_k, params.top_p)
    return scaled


def sample(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    positions: Int[Array, "b t"],
    mode: str,
) -> Int[Array, "b t"]:
    """One token per position.

    Args:
      logits: Raw float32 logits after positions - 1.
      params: Per row.
      positions: Absolute position of each sampled token.
      mode: GREEDY ignores params; SAMPLED ignores top_k and top_p; FILTERED uses all.

    Returns:
      int32 ids.
    """
    if mode == GREEDY:
        return argmax_lowest(logits)
    scaled = target_logits(logits, params, mode)
    v = logits.shape[-1]

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (v,), jnp.float32)

    gumbel = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(params.seed, positions)
    is_sampled = (params.temperature > 0)[:, None, None]
    return argmax_lowest(jnp.where(is_sampled, scaled + gumbel, scaled))


def mode_for(temperature: float, top_p: float, top_k: int) -> str:
    """The cheapest mode that serves one request."""
    if temperature <= 0:
        return GREEDY
    return FILTERED if top_p < 1 or top_k > 0 else SAMPLED
