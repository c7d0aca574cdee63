"""The run of all parts: one after the other, the report rewritten after each."""

import datetime
import json
import shlex
import sys
from collections.abc import Callable

from mimo_jax.bench.gpu_check.parts import LEFT_OUT, Figures, run_in_child, write_atomically
from mimo_jax.bench.gpu_check.report import extrapolate, to_markdown
from mimo_jax.bench.gpu_check.settings import KERNELS, PARTS, GpuCheck
from mimo_jax.config import ConfigError
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.published import read_config
from mimo_jax.timing import Stopwatch
from mimo_jax.train.provenance import revision

# A part that would get less than this is not begun.
MIN_SECONDS = 10.0
# How much longer a part may take in the interpreter, where a step of kernels is 5 to 15 seconds.
INTERPRETED = 6.0
EXTRAPOLATION = (
    "Measured step of one device's share, plus estimated all-reduces (5 us each and the bytes over "
    "NVLink; not measured), times the accept lengths published for the Pro's drafter."
)


def run(settings: GpuCheck, say: Callable[[str], None]) -> Figures:
    """Runs the parts that were asked for.

    Args:
      settings: What to run.
      say: Is told in one line how each part ended.

    Returns:
      The report, as it stands in report.json.

    Raises:
      ConfigError: If a part is unknown.
    """
    names = [part.name for part in PARTS]
    for name in settings.only:
        if name not in names:
            raise ConfigError(f"part {name!r} is unknown; allowed: {', '.join(names)}")
    report: Figures = {
        "command": shlex.join(["python", "-m", "mimo_jax.bench.gpu_check", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
        "size": settings.size,
        "extrapolation": EXTRAPOLATION,
        "parts": {},
    }
    whole = Stopwatch.started()
    for part in PARTS:
        if settings.only and part.name not in settings.only:
            continue
        left_s = settings.seconds - whole.elapsed_s
        result: Figures = {"status": LEFT_OUT, "error": f"{left_s:.0f} s were left", "figures": {}}
        with Stopwatch() as watch:
            if left_s >= MIN_SECONDS:
                answer = settings.out / "part.json"
                is_interpreted = settings.size == "toy" and part.argument == KERNELS
                patience = INTERPRETED if is_interpreted else 1.0
                limit_s = min(part.seconds * patience, left_s)
                result = run_in_child(part, settings.size, answer, limit_s)
        report["parts"][part.name] = result | {"seconds": watch.elapsed_s}
        _extrapolate(report, part.name)
        write_report(report, settings)
        error = f": {result['error']}" if "error" in result else ""
        say(f"{part.name}: {result['status']}, {watch.elapsed_s:.0f} s{error}")
    return report


def _extrapolate(report: Figures, name: str) -> None:
    """Adds what a part's steps would mean on eight GPUs; only the Pro's mean anything there."""
    steps = report["parts"][name]["figures"].get("steps")
    if report["size"] != "pro" or not steps:
        return
    from mimo_jax.bench.gpu_check.shard import CONFIG, NUM_DEVICES

    figures = extrapolate(steps, read_config(CONFIG), DEVICES["h200"], NUM_DEVICES)
    report.setdefault("extrapolated", {})[name] = figures


def write_report(report: Figures, settings: GpuCheck) -> None:
    """report.json and report.md."""
    write_atomically(settings.out / "report.json", json.dumps(report, indent=1) + "\n")
    write_atomically(settings.out / "report.md", to_markdown(report))
