"""Products with FP8 weights against their float64 definition.

Run: .venv/bin/python -m pytest tests/layers/test_scaled.py
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo_jax.layers import scaled
from mimo_jax.layers.linear import linear
from mimo_jax.layers.scaled import Fp8Weight
from mimo_jax.quant import fp8
from pallas_kernels.formats import decode_e4m3

E4M3 = ml_dtypes.float8_e4m3fn


def draw(rows, columns, num_chunks, t):
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(rows, columns)).astype(E4M3)
    scale = rng.uniform(0.5, 2, fp8.scale_shape((rows, columns), num_chunks)).astype(np.float32)
    x = rng.normal(size=(t, columns)).astype(np.float32)
    want = x.astype(np.float64) @ fp8.dequantize(codes, scale, num_chunks).T.astype(np.float64)
    return jnp.asarray(x), Fp8Weight(jnp.asarray(codes), jnp.asarray(scale), num_chunks), want


def run(way, x, w):
    return jax.jit(lambda x, c, s: way(x, Fp8Weight(c, s, w.num_chunks)))(x, w.codes, w.scale)


def test_every_code():
    codes = np.arange(256, dtype=np.uint8)
    got = jax.jit(decode_e4m3)(codes)
    np.testing.assert_array_equal(got, codes.view(E4M3).astype(np.float32))
    literal = {0x38: 1.0, 0x01: 2.0**-9, 0xFE: -448.0, 0x80: -0.0}
    assert [float(got[code]) for code in literal] == list(literal.values())
    assert np.isnan(got[0x7F])


WAYS = {
    "tiles": scaled._by_tiles,
    "blocks": scaled._by_blocks,
    "expanded": scaled._expanded,
    "the platform's": linear,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_all_ways_equal_the_definition(way, num_chunks, monkeypatch):
    """Rows 2 x 176 = 2 x (128 + 48), so that chunks matter; 16 rows to a tile."""
    monkeypatch.setattr(scaled, "_TILE_WEIGHTS", 20 * 256)
    x, w, want = draw(352, 256, num_chunks, 3)
    assert scaled.tile_rows(352, 256, num_chunks) == 16
    np.testing.assert_allclose(run(WAYS[way], x, w), want, atol=1e-4)


@pytest.mark.parametrize("way", ["tiles", "expanded", "the platform's"])
def test_partial_columns(way):
    x, w, want = draw(272, 160, 2, 70)
    np.testing.assert_allclose(run(WAYS[way], x, w), want, atol=1e-4)


def test_leading_axes_and_dtypes():
    x, w, want = draw(130, 128, 1, 6)
    out = linear(x.reshape(2, 3, 128).astype(jnp.bfloat16), w)
    assert (out.shape, out.dtype) == ((2, 3, 130), jnp.bfloat16)
    wide = linear(x.reshape(2, 3, 128), w, out_dtype=jnp.float32)
    np.testing.assert_allclose(wide.reshape(6, 130), want, atol=1e-4)


def test_codes_that_are_no_number_reach_their_outputs():
    x, w, want = draw(200, 128, 1, 2)
    codes = np.asarray(w.codes).copy()
    codes[150, 7] = np.nan
    got = np.asarray(run(scaled._by_tiles, x, w._replace(codes=jnp.asarray(codes))))
    assert np.isnan(got[:, 150]).all()
    others = np.arange(200) != 150
    np.testing.assert_allclose(got[:, others], want[:, others], atol=1e-4)


def test_tiles_are_literal():
    assert scaled.tile_rows(27136, 6144, 8) == 32
    assert scaled.tile_rows(3392, 6144, 1) == 32
    assert scaled.tile_rows(6144, 16384, 1) == 16
    assert scaled.tile_rows(1088, 160, 4) == 1088
    assert scaled.tile_rows(1024, 1024, 1) == 128


def test_the_program_expands_nothing():
    """4096 x 4096: 16.8 MB of codes; as float16, XLA's own way, they would be 33.6 MB more."""
    shape = jax.ShapeDtypeStruct
    program = jax.jit(lambda x, c, s: linear(x, Fp8Weight(c, s))).lower(
        shape((8, 4096), jnp.float32),
        shape((4096, 4096), jnp.float8_e4m3fn),
        shape((32, 32), jnp.float32),
    )
    assert program.compile().memory_analysis().temp_size_in_bytes < 2**21


def test_chunks_are_joined():
    columns = jnp.asarray([[0, 1, 10, 20, 2, 3, 11, 21]])  # q0 q1 k0 v0, q2 q3 k1 v1
    joined = scaled.join_chunks(columns, (4, 2, 2), 2)
    assert joined.tolist() == [[0, 1, 2, 3, 10, 11, 20, 21]]
    assert scaled.join_chunks(columns, (4, 2, 2), 1) is columns
