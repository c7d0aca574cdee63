"""Flags of a group, its errors, and the witness. Run: pytest tests/test_distributed.py

What several real processes do is in tests/serving/test_parts.py and tests/train/test_processes.py.
"""

import io
import json
import subprocess
import sys

import pytest

from mimo_jax.config import ConfigError
from mimo_jax.distributed import Membership, ProcessFlags, ProcessGroup, membership, open_group
from mimo_jax.witness import cause, listen
from tests import groups

SLURM = {"SLURM_NTASKS": "4", "SLURM_PROCID": "2"}
MPI = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "1"}


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ((), {}, Membership()),
        (("h:12", 3, 2), {}, Membership(2, 3, "h:12")),
        (("[::1]:12", 3, 0), {}, Membership(0, 3, "[::1]:12")),
        (("h:12", 1, 0), {}, Membership()),
        ((), SLURM, Membership(2, 4, None, "slurm")),
        (("h:12",), SLURM, Membership(2, 4, "h:12", "slurm")),
        (("h:12", 5, 3), SLURM, Membership(3, 5, "h:12")),
        ((None, 1), SLURM, Membership()),
        ((), MPI, Membership(1, 3, None, "ompi")),
        # sbatch without srun: one task, or a count without a rank.
        ((), {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, Membership()),
        ((), {"SLURM_NTASKS": "4"}, Membership()),
    ],
)
def test_who_says_which_process_this_is(flags, environ, expected):
    assert membership(ProcessFlags(*flags), environ) == expected


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (("h:12", 2, 2), {}, "process_id 2 is out of range; allowed: 0..1"),
        (("h:12", 2, -1), {}, "process_id -1 is out of range; allowed: 0..1"),
        (("h:12", 0, 0), {}, "num_processes 0 is out of range; allowed: >= 1"),
        (("h:12", 2), {}, "coordinator, num_processes given without process_id; allowed: all"),
        ((None, 2), SLURM, "num_processes given without coordinator, process_id; allowed: all"),
        (("h:12",), {}, "coordinator given without num_processes, process_id"),
        (("h", 2, 0), {}, "coordinator 'h' is no HOST:PORT; for instance 10.0.0.1:12345"),
        (("h:0", 2, 0), {}, "coordinator 'h:0' is no HOST:PORT"),
        (("h:99999", 2, 0), {}, "coordinator 'h:99999' is no HOST:PORT"),
        ((":12", 2, 0), {}, "coordinator ':12' is no HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit(flags, environ, message):
    with pytest.raises(ConfigError) as caught:
        membership(ProcessFlags(*flags), environ)
    assert str(caught.value).startswith(message)


def test_alone_nothing_waits_and_nothing_is_started():
    group = open_group(ProcessFlags(), "test")
    assert (group.index, group.count, group.is_first) == (0, 1, True)
    group.barrier("never")
    assert group.share("value", {"a": 1}) == {"a": 1}
    assert group.gather("value", 3) == [3]
    assert group.explain(ValueError("two\nlines")) == "two lines"
    assert group.losses() == ()
    group.abandon("said by nobody", 2)
    assert group.close(1) == 1


def test_what_another_process_is_said_to_have_done():
    group = ProcessGroup(Membership(1, 4, "h:12"))
    assert (group.is_first, str(group)) == (False, "process 1 of 4")
    assert group.explain(ValueError("file\nmissing")) == "process 1 of 4: file missing"
    gloo = ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
    assert group.explain(gloo).startswith("process 1 of 4: another process is gone (UNKNOWN: Gloo")


def test_a_coordinator_that_is_not_there():
    flags = ProcessFlags(f"127.0.0.1:{groups.free_port()}", 2, 1)
    with pytest.raises(ConfigError) as caught:
        open_group(flags, "test", join_timeout_s=0.3)
    assert "cannot be reached within 0 s: Connection refused; is process 0 run" in str(caught.value)


DIED = b"""E1 coordination_service.cc:15] UNAVAILABLE: are unhealthy (stopped sending heartbeats):
3
11
The tasks have crashed.
F1 client.h:86] Terminating process because the JAX distributed service detected fatal errors.
    @     0x7f8e4 absl::lts::LogMessage::SendToLog()
"""
LEFT = b"F1 JAX distributed service: Failed to send RPC to coordination service.\n  @ 0x1\n"


def heard(text: bytes) -> bytes:
    sink = io.BytesIO()
    listen(io.BytesIO(text), sink)
    return sink.getvalue()


def test_the_witness_speaks_when_there_was_no_goodbye():
    assert heard(b"\n\x01lost\n" + DIED) == b"lost (lost contact with process 3, 11)\n"
    assert heard(b"\x01lost\n" + LEFT) == b"lost (lost contact with process 0)\n"
    assert heard(b"\x01joining\nnote\n\n\x01lost\n") == b"note\nlost\n"
    assert cause(b"something else") == ""


def test_the_witness_hides_nothing_from_a_process_that_goes_on():
    barrier = b"E1 coordination_service.cc:7] Barrier timed out\n  more about it\n"
    assert heard(b"\x01lost\nnote\n" + barrier + b"\n\x01\n") == b"note\n" + barrier + b"\n"
    assert heard(b"a crash\n") == b"a crash\n"


PROGRAM = """
import os, sys
from mimo_jax.witness import Witness
witness = Witness("first words")
os.write(2, b"from C++\\n")
print("from Python", file=sys.stderr)
if sys.argv[1] == "killed":
    witness.say_last("killed\\nhere")
    os.kill(os.getpid(), 9)
witness.dismiss()
os.write(2, b"afterwards\\n")
"""


@pytest.mark.parametrize(
    ("how", "code", "last"), [("killed", -9, "killed here"), ("well", 0, "afterwards")]
)
def test_a_real_witness(how, code, last):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how],
        env=groups.environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-1]) == (code, last)
    assert sorted(lines[:-1]) == ["from C++", "from Python"]


MEETING = """
import json, sys
from mimo_jax.distributed import ProcessFlags, open_group
flags = ProcessFlags(sys.argv[2], int(sys.argv[4]), int(sys.argv[6]))
group = open_group(flags, "meeting", join_timeout_s=100)
print(json.dumps([group.share("a", [group.index, "x"]), group.gather("b", 10 + group.index)]))
try:
    group.barrier("c")
    if group.is_first:  # perhaps before the other has heard that the barrier is passed
        group.abandon("meeting: process 0 has its reasons", 2)
    group.barrier("d")
except group.losses() as error:
    group.abandon("meeting: " + group.explain(error), 3)
"""


def test_two_processes_meet_and_one_leaves(tmp_path):
    """Values arrive; the one that leaves says why, and the other notices at once: 0 watched it."""
    program = tmp_path / "meeting.py"
    program.write_text(MEETING)
    (code0, out0, err0), (code1, out1, err1) = groups.run([str(program)], 2)
    assert (code0, err0) == (2, "meeting: process 0 has its reasons\n")
    assert json.loads(out0) == [[0, "x"], [10, 11]]
    assert code1 != 0
    assert err1.startswith("meeting: process 1 of 2: ")
    assert "another process " in err1
    assert len(err1.splitlines()) == 1, "one line, not a stack trace"
    if out1:  # nothing is flushed where JAX aborts before Python hears of it
        assert json.loads(out1) == [[0, "x"], []]


def as_slurm(index: int) -> dict[str, str]:
    """JAX takes the coordinator's port from the job's number: 61440 + 123 here."""
    return {
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def as_open_mpi(index: int) -> dict[str, str]:
    """Likewise, from the launcher's address: 61440 + 124."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{124 * 4096}.0;tcp://127.0.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


FOUND = """
import sys
from mimo_jax.distributed import ProcessFlags, open_group
group = open_group(ProcessFlags(), "found", join_timeout_s=100)
print(group.gather("who", str(group)))
sys.exit(group.close(7))
"""


@pytest.mark.parametrize("launcher", [as_slurm, as_open_mpi])
def test_processes_find_each_other_through_their_launcher(tmp_path, launcher):
    """Real processes in the environment of a launcher; the address is JAX's to find."""
    program = tmp_path / "found.py"
    program.write_text(FOUND)
    with groups.started([str(program)], 2, launcher=launcher) as processes:
        first, second = groups.results(processes)
    assert first == (7, "['process 0 of 2', 'process 1 of 2']\n", "")
    assert second == (7, "[]\n", "")
