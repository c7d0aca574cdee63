"""Attention of one block in plain `jax.numpy`, float32: what the kernel must agree with.

Also the XLA implementation. It reads the whole memory, whatever the length of the row.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.sink_attention import block

# Finite, so that a query that sees nothing gives an average and not NaN.
MASKED_SCORE = -1e30


def rms_norm(x: jax.Array, weight: jax.Array, eps: float):
    """Float32 [.., h] over its root mean square, times a plain weight.

    Example: x=[3, 4], weight=[1, 1], eps=0 -> [0.8485, 1.1314].
    """
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    shape = (1,) * (x.ndim - 1) + weight.shape
    return x * jax.lax.rsqrt(mean_square + eps) * weight.astype(jnp.float32).reshape(shape)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates dim i < r of each head against dim i + r; the rest passes through.

    Example: a head [1, 0, 5] with r=1, cos=0, sin=1 -> [0, 1, 5].
    """
    half = cos.shape[-1]
    first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def own_keys(x: jax.Array, k: int, cos, sin, k_norm, norm_eps: float, dtype) -> jax.Array:
    """The block's keys as memory holds them: normed, rotated, head-major."""
    b, t, width = x.shape
    keys = x.astype(jnp.float32).reshape(b, t, k, width // k)
    if k_norm is not None:
        keys = rms_norm(keys, k_norm, norm_eps)
    return rotate(keys, cos, sin).transpose(0, 2, 1, 3).astype(dtype)


def own_values(x: jax.Array, k: int, value_scale: float, dtype) -> jax.Array:
    """The block's values as memory holds them: scaled, without NaN and infinities, head-major."""
    b, t, width = x.shape
    values = (x.astype(jnp.float32) * value_scale).reshape(b, t, k, width // k)
    return jnp.nan_to_num(values.transpose(0, 2, 1, 3).astype(dtype))


def write_rows(memory: jax.Array, new: jax.Array, first_slot):
    """The memory with each row's block at slots first_slot .. first_slot + t - 1."""

    def write(row, new_row, slot):
        return jax.lax.dynamic_update_slice(row, new_row, (0, slot, 0))

    return jax.vmap(write)(memory, new, first_slot)


def sink_attention(
    qkv,
    keys,
    values,
    *,
    start,
    depths,
    sees,
    slot_positions,
    cos,
    sin,
    sink,
    q_norm,
    k_norm,
    norm_eps: float,
    value_scale: float,
    window: int | None,
    write: bool,
    first_slot,
):
    """As `api.sink_attention`, which says what everything is."""
    b, t, _ = qkv.shape
    _, k, s, h = keys.shape
    hv = values.shape[3]
    n = (qkv.shape[2] - k * (h + hv)) // h
    q_part, k_part, v_part = jnp.split(qkv, [n * h, (n + k) * h], axis=-1)
    queries = q_part.astype(jnp.float32).reshape(b, t, n, h)
    if q_norm is not None:
        queries = rms_norm(queries, q_norm, norm_eps)
    queries = rotate(queries, cos, sin).reshape(b, t, k, n // k, h)
    new_keys = own_keys(k_part, k, cos, sin, k_norm, norm_eps, keys.dtype)
    new_values = own_values(v_part, k, value_scale, values.dtype)

    if slot_positions is None:
        slot_positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
    positions = slot_positions[:, None, :]
    in_memory = (positions >= 0) & (positions < start[:, None, None])
    in_memory = jnp.broadcast_to(in_memory, (b, t, s))
    in_block = block.unpack_bits(sees)
    if window is not None:
        query_pos = (start[:, None] + depths)[:, :, None]
        in_memory &= query_pos - positions < window
        in_block &= depths[:, :, None] - depths[:, None, :] < window

    def scores(of_keys, seen):
        part = jnp.einsum("btkgh,bksh->bkgts", queries, of_keys.astype(jnp.float32))
        return jnp.where(seen[:, None, None], part * h**-0.5, MASKED_SCORE)

    part = jnp.concatenate([scores(keys, in_memory), scores(new_keys, in_block)], axis=-1)
    top = part.max(axis=-1, keepdims=True)
    if sink is not None:
        logit = sink.astype(jnp.float32).reshape(1, k, n // k, 1, 1)
        top = jnp.maximum(top, logit)
    weights = jnp.exp(part - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + jnp.exp(logit - top)
    weights = weights / total
    of_memory, of_block = weights[..., :s], weights[..., s:]
    out = jnp.einsum("bkgts,bksv->btkgv", of_memory, values.astype(jnp.float32))
    out = out + jnp.einsum("bkgts,bksv->btkgv", of_block, new_values.astype(jnp.float32))
    out = out.reshape(b, t, n * hv).astype(qkv.dtype)
    if not write:
        return out, new_keys, new_values
    return out, write_rows(keys, new_keys, first_slot), write_rows(values, new_values, first_slot)


def write_context(kv, keys, values, *, first_slot, cos, sin, k_norm, norm_eps, value_scale):
    """As `api.write_context`."""
    k, h = keys.shape[1], keys.shape[3]
    k_part, v_part = jnp.split(kv, [k * h], axis=-1)
    new_keys = own_keys(k_part, k, cos, sin, k_norm, norm_eps, keys.dtype)
    new_values = own_values(v_part, k, value_scale, values.dtype)
    return write_rows(keys, new_keys, first_slot), write_rows(values, new_values, first_slot)
