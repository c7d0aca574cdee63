"""The product in plain `jax.numpy`: what the kernel must agree with, and the XLA implementation."""

import jax
import jax.numpy as jnp

SCALE_BLOCK = 128


def decode(codes: jax.Array, scale: jax.Array) -> jax.Array:
    """e4m3 [out, in] times the float32 scale of its 128x128 block -> float32 [out, in].

    Example: code 1.5 at row 130, column 5 under scale[1, 0] = 0.25 -> 0.375.
    """
    out_len, in_len = codes.shape
    rows = jnp.repeat(scale, SCALE_BLOCK, axis=0)[:out_len]
    return codes.astype(jnp.float32) * jnp.repeat(rows, SCALE_BLOCK, axis=1)[:, :in_len]


def normalise(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm of the last axis in float32, times a plain weight -> float32."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32 * inverse * weight.astype(jnp.float32)[None, :]


def matmul(
    x: jax.Array,
    weights: jax.Array,
    scale: jax.Array | None,
    norm: tuple[jax.Array, float] | None,
    out_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """normed(x) [t, in] @ decoded(weights) [out, in].T -> [t, out]; sums in float32."""
    rows = x.astype(jnp.float32) if norm is None else normalise(x, *norm)
    matrix = weights.astype(jnp.float32) if scale is None else decode(weights, scale)
    return jnp.matmul(rows, matrix.T, precision="highest").astype(out_dtype)
