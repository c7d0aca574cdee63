"""The choice in plain JAX, float32."""

import jax
import jax.numpy as jnp


def router_top_k(logits, bias, *, top_k: int, routed_scale: float, scoring: str):
    """(choices, weights), both [top_k, t]: `layers/moe.route` turned on its side."""
    logits = logits.astype(jnp.float32)
    if scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jax.nn.softmax(logits, axis=0)
    _, ids = jax.lax.top_k((scores + bias.astype(jnp.float32)[:, None]).T, top_k)
    weights = jnp.take_along_axis(scores, ids.T, axis=0)
    total = weights.sum(axis=0, keepdims=True) + 1e-20
    return ids.T, weights / total * routed_scale


def distinct(choices):
    """(ids [n], number int32 [1]) of distinct choices by first appearance; the rest repeats."""
    flat = choices.reshape(-1)
    n = flat.shape[0]
    index = jnp.arange(n, dtype=jnp.int32)
    is_equal = flat[:, None] == flat[None, :]
    is_first = ~(is_equal & (index[None, :] < index[:, None])).any(axis=1)
    slot = jnp.cumsum(is_first.astype(jnp.int32)) - 1
    ids = jnp.zeros((n,), jnp.int32).at[jnp.where(is_first, slot, n)].set(flat, mode="drop")
    return ids, is_first.sum(dtype=jnp.int32)[None]
