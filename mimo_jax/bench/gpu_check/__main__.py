"""`python -m mimo_jax.bench.gpu_check`: needs no more than jax, flax, numpy and jaxtyping."""

import argparse
import sys
from pathlib import Path

from mimo_jax.bench.gpu_check.parts import OK, run_function
from mimo_jax.bench.gpu_check.run import run
from mimo_jax.bench.gpu_check.settings import PARTS, GpuCheck
from mimo_jax.config import ConfigError


def parse(arguments: list[str]) -> argparse.Namespace:
    default = GpuCheck()
    parser = argparse.ArgumentParser(
        "python -m mimo_jax.bench.gpu_check", description=GpuCheck.__doc__
    )
    parser.add_argument("--size", choices=("pro", "toy"), default=default.size)
    parser.add_argument("--out", type=Path, default=default.out, help="directory of the report")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of the whole run")
    names = ", ".join(part.name for part in PARTS)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=f"of: {names}")
    # How the run calls itself for one part.
    parser.add_argument("--function", help=argparse.SUPPRESS)
    parser.add_argument("--argument", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    given = parse(arguments)
    if given.function is not None:
        run_function(given.function, given.argument, given.size, given.answer)
        return 0
    return check(GpuCheck(given.size, given.out, given.seconds, tuple(given.only)))


def check(settings: GpuCheck) -> int:
    """Runs the check and says where the report is; 1 if a part is not done or a kernel is wrong."""
    try:
        report = run(settings, say=lambda line: print(line, flush=True))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"report: {settings.out / 'report.md'}")
    kernels = report["parts"].get("kernels", {}).get("figures", {}).get("kernels", {})
    is_done = all(part["status"] == OK for part in report["parts"].values())
    return 0 if is_done and all(row.get("is_right") for row in kernels.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
