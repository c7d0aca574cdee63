"""Training by several real processes equals training by one; killed, it stops and resumes.

Run: pytest tests/train/test_processes.py
"""

import dataclasses
import json
import signal
import time

import jax
import numpy as np
import pytest

from mimo_jax.checkpoint.store import CheckpointStore
from mimo_jax.config import ConfigError
from mimo_jax.distributed import Membership, ProcessGroup
from mimo_jax.sharding import TRAIN, make_mesh, to_host
from mimo_jax.train.start import on_all_devices
from tests import groups
from tests.train import process_run, smallest_run

pytestmark = pytest.mark.usefixtures("standard_promotion")


def metrics(run_dir, stage="target"):
    """The lines of a run, without the clock."""
    lines = map(json.loads, (run_dir / stage / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in ("time", "tokens_per_s")} for line in lines]


def kill_one(command, count, victim, is_time, num_devices=1):
    """Kills a process once is_time(); returns the others' stderr and how long they took to end."""
    with groups.started(command, count, num_devices) as processes:
        groups.wait_for(is_time)
        processes[victim].send_signal(signal.SIGKILL)
        start = time.monotonic()
        ends = groups.results(processes, limit_s=60)
        stopped_s = time.monotonic() - start
    assert all(code != 0 for code, _, _ in ends)
    return [ends[i][2] for i in range(count) if i != victim], stopped_s


def last_line(text):
    """What a terminal shows last; before it there may be a bar."""
    return text.strip().splitlines()[-1]


def killed_resumed_and_compared(tmp_path, count, victim):
    """A killed and resumed run of several processes against one that was not, in this process."""
    num_steps, run_dir = 12, tmp_path / "run"
    command = ["tests/train/process_run.py", str(run_dir), str(num_steps), "0.3"]
    stored = lambda: (run_dir / "target" / "checkpoints" / "2" / "files.json").exists()
    said, stopped_s = kill_one(command, count, victim, stored)
    for line in map(last_line, said):
        assert line.startswith("process_run: process ")
        assert "another process" in line
    assert stopped_s < 60
    store = CheckpointStore(run_dir / "target" / "checkpoints")
    assert 2 <= max(store.steps()) < num_steps

    command[-1] = "0"
    for code, _, stderr in groups.run(command, count):
        assert code == 0, stderr
    assert max(store.steps()) == num_steps

    mesh = make_mesh(TRAIN, (count, 1, 1))
    alone = process_run.train(tmp_path / "alone", num_steps, mesh, ProcessGroup())
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    step, state, _ = store.restore_latest(jax.tree.map(like, alone))  # its hashes hold here, too
    assert step == num_steps
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(alone), strict=True):
        # Gloo and one process add up in different orders: some units in the last place.
        np.testing.assert_allclose(to_host(ours), to_host(theirs), rtol=1e-4, atol=2e-6)
    for found, expected in zip(metrics(run_dir), metrics(tmp_path / "alone"), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.e2e
def test_two_processes_train_like_one_also_when_killed(tmp_path):
    killed_resumed_and_compared(tmp_path, count=2, victim=1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_four_processes_train_like_one_also_when_killed(tmp_path, victim):
    killed_resumed_and_compared(tmp_path, count=4, victim=victim)


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_in_order(tmp_path):
    """Agreed on at the next step whose metrics are read: every tenth."""
    command = ["tests/train/process_run.py", str(tmp_path), "40", "0.3"]
    stored = lambda: (tmp_path / "target" / "checkpoints" / "2" / "files.json").exists()
    with groups.started(command, 2) as processes:
        groups.wait_for(stored)
        processes[1].send_signal(signal.SIGTERM)
        for code, _, stderr in groups.results(processes, limit_s=120):
            assert code == 0, stderr
            line = "process_run: target: stopped by SIGTERM after step 10 of 40, which is saved"
            assert last_line(stderr) == line
    assert max(CheckpointStore(tmp_path / "target" / "checkpoints").steps()) == 10


LATE = """
import sys, time
from mimo_jax.distributed import ProcessFlags, open_group
group = open_group(ProcessFlags(sys.argv[2], int(sys.argv[4]), int(sys.argv[6])), "late")
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from mimo_jax.sharding import TRAIN, connect, make_mesh
mesh = make_mesh(TRAIN, (2, 2, 1))
connect(mesh, group)
place = NamedSharding(mesh, P(("data", "expert")))
x = jax.make_array_from_callback((4,), place, lambda i: np.array([1, 2, 4, 8], np.int32)[i])
sums = lambda x: jax.lax.psum(x, "data")
sums = jax.shard_map(sums, mesh=mesh, in_specs=place.spec, out_specs=P("expert"))
if group.index == 1:
    time.sleep(35)
print([int(part.data[0]) for part in jax.jit(sums)(x).addressable_shards])
sys.exit(group.close())
"""


@pytest.mark.slow
def test_a_process_may_come_late_to_a_collective(tmp_path):
    """Later than the 30 s within which Gloo wants to open a connection."""
    program = tmp_path / "late.py"
    program.write_text(LATE)
    for code, out, stderr in groups.run([str(program)], 2, num_devices=2):
        assert code == 0, stderr
        assert out.splitlines()[-1] == "[5, 10]"


def test_every_device_of_every_process_has_to_be_in_the_mesh():
    """This process has 8 devices; a group of two is told that they are those of both."""
    config, group = smallest_run.get_config(), ProcessGroup(Membership(0, 2))
    with pytest.raises(ConfigError, match="target_train.batch_rows: axis batch of 4 cannot be cut"):
        on_all_devices(config, group)
    rows = {"batch_rows": 8}
    config = dataclasses.replace(
        config,
        target_train=dataclasses.replace(config.target_train, **rows),
        drafter_train=dataclasses.replace(config.drafter_train, **rows),
    )
    with pytest.raises(ConfigError, match="cannot be cut into 8 parts"):  # width 28
        on_all_devices(config, group)
    two = dataclasses.replace(config, mesh=(2, 1, 1))
    with pytest.raises(ConfigError, match="mesh 2x1x1 has 2 devices, and 2 processes bring 8"):
        on_all_devices(two, group)
    assert on_all_devices(two, ProcessGroup()) == two


@pytest.mark.slow
def test_the_whole_recipe_by_two_processes(tmp_path):
    """train.py: every file that two processes leave is what one process with two devices leaves."""
    one, two = tmp_path / "one", tmp_path / "two"
    command = ["train.py", "--config", "tests/train/smallest_run.py", "--run-dir"]
    ((code, out, stderr),) = groups.run([*command, str(one), "--mesh", "2x1x1"], 1, 2, 1200)
    assert code == 0, stderr
    assert out == f"exported to {one / 'export'}\n"

    is_time = lambda: (two / "target" / "checkpoints" / "3" / "files.json").exists()
    said, stopped_s = kill_one([*command, str(two)], 2, 1, is_time)
    assert last_line(said[0]).startswith("train.py: process 0 of 2: ")
    assert stopped_s < 60
    ends = groups.run([*command, str(two)], 2, limit_s=1200)
    for code, _, stderr in ends:
        assert code == 0, stderr
    assert [out.count("exported") for _, out, _ in ends] == [1, 0]
    for stage in ("target", "drafter"):
        for found, expected in zip(metrics(two, stage), metrics(one, stage), strict=True):
            assert found.keys() == expected.keys()
            for name in found:
                assert found[name] == pytest.approx(expected[name], rel=1e-3), name
    names = lambda root: sorted(
        str(path.relative_to(root)) for path in root.rglob("*")
        if path.is_file() and "checkpoints" not in path.parts
    )
    assert names(two) == names(one)
