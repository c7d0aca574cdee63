"""Name maps as data: which tensors of a file make up which parameter, read in both directions.

A published file keeps every projection as its own [out, in] matrix; our parameters are [in, out],
q, k and v side by side, and the experts of a layer in one stack. A `Leaf` says this once;
`read_leaves` and `write_model` follow it.

Nothing half-written is ever trusted: each file is written under a temporary name and renamed,
config.json is removed first and written last.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors.numpy
from jax.sharding import NamedSharding, PartitionSpec

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, aligned_empty, nearest
from mimo_jax.quant import fp8
from pallas_kernels.formats import MX_GROUP_LEN

_BYTE_DTYPES = (np.dtype(np.uint8), np.dtype(ml_dtypes.float8_e8m0fnu))
_SMALL_BYTES = 16 << 20  # below it compiling a transposition costs more than a host's takes
_FLOAT_DTYPES = tuple(np.dtype(d) for d in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and the tensors it is made of.

    Attributes:
      name: Parameter name, as in `models.params.flatten`.
      sources: Tensor names; part-minor, expert-major. Empty: the parameter is zero and not stored.
      shapes: Shape of each part in the file: [out, in], or any shape for a plain leaf.
      num_stacked: Experts in the stack; 0 = no stack.
      stack_axis: Where the experts' axis stands in the parameter, 0 or 1.
      is_plain: Copied as it stands instead of transposed.
      is_turned: Whether a matrix is [in, out] in memory; False keeps the order of the file.
      offsets: First row of each part within its tensor, where parts are pieces; () = all 0.
      dtype: Of its own whatever the dtype of the model: float32 for the router and its bias, uint8
        for packed experts, FP8 for codes that are kept; None = the model's.
    """

    name: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_stacked: int = 0
    stack_axis: int = 0
    is_plain: bool = False
    is_turned: bool = True
    offsets: tuple[int, ...] = ()
    dtype: np.dtype | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape with every tensor as the file holds it: experts first, then [out, in]."""
        if self.is_plain:
            shape = self.shapes[0]
        else:
            shape = (sum(out for out, _ in self.shapes), self.shapes[0][1])
        return (self.num_stacked, *shape) if self.num_stacked else shape

    @property
    def axes(self) -> tuple[int, ...]:
        """Axis of the stored shape that each axis of the parameter is."""
        rank = len(self.stored_shape)
        if self.is_plain or not (self.is_turned or self.num_stacked):
            return tuple(range(rank))
        if not self.num_stacked:
            return (1, 0)
        return (0, 2, 1) if self.stack_axis == 0 else (2, 0, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stored_shape[axis] for axis in self.axes)

    def source_shape(self, source_idx: int) -> tuple[int, ...]:
        return self.shapes[source_idx % len(self.shapes)]

    def in_file_order(self) -> "Leaf":
        """The same matrix as the file has it, [out, in]; stacks and the router stay as they are."""
        is_projection = not self.is_plain and not self.num_stacked and self.dtype is None
        return dataclasses.replace(self, is_turned=False) if is_projection else self

    def in_rows(self, order: np.ndarray) -> "Leaf":
        """The same matrix with its rows in this order, rows of the file repeated where asked.

        Args:
          order: Row numbers over all parts side by side.

        Example: parts q of 4 rows and k of 1, order 0, 1, 4, 2, 3, 4 -> pieces q[0:2], k[0:1],
          q[2:4], k[0:1].
        """
        heights = [rows for rows, _ in self.shapes]
        part_of = np.repeat(np.arange(len(heights)), heights)
        row_in_part = np.concatenate([np.arange(rows) for rows in heights])
        part, row = part_of[order], row_in_part[order]
        is_start = np.ones(len(order), bool)
        is_start[1:] = (np.diff(part) != 0) | (np.diff(row) != 1)
        starts = np.flatnonzero(is_start)
        lengths = np.diff(np.append(starts, len(order)))
        return dataclasses.replace(
            self,
            sources=tuple(self.sources[part[i]] for i in starts),
            shapes=tuple((int(n), self.shapes[0][1]) for n in lengths),
            offsets=tuple(int(row[i]) for i in starts),
        )

    def _slot(self, source_idx: int) -> tuple[int | slice, ...]:
        """Index of one source in the stored shape."""
        if self.is_plain:
            return (source_idx,) if self.num_stacked else ()
        expert_idx, part_idx = divmod(source_idx, len(self.shapes))
        first = sum(out for out, _ in self.shapes[:part_idx])
        part = slice(first, first + self.shapes[part_idx][0])
        return (expert_idx, part) if self.num_stacked else (part,)

    def read(self, get: Callable, index: tuple[slice, ...], dtype) -> np.ndarray:
        """A region in the stored order, touching only the bytes of the files that it needs.

        Args:
          get: (source name, region of it) -> array; see `Tensors.get`.
          index: One slice of step 1 per axis of `stored_shape`.
          dtype: Of the result.

        Example: w_qkv of q, k, v with 288, 96 and 64 rows, index 280:300 of the rows -> rows
          280:288 of q and 0:12 of k are read.
        """
        sizes = self.stored_shape
        wanted = [range(*part.indices(size)) for part, size in zip(index, sizes, strict=True)]
        places = []
        for source_idx, source in enumerate(self.sources):
            place, region = _overlap(self._slot(source_idx), sizes, wanted)
            if place is None or region is None:
                continue
            if self.offsets:
                offset, rows = self.offsets[source_idx], region[0]
                region = (slice(rows.start + offset, rows.stop + offset), *region[1:])
            places.append((place, source, region))
        if len(places) == 1 and len(self.sources) == 1:
            whole = get(*places[0][1:])
            if whole.flags.writeable and whole.dtype == dtype:  # its own memory, not the file's
                return whole
            return _copy_aligned(whole, dtype)
        value = aligned_empty([len(part) for part in wanted], dtype)
        if not self.sources:
            value[...] = 0
        for place, source, region in places:
            value[place] = get(source, region)
        return value

    def take_apart(self, value: np.ndarray, source_idx: int) -> np.ndarray:
        """One source from the parameter, as the file holds it."""
        stored = np.transpose(value, np.argsort(self.axes))
        return stored[self._slot(source_idx)]


def _copy_aligned(view: np.ndarray, dtype) -> np.ndarray:
    out = aligned_empty(view.shape, dtype)
    out[...] = view
    return out


def _overlap(slot: tuple, shape: tuple[int, ...], wanted: list[range]):
    """Where a source and a wanted region meet: (index in the region, region of the source).

    The source fills `slot` of a parameter of this shape: an integer on a stack axis, slices
    elsewhere. (None, None) where they do not meet.
    """
    slot = (*slot, *(slice(None),) * (len(shape) - len(slot)))
    place, region = [], []
    for held, size, part in zip(slot, shape, wanted, strict=True):
        if isinstance(held, int):
            if held not in part:
                return None, None
            place.append(held - part.start)
            continue
        first, last, _ = held.indices(size)
        low, high = max(first, part.start), min(last, part.stop)
        if low >= high:
            return None, None
        place.append(slice(low - part.start, high - part.start))
        region.append(slice(low - first, high - first))
    return tuple(place), tuple(region)


FLOAT32, UINT8 = np.dtype(np.float32), np.dtype(np.uint8)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def plain(name: str, source: str, *shape: int, dtype: np.dtype | None = None) -> Leaf:
    return Leaf(name, (source,), (shape,), is_plain=True, dtype=dtype)


def columns(
    name: str, width_in: int, parts: dict[str, int], *, dtype: np.dtype | None = None
) -> Leaf:
    """Matrices [out, width_in] side by side: parts maps tensor name -> out."""
    shapes = tuple((out, width_in) for out in parts.values())
    return Leaf(name, tuple(parts), shapes, dtype=dtype)


def experts(
    name: str, num_experts: int, width_in: int, width_out: int, source: str, *, stack_axis: int
) -> Leaf:
    """Matrices [width_out, width_in] of all experts; source holds one {} for the expert."""
    sources = tuple(source.format(i) for i in range(num_experts))
    shape = (width_out, width_in)
    return Leaf(name, sources, (shape,), num_stacked=num_experts, stack_axis=stack_axis)


def mxfp4_experts(
    name: str, num_experts: int, width_in: int, width_out: int, source: str
) -> list[Leaf]:
    """Packed matrices [width_out, width_in] of all experts and their scales, as they stand."""
    parts = {"": (source, width_in // 2), "_scale": (source + "_scale", width_in // MX_GROUP_LEN)}
    return [
        Leaf(
            name + suffix,
            tuple(part.format(i) for i in range(num_experts)),
            ((width_out, width),),
            num_stacked=num_experts,
            is_plain=True,
            dtype=UINT8,
        )
        for suffix, (part, width) in parts.items()
    ]


def fp8_blocks(name: str, source: str, out: int, width_in: int, num_chunks: int = 1) -> list[Leaf]:
    """A matrix [out, width_in] of FP8 codes and its block scales, as they stand; see `kept.py`."""
    scale_shape = fp8.scale_shape((out, width_in), num_chunks)
    return [
        plain(name, source, out, width_in, dtype=FP8),
        plain(f"{name}_scale", f"{source}_scale_inv", *scale_shape, dtype=FLOAT32),
    ]


def zeros(name: str, *shape: int) -> Leaf:
    """A float32 parameter that the files do not have."""
    return Leaf(name, (), (shape,), is_plain=True, dtype=FLOAT32)


# What a file may hold for a parameter of a dtype of its own; see FLOAT32 for all others.
_ALLOWED = {
    UINT8: (_BYTE_DTYPES, "uint8"),
    FP8: ((FP8,), "FP8"),
    FLOAT32: (_FLOAT_DTYPES, "float32, float16, bfloat16, FP8"),
}


@runtime_checkable
class Tensors(Protocol):
    """What the name map reads: `SafetensorsDir`, `DecodedTensors` or `KeptTensors`."""

    path: Path

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> np.dtype: ...
    def file_of(self, name: str) -> Path: ...
    def prefetch(self, name: str) -> None: ...
    def get(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray: ...


def _check_names(leaves: list[Leaf], tensors: Tensors, alias: dict, is_ignored) -> None:
    wanted = {source for leaf in leaves for source in leaf.sources}
    unused = sorted(name for name in alias if name not in wanted and not is_ignored(name))
    missing = [source for leaf in leaves for source in leaf.sources if source not in alias]
    if missing:
        raise CheckpointError(
            f"{tensors.path}: {len(missing)} tensors are missing, first {missing[0]!r}"
            f"{nearest(missing[0], unused)}"
        )
    if unused:
        raise CheckpointError(
            f"{tensors.file_of(alias[unused[0]])}: {len(unused)} tensors have no place in the "
            f"model, first {unused[0]!r}{nearest(unused[0], wanted)}"
        )


def read_leaves(
    tensors: Tensors,
    leaves: list[Leaf],
    dtype,
    *,
    is_ignored=lambda name: False,
    prefix: str = "",
    lay_out: Callable[[Leaf], Leaf] = lambda leaf: leaf,
    sharding_of: Callable[[str], NamedSharding] | None = None,
    on_progress: Callable[[int, int], object] = lambda done_bytes, total_bytes: None,
) -> dict[str, jax.Array]:
    """Every parameter by name, read part by part straight into place.

    Beside the parameters themselves the host holds one device's part of one parameter at a time.

    Args:
      tensors: Opened files.
      leaves: The whole model.
      dtype: Of all parameters that are not float32 by declaration.
      is_ignored: Whether a tensor that no leaf wants is expected all the same.
      prefix: May stand before any tensor name.
      lay_out: Leaf -> the leaf as it shall be in memory: other row order, or not turned.
      sharding_of: Parameter name -> NamedSharding; None = the default device.
      on_progress: Called after each parameter with (bytes so far, bytes in all).

    Raises:
      CheckpointError: If a tensor is missing, has another shape, is no plain float where one is
        needed (or no bytes where they are), or has no place in the model.
    """
    alias = check_leaves(tensors, leaves, is_ignored=is_ignored, prefix=prefix)
    leaves = [lay_out(leaf) for leaf in leaves]
    get = lambda source, region: tensors.get(alias[source], region)
    size_of = lambda leaf: math.prod(leaf.shape) * (leaf.dtype or np.dtype(dtype)).itemsize
    total_bytes, done_bytes = sum(map(size_of, leaves)), 0
    flat = {}
    for leaf, upcoming in zip(leaves, [*leaves[1:], None], strict=True):
        for source in upcoming.sources if upcoming else ():
            tensors.prefetch(alias[source])  # the disk works while this one is arranged
        final = leaf.dtype or np.dtype(dtype)
        in_file = {tensors.dtype(alias[source]) for source in leaf.sources}
        common = in_file.pop() if len(in_file) == 1 else final
        read: Any = functools.partial(leaf.read, get, dtype=common)
        if sharding_of is None:
            stored = read((slice(None),) * len(leaf.shape))
            if stored.nbytes < _SMALL_BYTES:
                flat[leaf.name] = jnp.array(np.transpose(stored, leaf.axes), final)
            else:
                flat[leaf.name] = _arrange(jnp.asarray(stored), leaf.axes, final, None)
        else:
            sharding = sharding_of(leaf.name)
            like_stored = _stored_sharding(sharding, leaf.axes)
            stored = jax.make_array_from_callback(leaf.stored_shape, like_stored, read)
            flat[leaf.name] = _arrange(stored, leaf.axes, final, sharding)
        flat[leaf.name].block_until_ready()  # or the next one would be read beside it
        done_bytes += size_of(leaf)
        on_progress(done_bytes, total_bytes)
    return flat


def _stored_sharding(sharding: NamedSharding, axes: tuple[int, ...]) -> NamedSharding:
    """The sharding of an array before its axes are arranged as `axes`."""
    spec = (*sharding.spec, *(None,) * (len(axes) - len(sharding.spec)))
    stored = [None] * len(axes)
    for axis, name in zip(axes, spec, strict=True):
        stored[axis] = name
    return NamedSharding(sharding.mesh, PartitionSpec(*stored))


def _arrange(stored: jax.Array, axes: tuple[int, ...], dtype: np.dtype, sharding) -> jax.Array:
    """The parameter from its stored form, on the device: a host transposes 1 GB/s at best."""
    if axes == tuple(range(len(axes))) and stored.dtype == dtype:
        return stored
    arrange = lambda x: jnp.transpose(x, axes).astype(dtype)
    return jax.jit(arrange, out_shardings=sharding)(stored)


def check_leaves(
    tensors: Tensors, leaves: list[Leaf], *, is_ignored=lambda name: False, prefix: str = ""
) -> dict[str, str]:
    """Raises as `read_leaves` does, reading no weight; returns source -> name in the files."""
    alias = {}
    for name in tensors.names():
        short = name.removeprefix(prefix)
        if short in alias:
            raise CheckpointError(
                f"{tensors.file_of(name)}: both {alias[short]!r} and {name!r} exist"
            )
        alias[short] = name
    _check_names(leaves, tensors, alias, is_ignored)
    for leaf in leaves:
        for source_idx, source in enumerate(leaf.sources):
            shape, expected = tensors.shape(alias[source]), leaf.source_shape(source_idx)
            if shape != expected:
                raise CheckpointError(
                    f"{tensors.file_of(alias[source])}: {source!r} has shape {list(shape)}, "
                    f"expected {list(expected)}"
                )
            dtype = tensors.dtype(alias[source])
            allowed_dtypes, allowed = _ALLOWED.get(leaf.dtype, _ALLOWED[FLOAT32])
            if dtype not in allowed_dtypes:
                raise CheckpointError(
                    f"{tensors.file_of(alias[source])}: {source!r} is {dtype}; allowed: {allowed}"
                )
    return alias


def write_file(path: Path, data: bytes) -> None:
    """A file that is whole or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _json_bytes(value: dict) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _cut_into_shards(sizes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names in order, each shard at most max_shard_bytes or one tensor."""
    shards, room = [], 0
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_model(
    directory: str | os.PathLike,
    leaves: list[Leaf],
    flat: dict,
    *,
    dtype,
    json_files: dict[str, dict],
    side_files: dict[str, bytes | None] | None = None,
    max_shard_bytes: int,
) -> None:
    """Writes sharded safetensors, their index, and the JSON files with config.json last.

    Weights and index of an earlier model in the same directory are removed.

    Args:
      directory: Made if needed.
      leaves: The whole model.
      flat: Parameters by name.
      dtype: Of all tensors that are not float32 by declaration.
      json_files: File name -> content; must hold config.json.
      side_files: File name -> content, or None to remove an earlier one.
      max_shard_bytes: A shard is cut before it would grow larger.

    Raises:
      CheckpointError: If parameters and leaves differ.
    """
    directory, dtype = Path(directory), np.dtype(dtype)
    if dtype not in _FLOAT_DTYPES:
        raise CheckpointError(f"{directory}: cannot write {dtype}; allowed: float32, bfloat16")
    names = {leaf.name for leaf in leaves}
    if names != set(flat):
        odd = sorted(names ^ set(flat))[0]
        raise CheckpointError(f"{directory}: parameter {odd!r} does not belong to this config")
    places, sizes = {}, {}
    for leaf in leaves:
        if tuple(flat[leaf.name].shape) != leaf.shape:
            raise CheckpointError(
                f"{directory}: parameter {leaf.name!r} has shape {list(flat[leaf.name].shape)}, "
                f"expected {list(leaf.shape)}"
            )
        if not leaf.sources and np.any(np.asarray(flat[leaf.name])):
            raise CheckpointError(
                f"{directory}: parameter {leaf.name!r} is not zero, and the format cannot store it"
            )
        item_bytes = (leaf.dtype or dtype).itemsize
        for source_idx, source in enumerate(leaf.sources):
            places[source] = (leaf, source_idx)
            sizes[source] = math.prod(leaf.source_shape(source_idx)) * item_bytes
    def make(source: str) -> np.ndarray:
        leaf, source_idx = places[source]
        value = leaf.take_apart(np.asarray(flat[leaf.name]), source_idx)
        return np.ascontiguousarray(value, leaf.dtype or dtype)

    write_tensors(
        directory,
        sizes,
        make,
        json_files=json_files,
        side_files=side_files,
        max_shard_bytes=max_shard_bytes,
    )


def write_tensors(
    directory: Path,
    sizes: dict[str, int],
    make: Callable[[str], np.ndarray],
    *,
    json_files: dict[str, dict],
    side_files: dict[str, bytes | None] | None = None,
    max_shard_bytes: int,
) -> None:
    """Writes tensors as `write_model` does, one shard in memory at a time.

    Args:
      directory: Made if needed.
      sizes: Bytes of every tensor, in the order of the files.
      make: The tensor of a name, contiguous.
      json_files: As `write_model`.
      side_files: As `write_model`.
      max_shard_bytes: As `write_model`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").unlink(missing_ok=True)
    shards = _cut_into_shards(sizes, max_shard_bytes)
    weight_map, kept = {}, set()
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        kept.add(file)
        tensors = {name: make(name) for name in shard}
        weight_map |= dict.fromkeys(shard, file)
        write_file(directory / file, safetensors.numpy.save(tensors, {"format": "pt"}))
    for old in [*directory.glob("model-*-of-*.safetensors"), directory / "model.safetensors"]:
        if old.name not in kept:
            old.unlink(missing_ok=True)
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    write_file(directory / "model.safetensors.index.json", _json_bytes(index))
    for name, data in (side_files or {}).items():
        if data is None:
            (directory / name).unlink(missing_ok=True)
        else:
            write_file(directory / name, data)
    for name in sorted(json_files, key=lambda name: name == "config.json"):
        write_file(directory / name, _json_bytes(json_files[name]))
