"""The process that compiles: one job in, the facts about one program out, as JSON files.

    python -m mimo_jax.plan.worker JOB.json ANSWER.json DUMP_FOLDER

Started by plan/aot.py, never by hand: the environment decides which compiler it meets. Errors that
Python sees become the answer; what kills the process is the parent's business.

Once XLA has assigned buffers, everything about memory, collectives and copies is decided, and it
writes the optimised module down; generating code then takes as long again. A job that asks for
memory alone is answered at that point and the process ends.
"""

import dataclasses
import importlib
import json
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.config import ConfigError
from mimo_jax.plan import hlo, thunks
from mimo_jax.plan.targets import target_text
from mimo_jax.sharding import RULES, make_mesh
from mimo_jax.timing import Stopwatch
from pallas_kernels.dispatch import why_not_mosaic

# Files that XLA writes once buffers are assigned; the last one, twice as long, is closed last.
OPTIMISED = "_after_optimizations.txt"
BUFFER_REPORT = "_after_optimizations-memory-usage-report.txt"
AFTER_BUFFERS = "_after_optimizations-buffer-assignment-values.txt"
NUM_MOVES = 8


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """What is known about a compiled program, per device; all sizes in bytes.

    Attributes:
      argument_bytes: Weights, caches and state that go in.
      alias_bytes: Arguments that results are written over.
      temp_bytes: Scratch memory.
      peak_bytes: The most that is held at once.
      is_step_loop: A loop over decode steps; then what follows counts one step.
      collectives: Per kind: runs and bytes.
      large_copies: [name, operations, bytes, loop depth] of data movements of 8 MB and more.
      num_aliased: Arguments that a result is written over.
      moved_bytes: Read and written, apart from the stacks that kernels pick experts from.
      picked_from_bytes: Of those stacks, whole; 0 without kernels.
      moves: The operations that read and write most.
      launches: By kind; None when not compiled for a GPU.
      top_level: Thunks at top level by kind; None when not compiled for a GPU.
      num_command_buffers: CUDA graphs; None when not compiled for a GPU.
      is_one_graph: The loop lies whole in one CUDA graph; None when not compiled for a GPU.
      num_inner_loops: Loops inside, whose launches are counted once; None as above.
      lower_s: Seconds of tracing and lowering.
      compile_s: Seconds of compiling.
      host_peak_bytes: Most memory of the compiling process.
      why_no_kernels: Why the devices cannot run the Pallas kernels; None if they can.
    """

    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    is_step_loop: bool
    collectives: dict[str, tuple[int, int]]
    large_copies: list[hlo.Copy]
    num_aliased: int
    moved_bytes: int
    picked_from_bytes: int
    moves: list[hlo.Move]
    launches: dict[str, int] | None
    top_level: dict[str, int] | None
    num_command_buffers: int | None
    is_one_graph: bool | None
    num_inner_loops: int | None
    lower_s: float
    compile_s: float
    host_peak_bytes: int
    why_no_kernels: str | None

    @property
    def num_launches(self) -> int | None:
        """All kinds together; None when not compiled for a GPU."""
        return None if self.launches is None else sum(self.launches.values())

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "ProgramFacts":
        """The facts back from an answer, where JSON has made lists of tuples."""
        rows = {
            "collectives": {kind: tuple(pair) for kind, pair in values["collectives"].items()},
            "moves": [hlo.Move(*row) for row in values["moves"]],
            "large_copies": [hlo.Copy(*row) for row in values["large_copies"]],
        }
        return cls(**(values | rows))


def lower_probe(mesh: Mesh):
    """A product and an exponential: needs a register assembler and the mathematics library."""
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    return jax.jit(lambda a: jnp.exp(a @ a)).lower(x)


def _devices(target: str | None, count: int) -> Sequence[Any]:
    if target is None:
        jax.config.update("jax_num_cpu_devices", count)
        return jax.devices()
    import jax_plugins.xla_cuda13 as plugin  # pyright: ignore[reportMissingImports]
    from jax.experimental import topologies

    from mimo_jax.plan.aot import LIBRARY

    library = Path(plugin.__path__[0]) / LIBRARY
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_text(library, target), topology=f"1x1x{count}"
    )
    return topology.devices


def _of_text(text: str) -> dict[str, Any]:
    """Facts that the optimised module's text tells."""
    module = hlo.parse(text)
    is_loop = hlo.has_step_loop(module)
    collectives: dict[str, tuple[int, int]] = {}
    for one in hlo.collectives(module):
        if one.loop_depth or not is_loop:
            number, num_bytes = collectives.get(one.kind, (0, 0))
            collectives[one.kind] = (
                number + one.trip_count,
                num_bytes + one.num_bytes * one.trip_count,
            )
    moves = hlo.moves(module, in_loop=is_loop)
    sizes = hlo.parameter_bytes(module)
    return {
        "is_step_loop": is_loop,
        "collectives": collectives,
        "large_copies": list(hlo.large_copies(module)),
        "num_aliased": len(module.aliased_parameters),
        "moved_bytes": sum(move.num_bytes for move in moves),
        "picked_from_bytes": hlo.picked_from_bytes(module, in_loop=is_loop),
        "moves": moves[:NUM_MOVES],
        "argument_bytes": sum(sizes.values()),
        "alias_bytes": sum(sizes[number] for number in module.aliased_parameters),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


NO_LAUNCHES: dict[str, Any] = {"launches": None, "top_level": None, "num_command_buffers": None,
               "is_one_graph": None, "num_inner_loops": None}  # fmt: skip


def _of_executable(compiled, dump_folder: Path) -> dict[str, Any]:
    """Facts about a finished program."""
    memory = compiled.memory_analysis()
    facts = _of_text(compiled.as_text())
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    facts |= NO_LAUNCHES | {
        "argument_bytes": memory.argument_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        # XLA:CPU reports a peak below its own arguments: added up for both.
        "peak_bytes": held,
    }
    listed = thunks.read_dump(dump_folder)
    if listed:
        shape = thunks.describe(listed, has_step_loop=facts["is_step_loop"])
        facts |= shape._asdict()
    return facts


def _buffer_files(dump_folder: Path, older: set[Path]) -> list[tuple[Path, int]]:
    """The files that tell about buffers, with their sizes; those that are not there left out.

    Args:
      dump_folder: Where XLA writes.
      older: Files of programs compiled before this one.
    """
    new = sorted(set(dump_folder.glob("*")) - older)
    ends = (OPTIMISED, BUFFER_REPORT, AFTER_BUFFERS)
    found = [next((file for file in new if file.name.endswith(end)), None) for end in ends]
    return [(file, file.stat().st_size) for file in found if file is not None]


def _of_buffers(text: Path, report: Path) -> dict[str, Any]:
    """Facts that stand once buffers are assigned."""
    facts = _of_text(text.read_text()) | NO_LAUNCHES
    total = sum(int(n) for n in re.findall(r"^Total bytes: (\d+)", report.read_text(), re.M))
    return facts | {"temp_bytes": total - facts["argument_bytes"], "peak_bytes": total}


def run(job: dict[str, Any], dump_folder: Path, finish: Callable[[ProgramFacts], None]) -> None:
    """Lowers and compiles the job's program and hands over what was found out.

    `finish` may end the process: with `stops_at_buffers` the compilation is given up half-way.
    """
    count = 1
    for size in job["mesh"]:
        count *= size
    devices = _devices(job["target"], count)
    mesh = make_mesh(RULES[job["rules"]], job["mesh"], devices)
    module, function = job["builder"].split(":")
    builder = getattr(importlib.import_module(module), function)
    with Stopwatch() as lowering:
        lowered = builder(mesh, **job["arguments"])
    older = set(dump_folder.glob("*"))
    compiling = Stopwatch.started()

    def circumstances() -> dict[str, Any]:
        seconds = {"lower_s": lowering.elapsed_s, "compile_s": compiling.elapsed_s}
        return seconds | {"why_no_kernels": why_not_mosaic(devices[0])}

    is_over = threading.Event()

    def watch() -> None:
        before = []
        while not is_over.wait(0.4):
            files = _buffer_files(dump_folder, older)
            # XLA writes them at one go: whole when they are all there and no longer grow.
            if len(files) == 3 and files == before and all(size for _, size in files):
                found = circumstances()
                finish(ProgramFacts(**_of_buffers(files[0][0], files[1][0]), **found))
            before = files

    if job["stops_at_buffers"]:
        threading.Thread(target=watch, daemon=True).start()
    compiled = lowered.compile()
    is_over.set()
    found = circumstances()
    finish(ProgramFacts(**_of_executable(compiled, dump_folder), **found))


def main() -> int:
    job_path, answer_path, dump_folder = (Path(argument) for argument in sys.argv[1:4])

    def answer(values: dict[str, Any]) -> None:
        answer_path.write_text(json.dumps(values))
        # Not sys.exit: a compilation may still run, and the plugin's threads may crash while the
        # interpreter is taken down.
        os._exit(0)

    try:
        job = json.loads(job_path.read_text())
        run(job, dump_folder, lambda facts: answer(dataclasses.asdict(facts)))
    except ConfigError as error:
        answer({"error": str(error)})
    except Exception as error:  # whatever the compiler raises is an answer, not a crash
        text = str(error).strip().splitlines() or [""]
        answer({"error": f"{type(error).__name__}: {text[0][:300]}"})
    return 0


if __name__ == "__main__":
    sys.exit(main())
