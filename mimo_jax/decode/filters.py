"""Min-p, top-k and nucleus filters by searching for a threshold instead of sorting.

What a filter keeps is "all logits above a threshold, and of those equal to it the first few ids".
The threshold is found bit by bit in an order-preserving integer view of the floats, each round
counting (or weighing) what lies at or above a candidate. Counts and masses of a vocabulary that is
cut over devices add up by one small `psum` a round, where a sort would need all logits in one
place; there a round decides four bits at once: 8 sums instead of 32, for more arithmetic. On one
device the search beats the sort as well: 8 positions of 2,048 ids take 0.5 ms against 2.5, of
152,576 ids 36 against 150 (AMD Zen 4, 2 cores, 2026-11-30).

The threshold is an exact float; masses are float32 sums, so a nucleus whose border falls within
rounding of top_p may differ by the token at the border from a sum taken in another order.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.layers.linear import psum_over
from mimo_jax.layers.vocab import from_all_devices, max_over


def _ordered_bits(x: Float[Array, "b t v"]):
    """uint32 whose order is that of the floats; -0 counts as 0."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where((bits & sign) != 0, ~bits, bits | sign)


def _largest_threshold(keys, amounts, wanted, mesh_axis):
    """Largest key T such that the amounts at keys >= T sum to `wanted` or more; 0 if none does.

    Args:
      keys: uint32 [b, t, v].
      amounts: [b, t, v] >= 0, of any dtype.
      wanted: [b, t].
      mesh_axis: Over which the vocabulary is cut, or None.
    """
    num_bits = 1 if mesh_axis is None else 4
    candidates = jnp.arange(1, 1 << num_bits, dtype=jnp.uint32)[None, None, :]

    def narrow(i, prefix):
        shift = (32 - num_bits * (i + 1)).astype(jnp.uint32)
        thresholds = prefix[..., None] | (candidates << shift)  # [b, t, 1 or 15]
        is_above = keys[:, :, None, :] >= thresholds[..., None]
        sums = jnp.where(is_above, amounts[:, :, None, :], jnp.zeros((), amounts.dtype)).sum(-1)
        is_enough = psum_over(sums, mesh_axis) >= wanted[..., None]
        return jnp.where(is_enough, thresholds, prefix[..., None]).max(axis=-1)

    start = jnp.zeros(wanted.shape, jnp.uint32)
    return jax.lax.fori_loop(0, 32 // num_bits, narrow, start)


def _rank_among(ties: Bool[Array, "b t v"], mesh_axis) -> Int[Array, "b t v"]:
    """How many ties stand before each id, counted over the whole vocabulary."""
    before = jnp.cumsum(ties.astype(jnp.int32), axis=-1) - ties.astype(jnp.int32)
    if mesh_axis is None:
        return before
    totals = from_all_devices(ties.sum(axis=-1, dtype=jnp.int32), mesh_axis)
    device = jnp.arange(totals.shape[0])[:, None, None]
    lower = jnp.where(device < jax.lax.axis_index(mesh_axis), totals, 0).sum(axis=0)
    return before + lower[..., None]


def _keep_largest(keys, amounts, wanted, mesh_axis):
    """Mask of the smallest set of largest keys whose amounts reach `wanted`; ties by lowest id."""
    threshold = _largest_threshold(keys, amounts, wanted, mesh_axis)[..., None]
    is_above, is_tie = keys > threshold, keys == threshold
    zero = jnp.zeros((), amounts.dtype)
    above = psum_over(jnp.where(is_above, amounts, zero).sum(-1), mesh_axis)[..., None]
    mass_before = above + _rank_among(is_tie, mesh_axis).astype(amounts.dtype) * amounts
    return is_above | (is_tie & (mass_before < wanted[..., None]))


def filter_logits(
    logits: Float[Array, "b t v"],
    top_k: Int[Array, "b"],
    top_p: Float[Array, "b"],
    min_p: Float[Array, "b"],
    mesh_axis: str | None = None,
) -> Float[Array, "b t v"]:
    """Sets logits below min-p, outside top-k, then outside the nucleus, to -inf.

    A token stays in the nucleus while the mass before it (larger logits, then equal ones of lower
    id) is below top_p; the largest always stays.

    Args:
      logits: Float32; on a mesh this device's stretch of the vocabulary.
      top_k: 0 = off.
      top_p: In (0, 1]; 1 = off.
      min_p: In [0, 1): least probability, as a share of the largest; 0 = off.
      mesh_axis: Over which the vocabulary is cut, or None.

    Example: probabilities (.5, .3, .2), top_k=0, top_p=.6 -> the first two stay.
    """
    b, t, v = logits.shape
    top = max_over(logits.max(axis=-1), mesh_axis)[..., None]
    # log 0 = -inf keeps everything.
    logits = jnp.where(logits >= top + jnp.log(min_p)[:, None, None], logits, -jnp.inf)
    keys = _ordered_bits(logits)
    limit = jnp.broadcast_to(top_k[:, None], (b, t))
    keep = _keep_largest(keys, jnp.ones((b, t, v), jnp.int32), limit, mesh_axis)
    logits = jnp.where(keep | (limit == 0)[..., None], logits, -jnp.inf)
    mass = jnp.exp(logits - top)
    total = psum_over(mass.sum(axis=-1), mesh_axis)
    keep = _keep_largest(keys, mass, total * top_p[:, None], mesh_axis)
    return jnp.where(keep | (top_p >= 1)[:, None, None], logits, -jnp.inf)
