"""Parts as child processes: one that fails, hangs or takes the GPU's context down ends alone.

A kernel that reads out of bounds ruins the CUDA context of its process, one that waits for a
barrier which nobody reaches never returns; neither raises anything that Python could catch. So each
part is a process of its own with a limit, and keeps what it has measured in a file as it goes on.
Starting Python, JAX and CUDA once per part costs a few seconds of each part's time.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mimo_jax.bench.gpu_check.settings import Part, Size

Figures = dict[str, Any]
Note = Callable[[Figures], None]

OK, FAILED, TIMED_OUT, LEFT_OUT = "ok", "failed", "timed out", "left out"


def write_atomically(path: Path, text: str) -> None:
    """A reader finds the old text or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text)
    os.replace(draft, path)


def run_in_child(part: Part, size: Size, answer: Path, seconds: float) -> Figures:
    """Runs one part in a process of its own.

    Args:
      part: What to run.
      size: Of the run.
      answer: File that the child keeps its figures in; an old one is removed.
      seconds: After which the child is killed.

    Returns:
      "status" OK, FAILED or TIMED_OUT, "figures" as far as they came, and "error" where there was
      one: its first line and the end of what the child said.
    """
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "mimo_jax.bench.gpu_check", "--size", size]
    command += ["--function", part.function, "--answer", str(answer)]
    command += [] if part.argument is None else ["--argument", part.argument]
    result: Figures = {"status": OK}
    try:
        done = subprocess.run(
            command, env=child_environment(os.environ), capture_output=True, text=True,
            errors="replace", timeout=seconds, check=False,
        )  # fmt: skip
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines() or ["it said nothing"]
            causes = [line.strip() for line in said if "Error" in line or "error:" in line]
            cause = (causes or said)[-1][:300]
            result = {"status": FAILED, "error": cause, "said": said[-30:]}
    except subprocess.TimeoutExpired:
        result = {"status": TIMED_OUT, "error": f"not done after {seconds:.0f} s"}
    figures = json.loads(answer.read_text()) if answer.is_file() else {}
    return result | {"figures": figures}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The parent's, with most of the GPU's memory for the one process and the flags of our runs."""
    from mimo_jax.gpu_flags import has_gpu_plugin, set_gpu_flags

    # Eight CPU devices: a toy run's interpreter calls back into Python from XLA's threads and waits
    # for ever where these are as few as the processors.
    defaults = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.93", "JAX_NUM_CPU_DEVICES": "8"}
    environment = {**defaults, **environ}
    if has_gpu_plugin():
        set_gpu_flags(environment)
    return environment


def run_function(function: str, argument: str | None, size: Size, answer: Path) -> None:
    """What the child does: calls a part's function and keeps every figure it notes."""
    module, name = function.split(":")
    known: Figures = {}

    def note(figures: Figures) -> None:
        known.update(figures)
        write_atomically(answer, json.dumps(known))

    call = getattr(importlib.import_module(module), name)
    call(size, note, *[] if argument is None else [argument])
