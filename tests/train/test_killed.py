"""A run that is killed again and again ends as the run that never was, bit for bit.

Run: pytest tests/train/test_killed.py [-m slow]

SIGKILL, which no program can answer. Moments are random but seeded: a kill is due when the run has
stored a certain step, after a random pause, or as soon as a checkpoint is being written.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from mimo_jax.checkpoint.store import CheckpointStore
from mimo_jax.train.metrics import read_metrics
from tests import groups

TOY = ["tests/train/toy_run.py"]
IN_A_SAVE = "in a save"


def store_of(stage_dir: Path) -> CheckpointStore:
    return CheckpointStore(stage_dir / "checkpoints")


def newest(stage_dir: Path) -> int:
    """The newest stored step, by the names of directories: a manager may not look on."""
    directory = stage_dir / "checkpoints"
    names = os.listdir(directory) if directory.exists() else []
    return max((int(name) for name in names if name.isdigit()), default=-1)


def is_saving(stage_dir: Path) -> bool:
    directory = stage_dir / "checkpoints"
    return directory.exists() and any("-tmp" in name for name in os.listdir(directory))


def kill_when(process, is_time, limit_s: float = groups.LIMIT_S) -> bool:
    """Kills once is_time(), looking every 2 ms; False if the process ended before."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if is_time():
            process.send_signal(signal.SIGKILL)
            process.communicate()
            return True
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
    return False


def kill_again_and_again(command, stage_dir: Path, num_steps: int, moments, seed: int) -> list[str]:
    """Starts the command anew after each kill; returns what was half-written when it was killed.

    Args:
      command: Of the run.
      stage_dir: Where its checkpoints and metrics are.
      num_steps: Of the run; kills are spread over them.
      moments: For each kill, seconds that a random pause may last, or IN_A_SAVE.
      seed: Of the pauses.
    """
    rng = np.random.default_rng(seed)
    half_written = []
    for number, moment in enumerate(moments):
        due = num_steps * number // (len(moments) + 1)
        with groups.started(command, 1) as (process,):
            is_due = lambda due=due: newest(stage_dir) >= due or process.poll() is not None
            groups.wait_for(is_due)
            is_time = lambda: is_saving(stage_dir)
            if moment != IN_A_SAVE:
                end = time.monotonic() + rng.uniform(0, moment)
                is_time = lambda end=end: time.monotonic() >= end
            was_killed = kill_when(process, is_time)
            assert was_killed, process.communicate()[1]
        if is_saving(stage_dir):
            half_written.append(f"kill {number}")
    assert newest(stage_dir) < num_steps
    return half_written


def manifest(stage_dir: Path, step: int) -> dict:
    """Shape, dtype and hash of every leaf of a stored step, and its meta."""
    return store_of(stage_dir)._read_manifest(step)


def lines_of(stage_dir: Path) -> list[dict]:
    """Metrics without the clock."""
    lines = read_metrics(stage_dir / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in ("time", "tokens_per_s")} for line in lines]


def check_same_end(ours: Path, theirs: Path, num_steps: int) -> None:
    """Last state by the hash of every leaf, and all metrics."""
    assert newest(ours) == newest(theirs) == num_steps
    for stage_dir in (ours, theirs):
        store_of(stage_dir)._check_files(num_steps)
    assert manifest(ours, num_steps) == manifest(theirs, num_steps)
    assert lines_of(ours) == lines_of(theirs)
    assert not is_saving(ours)


def killed_toy_equals_straight_one(tmp_path, num_steps, pause_s, moments, min_in_saves):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = [*TOY, str(killed), str(num_steps), str(pause_s)]
    with groups.started([*TOY, str(straight), str(num_steps), "0"], 1) as process:
        half = kill_again_and_again(command, killed / "toy", num_steps, moments, seed=4)
        assert len(half) >= min_in_saves, half
        ((code, _, stderr),) = groups.results(process)
        assert code == 0, stderr
    ((code, _, stderr),) = groups.run([*command[:-1], "0"], 1)
    assert code == 0, stderr
    check_same_end(killed / "toy", straight / "toy", num_steps)
    assert [line["step"] for line in lines_of(killed / "toy") if "loss" in line] == list(
        range(10, num_steps + 1, 10)
    )


@pytest.mark.e2e
def test_killed_twice_once_in_a_save(tmp_path):
    killed_toy_equals_straight_one(tmp_path, 60, 0.02, [0.3, IN_A_SAVE], min_in_saves=1)


@pytest.mark.slow
def test_killed_ten_times(tmp_path):
    """Three of the ten in a save; the others within half a second of a stored step."""
    moments = [0.5] * 10
    moments[2] = moments[5] = moments[8] = IN_A_SAVE
    killed_toy_equals_straight_one(tmp_path, 600, 0.02, moments, min_in_saves=2)


@pytest.mark.slow
def test_the_recipe_killed_stopped_and_finished(tmp_path):
    """train.py: a SIGKILL in a save of each training, a SIGTERM between, against one left alone."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = ["train.py", "--config", "tests/train/smallest_run.py", "--run-dir"]
    ((code, _, stderr),) = groups.run([*command, str(straight)], 1)
    assert code == 0, stderr
    command = [*command, str(killed)]
    with groups.started(command, 1) as (process,):
        assert kill_when(process, lambda: is_saving(killed / "target"))
    with groups.started(command, 1) as (process,):  # the stage's first step compiles for seconds
        begun = killed / "drafter" / "metrics.jsonl"
        groups.wait_for(lambda: begun.exists() or process.poll() is not None)
        process.send_signal(signal.SIGTERM)
        ((code, _, stderr),) = groups.results([process])
    assert code == 0, stderr
    last = stderr.strip().splitlines()[-1]
    assert last.startswith("train.py: drafter: stopped by SIGTERM after step ")
    assert last.endswith(" of 4, which is saved; the same command goes on")
    with groups.started(command, 1) as (process,):
        assert kill_when(process, lambda: is_saving(killed / "drafter"))
    ((code, out, stderr),) = groups.run(command, 1)
    assert code == 0, stderr
    assert out == f"exported to {killed / 'export'}\n"
    for stage, num_steps in (("target", 6), ("drafter", 4)):
        check_same_end(killed / stage, straight / stage, num_steps)
    written = lambda root: {
        path.relative_to(root): path.read_bytes()
        for path in root.rglob("*.safetensors")
        if "checkpoints" not in path.parts
    }
    assert written(killed).keys() == written(straight).keys()
    assert written(killed) == written(straight)
    assert json.loads((killed / "config.json").read_text())["config"]["name"] == "smallest"
