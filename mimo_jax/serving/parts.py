"""One output file written by several processes: a part each, merged when all are complete.

Every process is a replica with its own devices and answers the lines i, i + n, i + 2n ... of those
that the output does not hold yet. Strided and not in blocks: files are often sorted by scene or
length, and a block of long prompts would leave one process at work when the others are done. A
part grows through the same resumable writer as an output of one process; the output itself
changes only when the first process puts the merged file in its place, so what is left to do is
the same in every rerun until then.

    OUTPUT.part-0-of-2 ...   the answers of process 0, a prefix of its share
    OUTPUT.parts.json        whose parts these are: number of processes, hash of the job

The hash covers input, flags and what the output held: parts of another job, which may well have
the same ids (line numbers), are refused and not continued.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mimo_jax.distributed import ProcessGroup
from mimo_jax.serving.jsonl import Finished, JobError, is_stdio, read_finished, write_whole
from mimo_jax.serving.options import BatchOptions

# What the answers do not depend on. The input counts by what it holds.
_NO_MATTER = ("input", "output", "metrics_json", "quiet", "batch_size", "processes")


def part_path(output: Path, index: int, count: int) -> Path:
    """Where a process writes; the output itself if it is alone.

    Example: out/a.jsonl, 0, 2 -> out/a.jsonl.part-0-of-2.
    """
    return output if count == 1 else output.with_name(f"{output.name}.part-{index}-of-{count}")


def _plan_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.parts.json")


def job_hash(options: BatchOptions, lines: Sequence[tuple[int, bytes]], finished: Finished) -> str:
    """32 hex digits over all that decides what the parts of a job hold."""
    flags = {
        field.name: str(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in _NO_MATTER
    }
    digest = hashlib.blake2b(json.dumps([flags, finished.num_bytes]).encode(), digest_size=16)
    for number, line in lines:
        digest.update(b"%d %s\n" % (number, line))
    return digest.hexdigest()


def check_paths(options: BatchOptions, group: ProcessGroup) -> None:
    """Refuses, for several processes, what only one of them could read or write.

    Raises:
      JobError: If input or output is a stream.
    """
    if group.count == 1:
        return
    for name, path in (("input", options.input), ("output", options.output)):
        if is_stdio(path) or (path.exists() and not path.is_file()):
            raise JobError(
                f"{name} {path}: is a stream; {group.count} processes need a file that all can open"
            )


def _trouble(output: Path, plan: dict) -> str | None:
    """Why the parts beside an output cannot be continued; None if they can, or there are none."""
    path = _plan_path(output)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        n, job = int(found["num_processes"]), found["job"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"{path}: cannot be read; remove it and {part_path(output, 0, 2).name} and the like"
    parts = f"{part_path(output, 0, n)}{' and so on' if n > 1 else ''}"
    if n != plan["num_processes"]:
        return (
            f"output {output}: {parts} are of a run with {n} processes, this one has "
            f"{plan['num_processes']}; run it with {n} again, or remove them and {path.name}"
        )
    if job != plan["job"]:
        return (
            f"output {output}: {parts} are of another job (other input, flags or output); give "
            f"that one again, or remove them and {path.name}"
        )
    return None


def claim(output: Path, group: ProcessGroup, job: str) -> None:
    """Agrees, before anything is written, that all processes work on one job and its parts.

    Raises:
      JobError: On every process if there are parts of another job or number of processes; on a
        process that has another job than the first one.
    """
    plan = {"num_processes": group.count, "job": job}
    trouble = None
    if group.is_first:
        trouble = None if is_stdio(output) else _trouble(output, plan)
        if trouble is None and group.count > 1:
            write_whole(_plan_path(output), json.dumps(plan) + "\n")
    trouble, first_job = group.share("plan", [trouble, job])
    if trouble is not None:
        raise JobError(trouble)
    if first_job != job:
        raise JobError(
            f"{group} has another input, other flags or another output file than process 0"
        )


def read_part(path: Path, ids: Sequence[str]) -> Finished:
    """What a part holds already.

    Args:
      path: Of the part.
      ids: Of the lines it is for, in order.

    Raises:
      JobError: If it holds anything but answers to the first of them.
    """
    finished = read_finished(path)
    if finished.num_bytes:
        found = [json.loads(line)["id"] for line in path.read_bytes()[: finished.num_bytes].split(
            b"\n")[:-1]]
        if found != list(ids[: len(found)]):
            raise JobError(f"output {path}: holds other ids than this job; remove the file")
    return finished


def merge(output: Path, group: ProcessGroup, finished: Finished, ids: Sequence[str]) -> None:
    """Puts output + parts in the place of the output, in the order of the input; then cleans up.

    Args:
      output: The output file.
      group: Of the processes; this is the first one.
      finished: What the output holds.
      ids: Of all lines that the parts answer, in the order of the input.

    Raises:
      JobError: If a part is not complete or a file cannot be written; the output is as it was.
    """
    merged = output.with_name(f"{output.name}.merging")
    parts = [part_path(output, i, group.count) for i in range(group.count)]
    lines = [path.read_bytes().split(b"\n")[:-1] if path.exists() else [] for path in parts]
    for i, part in enumerate(lines):
        if [json.loads(line)["id"] for line in part] != list(ids[i :: group.count]):
            raise JobError(f"output {parts[i]}: is not complete; the same command goes on")
    try:
        with merged.open("wb") as file:
            if finished.num_bytes:
                file.write(output.read_bytes()[: finished.num_bytes])
            for k in range(len(ids)):
                file.write(lines[k % group.count][k // group.count] + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(merged, output)
    except OSError as error:
        raise JobError(f"output {output}: cannot be written: {error.strerror}") from error
    clean_up(output)


def clean_up(output: Path) -> None:
    """Removes the parts that a plan beside the output names, and last the plan."""
    path = _plan_path(output)
    if not path.exists():
        return
    count = int(json.loads(path.read_text(encoding="utf-8"))["num_processes"])
    for i in range(count if count > 1 else 0):
        part_path(output, i, count).unlink(missing_ok=True)
    path.unlink()
