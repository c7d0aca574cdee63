"""Kernels against their references, and the bytes they move per second.

A row of CHECKS is one kernel: shapes, inputs, the call, and what XLA would run in its place today.
Every input is drawn anew; NaN, infinities and unwritten outputs count as wrong. A timed program
calls the kernel once for each of several sets of inputs, more bytes together than the cache holds
(50 MB of L2 on an H200), so that every weight comes from memory as it does in a decode step.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.bench.gpu_check.parts import Figures, Note
from mimo_jax.bench.gpu_check.settings import Size
from mimo_jax.layers.norm import rms_norm
from mimo_jax.timing import measure
from pallas_kernels.fp8_matmul import arg_specs as fp8_specs
from pallas_kernels.fp8_matmul.api import dense_matmul, fp8_matmul

MIN_TIMED_BYTES = 250e6
MAX_SETS = 24
MAX_RELATIVE_ERROR = 0.01
EPS = 1e-5

Arrays = dict[str, jax.Array]


class KernelCheck(NamedTuple):
    """One kernel.

    Attributes:
      name: In the report.
      specs: Size of the run -> named shapes, as the op's arg_specs.
      draw: (key, spec) -> inputs.
      call: (inputs, spec, implementation) -> output.
      rival: (inputs, spec) -> output of what XLA makes of the same bfloat16 work.
      read: Names of the inputs whose bytes the kernel must read.
      rival_read: The same for the rival.
    """

    name: str
    specs: Mapping[Size, Mapping[str, Any]]
    draw: Callable[[jax.Array, Any], Arrays]
    call: Callable[[Arrays, Any, str], jax.Array]
    rival: Callable[[Arrays, Any], jax.Array]
    read: Sequence[str]
    rival_read: Sequence[str]


# --- dense products ------------------------------------------------------------------------------

PRODUCTS = {
    "pro": fp8_specs.PRIMARY,
    "toy": {name: fp8_specs.TOY[name] for name in ("one_column_block", "normed")},
}


def draw_product(key: jax.Array, spec: fp8_specs.ArgSpec) -> Arrays:
    keys = jax.random.split(key, 4)
    weights = jax.random.normal(keys[0], (spec.out_len, spec.in_len), jnp.bfloat16)
    blocks = (-(-spec.out_len // 128), -(-spec.in_len // 128))
    return {
        "x": jax.random.normal(keys[1], (spec.num_rows, spec.in_len), jnp.bfloat16),
        "weights": weights,
        "codes": weights.astype(jnp.float8_e4m3fn),
        "scale": jax.random.uniform(keys[2], blocks, jnp.float32, 0.5, 1.5),
        "norm": jax.random.uniform(keys[3], (spec.in_len,), jnp.bfloat16, 0.5, 1.5),
    }


def _norm(arrays: Arrays, spec: fp8_specs.ArgSpec):
    return (arrays["norm"], EPS) if spec.has_norm else None


def call_fp8(arrays: Arrays, spec: fp8_specs.ArgSpec, implementation: str) -> jax.Array:
    return fp8_matmul(
        arrays["x"], arrays["codes"], arrays["scale"],
        norm=_norm(arrays, spec), implementation=implementation,
    )  # fmt: skip


def call_dense(arrays: Arrays, spec: fp8_specs.ArgSpec, implementation: str) -> jax.Array:
    return dense_matmul(
        arrays["x"], arrays["weights"], norm=_norm(arrays, spec), implementation=implementation
    )


def xla_product(arrays: Arrays, spec: fp8_specs.ArgSpec) -> jax.Array:
    x = arrays["x"]
    if spec.has_norm:
        x = rms_norm(x, arrays["norm"], eps=EPS)
    return x @ arrays["weights"].T


_dense = functools.partial(
    KernelCheck, specs=PRODUCTS, draw=draw_product, rival=xla_product, rival_read=("weights",)
)

CHECKS = (
    _dense("fp8_matmul", call=call_fp8, read=("codes", "scale")),
    _dense("dense_matmul", call=call_dense, read=("weights",)),
)


# --- running them --------------------------------------------------------------------------------


def kernel_implementation() -> str:
    """Compiled where there is a GPU, else in the interpreter."""
    return "mosaic_gpu" if jax.default_backend() == "gpu" else "interpret"


def relative_error(out: jax.Array, reference: jax.Array) -> float:
    """Norm of the difference over the norm of the reference; NaN if either is not finite."""
    out, reference = out.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(out - reference) / jnp.linalg.norm(reference))


def check_numerics(check: KernelCheck, spec: Any) -> Figures:
    """One kernel and shape against the reference, on three draws."""
    draw = jax.jit(lambda key: check.draw(key, spec))
    run = {
        name: jax.jit(lambda arrays, name=name: check.call(arrays, spec, name))
        for name in (kernel_implementation(), "xla")
    }
    errors = []
    for seed in range(3):
        arrays = draw(jax.random.key(seed))
        errors.append(relative_error(*(one(arrays) for one in run.values())))
    is_right = all(error < MAX_RELATIVE_ERROR for error in errors)
    return {"relative_error": float(np.max(errors)), "is_right": is_right}


def check_speed(check: KernelCheck, spec: Any, size: Size) -> Figures:
    """Microseconds per call and GB/s of the kernel and of its rival, in programs of many calls."""
    draw = jax.jit(lambda key: check.draw(key, spec))
    key = jax.random.key(7)
    shapes = jax.eval_shape(draw, key)
    sizes = {name: one.size * one.dtype.itemsize for name, one in shapes.items()}
    num_bytes = sum(sizes[name] for name in check.read)
    num_sets = min(max(2, -(-int(MIN_TIMED_BYTES) // num_bytes)), MAX_SETS if size == "pro" else 2)
    sets = [draw(one) for one in jax.random.split(key, num_sets)]
    implementation = kernel_implementation()
    calls = {
        "kernel": (lambda one: check.call(one, spec, implementation), check.read),
        "xla": (lambda one: check.rival(one, spec), check.rival_read),
    }
    found: Figures = {"num_sets": num_sets}
    for name, (call, read) in calls.items():
        program = jax.jit(lambda sets, call=call: [call(one) for one in sets])
        timing = measure(program, sets, num_runs=20 if size == "pro" else 1)
        seconds = timing.median_s / num_sets
        found[f"{name}_us"] = seconds * 1e6
        found[f"{name}_gb_per_s"] = sum(sizes[one] for one in read) / seconds / 1e9
        found[f"{name}_spread"] = timing.spread
    return found


def check_kernels(size: Size, note: Note) -> None:
    """Every kernel and shape; a failure of one is noted in its place."""
    rows: dict[str, Figures] = {}
    for check in CHECKS:
        for name, spec in check.specs[size].items():
            row = rows[f"{check.name}, {name}"] = {"shape": str(spec)}
            try:
                row |= check_numerics(check, spec)
                row |= check_speed(check, spec, size)
            except Exception as error:  # a kernel that does not compile leaves the others alone
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            note({"kernels": rows})
