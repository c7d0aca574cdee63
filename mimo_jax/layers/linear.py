"""Matrix products with weights, in the two layouts that a CPU wants.

A weight is [in, out] and the product x @ w, which is the faster form when the model sits in the
cache (192x448 by 8 tokens: 14 us against 22). A model larger than the cache waits for memory, and
there XLA:CPU streams w @ x.T with w stored [out, in] at twice the speed (1024x4096 by 8 tokens,
67 M weights: 12.4 ms against 18-35, AMD Zen 4, 2 cores, 2026-11-29); one token costs the same
either way. `is_transposed` says which of the two a module holds; see `models/params.py`.
"""

from jaxtyping import Array, Float


def linear(x: Float[Array, "*b i"], w: Float[Array, "_ _"], *, is_transposed: bool = False):
    """x times a weight [in, out], or [out, in] when is_transposed; [*b, out] in the dtype of x."""
    if not is_transposed:
        return x @ w
    rows = x.reshape(-1, x.shape[-1])
    return (w @ rows.T).T.reshape(*x.shape[:-1], w.shape[0])
