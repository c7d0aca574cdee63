"""What made an artefact, written beside it: command, source revision, versions, machine, config."""

import dataclasses
import datetime
import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")


def revision() -> str:
    """Git revision of the source tree, "-dirty" if it was changed, or "unknown"."""
    root = Path(__file__).resolve().parents[2]
    try:
        run = lambda *args: subprocess.run(
            ["git", *args], cwd=root, capture_output=True, text=True, check=True
        ).stdout.strip()
        return run("rev-parse", "HEAD") + ("-dirty" if run("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """Name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine() -> dict:
    """Processor, cores, Python and package versions, date: what a figure depends on."""
    import os

    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def record(config) -> dict:
    """Everything a reader needs to make the artefact again."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "revision": revision(),
        **machine(),
        "config": dataclasses.asdict(config),
    }
