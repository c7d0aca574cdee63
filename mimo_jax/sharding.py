"""Sharding rules as data: logical axes of arrays -> axes of a device mesh.

Weights, activations and caches name their axes ("embed", "heads", "batch"); a rule set says which
mesh axis cuts which of them. There are two, because decoding and training want different cuts:

  * DECODE, mesh ("data", "model"): heads, hidden widths and *each expert's width* over "model", so
    that every device reads an eighth of every chosen expert (whole experts on devices lose
    1.5-2.6x at one to eight tokens: the busiest device decides), vocabulary over "model", rows of
    a batch over "data".
  * TRAIN, mesh ("data", "expert", "tensor", "sequence"): rows over "data" and "expert", the model
    width of every matrix over "data" (FSDP), whole experts over "expert", heads and widths over
    "tensor"; positions over "sequence", for rows too long for one device.

Rejected: a partition spec per weight, which says the same thing sixty times and cannot be checked.
This module knows no model: `models/params.py` reads the axes off a module.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from mimo_jax.config import ConfigError, require
from mimo_jax.distributed import ProcessGroup

DATA, MODEL, EXPERT, TENSOR, SEQUENCE = "data", "model", "expert", "tensor", "sequence"

Axes = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Which mesh axes cut which logical axis.

    Attributes:
      name: For messages.
      mesh_axes: Axes of the mesh, outermost first.
      cuts: Logical axis -> mesh axes; a logical axis that is not named is not cut.
      num_optional: Last mesh axes that a mesh may leave out; they then have one device.
    """

    name: str
    mesh_axes: tuple[str, ...]
    cuts: Mapping[str, tuple[str, ...]]
    num_optional: int = 0

    def __post_init__(self):
        for logical, mesh_axes in self.cuts.items():
            for axis in mesh_axes:
                require(
                    axis in self.mesh_axes,
                    f"rules {self.name}: {logical} is cut by {axis!r}, which is not a mesh axis; "
                    f"allowed: {', '.join(self.mesh_axes)}",
                )

    def spec(self, axes: Axes) -> PartitionSpec:
        """Partition spec of an array with these logical axes (None = an axis without a name).

        Raises:
          ConfigError: If one mesh axis would cut two axes of the array.

        Example: DECODE.spec(("embed", "heads")) -> PartitionSpec(None, "model").
        """
        parts, used = [], {}
        for logical in axes:
            mesh_axes = self.cuts.get(logical, ()) if logical is not None else ()
            for axis in mesh_axes:
                require(
                    axis not in used,
                    f"rules {self.name}: mesh axis {axis!r} would cut both {used.get(axis)} and "
                    f"{logical} of one array with axes {tuple(axes)}",
                )
                used[axis] = logical
            parts.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
        return PartitionSpec(*parts)


DECODE = AxisRules(
    "decode",
    (DATA, MODEL),
    {
        "batch": (DATA,),
        "heads": (MODEL,),
        "kv_heads": (MODEL,),
        "hidden": (MODEL,),
        "expert_hidden": (MODEL,),
        "vocab": (MODEL,),
        "context": (MODEL,),
    },
)
TRAIN = AxisRules(
    "train",
    (DATA, EXPERT, TENSOR, SEQUENCE),
    {
        "batch": (DATA, EXPERT),
        "sequence": (SEQUENCE,),
        "embed": (DATA,),
        "experts": (EXPERT,),
        "heads": (TENSOR,),
        "kv_heads": (TENSOR,),
        "hidden": (TENSOR,),
        "expert_hidden": (TENSOR,),
        "vocab": (TENSOR,),
    },
    num_optional=1,
)
RULES = {rules.name: rules for rules in (DECODE, TRAIN)}


def num_parts(spec_entry, sizes: Mapping[str, int]) -> int:
    """Pieces that one axis is cut into by its entry of a partition spec."""
    if spec_entry is None:
        return 1
    names = (spec_entry,) if isinstance(spec_entry, str) else spec_entry
    return int(np.prod([sizes[name] for name in names]))


def fitting_parts(size: int) -> str:
    """The numbers of parts, up to 512, that an axis divides into. Example: 6 -> "1, 2, 3, 6"."""
    return ", ".join(str(n) for n in range(1, min(size, 512) + 1) if size % n == 0)


def check_divides(
    name: str, shape: Sequence[int], axes: Axes, rules: AxisRules, sizes: Mapping[str, int]
) -> PartitionSpec:
    """The partition spec of an array, after a check that every cut axis divides.

    Args:
      name: Of the array, for the message.
      shape: Its dimensions.
      axes: Its logical axes, one per dimension.
      rules: Rule set.
      sizes: Devices along each mesh axis.

    Raises:
      ConfigError: Says which axis, its size, and into how many parts it could be cut.

    Example: ("w_gate", (28, 40), ("embed", "hidden"), DECODE, {"data": 1, "model": 16}) ->
      "w_gate: axis hidden of 40 cannot be cut into 16 parts (rules decode: model=16); 40 can be
      cut into 1, 2, 4, 5, 8, 10, 20, 40".
    """
    spec = rules.spec(axes)
    for size, logical, entry in zip(shape, axes, spec, strict=True):
        parts = num_parts(entry, sizes)
        if size % parts:
            cut = " and ".join(f"{a}={sizes[a]}" for a in rules.cuts[logical or ""])
            raise ConfigError(
                f"{name}: axis {logical} of {size} cannot be cut into {parts} parts "
                f"(rules {rules.name}: {cut}); {size} can be cut into {fitting_parts(size)}"
            )
    return spec


def part_shape(
    shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Shape of one device's part. Example: (8, 6), P("model"), {"model": 4} -> (2, 6)."""
    entries = (*spec, *(None,) * (len(shape) - len(spec)))
    return tuple(n // num_parts(e, sizes) for n, e in zip(shape, entries, strict=True))


def full_sizes(rules: AxisRules, sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of a mesh, one per axis of the rules.

    Raises:
      ConfigError: If there are too many or too few, or one below 1.

    Example: (TRAIN, (2, 2, 2)) -> (2, 2, 2, 1).
    """
    num_axes = len(rules.mesh_axes)
    optional = rules.mesh_axes[num_axes - rules.num_optional :]
    require(
        num_axes - len(optional) <= len(sizes) <= num_axes and all(n >= 1 for n in sizes),
        f"mesh {'x'.join(map(str, sizes))} does not fit rules {rules.name}: one size >= 1 is "
        f"needed for each of {', '.join(rules.mesh_axes)}"
        + (f" ({', '.join(optional)} may be left out)" if optional else ""),
    )
    return (*sizes, *(1,) * (num_axes - len(sizes)))


def make_mesh(
    rules: AxisRules, sizes: Sequence[int], devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh with the axes of a rule set; every axis is Auto.

    Args:
      rules: Names the axes.
      sizes: Devices along each axis, in the order of rules.mesh_axes; see `full_sizes`.
      devices: Default: the first devices of this process's backend.

    Raises:
      ConfigError: If sizes do not fit the axes or there are not enough devices.

    Example: make_mesh(DECODE, (1, 8)) -> Mesh of ("data", "model") = 1 x 8.
    """
    sizes = full_sizes(rules, sizes)
    available = list(jax.devices() if devices is None else devices)
    count = int(np.prod(sizes))
    require(
        count <= len(available),
        f"mesh {'x'.join(map(str, sizes))} needs {count} devices; there are {len(available)}",
    )
    grid = np.array(available[:count]).reshape(tuple(sizes))
    return Mesh(grid, rules.mesh_axes, axis_types=(AxisType.Auto,) * len(sizes))


def parse_mesh(text: str) -> tuple[int, ...]:
    """Sizes of a mesh as a user writes them. Example: "2x2x2" -> (2, 2, 2).

    Raises:
      ConfigError: If it is anything but whole numbers with x between them.
    """
    parts = text.lower().split("x")
    require(
        all(part.isdecimal() and part.isascii() for part in parts),
        f"mesh {text!r} is not a shape; write one number per axis with x between, as in 2x2x2",
    )
    return tuple(int(part) for part in parts)


def mesh_sizes(mesh: Mesh) -> dict[str, int]:
    """Devices along each axis. Example: {"data": 1, "model": 8}."""
    return dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))


def connect(mesh: Mesh, group: ProcessGroup) -> None:
    """Lets the processes of a mesh meet once over every set of its axes, all at the same time.

    The first collective between some devices opens their connections, and Gloo gives that 30 s: too
    little where one process still compiles and the other has found its program in the cache. Once
    connected they wait for each other (75 s were no trouble).

    Args:
      mesh: Over the devices of all processes.
      group: Those processes; alone, nothing happens.
    """
    if group.count == 1:
        return
    names = [name for name, size in mesh_sizes(mesh).items() if size > 1]
    sets = [s for n in range(len(names)) for s in itertools.combinations(names, n + 1)]
    place = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    x = jax.make_array_from_callback(
        mesh.devices.shape, place, lambda index: np.zeros(mesh.devices.shape, np.float32)[index]
    )
    sums = jax.shard_map(
        lambda x: [jax.lax.psum(x, axes) for axes in sets],
        mesh=mesh,
        in_specs=place.spec,
        out_specs=place.spec,
        check_vma=False,  # summed over some axes, a result is still cut over the others
    )
    program = jax.jit(sums).lower(x).compile()
    group.barrier("ready to connect")
    jax.block_until_ready(program(x))


def to_host(x: Any) -> np.ndarray:
    """The whole of an array as NumPy, on every process that has a part of it.

    Where other processes hold parts this is a collective: all must come here with the same array.
    """
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def constrain(x: Array, axes: Axes, rules: AxisRules, mesh: Mesh | None) -> Array:
    """x, held to its rule inside a jitted program; x itself without a mesh."""
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rules.spec(axes)))
