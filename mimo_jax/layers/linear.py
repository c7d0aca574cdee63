"""Matrix products with weights, in the two layouts that a CPU wants.

A weight is [in, out] and the product x @ w, which is the faster form when the model sits in the
cache (192x448 by 8 tokens: 14 us against 22). A model larger than the cache waits for memory, and
there XLA:CPU streams w @ x.T with w stored [out, in] at twice the speed (1024x4096 by 8 tokens,
67 M weights: 12.4 ms against 18-35, AMD Zen 4, 2 cores, 2026-11-29); one token costs the same
either way. `is_transposed` says which of the two a module holds; see `models/params.py`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float


def linear(
    x: Float[Array, "*b i"], w: Float[Array, "_ _"], *, is_transposed: bool = False, out_dtype=None
):
    """x times a weight [in, out], or [out, in] when is_transposed.

    Returns:
      [*b, out] in out_dtype, by default the dtype of x; the sums are at least that precise.
    """
    if not is_transposed:
        return jnp.matmul(x, w, preferred_element_type=out_dtype)
    rows = x.reshape(-1, x.shape[-1])
    product = jnp.matmul(w, rows.T, preferred_element_type=out_dtype)
    return product.T.reshape(*x.shape[:-1], w.shape[0])
