"""The router's choice for the few tokens of a decode step, in one launch.

XLA needs six or seven for the same (a sort of all scores, gathers, counting, a scatter), in every
sparse layer. Besides each token's experts the op gives the list of distinct ones, which is what the
expert products go through (`grouped_matmul`).
"""

from typing import NamedTuple

import jax

from pallas_kernels import dispatch
from pallas_kernels.router_top_k import reference

SCORINGS = ("sigmoid", "softmax")
# One thread block compares all choices with all: 16 tokens of 8 experts fill its registers, and
# larger trees take the plain path.
MAX_KERNEL_CHOICES = 128


class Choice(NamedTuple):
    """Who goes to which expert.

    Attributes:
      expert_ids: int32 [top_k * t], distinct experts in front, by first appearance.
      num_active: int32, how many they are, in every entry.
      choices: int32 [top_k, t], each token's experts, best first; -1 = none.
      weights: float32 [top_k, t].
    """

    expert_ids: jax.Array
    num_active: jax.Array
    choices: jax.Array
    weights: jax.Array


def router_top_k(
    logits: jax.Array,
    bias: jax.Array,
    *,
    top_k: int,
    routed_scale: float = 1.0,
    scoring: str = "sigmoid",
    implementation: str,
) -> Choice:
    """Chooses top_k experts per token; ties go to the lower index.

    Args:
      logits: float32 [e, t], one column per token, 1..64 of them.
      bias: float32 [e]. Moves the choice only; weights come from the unbiased scores, renormalised.
      top_k: Experts per token, at most e.
      routed_scale: Factor on the weights.
      scoring: One of SCORINGS.
      implementation: One of dispatch.IMPLEMENTATIONS; the kernel takes up to MAX_KERNEL_CHOICES.

    Raises:
      ValueError: If top_k, the number of tokens or scoring is not allowed.

    Example: logits (0, 2, 1) for one token, no bias, top_k 2 -> choices (1, 2), scores .8808 and
      .7311, weights .5465 and .4535; two distinct experts, (1, 2).
    """
    dispatch.check(implementation)
    e, t = logits.shape
    if not 1 <= top_k <= e:
        raise ValueError(f"top_k {top_k} must be in 1..{e}, the number of experts")
    if not 1 <= t <= 64:
        raise ValueError(f"logits are of {t} tokens; 1..64 are allowed")
    if scoring not in SCORINGS:
        raise ValueError(f"scoring {scoring!r} is unknown; allowed: {', '.join(SCORINGS)}")
    options = {"top_k": top_k, "routed_scale": routed_scale, "scoring": scoring}
    if implementation == dispatch.XLA or top_k * -(-t // 8) * 8 > MAX_KERNEL_CHOICES:
        choices, weights = reference.router_top_k(logits, bias, **options)
        return Choice(*reference.distinct(choices), choices, weights)
    from pallas_kernels.router_top_k import pallas_mosaic_gpu as kernel

    return Choice(*kernel.router_top_k(logits, bias, **options, implementation=implementation))
