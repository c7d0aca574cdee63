"""RMS norm, computed in float32 and cast back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.add_norm import api
from pallas_kernels.dispatch import XLA

MAX_KERNEL_TOKENS = 64  # a decode step's; prompt chunks are XLA's


def rms_norm(x: Float[Array, "*b d"], weight: Float[Array, "d"], *, eps: float):
    """Divides the last axis by its root mean square and multiplies by a plain weight.

    Args:
      x: Any leading shape; any float dtype.
      weight: Not offset by one.
      eps: Added to the mean square.

    Returns:
      Same shape and dtype as x: x is normalised in float32, cast back, then weighted.

    Example: x=[3, 4], weight=[1, 1], eps=0 -> [0.8485, 1.1314] (rms = sqrt(12.5)).
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, axis=-1, keepdims=True)
    normed = (x32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return normed * jnp.broadcast_to(weight.astype(x.dtype), x.shape)


def add_and_norm(
    x: Float[Array, "b t d"],
    addend: Float[Array, "b t d"],
    weight: Float[Array, "d"],
    *,
    eps: float,
    implementation: str = XLA,
) -> tuple[Float[Array, "b t d"], Float[Array, "b t d"]]:
    """(x + addend, its RMS norm): one launch with a kernel of pallas_kernels.dispatch."""
    if implementation == XLA or x.shape[0] * x.shape[1] > MAX_KERNEL_TOKENS:
        x = x + addend
        return x, rms_norm(x, weight, eps=eps)
    rows, added = (y.reshape(-1, y.shape[-1]) for y in (x, addend))
    total, normed = api.add_norm(rows, added, weight, eps=eps, implementation=implementation)
    return total.reshape(x.shape), normed.reshape(x.shape)
