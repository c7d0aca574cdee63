"""Trains a drafter, and where the config says so its target before it.

    python train.py --config configs/rounds_nano.py --dry-run     # for a target that exists
    python train.py --config configs/nano.py --run-dir runs/second
    python train.py --config configs/nano.py --mesh 2x2x2
    srun --ntasks 8 python train.py --config configs/nano.py      # eight processes, one run
    python train.py regenerate --model DIR --data prompts.jsonl --out answers.jsonl
    python train.py regenerate --help

A run that was stopped goes on where it was when the same command is given again. SIGTERM and Ctrl-C
end it after the step at hand, once that is saved, with exit code 0.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from mimo_jax.distributed import ALONE, ProcessFlags, ProcessGroup, open_group
from mimo_jax.gpu_flags import has_gpu_plugin, set_gpu_flags
from mimo_jax.train.answer_options import AnswerOptions


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Let a target write, and distil a DFlash drafter on what it wrote."""

    config: Path
    """Python file with get_config() -> ExperimentConfig or DistillConfig; see configs/."""
    run_dir: Path | None = None
    """Where the run lives; default runs/NAME. An unfinished run there is resumed."""
    mesh: str | None = None
    """Devices along data x expert x tensor (x sequence), as 2x2x2; instead of the config's own."""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Build everything and print parameters, memory per device, steps and time; train nothing."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --dry-run: print JSON."""
    tensorboard: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Write metrics for TensorBoard, too, to RUN_DIR/STAGE/tensorboard."""
    processes: tyro.conf.OmitArgPrefixes[ProcessFlags] = ProcessFlags()


def load_config(path: Path):
    """The config that a file's get_config() returns."""
    from mimo_jax.config import ConfigError

    if not path.is_file():
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.py")))
        raise ConfigError(f"config {path} does not exist; there are {known}")
    spec = importlib.util.spec_from_file_location("experiment_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"config {path} has no get_config()")
    return module.get_config()


def run(arguments: Arguments, group: ProcessGroup) -> None:
    """Trains, or says what would be trained."""
    from absl import logging
    from rich.console import Console

    logging.set_verbosity(logging.WARNING)  # at INFO Orbax reports every save in ten lines
    from mimo_jax.sharding import parse_mesh
    from mimo_jax.train import dry_run, recipe
    from mimo_jax.train.config import DistillConfig
    from mimo_jax.train.distill import run_distillation

    config = load_config(arguments.config)
    if arguments.mesh is not None:
        config = dataclasses.replace(config, mesh=parse_mesh(arguments.mesh))
    if arguments.dry_run:
        dry_run.provide_devices(config)
        found = dry_run.dry_run(config)
        if arguments.json:
            print(json.dumps(found, indent=1))
        else:
            Console().print(dry_run.table(found))
        return
    run_dir = arguments.run_dir or Path("runs") / config.name
    run_all = run_distillation if isinstance(config, DistillConfig) else recipe.run_recipe
    out = run_all(config, run_dir, group, arguments.tensorboard)
    if group.is_first:
        print(f"exported to {out}")


def regenerate(options: AnswerOptions) -> int:
    """Lets the target answer prompts and prints a summary; exit code 1 if an answer broke off."""
    if has_gpu_plugin():
        set_gpu_flags(os.environ)
    from mimo_jax.train.answer_job import run_answer_job

    summary = run_answer_job(options)
    print(json.dumps(summary, indent=1))
    return int("error" in summary.get("finish_reasons", ()))


def main() -> int:
    from mimo_jax.config import ConfigError, require
    from mimo_jax.train.stopping import Stopped, raising_stop

    group = ALONE
    try:
        if sys.argv[1:2] == ["regenerate"]:
            options = tyro.cli(AnswerOptions, prog="train.py regenerate", args=sys.argv[2:])
            return regenerate(options)
        arguments = tyro.cli(Arguments, description=__doc__)
        require(arguments.dry_run or not arguments.json, "--json belongs to --dry-run")
        with raising_stop():
            if not arguments.dry_run:
                group = open_group(arguments.processes, "train.py")  # before anything imports JAX
            run(arguments, group)
            return group.close()
    except (ConfigError, ValueError, FloatingPointError, OSError, *group.losses()) as error:
        line, code = f"train.py: {group.explain(error)}", 2
    except Stopped as stopped:
        line = f"train.py: {stopped}; the same command goes on"
        code = 0 if group.count == 1 else 130  # the others were not told
        if stopped.is_agreed:
            print(line, file=sys.stderr)
            return group.close()
    except KeyboardInterrupt:
        line, code = "train.py: stopped; the same command goes on where it was", 130
    group.abandon(line, code)
    print(line, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
