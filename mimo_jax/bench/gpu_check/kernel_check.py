"""One kernel against its reference, and the bytes it moves per second.

Every input is drawn anew; NaN, infinities and unwritten outputs count as wrong. A timed program
calls the kernel once for each of several sets of inputs, more bytes together than the cache holds
(50 MB of L2 on an H200), so that every weight comes from memory as it does in a decode step.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.bench.gpu_check.parts import Figures
from mimo_jax.bench.gpu_check.settings import Size
from mimo_jax.timing import measure

MIN_TIMED_BYTES = 250e6
MAX_SETS = 24
MAX_RELATIVE_ERROR = 0.01

Arrays = dict[str, Any]


class KernelCheck(NamedTuple):
    """One kernel.

    Attributes:
      name: In the report.
      specs: Size of the run -> named shapes, as the op's arg_specs.
      draw: (key, spec) -> inputs.
      call: (inputs, spec, implementation) -> output, one array.
      rival: (inputs, spec) -> what XLA makes of the same work.
      num_read: spec -> bytes that the kernel must read.
      num_read_by_rival: The same for the rival.
    """

    name: str
    specs: Mapping[Size, Mapping[str, Any]]
    draw: Callable[[jax.Array, Any], Arrays]
    call: Callable[[Arrays, Any, str], jax.Array]
    rival: Callable[[Arrays, Any], jax.Array]
    num_read: Callable[[Any], float]
    num_read_by_rival: Callable[[Any], float]


def kernel_implementation() -> str:
    """Compiled where there is a GPU, else in the interpreter."""
    return "mosaic_gpu" if jax.default_backend() == "gpu" else "interpret"


def relative_error(out: jax.Array, reference: jax.Array) -> float:
    """Norm of the difference over the norm of the reference; NaN if either is not finite."""
    out, reference = out.astype(jnp.float32), reference.astype(jnp.float32)
    return float(jnp.linalg.norm(out - reference) / jnp.linalg.norm(reference))


def check_numerics(check: KernelCheck, spec: Any, size: Size) -> Figures:
    """One kernel and shape against the reference, on three draws; a toy run makes one."""
    draw = jax.jit(lambda key: check.draw(key, spec))
    run = {
        name: jax.jit(lambda arrays, name=name: check.call(arrays, spec, name))
        for name in (kernel_implementation(), "xla")
    }
    errors = []
    for seed in range(3 if size == "pro" else 1):
        arrays = draw(jax.random.key(seed))
        errors.append(relative_error(*(one(arrays) for one in run.values())))
    is_right = all(error < MAX_RELATIVE_ERROR for error in errors)
    return {"relative_error": float(np.max(errors)), "is_right": is_right}


def check_speed(check: KernelCheck, spec: Any, size: Size) -> Figures:
    """Microseconds per call and GB/s of the kernel and of its rival, in programs of many calls."""
    draw = jax.jit(lambda key: check.draw(key, spec))
    num_bytes = check.num_read(spec)
    num_sets = min(max(2, int(MIN_TIMED_BYTES / num_bytes) + 1), MAX_SETS)
    num_runs = 20
    if size == "toy":  # to show that it runs; the interpreter's time means nothing
        num_sets = num_runs = 1
    sets = [draw(one) for one in jax.random.split(jax.random.key(7), num_sets)]
    implementation = kernel_implementation()
    calls = {
        "kernel": (lambda one: check.call(one, spec, implementation), num_bytes),
        "xla": (lambda one: check.rival(one, spec), check.num_read_by_rival(spec)),
    }
    found: Figures = {"num_sets": num_sets}
    for name, (call, num_read) in calls.items():
        program = jax.jit(lambda sets, call=call: [call(one) for one in sets])
        timing = measure(program, sets, num_runs=num_runs, num_warmup=1)
        seconds = timing.median_s / num_sets
        found[f"{name}_us"] = seconds * 1e6
        found[f"{name}_gb_per_s"] = num_read / seconds / 1e9
        found[f"{name}_spread"] = timing.spread
    return found
