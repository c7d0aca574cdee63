"""Serves a target with its drafter: files of prompts now.

    python serve.py batch --checkpoint DIR --input prompts.jsonl --output answers.jsonl
    python serve.py batch --help

Exit codes: 0 all lines answered, 1 some line has an error, 2 wrong usage or unusable files.
"""

import sys
from collections.abc import Sequence

import tyro

from mimo_jax.serving.options import BatchOptions


def main(args: Sequence[str] | None = None) -> int:
    options = tyro.extras.subcommand_cli_from_dict(
        {"batch": BatchOptions},
        prog="serve.py",
        description=__doc__,
        args=args,
    )
    # Only now: `--help` and a misspelt flag need no JAX.
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.config import ConfigError
    from mimo_jax.serving.batch import run_batch
    from mimo_jax.serving.jsonl import JobError

    try:
        return run_batch(options)
    except (ConfigError, CheckpointError, JobError) as error:
        print(f"serve.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("serve.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
