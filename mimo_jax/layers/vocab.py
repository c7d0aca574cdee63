"""The vocabulary axis: embedding, argmax, and what must look at all of it at once.

On a mesh the vocabulary is cut: each device holds a stretch of the embedding's rows and of the
head's columns, and logits are never gathered. What crosses devices is one sum of embedded tokens
and, per choice, one (value, id) pair per device. Both travel by `psum` alone, as int32 bits where
an id or an exact value is meant (a float sum may flush what looks like a denormal, and other
collectives leave the CUDA graph of the decode loop).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from mimo_jax.layers.linear import psum_over

NO_ID = -1  # where logits allow no choice: their largest is NaN or infinite


def first_id(num_local: int, mesh_axis: str | None) -> Int[Array, ""]:
    """Global id of this device's first entry. Example: 8 entries each, third device -> 16."""
    if mesh_axis is None:
        return jnp.zeros((), jnp.int32)
    return jax.lax.axis_index(mesh_axis) * num_local


def embed_rows(
    embedding: Float[Array, "v d"], token_ids: Int[Array, "*b"], mesh_axis: str | None = None
) -> Float[Array, "*b d"]:
    """Rows of an embedding; on a mesh each device holds a stretch of rows, and one psum joins."""
    if mesh_axis is None:
        return jnp.take(embedding, token_ids, axis=0)
    v = embedding.shape[0]
    local_ids = token_ids - first_id(v, mesh_axis)
    rows = jnp.take(embedding, jnp.clip(local_ids, 0, v - 1), axis=0)
    is_here = (local_ids >= 0) & (local_ids < v)
    return psum_over(jnp.where(is_here[..., None], rows, jnp.zeros_like(rows)), mesh_axis)


def argmax_lowest(
    logits: Float[Array, "*b v"], mesh_axis: str | None = None
) -> Int[Array, "*b"]:
    """Index of the maximum, the lowest on ties, as int32; two vectorised passes.

    XLA:CPU compiles jnp.argmax to a scalar loop over (value, index) pairs. On a mesh the logits
    are this device's stretch of the vocabulary and the index is global.

    Logits that hold NaN or +inf, or only -inf, give NO_ID: a broken model is noticed by the pass
    over its logits that is made anyway. (Their maximum alone says nothing: XLA:CPU's loses NaN.)

    Example: (3, 7, 7) -> 1; (3, nan, 7) -> -1; (-inf, 2) -> 1.
    """
    v = logits.shape[-1]
    top = logits.max(axis=-1, keepdims=True)
    index = jnp.arange(v, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (v,))
    otherwise = jnp.where(jnp.isnan(logits), NO_ID, v - 1)
    best = jnp.min(jnp.where(logits == top, index, otherwise), axis=-1)
    if mesh_axis is None:
        return jnp.where(jnp.isfinite(top[..., 0]), best, NO_ID)
    bits = jax.lax.bitcast_convert_type(top[..., 0].astype(jnp.float32), jnp.int32)
    best = jnp.where(best == NO_ID, NO_ID, best + first_id(v, mesh_axis))
    pairs = from_all_devices(jnp.stack([bits, best]), mesh_axis)
    tops = jax.lax.bitcast_convert_type(pairs[:, 0], jnp.float32)
    whole_top = tops.max(axis=0)
    is_usable = jnp.isfinite(whole_top) & (pairs[:, 1] != NO_ID).all(axis=0)
    past_all = jnp.iinfo(jnp.int32).max
    best = jnp.min(jnp.where(tops == whole_top[None], pairs[:, 1], past_all), axis=0)
    return jnp.where(is_usable, best, NO_ID)


def at_ids(
    values: Float[Array, "*b v"], ids: Int[Array, "*b"], mesh_axis: str | None = None
) -> Float[Array, "*b"]:
    """values[..., ids]; on a mesh the values are this device's stretch, the ids global."""
    v = values.shape[-1]
    local_ids = ids - first_id(v, mesh_axis)
    found = jnp.take_along_axis(values, jnp.clip(local_ids, 0, v - 1)[..., None], axis=-1)[..., 0]
    if mesh_axis is None:
        return found
    is_here = (local_ids >= 0) & (local_ids < v)
    return psum_over(jnp.where(is_here, found, jnp.zeros_like(found)), mesh_axis)


def top_over(
    logits: Float[Array, "*b v"], num_top: int, mesh_axis: str | None = None
) -> tuple[Float[Array, "*b n"], Int[Array, "*b n"]]:
    """The num_top largest over the whole vocabulary and their global ids, best first.

    Ties: the lower id first.

    Example: (1, 7, 7), two wanted -> (7, 7), ids (1, 2).
    """
    values, ids = jax.lax.top_k(logits, num_top)
    if mesh_axis is None:
        return values, ids
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.int32)
    ids = ids + first_id(logits.shape[-1], mesh_axis)
    pairs = from_all_devices(jnp.stack([bits, ids]), mesh_axis)
    join = lambda x: jnp.moveaxis(x, 0, -2).reshape(*logits.shape[:-1], -1)  # lower devices first
    values = jax.lax.bitcast_convert_type(join(pairs[:, 0]), jnp.float32)
    values, order = jax.lax.top_k(values, num_top)
    return values, jnp.take_along_axis(join(pairs[:, 1]), order, axis=-1)


def log_total(logits: Float[Array, "*b v"], mesh_axis: str | None = None) -> Float[Array, "*b"]:
    """Log of the sum of exp(logits) over the whole vocabulary. Example: (0, 0) -> 0.693."""
    top = max_over(logits.max(axis=-1), mesh_axis)
    total = psum_over(jnp.exp(logits - top[..., None]).sum(axis=-1), mesh_axis)
    return jnp.log(total) + top


def max_over(x: Float[Array, "*b"], mesh_axis: str | None) -> Float[Array, "*b"]:
    """The maximum over the devices of a mesh axis, by psum: pmax is another collective."""
    if mesh_axis is None:
        return x
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    everyones = jax.lax.bitcast_convert_type(from_all_devices(bits, mesh_axis), jnp.float32)
    return everyones.max(axis=0)


def from_all_devices(
    x: Shaped[Array, "*s"], mesh_axis: str
) -> Shaped[Array, "devices *s"]:
    """A small integer array of every device, in mesh order, by one psum into empty slots."""
    num_devices = jax.lax.axis_size(mesh_axis)
    slot = jnp.arange(num_devices).reshape((-1,) + (1,) * x.ndim)
    is_mine = slot == jax.lax.axis_index(mesh_axis)
    return jax.lax.psum(jnp.where(is_mine, x[None], jnp.zeros_like(x)[None]), mesh_axis)
