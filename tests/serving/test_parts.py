"""Batch jobs of several processes: parts, their merging, refusals, and real ones that are killed.

Run: pytest tests/serving/test_parts.py
"""

import json
import signal
import time

import pytest

from mimo_jax import LLM
from mimo_jax.distributed import Membership, ProcessGroup
from mimo_jax.serving.batch import run_batch
from mimo_jax.serving.jsonl import JobError
from mimo_jax.serving.options import BatchOptions
from mimo_jax.serving.parts import part_path
from tests import groups
from tests.golden.files import arrays
from tests.serving.checkpoints import make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
PROMPT = GOLDEN["spec0_output_ids"][:16].tolist()
# Ids that differ from the order, a repeated id, errors, and a number that no n here divides.
LINES = [{"id": f"q{7 * i % 11}", "prompt_token_ids": [i + 1, 5], "max_tokens": 1 + i} for i in
         range(7)]
LINES[4] = {"id": "q1", "prompt_token_ids": [300]}
LINES.append({"id": "q0", "prompt": "again"})
LINES += [{"prompt": "Füße", "max_tokens": 5, "scene": "chat"}, {"prompt_token_ids": []}]
LINES.append({"id": "last", "prompt_token_ids": PROMPT, "max_tokens": 20})


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM.load(make_text_checkpoint(tmp_path_factory.mktemp("parts") / "model"))


@pytest.fixture
def job(llm, tmp_path):
    """Runs one process of a job in this process; process 0, which merges, has to come last."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(index=0, count=1, output="out.jsonl", **options):
        made = BatchOptions(
            llm.directory, tmp_path / "in.jsonl", tmp_path / output, batch_size=2, quiet=True,
            **options,
        )
        return run_batch(made, llm, ProcessGroup(Membership(index, count)))

    return run


def run_all(job, count, **options):
    return [job(i, count, **options) for i in reversed(range(count))]


@pytest.fixture
def whole(job, tmp_path):
    """What one process writes."""
    assert job(output="whole.jsonl") == 1
    return (tmp_path / "whole.jsonl").read_bytes()


def leftovers(tmp_path):
    return [path.name for path in tmp_path.iterdir() if "out.jsonl." in path.name]


@pytest.mark.parametrize("count", [2, 4, 13])
def test_parts_merge_to_what_one_process_writes(job, whole, tmp_path, count):
    """13 processes for 11 lines: two have nothing to do."""
    output = tmp_path / "out.jsonl"
    for i in range(1, count):
        job(i, count)
        assert not output.exists()
    ids = [json.loads(line)["id"] for line in whole.splitlines()]
    part = part_path(output, 1, count)
    assert part.name == f"out.jsonl.part-1-of-{count}"
    assert [json.loads(line)["id"] for line in part.read_bytes().splitlines()] == ids[1::count]
    job(0, count)
    assert output.read_bytes() == whole
    assert leftovers(tmp_path) == []
    run_all(job, count)
    assert output.read_bytes() == whole
    assert leftovers(tmp_path) == []


def test_stopped_parts_go_on(job, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    for cuts in ((0, 30), (200, 0), (10**6, 77)):
        job(1, 2)
        part1 = part_path(output, 1, 2)
        part1.write_bytes(part1.read_bytes()[: cuts[1]])
        with pytest.raises(JobError, match=r"part-1-of-2: is not complete; the same command"):
            job(0, 2)
        assert not output.exists()
        part0 = part_path(output, 0, 2)
        part0.write_bytes(part0.read_bytes()[: cuts[0]])
        run_all(job, 2)
        assert output.read_bytes() == whole
        output.unlink()


def test_several_processes_continue_what_one_began(job, whole, tmp_path):
    output = tmp_path / "out.jsonl"
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    output.write_bytes(whole[: ends[2] + 9])
    run_all(job, 3)
    assert output.read_bytes() == whole
    assert leftovers(tmp_path) == []


@pytest.fixture
def half_done(job, tmp_path):
    """Process 0 of 2 is done and process 1 did not come: plan and part lie there."""
    with pytest.raises(JobError, match="part-1-of-2: is not complete"):
        job(0, 2)
    return sorted(leftovers(tmp_path))


def test_killed_between_merging_and_cleaning_up(job, whole, half_done, tmp_path):
    assert half_done == ["out.jsonl.part-0-of-2", "out.jsonl.parts.json"]
    (tmp_path / "out.jsonl").write_bytes(whole)
    assert job(0, 1) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("count", [1, 3])
def test_parts_of_another_number_of_processes(job, half_done, tmp_path, count):
    with pytest.raises(JobError) as caught:
        job(0, count)
    text = str(caught.value)
    assert "out.jsonl.part-0-of-2 and so on are of a run with 2 processes, this one has" in text
    assert f"has {count}; run it with 2 again, or remove them and out.jsonl.parts.json" in text
    assert sorted(leftovers(tmp_path)) == half_done


def test_parts_of_another_job(job, half_done, tmp_path):
    with pytest.raises(JobError, match=r"part-0-of-2 and so on are of another job \(other input"):
        job(0, 2, max_tokens=3)
    (tmp_path / "in.jsonl").write_text('{"prompt": "the same id, another question"}\n')
    with pytest.raises(JobError, match="are of another job"):
        job(0, 2)
    assert sorted(leftovers(tmp_path)) == half_done


def test_a_part_with_other_ids_and_a_damaged_plan(job, half_done, tmp_path):
    part = part_path(tmp_path / "out.jsonl", 0, 2)
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(lines[1] + lines[0])
    with pytest.raises(JobError, match="part-0-of-2: holds other ids than this job"):
        job(0, 2)
    (tmp_path / "out.jsonl.parts.json").write_text("{")
    with pytest.raises(JobError, match=r"parts\.json: cannot be read; remove it"):
        job(0, 2)


@pytest.mark.parametrize("name", ["input", "output"])
def test_streams_are_for_one_process(llm, tmp_path, name):
    (tmp_path / "in.jsonl").write_text("")
    paths = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl"} | {name: "-"}
    options = BatchOptions(llm.directory, **{k: type(tmp_path)(v) for k, v in paths.items()})
    with pytest.raises(JobError, match=f"{name} -: is a stream; 2 processes need a file"):
        run_batch(options, llm, ProcessGroup(Membership(0, 2)))


# --- real processes ------------------------------------------------------------------------------


def kill_one_then_rerun(llm, tmp_path, count, victim, num_lines):
    """Kills a process in the middle; returns (stderr of the others, seconds until they ended)."""
    lines = [{"prompt_token_ids": [i % 250, 7, 9], "max_tokens": 40} for i in range(num_lines)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    files = ["--checkpoint", llm.directory, "--input", tmp_path / "in.jsonl", "--output"]
    command = ["serve.py", "batch", *map(str, files), str(output), "--quiet", "--draft", "off"]
    parts = [part_path(output, i, count) for i in range(count)]
    num_done = lambda: min(p.read_bytes().count(b"\n") if p.exists() else 0 for p in parts)
    with groups.started(command, count) as processes:
        groups.wait_for(lambda: num_done() >= 1)
        processes[victim].send_signal(signal.SIGKILL)
        start = time.monotonic()
        ends = groups.results(processes, limit_s=60)
        stopped_s = time.monotonic() - start
    assert all(code != 0 for code, _, _ in ends)
    assert not output.exists()
    kept = [part.read_bytes() for part in parts]

    metrics = tmp_path / "metrics.json"
    for code, _, stderr in groups.run([*command, "--metrics-json", str(metrics)], count):
        assert (code, stderr) == (0, "")
    figures = json.loads(metrics.read_text())
    num_kept = sum(data.count(b"\n") for data in kept)
    assert (figures["num_skipped"], figures["num_requests"]) == (num_kept, num_lines - num_kept)
    assert num_kept >= count
    assert figures["run"]["num_processes"] == count

    alone = BatchOptions(llm.directory, tmp_path / "in.jsonl", tmp_path / "alone.jsonl", quiet=True,
                         draft="off")
    assert run_batch(alone, llm) == 0
    merged = output.read_bytes()
    assert merged == (tmp_path / "alone.jsonl").read_bytes()
    whole_lines = set(merged.splitlines())
    assert all(line in whole_lines for data in kept for line in data.split(b"\n")[:-1])
    assert leftovers(tmp_path) == []
    return [stderr for i, (_, _, stderr) in enumerate(ends) if i != victim], stopped_s


@pytest.mark.e2e
def test_two_processes_of_which_the_coordinator_is_killed(llm, tmp_path):
    (said,), stopped_s = kill_one_then_rerun(llm, tmp_path, count=2, victim=0, num_lines=120)
    assert said.startswith("serve.py: process 1 of 2: ")
    assert "another process " in said
    assert len(said.splitlines()) == 1
    assert stopped_s < 60


@pytest.mark.slow
@pytest.mark.parametrize(("count", "victim"), [(2, 1), (4, 2)])
def test_processes_of_which_another_is_killed(llm, tmp_path, count, victim):
    """Takes the 40 s after which a silent process counts as dead."""
    said, stopped_s = kill_one_then_rerun(llm, tmp_path, count, victim, num_lines=300 * count)
    for line in said:
        assert line.startswith("serve.py: process ")
        assert len(line.splitlines()) == 1
    assert f"process {victim})" in said[0]
    assert stopped_s < 60
