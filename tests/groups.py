"""Starts one command as several real processes on loopback, with a limit that nothing outlives."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
# Seconds on a quiet machine; ten times as long where others compile on the same two cores.
LIMIT_S = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(num_devices: int = 1) -> dict[str, str]:
    """Of a process: CPU devices of its own, and the compile cache of this test run."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_"))}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
    }


@contextlib.contextmanager
def started(
    command: list[str],
    num_processes: int,
    num_devices: int = 1,
    launcher: Callable[[int], dict[str, str]] | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """The command as processes 0 .. num_processes - 1 of a group; all are killed at the end.

    With one process the command runs as it is; so it does where a launcher gives every process
    its environment.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    processes = []
    for i in range(num_processes):
        flags = ["--coordinator", coordinator, "--num-processes", str(num_processes)]
        flags += ["--process-id", str(i)]
        has_flags = num_processes > 1 and launcher is None
        processes.append(
            subprocess.Popen(
                [sys.executable, *command, *(flags if has_flags else [])],
                cwd=ROOT,
                env=environment(num_devices) | (launcher(i) if launcher else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def results(processes: list[subprocess.Popen], limit_s: float = LIMIT_S) -> list[tuple]:
    """(exit code, stdout, stderr) of each, once all have ended."""
    deadline = time.monotonic() + limit_s
    out = []
    for process in processes:
        stdout, stderr = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
        out.append((process.returncode, stdout, stderr))
    return out


def run(
    command: list[str], num_processes: int, num_devices: int = 1, limit_s: float = LIMIT_S
) -> list[tuple]:
    """`started` and `results` in one."""
    with started(command, num_processes, num_devices) as processes:
        return results(processes, limit_s)


def wait_for(condition, limit_s: float = LIMIT_S) -> None:
    """Returns when condition() is true; asserts that it becomes so."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
