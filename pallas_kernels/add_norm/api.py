"""The residual stream's next value and its norm, in one launch.

XLA makes the norm one launch and computes the sum inside it, but where the sum is read again later
it stores it by a launch of its own: in 38 of the 150 halves of the Pro's step.
"""

import jax

from pallas_kernels import dispatch
from pallas_kernels.add_norm import reference


def add_norm(
    x: jax.Array, addend: jax.Array, weight: jax.Array, *, eps: float, implementation: str
) -> tuple[jax.Array, jax.Array]:
    """(x + addend, its RMS norm times weight).

    Args:
      x: Residual stream [t, d]; d a multiple of 128 in the kernel.
      addend: As x.
      weight: [d].
      eps: Added to the mean square.
      implementation: One of dispatch.IMPLEMENTATIONS.

    Raises:
      ValueError: If shapes differ, or d is no multiple of 128 (kernel).

    Example: x (3, 0), addend (0, 4), weight 1, eps 0 -> (3, 4) and (.8485, 1.1314).
    """
    dispatch.check(implementation)
    if x.shape != addend.shape or weight.shape != x.shape[1:]:
        raise ValueError(f"x {x.shape}, addend {addend.shape}, weight {weight.shape} do not fit")
    if implementation == dispatch.XLA:
        return reference.add_norm(x, addend, weight, eps)
    if x.shape[1] % 128:
        raise ValueError(f"x has {x.shape[1]} columns; the kernel takes multiples of 128")
    from pallas_kernels.add_norm import pallas_mosaic_gpu as kernel

    return kernel.add_norm(x, addend, weight, eps=eps, implementation=implementation)
