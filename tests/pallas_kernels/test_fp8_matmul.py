"""Products of few rows: the kernel in the interpreter, against the reference and for an H200.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_fp8_matmul.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo_jax.plan.aot import Job, why_not
from mimo_jax.plan.devices import DEVICES
from pallas_kernels.fp8_matmul.api import dense_matmul, fp8_matmul
from pallas_kernels.fp8_matmul.arg_specs import PRIMARY, TOY, ArgSpec
from tests.pallas_kernels.lowering import both_products, compile_kernels, matmul_arguments

EPS = 1e-5


def draw(spec: ArgSpec, getkey) -> dict[str, jax.Array]:
    blocks = (-(-spec.out_len // 128), -(-spec.in_len // 128))
    weights = jax.random.normal(getkey(), (spec.out_len, spec.in_len), jnp.float32)
    return {
        "x": jax.random.normal(getkey(), (spec.num_rows, spec.in_len), jnp.bfloat16),
        "codes": weights.astype(jnp.float8_e4m3fn),
        "scale": jax.random.uniform(getkey(), blocks, jnp.float32, 0.5, 1.5),
        "weights": weights.astype(jnp.bfloat16),
        "norm": jax.random.uniform(getkey(), (spec.in_len,), jnp.bfloat16, 0.5, 1.5),
    }


def in_float64(spec: ArgSpec, arrays: dict[str, np.ndarray], kind: str) -> np.ndarray:
    """The product by hand; x * norm and squares rounded to bfloat16 as the kernel says."""
    x = np.asarray(arrays["x"], np.float64)
    if spec.has_norm:
        rounded = lambda values: values.astype(ml_dtypes.bfloat16).astype(np.float64)
        inverse = 1 / np.sqrt(rounded(x * x).mean(axis=1, keepdims=True) + EPS)
        x = rounded(x * np.asarray(arrays["norm"], np.float64)) * inverse
    if kind == "dense":
        return x @ np.asarray(arrays["weights"], np.float64).T
    matrix = np.asarray(arrays["codes"], np.float64)
    for row in range(matrix.shape[0]):
        for column in range(matrix.shape[1]):
            matrix[row, column] *= float(arrays["scale"][row // 128, column // 128])
    return x @ matrix.T


@pytest.mark.parametrize("name", TOY)
def test_kernel_agrees_with_loops(name, getkey) -> None:
    spec = TOY[name]
    arrays = draw(spec, getkey)
    host = {key: np.asarray(one) for key, one in arrays.items()}
    norm = (arrays["norm"], EPS) if spec.has_norm else None
    options = {"norm": norm, "out_dtype": jnp.float32, "implementation": "interpret"}
    got = {
        "fp8": fp8_matmul(arrays["x"], arrays["codes"], arrays["scale"], **options),
        "dense": dense_matmul(arrays["x"], arrays["weights"], **options),
    }
    for kind, out in got.items():
        want = in_float64(spec, host, kind)
        assert out.shape == (spec.num_rows, spec.out_len), kind
        assert np.abs(np.asarray(out) - want).max() < 2e-6 * np.abs(want).max(), kind


def test_reference_agrees_with_loops(getkey) -> None:
    spec = ArgSpec(3, 130, 257)
    arrays = draw(spec, getkey)
    out = fp8_matmul(
        arrays["x"], arrays["codes"], arrays["scale"],
        out_dtype=jnp.float32, implementation="xla",
    )  # fmt: skip
    host = {key: np.asarray(one) for key, one in arrays.items()}
    np.testing.assert_allclose(out, in_float64(spec, host, "fp8"), rtol=0, atol=2e-5)


def test_examples() -> None:
    x = jnp.array([[1, 2]], jnp.bfloat16)
    codes = jnp.array([[0.5, 1]], jnp.float8_e4m3fn)
    out = fp8_matmul(x, codes, jnp.array([[4.0]]), implementation="xla")
    assert (out.tolist(), out.dtype) == ([[10.0]], jnp.bfloat16)
    weights = jnp.array([[3, 4]], jnp.bfloat16)
    assert dense_matmul(x, weights, implementation="xla").tolist() == [[11.0]]
    # rms of [3, 4] is sqrt(12.5): [0.8485, 1.1314] * [1, 2] @ [3, 4].
    norm = (jnp.array([1, 2], jnp.bfloat16), 0.0)
    out = dense_matmul(
        weights, weights, norm=norm, out_dtype=jnp.float32, implementation="xla"
    )  # fmt: skip
    np.testing.assert_allclose(out, [[11.5966]], atol=1e-4)


def test_every_code_decodes_exactly() -> None:
    """All 254 numbers of e4m3, subnormal ones too, picked out one column at a time."""
    bytes_ = np.zeros((64, 128), np.uint8)
    bytes_[:, :4] = np.arange(256).reshape(4, 64).T
    bytes_[(bytes_ & 0x7F) == 0x7F] = 0  # the two NaN
    codes = bytes_.view(ml_dtypes.float8_e4m3fn)
    x = np.zeros((8, 128), ml_dtypes.bfloat16)
    x[np.arange(4), np.arange(4)] = 1
    out = fp8_matmul(
        jnp.asarray(x), jnp.asarray(codes), jnp.full((1, 1), 0.375, jnp.float32),
        out_dtype=jnp.float32, implementation="interpret",
    )  # fmt: skip
    np.testing.assert_array_equal(out[:4], codes[:, :4].T.astype(np.float32) * np.float32(0.375))
    assert float(out[0, 1]) == 2.0**-9 * 0.375  # the smallest subnormal
    assert float(out[1, 62]) == 448 * 0.375  # byte 126, the largest number


def test_a_broken_row_stays_alone(getkey) -> None:
    """Rows that pad a block may hold anything: no other row sees them."""
    spec = TOY["normed"]
    arrays = draw(spec, getkey)
    options = {"norm": (arrays["norm"], EPS), "implementation": "interpret"}
    clean = dense_matmul(arrays["x"], arrays["weights"], **options)
    broken = arrays["x"].at[jnp.array([3, 6])].set(jnp.nan)
    out = dense_matmul(broken, arrays["weights"], **options)
    others = np.array([0, 1, 2, 4, 5, 7])
    np.testing.assert_array_equal(out[others], clean[others])
    assert not np.isfinite(np.asarray(out[np.array([3, 6])], np.float32)).any()


def test_errors_name_what_is_allowed() -> None:
    x = jnp.zeros((8, 256), jnp.bfloat16)
    codes = jnp.zeros((192, 256), jnp.float8_e4m3fn)
    scale = jnp.zeros((2, 2), jnp.float32)

    def message(*arrays, implementation: str = "interpret", **options) -> str:
        with pytest.raises(ValueError, match=r"\S") as raised:
            fp8_matmul(*arrays, implementation=implementation, **options)
        return str(raised.value)

    assert message(x, codes, scale[:1]) == (
        "scale is float32[1, 2]; codes [192, 256] want float32[2, 2], one per 128x128 block"
    )
    assert message(x, codes[:100], scale[:1]) == (
        "weights are [100, 256]; the kernel allows multiples of 64 rows and 128 columns"
    )
    assert message(x[:, :200], codes, scale) == "weights are [192, 256]; x [8, 200] wants [out, in]"
    assert message(jnp.zeros((65, 256), jnp.bfloat16), codes, scale) == (
        "x is [65, 256]; allowed: [t, in] with 1 <= t <= 64"
    )
    assert message(x, codes.astype(jnp.bfloat16), scale) == (
        "codes are bfloat16; allowed: float8_e4m3fn"
    )
    assert message(x.astype(jnp.float32), codes, scale) == (
        "x is float32; the kernel allows bfloat16"
    )
    assert message(x, codes, scale, norm=(jnp.ones((128,)), 1e-5)) == (
        "the norm's weight is [128]; x wants [256]"
    )
    assert message(x, codes, scale, implementation="triton") == (
        "implementation is 'triton'; allowed: xla, mosaic_gpu, interpret"
    )
    with pytest.raises(ValueError, match=r"^weights are float32; allowed: bfloat16$"):
        dense_matmul(x, codes.astype(jnp.float32), implementation="xla")


def test_lowers_for_cuda_without_a_plugin() -> None:
    """One launch per product of every primary shape, as `jax.export` sees it."""
    for spec in PRIMARY.values():
        program = jax.jit(lambda arrays, spec=spec: both_products(spec, arrays, "mosaic_gpu"))
        exported = jax.export.export(
            program,
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
        )(matmul_arguments(spec))
        assert exported.mlir_module().count("@mosaic_gpu_v2(") == 2, spec


def test_compiles_for_h200_without_spills(tmp_path: Path) -> None:
    """Full shapes of the Pro: one launch each, no register spilled, no scratch memory."""
    target = DEVICES["h200"].target
    if (reason := why_not(target)) is not None:
        pytest.skip(f"compiling for a GPU is not available because {reason}")
    job = Job("tests.pallas_kernels.lowering:lower_fp8_matmul", {}, (1, 1), target=target)
    facts, spilled = compile_kernels(job, tmp_path)
    assert facts["temp_bytes"] == 0
    assert sum(facts["launches"].values()) == 2 * len(PRIMARY), facts["launches"]
    # Equal kernels are assembled once: attention_out and dense_down are the same shape.
    assert spilled == [0] * 6
