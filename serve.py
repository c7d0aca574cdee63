"""Serves a target with its drafter: files of prompts now.

    python serve.py batch --checkpoint DIR --input prompts.jsonl --output answers.jsonl
    python serve.py batch --help
    srun --ntasks 8 python serve.py batch ...     # eight processes share the lines

Exit codes: 0 all lines answered, 1 some line has an error, 2 wrong usage or unusable files; others
if this process or another one of the group was killed.
"""

import os
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
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.config import ConfigError
    from mimo_jax.distributed import ALONE, open_group
    from mimo_jax.gpu_flags import has_gpu_plugin, set_gpu_flags
    from mimo_jax.serving.jsonl import JobError

    if has_gpu_plugin():
        set_gpu_flags(os.environ)
    group = ALONE
    try:
        group = open_group(options.processes, "serve.py")
        # Only now: `--help` and a misspelt flag need no JAX, and the group comes before it.
        from mimo_jax.serving.batch import run_batch

        return group.close(run_batch(options, group=group))
    except (ConfigError, CheckpointError, JobError, *group.losses()) as error:
        line, code = f"serve.py: {group.explain(error)}", 2
    except KeyboardInterrupt:
        line, code = "serve.py: stopped; the same command goes on from here", 130
    group.abandon(line, code)
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
