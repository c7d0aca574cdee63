"""Curves and a page of a training run, finished, running or crashed.

    python -m mimo_jax.train.report runs/nano

Writes RUN_DIR/report: index.html, which needs no other file, the pictures as PNG, and report.json.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import tyro

from mimo_jax.config import ConfigError
from mimo_jax.train.report.curves import save_curves
from mimo_jax.train.report.page import write_page
from mimo_jax.train.report.record import read_run


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Curves and a page of a training run."""

    run_dir: Annotated[Path, tyro.conf.Positional]
    """Directory that train.py --run-dir was given."""
    out: Path | None = None
    """Where to write; default RUN_DIR/report."""


def main(args: list[str] | None = None) -> int:
    prog = "python -m mimo_jax.train.report"
    arguments = tyro.cli(Arguments, args=args, prog=prog, description=__doc__)
    try:
        record = read_run(arguments.run_dir)
        out = arguments.out or arguments.run_dir / "report"
        pictures = {stage.name: save_curves(stage, out) for stage in record.stages}
        write_page(record, pictures, out / "index.html")
        (out / "report.json").write_text(json.dumps(record.to_json(), indent=1) + "\n")
    except (ConfigError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    for stage in record.stages:
        print(f"{stage.name}: {stage.progress}")
    print(f"wrote {out / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
