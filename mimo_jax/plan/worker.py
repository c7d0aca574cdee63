"""The process that compiles: one job in, the facts about one program out, as JSON files.

    python -m mimo_jax.plan.worker JOB.json ANSWER.json DUMP_FOLDER

Started by plan/aot.py, never by hand: the environment decides which compiler it meets. Errors that
Python sees become the answer; what kills the process is the parent's business.
"""

import dataclasses
import importlib
import json
import os
import resource
import sys
from collections.abc import Sequence
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


@dataclasses.dataclass(frozen=True)
class ProgramFacts:
    """What is known about a compiled program, per device; all sizes in bytes.

    Attributes:
      argument_bytes: Weights, caches and state that go in.
      output_bytes: Results, aliased ones included.
      alias_bytes: Results that are written over donated arguments.
      temp_bytes: Scratch memory.
      peak_bytes: The most that is held at once.
      collectives: Per kind: runs per step, bytes per step, and whether any stands outside the loop.
      large_copies: [name, operations, bytes, loop depth] of data movements of 8 MB and more.
      num_aliased: Arguments that a result is written over.
      moved_bytes: Read and written by one step (or by the program, without a loop).
      launches: Launches of one step by kind; None when not compiled for a GPU.
      top_level: Kinds of the thunks at top level; None when not compiled for a GPU.
      num_command_buffers: CUDA graphs; None when not compiled for a GPU.
      is_one_graph: The loop lies whole in one CUDA graph; None when not compiled for a GPU.
      num_inner_loops: Loops inside the step, whose launches are counted once.
      lower_s: Seconds of tracing and lowering.
      compile_s: Seconds of compiling.
      host_peak_bytes: Most memory of the compiling process.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    peak_bytes: int
    collectives: dict[str, tuple[int, int]]
    large_copies: list[tuple[str, str, int, int]]
    num_aliased: int
    moved_bytes: int
    launches: dict[str, int] | None
    top_level: list[str] | None
    num_command_buffers: int | None
    is_one_graph: bool | None
    num_inner_loops: int | None
    lower_s: float
    compile_s: float
    host_peak_bytes: int


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

    library = Path(plugin.__file__).with_name(LIBRARY)
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_text(library, target), topology=f"1x1x{count}"
    )
    return topology.devices


def _facts(compiled, dump_folder: Path, lower_s: float, compile_s: float) -> ProgramFacts:
    memory = compiled.memory_analysis()
    module = hlo.parse(compiled.as_text())
    has_loop = any(visit.loop_depth for visit in hlo.walk(module))
    collectives: dict[str, tuple[int, int]] = {}
    for one in hlo.collectives(module):
        if one.loop_depth or not has_loop:
            number, num_bytes = collectives.get(one.kind, (0, 0))
            collectives[one.kind] = (
                number + one.trip_count,
                num_bytes + one.num_bytes * one.trip_count,
            )
    listed = thunks.read_dump(dump_folder) if dump_folder.is_dir() else None
    shape = thunks.describe(listed) if listed else None
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    # XLA:CPU reports a peak below its own arguments: add up instead.
    peak = memory.peak_memory_in_bytes if shape else held
    return ProgramFacts(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        peak_bytes=max(peak, memory.argument_size_in_bytes),
        collectives=collectives,
        large_copies=[tuple(copy) for copy in hlo.large_copies(module)],
        num_aliased=len(module.aliased_parameters),
        moved_bytes=hlo.bytes_moved(module, in_loop=has_loop),
        launches=shape.launches if shape else None,
        top_level=list(shape.top_level) if shape else None,
        num_command_buffers=shape.num_command_buffers if shape else None,
        is_one_graph=shape.is_one_graph if shape else None,
        num_inner_loops=shape.num_inner_loops if shape else None,
        lower_s=lower_s,
        compile_s=compile_s,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def run(job: dict[str, Any], dump_folder: Path) -> ProgramFacts:
    """Lowers and compiles the job's program and reads off the result."""
    count = 1
    for size in job["mesh"]:
        count *= size
    devices = _devices(job["target"], count)
    mesh = make_mesh(RULES[job["rules"]], job["mesh"], devices)
    module, function = job["builder"].split(":")
    builder = getattr(importlib.import_module(module), function)
    with Stopwatch() as lowering:
        lowered = builder(mesh, **job["arguments"])
    with Stopwatch() as compiling:
        compiled = lowered.compile()
    return _facts(compiled, dump_folder, lowering.elapsed_s, compiling.elapsed_s)


def main() -> int:
    job_path, answer_path, dump_folder = (Path(argument) for argument in sys.argv[1:4])
    try:
        answer = dataclasses.asdict(run(json.loads(job_path.read_text()), dump_folder))
    except ConfigError as error:
        answer = {"error": str(error)}
    except Exception as error:  # whatever the compiler raises is an answer, not a crash
        text = str(error).strip().splitlines() or [""]
        answer = {"error": f"{type(error).__name__}: {text[0][:300]}"}
    answer_path.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    code = main()
    # The plugin's threads may crash while the interpreter is taken down; the answer is written.
    sys.stdout.flush()
    os._exit(code)
