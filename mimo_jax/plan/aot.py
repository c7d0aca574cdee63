"""Compiling for a mesh that is not here: in a process of its own, which may die.

The GPU compiler is a plugin of 700 MB that an ordinary user of this project neither needs nor
should notice: imported by JAX at start, it looks for a driver and complains. So it lives in a
folder that is on nobody's path (`aot` in the environment, made by .ci/setup_env.sh) and only the
worker process gets to see it. A worker process also takes what the compiler may do to it: a missing
ptxas ends the process with a C++ stack trace. The parent turns all of that into one line.

XLA_FLAGS are those of our GPU runs (`gpu_flags`), and one more: CUB's radix sort asks a device for
its scratch size where there is none.

Rejected: the plugin in the environment itself with JAX_PLATFORMS=cpu set for everybody; one
forgotten variable and every command prints a CUDA error first.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo_jax.gpu_flags import GPU_XLA_FLAGS

WORKER_XLA_FLAGS = (*GPU_XLA_FLAGS, "--xla_gpu_enable_cub_radix_sort=false")
PLUGIN = "jax_plugins/xla_cuda13"
LIBRARY = "xla_cuda_plugin.so"
WORKER_TIMEOUT_S = 900.0
PROBE_TIMEOUT_S = 120.0


class NotAvailable(RuntimeError):
    """Compiling ahead of time cannot be done here; the message says why, in one line."""


def plugin_folder() -> Path | None:
    """The folder to put on a worker's path so that it sees the plugin; None if there is no plugin.

    First the environment's own `aot` folder, then the environment itself (an installation for real
    GPUs has the plugin there).
    """
    own = Path(sys.prefix) / "aot"
    if (own / PLUGIN / LIBRARY).is_file():
        return own
    spec = importlib.util.find_spec("jax_plugins")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder).parent / PLUGIN / LIBRARY).is_file():
            return Path(folder).parent
    return None


@dataclasses.dataclass(frozen=True)
class Job:
    """One program to compile.

    Attributes:
      builder: "package.module:function"; called as function(mesh, **arguments), returns
        `jax.stages.Lowered`.
      arguments: Of the builder; plain JSON values.
      mesh: Devices along "data" and "model" (decode) or "data", "expert" and "tensor" (train).
      rules: Name of the sharding rules that give the mesh its axes.
      target: The device's name inside the plugin; None = compile for this machine's CPU.
      stops_at_buffers: Answer as soon as memory is decided; nothing is then known of launches.
    """

    builder: str
    arguments: Mapping[str, Any]
    mesh: tuple[int, ...]
    rules: str = "decode"
    target: str | None = None
    stops_at_buffers: bool = False


def worker_environment(job: Job, dump_folder: str) -> dict[str, str]:
    """Environment of a worker: no GPU is looked for, flags are ours alone."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "JAX_ENABLE_COMPILATION_CACHE", "JAX_NUM_CPU_DEVICES")
    }
    root = Path(__file__).resolve().parents[2]
    path = [str(root), os.environ.get("PYTHONPATH", "")]
    flags = [f"--xla_dump_to={dump_folder}", "--xla_dump_hlo_as_text"]
    if job.target is not None:
        folder = plugin_folder()
        if folder is None:
            raise NotAvailable(
                "the GPU compiler is not installed (make setup puts it into the environment)"
            )
        path.insert(0, str(folder))
        flags += WORKER_XLA_FLAGS
    return environment | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "XLA_FLAGS": " ".join(flags),
    }


def _death(returncode: int, stderr: str) -> str:
    """One line about a worker that gave no answer."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    # The cause stands before the stack trace: the first line that speaks of a failure.
    causes = [line for line in lines if "rror" in line or "FATAL" in line or "Check failed" in line]
    cause = (causes or lines or ["it said nothing"])[0][:300]
    if returncode < 0:
        return f"the compiler died of {signal.Signals(-returncode).name}: {cause}"
    return f"the compiler process ended with code {returncode}: {cause}"


def compile_in_worker(job: Job, timeout_s: float = WORKER_TIMEOUT_S) -> dict[str, Any]:
    """Compiles a job in a process of its own and returns what the worker found out.

    Returns:
      The fields of `worker.ProgramFacts`.

    Raises:
      NotAvailable: If there is no compiler, or it failed or died; the message is one line.
    """
    with tempfile.TemporaryDirectory(prefix="mimo-plan-") as folder:
        job_path, answer_path = Path(folder) / "job.json", Path(folder) / "answer.json"
        dump_folder = Path(folder) / "dump"
        job_path.write_text(json.dumps(dataclasses.asdict(job)))
        environment = worker_environment(job, str(dump_folder))
        command = [sys.executable, "-m", "mimo_jax.plan.worker", str(job_path), str(answer_path)]
        try:
            done = subprocess.run(
                [*command, str(dump_folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NotAvailable(f"the compiler took longer than {timeout_s:.0f} s") from error
        if not answer_path.is_file():
            raise NotAvailable(_death(done.returncode, done.stderr))
        answer = json.loads(answer_path.read_text())
    if "error" in answer:
        raise NotAvailable(answer["error"])
    return answer


@functools.cache
def why_not(target: str) -> str | None:
    """None if this machine can compile for the target, else the reason in one line.

    Tried once per process with a program of two operations: it needs libdevice and ptxas.
    """
    job = Job("mimo_jax.plan.worker:lower_probe", {}, (1, 1), target=target)
    try:
        compile_in_worker(job, timeout_s=PROBE_TIMEOUT_S)
    except NotAvailable as error:
        return str(error)
    return None
