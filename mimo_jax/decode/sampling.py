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

from mimo_jax.decode.filters import filter_logits
from mimo_jax.layers.vocab import argmax_lowest, first_id

# Static choice of program: filters cost 64 passes over the logits, noise costs v random numbers.
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


def target_logits(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    mode: str,
    mesh_axis: str | None = None,
) -> Float[Array, "b t v"]:
    """Logits of the distribution that output follows: scaled by temperature, then filtered."""
    # A row at temperature 0 takes the argmax of unscaled logits.
    scale = jnp.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits / scale[:, None, None]
    if mode == FILTERED:
        scaled = filter_logits(scaled, params.top_k, params.top_p, mesh_axis)
    return scaled


def sample(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    positions: Int[Array, "b t"],
    mode: str,
    mesh_axis: str | None = None,
) -> Int[Array, "b t"]:
    """One token per position.

    Args:
      logits: Raw float32 logits after positions - 1; on a mesh this device's stretch of the
        vocabulary.
      params: Per row.
      positions: Absolute position of each sampled token.
      mode: GREEDY ignores params; SAMPLED ignores top_k and top_p; FILTERED uses all.
      mesh_axis: Over which the vocabulary is cut, or None.

    Returns:
      int32 ids, the same on every device.
    """
    if mode == GREEDY:
        return argmax_lowest(logits, mesh_axis)
    scaled = target_logits(logits, params, mode, mesh_axis)
    v = logits.shape[-1]
    whole_v = v if mesh_axis is None else v * jax.lax.axis_size(mesh_axis)

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        # The noise of an id must not depend on the mesh; XLA makes only the slice that is used.
        whole = jax.random.gumbel(key, (whole_v,), jnp.float32)
        return jax.lax.dynamic_slice_in_dim(whole, first_id(v, mesh_axis), v)

    gumbel = jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(params.seed, positions)
    is_sampled = (params.temperature > 0)[:, None, None]
    return argmax_lowest(jnp.where(is_sampled, scaled + gumbel, scaled), mesh_axis)


def mode_for(temperature: float, top_p: float, top_k: int) -> str:
    """The cheapest mode that serves one request."""
    if temperature <= 0:
        return GREEDY
    return FILTERED if top_p < 1 or top_k > 0 else SAMPLED
