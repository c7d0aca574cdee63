"""MXFP4 and FP8 decoding against other people's tables, byte by byte.

Run: .venv/bin/python -m pytest tests/quant/test_formats.py
"""

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo_jax.quant import fp8
from pallas_kernels import formats
from tests.golden.files import arrays


def test_every_code_under_every_exact_scale_under_jit():
    """The trap: XLA:CPU flushes subnormals, and a float32 or bfloat16 route loses code 1."""
    golden = arrays("mxfp4")
    scales = golden["sweep_scales"]
    got = jax.jit(formats.decode_mxfp4)(golden["sweep_packed"], scales[:, None])
    exact = (scales >= 2) & (scales <= 252)
    np.testing.assert_array_equal(got[exact], golden["sweep_dequant_ml_dtypes"][exact])
    assert np.isnan(np.asarray(got[scales == 255])).all()


def test_literal_bytes():
    packed = np.tile(np.array([0x21, 0x91, 0x7F], np.uint8), 6)[:16][None]
    values = np.asarray(jax.jit(formats.decode_mxfp4)(packed, np.array([[128]], np.uint8)))[0]
    np.testing.assert_array_equal(values[:6], [1.0, 2.0, 1.0, -1.0, -12.0, 12.0])


@pytest.mark.parametrize("name", ["torchao_floor", "mlx", "gfloat_floor", "ml_dtypes_floor"])
def test_other_packages_files_decode_to_their_values(name):
    golden = arrays("mxfp4")
    scale = golden[f"{name}_scale"]
    got = np.asarray(jax.jit(formats.decode_mxfp4)(golden[f"{name}_packed"], scale[:, None]))
    exact = (scale >= 2) & (scale <= 252)
    np.testing.assert_array_equal(got[exact], golden[f"{name}_dequant"][exact])
    assert exact.sum() > 30


def test_fp8_table():
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    expected = arrays("fp8_flash_gaqkv")["e4m3_table"]
    np.testing.assert_array_equal(codes.astype(np.float32), expected)


def test_scale_rows_start_anew_with_every_chunk():
    codes = np.ones((272, 3), ml_dtypes.float8_e4m3fn)
    scale = np.arange(1, 5, dtype=np.float32)[:, None]
    got = fp8.dequantize(codes, scale, num_chunks=2)[:, 0]
    assert got[[0, 127, 128, 135, 136, 263, 264, 271]].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    with pytest.raises(ValueError, match=r"\[4, 1\], expected \[3, 1\]"):
        fp8.dequantize(codes, scale)
    with pytest.raises(ValueError, match="3 chunks do not divide 272"):
        fp8.dequantize(codes, scale, num_chunks=3)


def test_published_scale_shapes():
    """The Pro and V2.5 files; 14848 rows cannot tell one chunk from four, 13568 can."""
    assert fp8.scale_shape((27136, 6144), 8) == (216, 48)
    assert fp8.scale_shape((13568, 4096), 4) == (108, 32)
    assert fp8.scale_shape((13568, 4096), 1) == (106, 32)
    assert fp8.scale_shape((14848, 4096), 4) == fp8.scale_shape((14848, 4096), 1) == (116, 32)


def test_keys_and_values_scaled_as_one_stack():
    """Flash's global layers: the seam block belongs to keys and values."""
    key, value, num_key_scales = fp8.split_kv_scale_rows(4, 768, 512)
    assert num_key_scales == 8
    assert key[[0, 127, 128, 191, 192]].tolist() == [0, 0, 1, 1, 2]
    assert value[[0, 63, 64, 127, 128]].tolist() == [1, 1, 8, 8, 3]
    # Two heads per chunk are whole blocks: then each stands alone.
    key, value, num_key_scales = fp8.split_kv_scale_rows(4, 1536, 1024)
    assert num_key_scales == 12
    assert value.tolist() == (12 + np.arange(1024) // 128).tolist()
    np.testing.assert_array_equal(key, np.arange(1536) // 128)


def test_a_stack_quantized_and_cut_is_the_golden_one():
    golden = arrays("fp8_flash_gaqkv")
    codes = [golden[f"{part}_proj_weight"] for part in "kv"]
    scales = [golden[f"{part}_proj_weight_scale_inv"] for part in "kv"]
    together = np.concatenate(scales)
    place_k, place_v, _ = fp8.split_kv_scale_rows(4, 768, 512)
    keys, values = (
        fp8.dequantize_rows(c.view(ml_dtypes.float8_e4m3fn), together, place)
        for c, place in zip(codes, (place_k, place_v), strict=True)
    )
    got = fp8.quantize_split_kv(keys, values, num_chunks=4)
    for (got_codes, got_scale), c, scale in zip(got, codes, scales, strict=True):
        np.testing.assert_array_equal(got_codes.view(np.uint8), c)
        np.testing.assert_array_equal(got_scale, scale)
    with pytest.raises(ValueError, match="5 chunks do not divide 768"):
        fp8.quantize_split_kv(keys, values, num_chunks=5)


def test_the_seam_block_takes_the_scale_of_its_largest_value():
    keys, values = np.ones((192, 3), np.float32), np.ones((128, 3), np.float32)
    values[63, 2] = 448
    (_, key_scale), (_, value_scale) = fp8.quantize_split_kv(keys, values, num_chunks=1)
    np.testing.assert_array_equal(key_scale[:, 0], np.array([1 / 448, 1], np.float32))
    np.testing.assert_array_equal(value_scale[:, 0], np.array([1 / 448], np.float32))
