"""The training loop: one straight line used by every stage.

resume -> (step -> log -> maybe evaluate -> maybe save -> maybe stop) * n -> save. Batches are a
function of the step number and randomness of (seed, step), so a run that was killed and resumed is
the run that was not. Of several processes each takes every step and evaluation, since those are
collective, and the first one writes.

- Faults are looked for where the host waits for the device anyway: bad steps (which the step
  functions skip, and count in the state) when metrics are read, every LOG_EVERY steps; parameters
  that are not finite before a save. So a run stops up to LOG_EVERY - 1 steps after it had to,
  having changed nothing in them, and no NaN reaches a checkpoint.
- Asked to stop (see `stopping.py`), the loop finishes the step at hand and saves. Of several
  processes perhaps one has the signal, and all must take the same steps: they ask each other every
  LOG_EVERY steps, which is how long stopping may take there.
"""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mimo_jax.checkpoint.store import CheckpointStore, naming_full_disk
from mimo_jax.config import ConfigError
from mimo_jax.distributed import ALONE, ProcessGroup
from mimo_jax.train.metrics import MetricsFile, mean_accept_length
from mimo_jax.train.step import TrainState
from mimo_jax.train.stopping import Stopped, noting_signals

LOG_EVERY = 10
MAX_BAD_STEPS = 8
_MAX_FIELDS_SHOWN = 6
_ABSENT = object()


def progress_bar(console: Console | None = None, is_shown: bool = True) -> Progress:
    """The one bar of every long job: name, done/total, elapsed, remaining, a line of figures."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        # Plain text in notebooks, too: there Rich wants ipywidgets and leaves empty boxes without.
        console=console or Console(stderr=True, force_jupyter=False),
        disable=not is_shown,
    )


def differing_fields(stored: Any, now: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, a line per field with its full path.

    Example: {"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}} -> ["a.c: stored 2, now 3"].
    """
    if isinstance(stored, dict) and isinstance(now, dict):
        return [
            line
            for key in sorted(stored.keys() | now.keys())
            for line in differing_fields(
                stored.get(key, _ABSENT), now.get(key, _ABSENT), f"{path}.{key}" if path else key
            )
        ]
    if stored == now:
        return []
    show = lambda value: "absent" if value is _ABSENT else repr(value)
    return [f"{path}: stored {show(stored)}, now {show(now)}"]


def _check_meta(directory: Path, stored: dict, now: dict) -> None:
    """Raises ConfigError unless a run of `now` may go on from a checkpoint with `stored`."""
    old, new = (meta.get("data_hash") for meta in (stored, now))
    if old is not None and new is not None and old != new:
        raise ConfigError(
            f"the training rows of {directory} have changed since its checkpoint (hash {old}, now "
            f"{new}); bring the old ones back or give the run another --run-dir"
        )
    fields = differing_fields(stored, now)
    if fields:
        more = f"; and {len(fields) - _MAX_FIELDS_SHOWN} more" * (len(fields) > _MAX_FIELDS_SHOWN)
        raise ConfigError(
            f"{directory} was run with another config: {'; '.join(fields[:_MAX_FIELDS_SHOWN])}"
            f"{more}; give the run another --run-dir or the same config"
        )


@jax.jit
def _all_finite(tree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all() if floats else jnp.bool_(True)


def _keep_bad_batch(
    directory: Path, step: int, meta: dict, batch_of: Callable[[int], Any] | None
) -> str:
    """Writes bad_batch.npz; returns where to look, for the message."""
    if batch_of is None:
        return ""
    path = directory / "bad_batch.npz"
    seed = {"seed": meta["seed"]} if "seed" in meta else {}
    with naming_full_disk(directory):
        np.savez(path, step=step, **seed, **batch_of(step)._asdict())
    return f"; the batch of step {step} is in {path}"


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
    group: ProcessGroup = ALONE,
    batch_of: Callable[[int], Any] | None = None,
    max_bad_steps: int = MAX_BAD_STEPS,
    has_tensorboard: bool = False,
) -> TrainState:
    """Trains from the newest intact checkpoint of `run_dir` to num_steps.

    Args:
      name: Shown in the bar; names the files in run_dir.
      state: Fresh state; replaced when a checkpoint exists, each leaf placed where the fresh one
        lies, whatever mesh it was saved from.
      step_fn: (state, step number) -> (state, metrics on the device). Metrics hold "loss", and if
        the step skips what is not finite, "num_bad": such steps in a row, up to this one.
      run_dir: Checkpoints and metrics go to run_dir/name/.
      num_steps: Optimizer steps in all.
      save_every: Steps between checkpoints; the last step is always saved.
      eval_every: Steps between evaluations; the last step is always evaluated.
      eval_fn: state -> metrics, or None.
      meta: Written with each checkpoint; a resumed run must have the same. Of "data_hash"
        (`row_files.dataset_hash`) and "seed" the loop knows the meaning.
      tokens_per_step: For the tokens/s figure.
      group: The processes that train together.
      batch_of: Step number -> its batch on the host, a NamedTuple of arrays; to keep a bad one.
      max_bad_steps: The run stops after so many bad steps in a row.
      has_tensorboard: Write metrics for TensorBoard, too.

    Returns:
      The state after num_steps.

    Raises:
      ConfigError: If the checkpoint was written with another meta; names the fields.
      FloatingPointError: If steps are bad, or what is trained is not finite; the newest checkpoint
        is kept, and the batch is in run_dir/name/bad_batch.npz.
      DiskFullError: If a checkpoint or a line of metrics does not fit; older ones are kept.
      Stopped: If SIGTERM or SIGINT came; the state is saved.
    """
    directory = run_dir / name
    store = CheckpointStore(directory / "checkpoints", group=group)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    restored = store.restore_latest(jax.tree.map(like, state))
    start = 0
    if restored is not None:
        start, state, saved_meta = restored
        _check_meta(directory, saved_meta, meta)
    path = directory / "metrics.jsonl"
    metrics_file = MetricsFile(path, start, group.is_first, has_tensorboard)

    def fail(line: str, step: int):
        found = _keep_bad_batch(directory, step, meta, batch_of) if group.is_first else ""
        raise FloatingPointError(f"{name}: {line} at step {step + 1}{found}")

    def save(step: int) -> None:
        if not _all_finite(state):
            fail("what is trained is not finite (it is not saved)", step - 1)
        store.save(step, state, meta)

    bar = progress_bar(is_shown=group.is_first)
    with noting_signals() as signal_name, contextlib.closing(metrics_file), bar:
        task = bar.add_task(name, total=num_steps, completed=start, figures="")
        clock, last_step, tau = time.monotonic(), start, ""
        for step in range(start, num_steps):
            state, metrics = step_fn(state, step)
            done = step + 1
            is_logged = done % LOG_EVERY == 0 or done == num_steps
            if is_logged:
                metrics = {k: float(v) for k, v in metrics.items()}
                is_guarded = "num_bad" in metrics
                if is_guarded and metrics["num_bad"] >= max_bad_steps:
                    count = int(metrics["num_bad"])
                    fail(f"{count} steps in a row had no finite loss and gradient", step)
                if not is_guarded and not metrics["loss"] < float("inf"):
                    fail(f"loss is {metrics['loss']}", step)
                now = time.monotonic()
                metrics["tokens_per_s"] = (done - last_step) * tokens_per_step / (now - clock)
                clock, last_step = now, done
                metrics_file.write(done, metrics)
                skipped = int(metrics.get("num_skipped", 0))
                figures = f"loss {metrics['loss']:.3f}{tau}  {metrics['tokens_per_s']:,.0f} tok/s"
                figures += f"  {skipped} skipped" if skipped else ""
                bar.update(task, completed=done, figures=figures)
            if eval_fn is not None and (done % eval_every == 0 or done == num_steps):
                found = eval_fn(state)
                metrics_file.write(done, found)
                mean = mean_accept_length(found)
                tau = tau if mean is None else f"  τ {mean:.2f}"
                clock, last_step = time.monotonic(), done
            is_saved = done % save_every == 0 or done == num_steps
            if is_saved:
                save(done)
                clock, last_step = time.monotonic(), done
            wish = signal_name()
            if group.count > 1:
                wishes = group.gather("stop", wish) if is_logged else []
                wish = group.share("stop", next(filter(None, wishes), None)) if is_logged else None
            if wish is not None and done < num_steps:
                if not is_saved:
                    save(done)
                raise Stopped(
                    f"{name}: stopped by {wish} after step {done} of {num_steps}, which is saved",
                    is_agreed=True,
                )
    return state
