"""The training loop: one straight line used by every stage.

resume -> (step -> log -> maybe evaluate -> maybe save) * n -> save. Batches are a function of the
step number and randomness of (seed, step), so a run that was killed and resumed is the run that
was not. Metrics go to a JSON Lines file; a resumed run first cuts the lines past its step, so the
file reads as one run.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mimo_jax.checkpoint.store import CheckpointStore
from mimo_jax.train.step import TrainState

LOG_EVERY = 10


class MetricsFile:
    """Append-only JSON Lines of {"step": ..., metric: value}; lines past `step` are dropped."""

    def __init__(self, path: Path, step: int):
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for line in path.read_text().splitlines():
                try:
                    record = json.loads(line)
                except ValueError:
                    break  # a torn line: the run was killed while writing it
                if record["step"] <= step:
                    kept.append(line)
        path.write_text("".join(line + "\n" for line in kept))

    def write(self, step: int, values: dict) -> None:
        record = {"step": step, "time": round(time.time(), 1)}
        record |= {k: v if isinstance(v, dict) else round(float(v), 5) for k, v in values.items()}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def progress_bar(console: Console | None = None) -> Progress:
    """The one bar of every long job: name, done/total, elapsed, remaining, a line of figures."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console or Console(stderr=True),
    )


def run(
    name: str,
    state: TrainState,
    step_fn: Callable[[TrainState, int], tuple[TrainState, dict]],
    *,
    run_dir: Path,
    num_steps: int,
    save_every: int,
    eval_every: int,
    eval_fn: Callable[[TrainState], dict] | None,
    meta: dict,
    tokens_per_step: int,
) -> TrainState:
    """Trains from the newest intact checkpoint of `run_dir` to num_steps.

    Args:
      name: Shown in the bar; names the files in run_dir.
      state: Fresh state; replaced when a checkpoint exists, each leaf placed where the fresh one
        lies, whatever mesh it was saved from.
      step_fn: (state, step number) -> (state, metrics on the device).
      run_dir: Checkpoints and metrics go to run_dir/name/.
      num_steps: Optimizer steps in all.
      save_every: Steps between checkpoints; the last step is always saved.
      eval_every: Steps between evaluations; the last step is always evaluated.
      eval_fn: state -> metrics, or None.
      meta: Written with each checkpoint; a resumed run must have the same.
      tokens_per_step: For the tokens/s figure.

    Returns:
      The state after num_steps.

    Raises:
      ValueError: If the checkpoint was written with another meta; names the field.
      FloatingPointError: If the loss is not finite; the newest checkpoint is kept.
    """
    store = CheckpointStore(run_dir / name / "checkpoints")
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    restored = store.restore_latest(jax.tree.map(like, state))
    start = 0
    if restored is not None:
        start, state, saved_meta = restored
        for key in sorted(set(meta) | set(saved_meta)):
            if meta.get(key) != saved_meta.get(key):
                raise ValueError(
                    f"{run_dir / name} was run with {key}={saved_meta.get(key)!r}, now "
                    f"{meta.get(key)!r}; give the run another --run-dir or the same config"
                )
    metrics_file = MetricsFile(run_dir / name / "metrics.jsonl", start)

    with progress_bar() as bar:
        task = bar.add_task(name, total=num_steps, completed=start, figures="")
        clock, last_step = time.monotonic(), start
        for step in range(start, num_steps):
            state, metrics = step_fn(state, step)
            done = step + 1
            if done % LOG_EVERY == 0 or done == num_steps:
                metrics = {k: float(v) for k, v in metrics.items()}
                if not metrics["loss"] < float("inf"):
                    raise FloatingPointError(f"{name}: loss is {metrics['loss']} at step {done}")
                now = time.monotonic()
                metrics["tokens_per_s"] = (done - last_step) * tokens_per_step / (now - clock)
                clock, last_step = now, done
                metrics_file.write(done, metrics)
                figures = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_s']:,.0f} tok/s"
                bar.update(task, completed=done, figures=figures)
            if eval_fn is not None and (done % eval_every == 0 or done == num_steps):
                metrics_file.write(done, eval_fn(state))
                clock, last_step = time.monotonic(), done
            if done % save_every == 0 or done == num_steps:
                store.save(done, state, meta)
                clock, last_step = time.monotonic(), done
    return state
