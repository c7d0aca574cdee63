"""Training for a given number of processor seconds, so that drafters can be compared fairly.

Equal steps would favour whoever has the dearest step, equal wall time whoever ran while the machine
was quiet. So the cost of a step is measured first, in processor time of all threads, and the number
of steps follows: rates fall to zero over a schedule that must know its end. The number is written
down, so that a run that is stopped and resumed has the same schedule.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mimo_jax.timing import cpu_seconds
from mimo_jax.train import loop
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.step import TrainState

_PROBE_STEPS = 24


class Training(NamedTuple):
    """State and step of one run: step_fn(state, step number) -> (state, metrics)."""

    state: TrainState
    step_fn: Callable


class Spent(NamedTuple):
    """What a run cost.

    Attributes:
      num_steps: Optimizer steps.
      cpu_s: Processor seconds of these steps, compilation left out; of a resumed run estimated from
        the cost of a step.
    """

    num_steps: int
    cpu_s: float


def step_cost(training: Training) -> float:
    """Processor seconds of one step; its compilation is left out."""
    state = jax.tree.map(jnp.copy, training.state)
    state = jax.block_until_ready(training.step_fn(state, 0)[0])
    before = cpu_seconds()
    for step in range(_PROBE_STEPS):
        state = training.step_fn(state, step)[0]
    jax.block_until_ready(state)
    return (cpu_seconds() - before) / _PROBE_STEPS


def train_for_seconds(
    name: str,
    make: Callable[[DrafterTrainConfig], Training],
    config: DrafterTrainConfig,
    seconds: float,
    run_dir: Path,
) -> tuple[TrainState, Spent]:
    """Trains for about so many processor seconds, or takes up what is in run_dir.

    Args:
      name: Of the drafter; its files go to run_dir/name/.
      make: Run of a config; called anew once the number of steps is known.
      config: Of the run; num_steps and save_every are replaced.
      seconds: Processor seconds.
      run_dir: Where runs live; another `seconds` there is another run.

    Returns:
      The state after the last step and what was spent.
    """
    run_dir = run_dir / f"{seconds:g}s"
    path = run_dir / name / "spent.json"
    if path.exists():
        spent = Spent(**json.loads(path.read_text()))
    else:
        cost = step_cost(make(dataclasses.replace(config, num_steps=1000)))
        num_steps = max(int(seconds / cost), 1)
        spent = Spent(num_steps, round(num_steps * cost, 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(spent._asdict()))
    save_every = max(spent.num_steps // 4, 1)
    config = dataclasses.replace(config, num_steps=spent.num_steps, save_every=save_every)
    training = make(config)
    is_fresh = not (run_dir / name / "checkpoints").exists()
    if is_fresh:  # compiles outside of the count
        jax.block_until_ready(training.step_fn(jax.tree.map(jnp.copy, training.state), 0)[0])
    before = cpu_seconds()
    state = loop.run(
        name,
        training.state,
        training.step_fn,
        run_dir=run_dir,
        num_steps=spent.num_steps,
        save_every=save_every,
        eval_every=spent.num_steps,
        eval_fn=None,
        meta={"config": json.loads(json.dumps(dataclasses.asdict(config)))},
        tokens_per_step=config.batch_rows * config.row_len,
    )
    if is_fresh:
        spent = spent._replace(cpu_s=round(cpu_seconds() - before, 1))
        path.write_text(json.dumps(spent._asdict()))
    return state, spent
