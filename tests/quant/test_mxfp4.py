"""Packing MXFP4 against other packages' bytes, rule by rule, and what must hold of any rule.

Run: .venv/bin/python -m pytest tests/quant/test_mxfp4.py

Seen red: ties upwards; a carry of one bit more in rceil; the sign of zero dropped; subnormals read
as floats; the odd column low.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.config import ConfigError
from mimo_jax.quant import mxfp4
from mimo_jax.quant.policy import mxfp4_axis
from pallas_kernels import formats
from tests.golden.files import arrays

# (rule, package, rows in which that package is known to be wrong). Both torchao rules divide by
# 2**-126 where the scale byte 0 stands for 2**-127; compressed-tensors makes -0 into +0 and its
# rounding overflows near the largest float.
BYTE_0 = {"near_min_scale", "below_min_scale"}
GOLDENS = [
    ("floor", "gfloat_floor", set()),
    ("floor", "ml_dtypes_floor", set()),
    ("floor", "torchao_floor", BYTE_0),
    ("rceil", "torchao_rceil", BYTE_0),
    ("even", "torchao_even", BYTE_0),
    (
        "even",
        "compressed_tensors",
        {"neg_zeros", "ties_amax6", "all_codes", "huge", "f32_max", "bf16_max"},
    ),
]
quantize = jax.jit(mxfp4.quantize, static_argnames="rule")
dequantize = jax.jit(mxfp4.dequantize)


@pytest.mark.parametrize(("rule", "package", "faulty"), GOLDENS)
def test_bytes_are_those_of_other_packages(rule, package, faulty):
    golden = arrays("mxfp4")
    packed = quantize(golden["x"], rule=rule)
    same = (np.asarray(packed.codes) == golden[f"{package}_packed"]).all(axis=1)
    same &= np.asarray(packed.scale)[:, 0] == golden[f"{package}_scale"]
    different = {str(name) for name in golden["row_names"][~same]}
    assert different == faulty
    assert len(same) == 40


LITERAL = {"floor": (127, 0x27, [6, 1]), "even": (128, 0x16, [8, 1]), "rceil": (128, 0x16, [8, 1])}


@pytest.mark.parametrize("rule", mxfp4.RULES)
def test_seven_and_one(rule):
    x = np.zeros((1, 32), np.float32)
    x[0, :2] = 7, 1
    scale, byte, values = LITERAL[rule]
    packed = quantize(x, rule=rule)
    assert packed.scale.tolist() == [[scale]]
    assert packed.codes.tolist() == [[byte] + [0] * 15]
    assert dequantize(packed)[0, :3].tolist() == [*values, 0]


def test_zeros_keep_their_sign_and_take_the_smallest_scale():
    x = np.zeros((1, 32), np.float32)
    x[0, 1] = -0.0
    packed = quantize(x)
    assert packed.scale.tolist() == [[0]]
    assert packed.codes.tolist() == [[0x80] + [0] * 15]


def _group(seed, exponent):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((1, 32)) * np.exp(rng.standard_normal((1, 32))) * 2.0**exponent
    if seed % 3 == 0:  # on borders and codes themselves
        x = rng.integers(-32, 33, (1, 32)) / 4 * 2.0**exponent
    return x.astype(np.float32)


groups = st.builds(_group, st.integers(0, 2**32 - 1), st.integers(-110, 110))
# Largest error in scales X, and as a share of the largest magnitude of the group.
BOUND = {"floor": (2.0, 1 / 4), "even": (1.0, 1 / 5), "rceil": (1.0, 1 / 5)}


@pytest.mark.parametrize("rule", mxfp4.RULES)
@settings(max_examples=150)
@given(x=groups)
def test_rounded_once_is_rounded(rule, x):
    once = dequantize(quantize(x, rule=rule))
    np.testing.assert_array_equal(dequantize(quantize(once, rule=rule)), once)


@pytest.mark.parametrize("rule", mxfp4.RULES)
@settings(max_examples=150)
@given(x=groups)
def test_error_is_bounded(rule, x):
    packed = quantize(x, rule=rule)
    error = np.abs(np.asarray(dequantize(packed), np.float64) - x).max()
    in_scales, share = BOUND[rule]
    assert error <= in_scales * 2.0 ** (float(packed.scale[0, 0]) - 127)
    assert error <= share * np.abs(x).max()


@pytest.mark.parametrize("rule", mxfp4.RULES)
@settings(max_examples=150)
@given(bits=st.lists(st.integers(0, 2**32 - 1), min_size=32, max_size=32))
def test_finite_numbers_give_no_nan(rule, bits):
    x = np.asarray([bits], np.uint32).view(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(0))
    packed = quantize(x, rule=rule)
    assert packed.scale[0, 0] <= 253
    assert not np.isnan(np.asarray(dequantize(packed))).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_group_under_jit_and_is_refused_outside(value):
    x = np.ones((5, 96), np.float32)
    x[3, 70] = value
    packed = quantize(x)
    values = np.asarray(dequantize(packed))
    assert np.isnan(values[3, 64:]).all()
    assert np.isfinite(np.delete(values.reshape(15, 32), 11, axis=0)).all()
    with pytest.raises(ConfigError, match=r"^w: group \[3, 2\] holds .* not finite \(1 such") as e:
        mxfp4.quantize_weights("w", x)
    assert "\n" not in str(e.value)


def test_policy_at_the_edges_of_the_scale():
    """Every magnitude under the bytes at which float32 ends; `formats` states the policy."""
    codes = np.arange(16, dtype=np.uint8)
    packed = np.tile(codes[::2] | codes[1::2] << 4, 2)
    decode = jax.jit(formats.decode_mxfp4)
    magnitudes = np.asarray(formats.E2M1_VALUES, np.float64)

    def decoded(byte):
        return np.asarray(decode(packed, np.array([byte], np.uint8)))[:8]

    assert decoded(0).tolist() == [0] * 8
    for byte in (1, 2, 252, 253, 254):
        want = magnitudes * 2.0 ** (byte - 127)
        want[want >= 2.0**128] = np.inf
        want[want < 2.0**-126] = 0
        np.testing.assert_array_equal(decoded(byte), want.astype(np.float32))
    assert decoded(1)[1] == 0
    assert decoded(2)[1] > 0
    assert np.isinf(decoded(253)).tolist() == [False] * 6 + [True] * 2
    assert np.isinf(decoded(254)).tolist() == [False] * 4 + [True] * 4
    assert np.isnan(decoded(255)).all()


def test_wrong_requests_get_one_line():
    x = np.zeros((2, 48), np.float32)
    with pytest.raises(ConfigError, match="of 48 is no multiple of 32"):
        mxfp4.quantize(jnp.asarray(x))
    with pytest.raises(ConfigError, match="'ceil' is unknown; allowed: floor, even, rceil"):
        mxfp4.quantize(jnp.asarray(x), "ceil")


def test_a_cut_through_a_group_is_refused():
    check = functools.partial(mxfp4.check_groups, "layers.1.experts_down", "expert_hidden", 128)
    check(4)
    message = (
        "layers.1.experts_down: axis expert_hidden of 128 cut into 8 parts would split MXFP4 "
        "groups of 32; it can be cut into 1, 2, 4 parts"
    )
    with pytest.raises(ConfigError) as error:
        check(8)
    assert str(error.value) == message


def test_experts_and_nothing_else_are_quantized():
    names = ("experts_gate", "experts_up", "experts_down", "w_router", "w_down", "sink")
    assert [mxfp4_axis(f"layers.3.{name}") for name in names] == [0, 0, 1, None, None, None]
    assert mxfp4_axis("layers.3.experts_down_scale") is None
