"""Sum and RMS norm in plain JAX."""

import jax
import jax.numpy as jnp


def add_norm(x, addend, weight, eps: float):
    total = x + addend
    wide = total.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    normed = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    return total, normed * weight[None, :].astype(x.dtype)
