"""Products with FP8 weights that stay FP8: one byte a weight, one float32 scale per 128x128 block.

Codes are [out, in] row-major, as the files have them and as a GPU kernel wants them, whatever
`is_transposed` says of a model's other matrices. A fused projection may be several training shards
one after the other; its blocks, and so its scale rows, start anew with each (`num_chunks`).

  * CPU: tiles of rows that share a scale row become float32 behind an optimization_barrier, then
    meet a plain product. 4096x4096 by one token: 3.1 ms, float32 1.8 to 3.2, bfloat16 38 to 70
    (BENCHMARKS.md). Small matrices are one tile.
  * Hopper with the kernels on, a few tokens: `pallas_kernels/fp8_matmul`, one launch.
  * elsewhere, a few tokens: one batched product per column block on the codes themselves, scaled
    afterwards. XLA:GPU converts inside the product, reads each code once and expands nothing;
    scaling first would write a bfloat16 copy of the matrix (42 MB for 3392x6144).
  * elsewhere, many tokens: those partial products would outgrow the copy, and the copy is made.

Traps of XLA:CPU: it holds an 8-bit float array that is sliced or passed to a loop as float16, twice
the memory, made anew each step; hence the bytes are looked at as uint8. That view is a copy too
when it is hoisted out of the loop, which the barrier around codes and index prevents.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Shaped

from mimo_jax.quant.fp8 import BLOCK_LEN, num_blocks
from pallas_kernels.dispatch import XLA
from pallas_kernels.formats import decode_e4m3
from pallas_kernels.fp8_matmul.api import MAX_ROWS, TILE_IN, TILE_OUT, fp8_matmul

# Weights of a CPU tile: 1 MB in float32, which stays in a core's L2.
_TILE_WEIGHTS = 1 << 18


class Fp8Weight(NamedTuple):
    """A weight in FP8.

    Attributes:
      codes: [out, in].
      scale: One factor per block; [num_chunks * blocks of a chunk's rows, blocks of in].
      num_chunks: Stretches of rows, equally long, whose blocks start anew.
      implementation: Of pallas_kernels.dispatch: what multiplies a decode step's few tokens.
    """

    codes: Float8e4m3fn[Array, "out in"]
    scale: Float32[Array, "_ _"]
    num_chunks: int = 1
    implementation: str = XLA


def scaled_linear(x: Float[Array, "*b i"], w: Fp8Weight, *, out_dtype=None) -> Float[Array, "*b o"]:
    """x times a weight, as `linear`; sums in float32.

    Args:
      x: [*b, in].
      w: The weight.
      out_dtype: Default: the dtype of x.

    Example: x (1, 2), codes ((3, 4),), scale 0.5 -> 5.5.
    """
    rows = x.reshape(-1, x.shape[-1])
    if _fits_kernel(rows, w):
        out = fp8_matmul(rows, w.codes, w.scale, implementation=w.implementation)
        return out.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], w.codes.shape[0])
    out = _of_platform(rows, w.codes, w.scale, num_chunks=w.num_chunks)
    return out.astype(out_dtype or x.dtype).reshape(*x.shape[:-1], w.codes.shape[0])


def _fits_kernel(x, w: Fp8Weight) -> bool:
    """Whether the Hopper kernel takes the product; it knows one chunk and whole tiles."""
    num_rows, width = w.codes.shape
    is_whole = num_rows % TILE_OUT == 0 and width % TILE_IN == 0 and w.num_chunks == 1
    return w.implementation != XLA and is_whole and x.shape[0] <= MAX_ROWS


# Compiled once per shape: 70 layers alike are traced as one.
@functools.partial(jax.jit, static_argnames="num_chunks")
def _of_platform(x, codes, scale, *, num_chunks: int):
    by = lambda way: lambda x, codes, scale: way(x, Fp8Weight(codes, scale, num_chunks))
    # Float32 products of every column block against a 2-byte copy: out of proportion at 64 rows.
    is_small = 4 * x.shape[0] < 2 * BLOCK_LEN
    in_blocks = is_small and x.shape[1] % BLOCK_LEN == 0
    return jax.lax.platform_dependent(
        x, codes, scale, cpu=by(_by_tiles), default=by(_by_blocks if in_blocks else _expanded)
    )


def tile_rows(num_rows: int, width: int, num_chunks: int) -> int:
    """Rows of a tile: all of a small matrix, else a power of two that no block's edge falls into.

    Example: 27136 rows of 6144 in 8 chunks -> 32; 1088 of 160 -> 1088.
    """
    if num_rows * width <= _TILE_WEIGHTS:
        return num_rows
    rows = int(np.gcd(num_rows // num_chunks, BLOCK_LEN))
    while rows * width > _TILE_WEIGHTS and rows % 2 == 0:
        rows //= 2
    return rows


def _by_tiles(x, w: Fp8Weight):
    num_rows, width = w.codes.shape
    x = x.astype(jnp.float32)
    rows = tile_rows(num_rows, width, w.num_chunks)
    chunk_rows = num_rows // w.num_chunks

    def product(codes, scale):
        tile = jax.lax.optimization_barrier(decode_e4m3(codes) * _over_columns(scale, width))
        return jax.lax.dot_general(tile, x, (((1,), (1,)), ((), ())))

    if rows == num_rows:
        codes = jax.lax.bitcast_convert_type(w.codes, jnp.uint8)
        return product(codes, _over_rows(w)).T

    def write(i, out):
        codes, i = jax.lax.optimization_barrier((w.codes, i))
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8)
        codes = jax.lax.dynamic_slice_in_dim(codes, i * rows, rows)
        chunk, row = i * rows // chunk_rows, i * rows % chunk_rows
        scale_row = chunk * num_blocks(chunk_rows) + row // BLOCK_LEN
        scale = jax.lax.dynamic_slice_in_dim(w.scale, scale_row, 1)
        return jax.lax.dynamic_update_slice(out, product(codes, scale), (i * rows, 0))

    out = jnp.zeros((num_rows, x.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, num_rows // rows, write, out).T


def _by_blocks(x, w: Fp8Weight):
    num_rows, width = w.codes.shape
    codes = w.codes.reshape(num_rows, width // BLOCK_LEN, BLOCK_LEN).astype(x.dtype)
    x = x.reshape(x.shape[0], width // BLOCK_LEN, BLOCK_LEN)
    parts = jnp.einsum("tbi,obi->bto", x, codes, preferred_element_type=jnp.float32)
    return jnp.einsum("bto,ob->to", parts, _over_rows(w))


def _expanded(x, w: Fp8Weight):
    return jnp.matmul(x, expand(w, x.dtype).T, preferred_element_type=jnp.float32)


def expand(w: Fp8Weight, dtype) -> Float[Array, "out in"]:
    """The weight in full. Example: codes ((3, 4),), scale 0.5 -> 1.5, 2.0."""
    scale = _over_columns(_over_rows(w), w.codes.shape[1])
    return (w.codes.astype(jnp.float32) * scale).astype(dtype)


def _over_rows(w: Fp8Weight):
    """[scale rows, blocks] -> [out, blocks]: each factor over its block's rows."""
    num_rows, num_columns = w.codes.shape[0], w.scale.shape[1]
    rows = jnp.repeat(w.scale.reshape(w.num_chunks, -1, num_columns), BLOCK_LEN, axis=1)
    return rows[:, : num_rows // w.num_chunks].reshape(num_rows, num_columns)


def _over_columns(scale, width: int):
    """[rows, blocks] -> [rows, width]: each factor over its block's columns."""
    return jnp.repeat(scale, BLOCK_LEN, axis=1)[:, :width]


def join_chunks(
    qkv: Shaped[Array, "*b w"], widths: tuple[int, int, int], num_chunks: int
) -> Shaped[Array, "*b w"]:
    """Columns [Q_c | K_c | V_c] of every chunk after the other -> [Q | K | V].

    Args:
      qkv: What a fused projection in chunks gives.
      widths: Columns of q, k and v over all chunks.
      num_chunks: Divides each.

    Example: widths (4, 2, 2), 2 chunks: q0 q1 k0 v0 q2 q3 k1 v1 -> q0 q1 q2 q3 k0 k1 v0 v1.
    """
    if num_chunks == 1:
        return qkv
    batch = qkv.shape[:-1]
    chunks = qkv.reshape(*batch, num_chunks, -1)
    borders = [widths[0] // num_chunks, (widths[0] + widths[1]) // num_chunks]
    parts = jnp.split(chunks, borders, axis=-1)
    return jnp.concatenate([part.reshape(*batch, -1) for part in parts], axis=-1)
