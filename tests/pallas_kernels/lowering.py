"""Kernels compiled for an H200 that is not here: programs for the worker, and what ptxas said.

Programs are called by name in another process (plan/aot.py), so they take plain values only.
"""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.plan.aot import Job, worker_environment
from pallas_kernels.fp8_matmul.api import dense_matmul, fp8_matmul
from pallas_kernels.fp8_matmul.arg_specs import PRIMARY, ArgSpec

SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
TIMEOUT_S = 240.0


class Compiled(NamedTuple):
    """The worker's answer, and the bytes that each Mosaic kernel spills."""

    facts: dict[str, Any]
    spilled_bytes: list[int]


def compile_kernels(job: Job, folder: Path) -> Compiled:
    """As plan/aot.py compiles, with the assembler's figures kept.

    Args:
      job: The program; its target is a GPU.
      folder: An empty folder for the files in between.
    """
    files = [folder / "job.json", folder / "answer.json", folder / "dump"]
    files[0].write_text(json.dumps(dataclasses.asdict(job)))
    done = subprocess.run(
        [sys.executable, "-m", "mimo_jax.plan.worker", *map(str, files)],
        env=worker_environment(job, str(files[2])) | {"MOSAIC_GPU_DUMP_PTXAS": "1"},
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
    )
    said = done.stdout + done.stderr
    assert files[1].is_file(), said[-2000:]
    spills = [int(stores) + int(loads) for stores, loads in SPILLS.findall(said)]
    return Compiled(json.loads(files[1].read_text()), spills)


def matmul_arguments(spec: ArgSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one product: rows, codes, scales, bfloat16 weights, the norm's weight."""
    shapes = {
        "x": ((spec.num_rows, spec.in_len), jnp.bfloat16),
        "codes": ((spec.out_len, spec.in_len), jnp.float8_e4m3fn),
        "scale": ((-(-spec.out_len // 128), -(-spec.in_len // 128)), jnp.float32),
        "weights": ((spec.out_len, spec.in_len), jnp.bfloat16),
        "norm": ((spec.in_len,), jnp.bfloat16),
    }
    return {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}


def both_products(spec: ArgSpec, arrays: dict[str, jax.Array], implementation: str):
    """The product with FP8 weights and with bfloat16 ones."""
    norm = (arrays["norm"], 1e-5) if spec.has_norm else None
    options = {"norm": norm, "implementation": implementation}
    return (
        fp8_matmul(arrays["x"], arrays["codes"], arrays["scale"], **options),
        dense_matmul(arrays["x"], arrays["weights"], **options),
    )


def lower_fp8_matmul(mesh: Mesh):
    """Every primary shape, with both kinds of weights, in one program."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    arguments = {
        name: {
            key: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=everywhere)
            for key, one in matmul_arguments(spec).items()
        }
        for name, spec in PRIMARY.items()
    }

    def program(arrays):
        return {name: both_products(PRIMARY[name], arrays[name], "mosaic_gpu") for name in arrays}

    return jax.jit(program).lower(arguments)
