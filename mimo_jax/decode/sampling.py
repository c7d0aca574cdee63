"""Logits -> token ids: greedy, temperature, filters, penalties, per row and without a host.

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
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.decode.filters import filter_logits
from mimo_jax.layers.linear import psum_over
from mimo_jax.layers.vocab import argmax_lowest, first_id, max_over

# Static choice of program, each covering the ones before it: noise costs v random numbers, filters
# 64 passes over the logits, adjusting a count per id and row.
GREEDY, SAMPLED, FILTERED, ADJUSTED = MODES = ("greedy", "sampled", "filtered", "adjusted")

# Streams of noise at one (seed, position): the token itself, a drafter's proposal, and the coin
# that judges it must not share numbers.
_TOKEN, _PROPOSAL, _COIN = None, 1, 2


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of each row of a batch.

    Attributes:
      temperature: float32 [b]; 0 = greedy.
      top_p: float32 [b] in (0, 1]; 1 = off.
      top_k: int32 [b]; 0 = off.
      min_p: float32 [b] in [0, 1); 0 = off.
      repetition_penalty: float32 [b] > 0; 1 = off.
      presence_penalty: float32 [b]; 0 = off.
      frequency_penalty: float32 [b]; 0 = off.
      bias_ids: int32 [b, n] ids with a bias, padded with -1.
      bias_values: float32 [b, n] added to their logits.
      seed: int32 [b].
    """

    temperature: Float[Array, "b"]
    top_p: Float[Array, "b"]
    top_k: Int[Array, "b"]
    min_p: Float[Array, "b"]
    repetition_penalty: Float[Array, "b"]
    presence_penalty: Float[Array, "b"]
    frequency_penalty: Float[Array, "b"]
    bias_ids: Int[Array, "b n"]
    bias_values: Float[Array, "b n"]
    seed: Int[Array, "b"]


def adjust_logits(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    num_emitted: Int[Array, "b t v"],
    is_in_prompt: Bool[Array, "b v"],
    mesh_axis: str | None = None,
) -> Float[Array, "b t v"]:
    """Raw logits with penalties for what was said before, then the biases of single ids.

    Args:
      logits: Raw.
      params: Per row.
      num_emitted: How often each id stands in the output before each position, drafts included.
      is_in_prompt: Ids of the prompt; they count for the repetition penalty only.
      mesh_axis: Over which the vocabulary is cut, or None.

    Example: logit 2, said twice, repetition 1.25, presence .5, frequency .1 -> 2 / 1.25 - .5 - .2
      = .9.

    Source: repetition as in arXiv:1909.05858 section 4.1; the other two as OpenAI's API defines.
    """
    row = lambda x: x[:, None, None]
    was_said = num_emitted > 0
    repeated = jnp.where(
        logits > 0, logits / row(params.repetition_penalty), logits * row(params.repetition_penalty)
    )
    logits = jnp.where(was_said | is_in_prompt[:, None, :], repeated, logits)
    logits = logits - row(params.presence_penalty) * was_said.astype(jnp.float32)
    logits = logits - row(params.frequency_penalty) * num_emitted.astype(jnp.float32)
    v = logits.shape[-1]
    ids = first_id(v, mesh_axis) + jnp.arange(v, dtype=jnp.int32)
    is_biased = params.bias_ids[:, :, None] == ids[None, None, :]
    bias = jnp.where(is_biased, params.bias_values[:, :, None], 0.0).sum(axis=1)
    return logits + bias[:, None, :]


def count_ids(ids: Int[Array, "b n"], keep: Bool[Array, "b n"], v: int, mesh_axis: str | None):
    """int32 [b, v]: how often each id of this device's stretch stands in a row's kept ids."""
    local = jnp.where(keep, ids - first_id(v, mesh_axis), -1)
    is_here = (local >= 0) & (local < v)
    one_row = lambda x, ok: jnp.zeros((v,), jnp.int32).at[jnp.where(ok, x, v)].add(1, mode="drop")
    return jax.vmap(one_row)(local, is_here)


def target_logits(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    mode: str,
    mesh_axis: str | None = None,
) -> Float[Array, "b t v"]:
    """Logits of the distribution that output follows: scaled by temperature, then filtered.

    In the order min-p, top-k, top-p; see `filters.filter_logits`.
    """
    # A row at temperature 0 takes the argmax of unscaled logits.
    scale = jnp.where(params.temperature > 0, params.temperature, 1.0)
    scaled = logits / scale[:, None, None]
    if mode in (FILTERED, ADJUSTED):
        kept = filter_logits(scaled, params.top_k, params.top_p, params.min_p, mesh_axis)
        scaled = jnp.where(jnp.isnan(scaled), scaled, kept)  # a broken model must not pass
    return scaled


def _key(seed, position, stream):
    key = jax.random.fold_in(jax.random.key(seed), position)
    return key if stream is None else jax.random.fold_in(key, stream)


def _gumbel(params: RowSampling, positions: Int[Array, "b t"], v: int, mesh_axis, stream):
    """Noise [b, t, v] of this device's stretch of the vocabulary."""
    whole_v = v if mesh_axis is None else v * jax.lax.axis_size(mesh_axis)

    def noise(seed, position):
        # The noise of an id must not depend on the mesh; XLA makes only the slice that is used.
        whole = jax.random.gumbel(_key(seed, position, stream), (whole_v,), jnp.float32)
        return jax.lax.dynamic_slice_in_dim(whole, first_id(v, mesh_axis), v)

    return jax.vmap(jax.vmap(noise, in_axes=(None, 0)))(params.seed, positions)


def sample(
    logits: Float[Array, "b t v"],
    params: RowSampling,
    positions: Int[Array, "b t"],
    mode: str,
    mesh_axis: str | None = None,
) -> Int[Array, "b t"]:
    """One token per position.

    Args:
      logits: Float32 logits after positions - 1, adjusted where the mode says so; on a mesh this
        device's stretch of the vocabulary.
      params: Per row.
      positions: Absolute position of each sampled token.
      mode: GREEDY ignores params; SAMPLED ignores the filters; FILTERED and ADJUSTED use all.
      mesh_axis: Over which the vocabulary is cut, or None.

    Returns:
      int32 ids, the same on every device; vocab.NO_ID where the logits are not finite.
    """
    if mode == GREEDY:
        return argmax_lowest(logits, mesh_axis)
    scaled = target_logits(logits, params, mode, mesh_axis)
    return _argmax_with_noise(scaled, params, positions, mesh_axis, _TOKEN)


def _argmax_with_noise(logits, params, positions, mesh_axis, stream):
    gumbel = _gumbel(params, positions, logits.shape[-1], mesh_axis, stream)
    is_sampled = (params.temperature > 0)[:, None, None]
    return argmax_lowest(jnp.where(is_sampled, logits + gumbel, logits), mesh_axis)


def propose(
    logits: Float[Array, "b m v"],
    params: RowSampling,
    positions: Int[Array, "b m"],
    mode: str,
    mesh_axis: str | None = None,
) -> tuple[Int[Array, "b m"], Float[Array, "b m v"]]:
    """Samples a drafter's proposals, for the rules that judge samples.

    Returns:
      (ids, the distribution that each was drawn from: temperature and filters as the target's).
    """
    scaled = target_logits(logits, params, mode, mesh_axis)
    ids = _argmax_with_noise(scaled, params, positions, mesh_axis, _PROPOSAL)
    return ids, probabilities(scaled, params, mesh_axis)


def probabilities(
    scaled: Float[Array, "b t v"], params: RowSampling, mesh_axis: str | None = None
) -> Float[Array, "b t v"]:
    """Softmax of what `target_logits` gives; one-hot in rows at temperature 0."""
    v = scaled.shape[-1]
    top = max_over(scaled.max(axis=-1), mesh_axis)[..., None]
    mass = jnp.exp(scaled - top)
    probs = mass / psum_over(mass.sum(axis=-1, keepdims=True), mesh_axis)
    ids = first_id(v, mesh_axis) + jnp.arange(v, dtype=jnp.int32)
    is_best = ids[None, None, :] == argmax_lowest(scaled, mesh_axis)[..., None]
    is_sampled = (params.temperature > 0)[:, None, None]
    return jnp.where(is_sampled, probs, is_best.astype(probs.dtype))


def coins(params: RowSampling, positions: Int[Array, "b m"]) -> Float[Array, "b m"]:
    """A number in [0, 1) per position, to judge a proposal by."""
    coin = lambda seed, position: jax.random.uniform(_key(seed, position, _COIN), (), jnp.float32)
    return jax.vmap(jax.vmap(coin, in_axes=(None, 0)))(params.seed, positions)


def sample_by_weight(
    weights: Float[Array, "b v"],
    params: RowSampling,
    positions: Int[Array, "b"],
    mesh_axis: str | None = None,
) -> Int[Array, "b"]:
    """One id per row with probability proportional to its weight; zeros are never chosen."""
    logits = jnp.where(weights > 0, jnp.log(jnp.maximum(weights, 1e-38)), -jnp.inf)
    ids = _argmax_with_noise(
        logits[:, None], params, positions[:, None], mesh_axis, _TOKEN
    )
    return ids[:, 0]


def mode_for(params) -> str:
    """The cheapest mode that serves one request.

    Args:
      params: Has the fields of `engine.Request`.
    """
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != (1.0, 0.0, 0.0) or params.logit_bias:
        return ADJUSTED
    if params.temperature <= 0:
        return GREEDY
    is_filtered = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    return FILTERED if is_filtered else SAMPLED
