"""Partial rotary position embedding in the rotate-half layout.

Only the first `rope_dim` dims of a head are rotated; dim i pairs with dim i + rope_dim/2. Tables
are never cached: positions are absolute and per row, and computing 8 positions costs less than
reading a table.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mimo_jax.config import RopeScaling


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Rotation per position of each pair: float32 [rope_dim/2].

    Example: rope_dim=4, theta=100 -> [1.0, 0.1].

    Source: arXiv:2104.09864; the llama3 blend follows Meta's published rule.
    """
    exponents = np.arange(0, rope_dim, 2, dtype=np.float64) / rope_dim
    freqs = theta**-exponents
    if scaling is None:
        return freqs.astype(np.float32)
    if scaling.kind == "linear":
        return (freqs / scaling.factor).astype(np.float32)
    wavelengths = 2 * np.pi / freqs
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    keep = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - keep) * freqs / scaling.factor + keep * freqs
    scaled = np.where(wavelengths > low, freqs / scaling.factor, freqs)
    scaled = np.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)
    return scaled.astype(np.float32)


def rope_tables(positions: Int[Array, "b t"], inv_freq: np.ndarray):
    """(cos, sin), float32 [b, t, rope_dim/2], of absolute positions."""
    # f32: bf16 cannot hold positions above 256.
    angles = positions.astype(jnp.float32)[:, :, None] * jnp.asarray(inv_freq)[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "b t n h"],
    cos: Float[Array, "b t r"],
    sin: Float[Array, "b t r"],
) -> Float[Array, "b t n h"]:
    """Rotates the first 2r dims of each head; the rest passes through.

    Example: a head [1, 0, 5] with r=1, cos=0, sin=1 -> [0, 1, 5].
    """
    half = cos.shape[-1]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    rotated = [part.astype(x.dtype) for part in rotated]
    return jnp.concatenate([*rotated, x[..., 2 * half :]], axis=-1)
