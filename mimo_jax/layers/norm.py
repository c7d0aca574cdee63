"""RMS norm, computed in float32 and cast back."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


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
