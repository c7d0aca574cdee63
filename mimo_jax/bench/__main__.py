"""`python -m mimo_jax.bench WHAT`: tables on the terminal, JSON beside them."""

import sys
from collections.abc import Callable
from typing import Any

import tyro

from mimo_jax.bench import commands, options
from mimo_jax.bench.gpu_check.__main__ import check
from mimo_jax.bench.gpu_check.settings import GpuCheck

COMMANDS: dict[str, tuple[type, Callable[[Any], int]]] = {
    "decode": (options.Decode, commands.run_decode),
    "drafters": (options.Drafters, commands.run_drafters),
    "lossless": (options.Lossless, commands.run_lossless),
    "train": (options.Train, commands.run_train),
    "prefix": (options.Prefix, commands.run_prefix),
    "context": (options.Context, commands.run_context),
    "qat": (options.Qat, commands.run_qat),
    "optimizers": (options.Optimizers, commands.run_optimizers),
    "load": (options.Load, commands.run_load),
    "moe": (options.Moe, commands.run_moe),
    "fp8": (options.Fp8, commands.run_fp8),
    "gpu-check": (GpuCheck, check),
}


def main() -> int:
    arguments = tyro.extras.subcommand_cli_from_dict(
        {name: flags for name, (flags, _) in COMMANDS.items()},
        description="Measures: tables on the terminal, JSON beside.",
    )
    return dict(COMMANDS.values())[type(arguments)](arguments)


if __name__ == "__main__":
    sys.exit(main())
