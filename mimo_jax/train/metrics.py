"""The figures of a stage over time: one JSON Lines file, and TensorBoard for those who want it.

Problem: a run is killed at any moment, perhaps while a line is being written, and resumed from a
step before the last line. The file must then read as the file of one run. Choice: on opening, the
lines past the step are cut and the rest is written anew under another name and renamed, so that no
moment leaves fewer lines than the checkpoint knows of. A value is a number, or a dict or list of
numbers (by scene, by position in the block); what is not finite is null, as JSON has no NaN.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mimo_jax.checkpoint.store import naming_full_disk
from mimo_jax.config import ConfigError

# Held-out accept lengths by scene, measured by decoding or else simulated: the first that is there.
ACCEPT_LENGTHS = ("real_accept_length", "heldout_accept_length")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file up to a torn line; [] where there is no file."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break  # the run was killed while writing it
    return records


def scalars(values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers of a record under slashed names; positions of lists count from 1, null is left out.

    Example: {"loss": 2.0, "alpha": {"math": [0.5, None]}} -> ("loss", 2.0), ("alpha/math/1", 0.5).
    """
    for name, value in values.items():
        if isinstance(value, list | tuple):
            value = {str(i): each for i, each in enumerate(value, start=1)}
        if isinstance(value, dict):
            yield from ((f"{name}/{inner}", each) for inner, each in scalars(value))
        elif value is not None:
            yield name, value


def mean_accept_length(values: dict[str, Any]) -> float | None:
    """Mean over scenes of a record's held-out accept length; None if it has none."""
    for name in ACCEPT_LENGTHS:
        by_scene = [tau for tau in (values.get(name) or {}).values() if tau is not None]
        if by_scene:
            return sum(by_scene) / len(by_scene)
    return None


def _plain(value: Any) -> Any:
    """As JSON holds it: rounded to 5 digits after the point, null where it is not finite."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or not math.isfinite(value):
        return None
    return round(float(value), 5)


def _open_board(directory: Path, step: int):
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "--tensorboard needs the package tensorboardX: pip install 'mimo_jax[tensorboard]'"
        ) from error
    # What an interrupted run wrote past its checkpoint is not shown.
    return SummaryWriter(str(directory), purge_step=step + 1)


class MetricsFile:
    """Append-only JSON Lines of {"step": ..., "time": ..., metric: value}.

    Args:
      path: Made if absent; lines past `step` are dropped.
      step: Of the state that the run goes on from.
      is_first: Other processes than the first write nothing.
      has_tensorboard: Write the same figures to tensorboard/ beside it, too.

    Raises:
      ConfigError: If has_tensorboard and the package for it is absent.
    """

    def __init__(
        self, path: Path, step: int, is_first: bool = True, has_tensorboard: bool = False
    ):
        self._path, self._is_first, self._board = path, is_first, None
        if not is_first:
            return
        if has_tensorboard:
            self._board = _open_board(path.parent / "tensorboard", step)
        with naming_full_disk(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [record for record in read_metrics(path) if record["step"] <= step]
            part = path.with_name(path.name + ".partial")
            part.write_text("".join(json.dumps(record) + "\n" for record in kept))
            os.replace(part, path)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Appends one record.

        Raises:
          DiskFullError: If it does not fit on the disk.
        """
        if not self._is_first:
            return
        values = _plain(values)
        record = {"step": step, "time": round(time.time(), 1), **values}
        with naming_full_disk(self._path.parent), self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in scalars(values):
                self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Writes out what TensorBoard's writer still holds."""
        if self._board is not None:
            self._board.close()
