"""The launches of a compiled GPU program, from the thunk list that XLA dumps.

A thunk is what the host, or a CUDA graph in its place, starts: a kernel, a copy, a collective. The
list after XLA's thunk passes shows which of them lie in a command buffer (a CUDA graph), and
nesting by indentation:

    000: kCommandBuffer
        001: kWhile
          body:
            002: kCustomKernel fusion_1 grid: [1, 1, 1]

Trap: XLA writes the second list only when a pass changed something; the first then says the same.
"""

import re
from pathlib import Path
from typing import NamedTuple

_LINE = re.compile(r"^(\s*)(\d+): (k\w+)\s*(?:\[[^\]]*\])?\s*(.*)$")
# Thunks that hold others or only wait; everything else is one launch.
CONTAINERS = {"kCommandBuffer", "kWhile", "kConditional", "kSequential", "kAsyncStart",
              "kAsyncDone", "kDynamicSliceFusion", "kPartitionId", "kReplicaId"}  # fmt: skip
COLLECTIVE_KERNEL = "kCollectiveKernel"
# Collectives that the library runs: they cut a command buffer in two.
NCCL = ("kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll", "kRaggedAllToAll",
        "kCollectivePermute")  # fmt: skip


class Thunk(NamedTuple):
    """One entry of the list: its kind, what follows it, its children."""

    kind: str
    text: str
    children: tuple["Thunk", ...]


def parse(text: str) -> tuple[Thunk, ...]:
    """The tree of a thunk list."""
    rows = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found:
            indent, _, kind, rest = found.groups()
            rows.append((len(indent), kind, rest.strip()))

    def build(start: int, end: int) -> tuple[Thunk, ...]:
        nodes, i = [], start
        while i < end:
            indent, kind, rest = rows[i]
            stop = i + 1
            while stop < end and rows[stop][0] > indent:
                stop += 1
            nodes.append(Thunk(kind, rest, build(i + 1, stop)))
            i = stop
        return tuple(nodes)

    return build(0, len(rows))


def read_dump(directory: Path) -> tuple[Thunk, ...] | None:
    """The thunks of the largest program dumped into a directory; None if there is none."""
    lists = sorted(directory.glob("*thunk_sequence.txt"), key=lambda path: path.stat().st_size)
    if not lists:
        return None
    after = lists[-1].with_name(lists[-1].name.replace(".txt", "_after_thunk_passes.txt"))
    return parse((after if after.exists() else lists[-1]).read_text())


def count(thunks: tuple[Thunk, ...]) -> dict[str, int]:
    """Launches by kind, all levels, containers left out."""
    found: dict[str, int] = {}
    for thunk in thunks:
        if thunk.kind not in CONTAINERS:
            found[thunk.kind] = found.get(thunk.kind, 0) + 1
        for kind, number in count(thunk.children).items():
            found[kind] = found.get(kind, 0) + number
    return found


class Shape(NamedTuple):
    """What a program looks like to the host.

    Attributes:
      top_level: Kinds at top level, with their number.
      num_command_buffers: CUDA graphs, at any level.
      is_one_graph: One command buffer at top level holds the loop, and nothing stands beside it
        but copies of arguments.
      launches: Of one pass through the loop over steps (or of everything, without one), by kind.
      num_inner_loops: Loops inside what is counted; their launches are counted once.
    """

    top_level: dict[str, int]
    num_command_buffers: int
    is_one_graph: bool
    launches: dict[str, int]
    num_inner_loops: int

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())


def _loops(thunks: tuple[Thunk, ...]) -> list[Thunk]:
    found = []
    for thunk in thunks:
        if thunk.kind == "kWhile":
            found.append(thunk)
        found += _loops(thunk.children)
    return found


def _number(thunks: tuple[Thunk, ...], kind: str) -> int:
    return sum((thunk.kind == kind) + _number(thunk.children, kind) for thunk in thunks)


def describe(thunks: tuple[Thunk, ...], *, has_step_loop: bool) -> Shape:
    """The shape of a program, see `Shape`.

    Args:
      thunks: Of the whole program.
      has_step_loop: Whether its largest loop is one over decode steps.
    """
    loops = _loops(thunks)
    inside = thunks
    if has_step_loop and loops:
        inside = max(loops, key=lambda loop: sum(count(loop.children).values())).children
    top: dict[str, int] = {}
    for thunk in thunks:
        top[thunk.kind] = top.get(thunk.kind, 0) + 1
    graphs = [thunk for thunk in thunks if thunk.kind == "kCommandBuffer"]
    is_one_graph = (
        len(graphs) == 1
        and bool(_loops(graphs[0].children))
        and set(top) <= {"kCommandBuffer", "kCopy", "kMemset"}
        and _number(thunks, "kCommandBuffer") == 1
    )
    return Shape(
        top, _number(thunks, "kCommandBuffer"), is_one_graph, count(inside), len(_loops(inside))
    )
