"""Dense products of a draft block: few rows against a matrix that is read once.

A decode step multiplies at most 64 rows (one draft block or tree) with every dense weight, so its
time is the time of reading the weights. Stored in FP8 they are half as long as in bfloat16.

`fp8_matmul` takes weights as the MiMo checkpoints store them: e4m3 codes, one float32 scale per
128x128 block. `dense_matmul` is the same kernel over bfloat16 weights. Both can put the RMS norm
in front of the product into the same launch (`norm`), which saves one launch per half layer.

Implementations: "xla" (any shape), "mosaic_gpu" (Hopper) and "interpret" (the same kernel on a
CPU). The kernel wants out % 64 == 0 and in % 128 == 0: tiles of 64 rows lie in one scale block
each, tiles of 128 columns too. The last block of rows may be partial (3392 = 26 * 128 + 64).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul.reference import SCALE_BLOCK

MAX_ROWS = 64
ROW_STEP = 8  # the narrowest accumulator of wgmma
TILE_OUT = 64
TILE_IN = 128

Norm = tuple[jax.Array, float]


def fp8_matmul(
    x: jax.Array,
    codes: jax.Array,
    scale: jax.Array,
    *,
    implementation: str,
    norm: Norm | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """x @ (codes * scale of their block).T, sums in float32.

    Args:
      x: bfloat16 [t, in], 1 <= t <= 64. In a kernel t is padded to a multiple of 8 (one more
        launch unless it is one already).
      codes: float8_e4m3fn [out, in], row-major.
      scale: float32 [ceil(out / 128), ceil(in / 128)]; value = code * scale.
      implementation: "xla", "mosaic_gpu" or "interpret".
      norm: (weight [in], eps): x is first divided by its root mean square and multiplied by weight.
        A kernel rounds x * weight to bfloat16 and divides the sums instead.
      out_dtype: Of the result; by default that of x.

    Returns:
      [t, out].

    Raises:
      ValueError: If a shape, dtype or implementation is none of these; names it and what is
        allowed.

    Example: x = [[1, 2]], codes = [[0.5, 1]], scale = [[4]] -> [[10]].
    """
    _check(x, codes, norm, implementation)
    if codes.dtype != jnp.float8_e4m3fn:
        raise ValueError(f"codes are {codes.dtype}; allowed: float8_e4m3fn")
    blocks = tuple(-(-length // SCALE_BLOCK) for length in codes.shape)
    if scale.shape != blocks or scale.dtype != jnp.float32:
        raise ValueError(
            f"scale is {scale.dtype}{list(scale.shape)}; codes {list(codes.shape)} want "
            f"float32{list(blocks)}, one per {SCALE_BLOCK}x{SCALE_BLOCK} block"
        )
    return _multiply(x, codes, scale, norm, out_dtype or x.dtype, implementation)


def dense_matmul(
    x: jax.Array,
    weights: jax.Array,
    *,
    implementation: str,
    norm: Norm | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """x @ weights.T with bfloat16 weights [out, in]; otherwise as `fp8_matmul`.

    Example: x = [[1, 2]], weights = [[3, 4]] -> [[11]].
    """
    _check(x, weights, norm, implementation)
    if weights.dtype != jnp.bfloat16:
        raise ValueError(f"weights are {weights.dtype}; allowed: bfloat16")
    return _multiply(x, weights, None, norm, out_dtype or x.dtype, implementation)


def _check(x: jax.Array, weights: jax.Array, norm: Norm | None, implementation: str) -> None:
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation is {implementation!r}; allowed: {allowed}")
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        raise ValueError(f"x is {list(x.shape)}; allowed: [t, in] with 1 <= t <= {MAX_ROWS}")
    if weights.ndim != 2 or weights.shape[1] != x.shape[1]:
        raise ValueError(f"weights are {list(weights.shape)}; x {list(x.shape)} wants [out, in]")
    if norm is not None and norm[0].shape != x.shape[1:]:
        raise ValueError(f"the norm's weight is {list(norm[0].shape)}; x wants {[x.shape[1]]}")
    if implementation == "xla":
        return
    out_len, in_len = weights.shape
    if out_len % TILE_OUT or in_len % TILE_IN:
        raise ValueError(
            f"weights are [{out_len}, {in_len}]; the kernel allows multiples of {TILE_OUT} rows "
            f"and {TILE_IN} columns"
        )
    if x.dtype != jnp.bfloat16:
        raise ValueError(f"x is {x.dtype}; the kernel allows bfloat16")


def _multiply(x, weights, scale, norm, out_dtype, implementation):
    if implementation == "xla":
        return reference.matmul(x, weights, scale, norm, out_dtype)
    # Imported late: a program that asks for no kernel needs no Mosaic.
    from pallas_kernels.fp8_matmul.pallas_mosaic_gpu import matmul

    num_rows = x.shape[0]
    padding = -num_rows % ROW_STEP
    rows = jnp.pad(x, ((0, padding), (0, 0))) if padding else x
    weight, eps = norm or (None, None)
    out = matmul(
        rows, weights, scale, weight, eps=eps, out_dtype=jnp.dtype(out_dtype),
        is_interpreted=implementation == "interpret",
    )  # fmt: skip
    return out[:num_rows] if padding else out
