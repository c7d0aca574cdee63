"""Matrix products with weights, in the two layouts that a CPU wants.

A weight is [in, out] and the product x @ w, which is the faster form when the model sits in the
cache (192x448 by 8 tokens: 14 us against 22) and good enough outside it, except where the width is
a large power of two, whose rows fall on the same cache sets: 1024x4096 by 8 tokens, 67 M weights,
takes 35 ms as x @ w and 12 as w @ x.T with w stored [out, in] (AMD Zen 4, 2 cores, 2026-11-29).
`is_transposed` says which of the two a module holds; see `models/params.py`. FP8 weights are always
[out, in]; `layers/scaled.py` multiplies them.

On a mesh a product whose inputs are cut (`sum_over`) gives each device a part of every sum; one
all-reduce makes it whole. A product whose outputs are cut needs none.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from mimo_jax.layers.scaled import Fp8Weight, scaled_linear


def linear(
    x: Float[Array, "*b i"],
    w: Float[Array, "_ _"] | Fp8Weight,
    *,
    is_transposed: bool = False,
    out_dtype=None,
    sum_over: str | None = None,
):
    """x times a weight [in, out], or [out, in] when is_transposed or in FP8.

    With sum_over, inside a shard_map, x and w hold this device's part of the inputs and the
    result is summed over that mesh axis.

    Returns:
      [*b, out] in out_dtype, by default the dtype of x; the sums are at least that precise.
    """
    if isinstance(w, Fp8Weight):
        return psum_over(scaled_linear(x, w, out_dtype=out_dtype), sum_over)
    if not is_transposed:
        return psum_over(jnp.matmul(x, w, preferred_element_type=out_dtype), sum_over)
    rows = x.reshape(-1, x.shape[-1])
    product = jnp.matmul(w, rows.T, preferred_element_type=out_dtype)
    # Without the barrier XLA folds the transposes into x @ w.T, the slowest form of the three: a
    # round of the 57.9M model then takes 3.1 plain steps instead of 2.6.
    product = jax.lax.optimization_barrier(product)
    return psum_over(product.T.reshape(*x.shape[:-1], w.shape[0]), sum_over)


def psum_over(x: Shaped[Array, "*b"], mesh_axis: str | None):
    """The sum over the devices of a mesh axis; x itself without one."""
    return x if mesh_axis is None else jax.lax.psum(x, mesh_axis)
