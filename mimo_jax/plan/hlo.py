"""What an optimised HLO module does, read from its text: collectives, copies, bytes moved.

The text is the one account that every backend gives; cost analysis is not implemented for
executables compiled ahead of time. Sizes are per device, since the module is one device's program.

A fusion reads its operands once, except where it only gathers or slices them: then it reads what it
picks (a layer's experts are 0.96 GB per device, of which a step picks 64 rows). An in-place update
moves the update alone.

Trap: XLA puts a small all-reduce inside a fusion of its own ("fusion-start"), so collectives are
counted wherever they stand, not at top level.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

ITEM_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "f8e8m0fnu": 1,
    "s16": 2, "u16": 2, "f16": 2, "bf16": 2,
    "s32": 4, "u32": 4, "f32": 4,
    "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
               "ragged-all-to-all")  # fmt: skip
# Operations that move data and compute nothing.
MOVES = {"copy", "copy-start", "slice", "dynamic-slice", "transpose", "concatenate", "pad",
         "reshape", "broadcast", "bitcast", "parameter", "constant", "tuple",
         "get-tuple-element"}  # fmt: skip
# Operations that have no run time of their own.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all",
        "partition-id", "replica-id", "copy-done", "fusion-done", "async-done"}  # fmt: skip
PICKS = ("gather", "dynamic-slice", "slice")

_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ALIAS = re.compile(r"\((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")


class Instruction(NamedTuple):
    """One line: name, result type, operation, operand names, called computations, whole text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    called: tuple[tuple[str, str], ...]
    text: str


class Module(NamedTuple):
    """Computations by name, the entry's name, and the parameter numbers that outputs alias."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    aliased_parameters: tuple[int, ...]


def shape_bytes(shape: str) -> int:
    """Bytes of an array or tuple type. Example: "(bf16[8,6144]{1,0}, s32[])" -> 98308."""
    total = 0
    for dtype, dims in _SHAPE.findall(shape):
        if dtype not in ITEM_BYTES:
            continue
        count = 1
        for size in dims.split(","):
            count *= int(size) if size else 1
        total += count * ITEM_BYTES[dtype]
    return total


def _operands(rest: str) -> tuple[str, ...]:
    """Names up to the parenthesis that closes the operand list; "t#4" is an element of tuple t."""
    depth = 1
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return tuple(re.findall(r"%([\w.\-]+(?:#\d+)?)", rest[:i]))
    return ()


def parse(text: str) -> Module:
    """Reads the text of an optimised module (`compiled.as_text()`)."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        started = _COMPUTATION.match(line)
        if started:
            current = computations.setdefault(started.group(2), {})
            if started.group(1):
                entry = started.group(2)
            continue
        if current is None or line.startswith("}"):
            continue
        found = _INSTRUCTION.match(line)
        if found:
            name, shape, opcode, rest = found.groups()
            called = list(_CALLED.findall(rest))
            for branches in _BRANCHES.findall(rest):
                called += [("branch", name.strip(" %")) for name in branches.split(",")]
            current[name] = Instruction(name, shape, opcode, _operands(rest), tuple(called), line)
    aliases = _ALIAS.findall(text.split("\n", 1)[0])
    return Module(computations, entry, tuple(sorted({int(number) for number in aliases})))


class Visit(NamedTuple):
    """An instruction at top level of some computation, its neighbours, and how deep in loops."""

    instruction: Instruction
    neighbours: dict[str, Instruction]
    loop_depth: int
    trip_count: int


def _trip_count(instruction: Instruction) -> int:
    known = re.search(r'known_trip_count[^0-9]*"?(\d+)', instruction.text)
    return int(known.group(1)) if known else 1


def walk(
    module: Module, computation: str | None = None, depth: int = 0, trips: int = 1
) -> Iterator[Visit]:
    """Everything that is executed, fusions as one instruction, with how often it runs.

    A loop whose trip count is not known counts once: the loop over decode steps is one, so what is
    counted is a step.
    """
    neighbours = module.computations[computation or module.entry]
    for instruction in neighbours.values():
        yield Visit(instruction, neighbours, depth, trips)
        for role, name in instruction.called:
            if role in ("body", "condition"):
                inside = trips * _trip_count(instruction)
                yield from walk(module, name, depth + 1, inside)
            elif role == "branch" or (role == "to_apply" and instruction.opcode == "call"):
                yield from walk(module, name, depth, trips)
            elif role == "calls" and instruction.opcode.startswith(("async", "call")):
                yield from walk(module, name, depth, trips)


def has_step_loop(module: Module) -> bool:
    """Whether the program loops over decode steps: a loop of unknown count that is most of it.

    Prefill has such loops too, over the pieces of a long memory, but does its work outside; other
    loops (over experts, Newton-Schulz) have a known count.
    """
    is_work = lambda visit: visit.instruction.opcode not in FREE | {"while", "copy"}
    visits = list(walk(module))
    outside = sum(is_work(visit) for visit in visits if visit.loop_depth == 0)
    for visit in visits:
        instruction = visit.instruction
        if instruction.opcode == "while" and "known_trip_count" not in instruction.text:
            body = dict(instruction.called)["body"]
            if sum(map(is_work, walk(module, body))) >= outside:
                return True
    return False


def _fused(module: Module, instruction: Instruction) -> dict[str, Instruction]:
    if instruction.opcode not in ("fusion", "fusion-start"):
        return {}
    return module.computations.get(dict(instruction.called).get("calls", ""), {})


class Collective(NamedTuple):
    """One collective operation: kind, bytes of its result on one device, loop depth, runs."""

    kind: str
    num_bytes: int
    loop_depth: int
    trip_count: int


def collectives(module: Module) -> list[Collective]:
    """Every collective, also those inside fusions; a start/done pair counts once."""
    found = []
    for visit in walk(module):
        for instruction in (visit.instruction, *_fused(module, visit.instruction).values()):
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                num_bytes = shape_bytes(instruction.shape)
                if instruction.opcode.endswith("-start"):
                    num_bytes //= 2  # the type holds operand and result
                found.append(Collective(kind, num_bytes, visit.loop_depth, visit.trip_count))
    return found


class Copy(NamedTuple):
    """A data movement that computes nothing."""

    name: str
    opcode: str
    num_bytes: int
    loop_depth: int


def large_copies(module: Module, min_bytes: int = 8_000_000) -> list[Copy]:
    """Copies, slices and fusions that only move data, with results of at least min_bytes."""
    found = []
    for visit in walk(module):
        instruction = visit.instruction
        fused = _fused(module, instruction)
        opcodes = {inner.opcode for inner in fused.values()} or {instruction.opcode}
        is_free = not fused and instruction.opcode in FREE
        num_bytes = shape_bytes(instruction.shape)
        if opcodes <= MOVES and not is_free and num_bytes >= min_bytes:
            kind = "+".join(sorted(opcodes - FREE)) or "copy"
            found.append(Copy(instruction.name, kind, num_bytes, visit.loop_depth))
    return found


def _fusion_bytes(module: Module, instruction: Instruction) -> int:
    """Bytes read and written by a fusion, picks and in-place updates counted as such."""
    fused = _fused(module, instruction)
    users: dict[str, list[Instruction]] = {}
    for inner in fused.values():
        for operand in inner.operands:
            users.setdefault(operand, []).append(inner)
    total, updated = 0, set()
    for inner in fused.values():
        if inner.opcode == "dynamic-update-slice":
            updated.add(inner.operands[0])
            total += shape_bytes(fused[inner.operands[1]].shape)
    for inner in fused.values():
        if inner.opcode != "parameter":
            continue
        readers, names, is_picked = [], [inner.name], True
        while names:  # through bitcasts, which only rename
            name = names.pop()
            for user in users.get(name, ()):
                if user.opcode == "bitcast":
                    names.append(user.name)
                    if user.name in updated:
                        updated.add(inner.name)
                else:
                    readers.append(user)
                    is_picked &= user.opcode in PICKS and user.operands[0] == name
        if inner.name in updated:
            continue
        if readers and is_picked:
            total += sum(shape_bytes(reader.shape) for reader in readers)
        else:
            total += shape_bytes(inner.shape)
    if not updated:
        total += shape_bytes(instruction.shape)
    return total


class Move(NamedTuple):
    """Operations of one kind: their common name, result type, number, and bytes of all of them."""

    name: str
    shape: str
    count: int
    num_bytes: int


def _operand_shape(neighbours: dict[str, Instruction], operand: str) -> str:
    """Type of an operand; names are unique within a computation only."""
    name, _, index = operand.partition("#")
    shape = neighbours[name].shape
    return re.findall(r"[a-z][a-z0-9]*\[[^\]]*\]", shape)[int(index)] if index else shape


def _operand_bytes(neighbours: dict[str, Instruction], operand: str) -> int:
    return shape_bytes(_operand_shape(neighbours, operand))


# Our kernels in a compiled program; who made one is told by the jitted function around it.
KERNEL_TARGET = 'custom_call_target="mosaic_gpu_v2"'
_KERNEL_MAKER = re.compile(r'jit\((\w+)\)/[\w/]*mpmd_map"')
_WRITTEN = re.compile(r"\((\d+), \{[\d, ]*\}\)")


def _is_kernel(instruction: Instruction) -> bool:
    return KERNEL_TARGET in instruction.text


def _kernel_name(instruction: Instruction) -> str:
    """Example: op_name ".../jit(attend_ring)/body/mpmd_map" -> "attend_ring"."""
    found = _KERNEL_MAKER.search(instruction.text)
    return found.group(1) if found else instruction.name


def _is_stack(shape: str) -> bool:
    """Packed experts of layers: integers in five dimensions or more, of which a kernel picks."""
    found = re.match(r"(s32|u8)\[([\d,]*)\]", shape)
    return found is not None and found.group(2).count(",") >= 4


def _kernel_bytes(visit: Visit) -> int:
    """As `_moved_by` for one of our kernels, apart from the stacks that it picks from.

    Memory that it writes in place (a block of keys and values) counts as nothing.
    """
    instruction = visit.instruction
    aliasing = re.search(r"output_to_operand_aliasing=\{(.*?)\}, \w+=", instruction.text)
    aliased = {int(n) for n in _WRITTEN.findall(aliasing.group(1))} if aliasing else set()
    total = shape_bytes(instruction.shape)
    for number, operand in enumerate(instruction.operands):
        num_bytes = _operand_bytes(visit.neighbours, operand)
        if number in aliased:
            total -= num_bytes
        elif not _is_stack(_operand_shape(visit.neighbours, operand)):
            total += num_bytes
    return total


def picked_from_bytes(module: Module, *, in_loop: bool) -> int:
    """Bytes of all stacks that kernels pick experts from; a step reads a share of them."""
    total = 0
    for visit in walk(module):
        if not _is_kernel(visit.instruction) or (in_loop and visit.loop_depth == 0):
            continue
        for operand in visit.instruction.operands:
            if _is_stack(_operand_shape(visit.neighbours, operand)):
                total += _operand_bytes(visit.neighbours, operand) * visit.trip_count
    return total


def _moved_by(module: Module, visit: Visit) -> int:
    """Bytes that one run of an instruction reads and writes."""
    instruction = visit.instruction
    if _is_kernel(instruction):
        return _kernel_bytes(visit)
    if instruction.opcode in (*FREE, "while", "call", "conditional"):
        return 0
    if instruction.opcode in ("fusion", "fusion-start"):
        return _fusion_bytes(module, instruction)
    if "async" in instruction.opcode:
        return 0
    sizes = [_operand_bytes(visit.neighbours, operand) for operand in instruction.operands]
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sizes[1]
    written = shape_bytes(instruction.shape)
    return 2 * written if instruction.opcode in PICKS else written + sum(sizes)


def moves(module: Module, *, in_loop: bool) -> list[Move]:
    """What reads and writes device memory, from operand and result sizes, largest first.

    An upper bound: what an operation leaves in the chip's cache for the next is counted twice.

    Args:
      module: The program of one device.
      in_loop: Count the bodies of loops alone (one decode step) instead of everything.

    Example: 60 products "gemm_fusion_dot.1" to ".60" with result bf16[8,3392], 41.8 MB each ->
      Move("gemm_fusion_dot", "bf16[8,3392]", 60, 2_508_000_000).
    """
    found: dict[tuple[str, str], Move] = {}
    for visit in walk(module):
        num_bytes = _moved_by(module, visit) * visit.trip_count
        if not num_bytes or (in_loop and visit.loop_depth == 0):
            continue
        name = re.sub(r"(\.\d+)+$", "", visit.instruction.name)
        if _is_kernel(visit.instruction):
            name = _kernel_name(visit.instruction)
        shape = re.sub(r"\{[^}]*\}", "", visit.instruction.shape)
        before = found.get((name, shape), Move(name, shape, 0, 0))
        found[name, shape] = Move(
            name, shape, before.count + visit.trip_count, before.num_bytes + num_bytes
        )
    return sorted(found.values(), key=lambda move: -move.num_bytes)


def parameter_bytes(module: Module) -> dict[int, int]:
    """Bytes of every parameter of the program, by number."""
    found = {}
    for instruction in module.computations[module.entry].values():
        if instruction.opcode == "parameter":
            number = int(re.findall(r"parameter\((\d+)\)", instruction.text)[0])
            found[number] = shape_bytes(instruction.shape)
    return found
