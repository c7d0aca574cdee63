"""Lazy, memory-mapped reading of safetensors files and sharded directories.

Opening a directory reads every header and checks it completely: a truncated download, a missing
shard or a damaged header is an error before any weight is used. Bytes of tensors are touched only
by `get`: large contiguous pieces by reading into fresh memory, all else as views of the mapped
file. Copying out of a mapping takes a page fault per 64 KB, which a virtual machine pays dearly:
0.5-0.9 GB/s against 3.3 for one reading thread and 5 for several, of files in memory (AMD Zen 4,
2 cores, 2026-11-30). Where a mapping is used, its pages are asked for in one call first.

Rejected: the library's NumPy loader, which knows no FP8 and no E8M0. Its own checks are repeated
here because damaged files must give one line that names the file and the key.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}},
then the tensors back to back without holes.
"""

import difflib
import json
import math
import mmap
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}

# The published library refuses longer headers too.
MAX_HEADER_BYTES = 100_000_000
_MAX_COMPARED = 2000
_MIN_READ_BYTES = 1 << 20  # smaller pieces are views
_READ_PIECE_BYTES = 8 << 20  # per thread and call
_MADV_POPULATE_READ = 22  # Linux 5.14; Python has no name for it
_MAX_RANK = 32
_MAX_DIM = 2**40
_SHARD_NAME = re.compile(r"^(.*)-(\d+)-of-(\d+)\.safetensors$")


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted or is not supported; one line, naming file and key."""


def aligned_empty(shape: Sequence[int], dtype) -> np.ndarray:
    """An array that XLA:CPU takes over as it is: it copies what is not aligned to 64 bytes."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(num_bytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def nearest(name: str, names) -> str:
    """Clause with the most similar name, to end an error line; empty when none is similar."""
    names = list(names)
    if len(names) > _MAX_COMPARED:  # difflib takes half a minute over 160,000 expert tensors
        ending = name.rsplit(".", 2)[-2:]
        names = [other for other in names if other.rsplit(".", 2)[-2:] == ending][:_MAX_COMPARED]
    close = difflib.get_close_matches(name, names, n=1)
    return f" (nearest: {close[0]})" if close else ""


def parse_json(data: bytes, path) -> dict:
    """A JSON object without duplicate keys.

    Raises:
      CheckpointError: If it is not UTF-8, not JSON, not an object, or repeats a key.
    """

    def pairs(items):
        seen = {}
        for key, value in items:
            if key in seen:
                raise CheckpointError(f"{path}: duplicate key {key!r}")
            seen[key] = value
        return seen

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: JSON is nested too deeply") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {str(error).splitlines()[0]}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: JSON is a {type(value).__name__}, expected an object")
    return value


def _is_count(value, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


class _Entry:
    """Where one tensor lies: dtype, shape and byte range in the data part."""

    def __init__(self, path: Path, name: str, info, data_bytes: int):
        where = f"{path}: {name!r}"
        if not isinstance(info, dict):
            raise CheckpointError(f"{where} is described by no object")
        for key in ("dtype", "shape", "data_offsets"):
            if key not in info:
                raise CheckpointError(f"{where} has no {key}")
        dtype = info["dtype"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise CheckpointError(
                f"{where} has dtype {dtype!r}, which is unknown; allowed: {', '.join(DTYPES)}"
            )
        shape = info["shape"]
        if (
            not isinstance(shape, list)
            or len(shape) > _MAX_RANK
            or not all(_is_count(size, _MAX_DIM) for size in shape)
        ):
            raise CheckpointError(f"{where} has shape {shape!r}, which is no list of sizes")
        offsets = info["data_offsets"]
        if (
            not isinstance(offsets, list)
            or len(offsets) != 2
            or not all(_is_count(offset, 2**63) for offset in offsets)
            or offsets[0] > offsets[1]
        ):
            raise CheckpointError(f"{where} has data_offsets {offsets!r}, which are no range")
        if offsets[1] > data_bytes:
            raise CheckpointError(
                f"{where} ends at byte {offsets[1]} of {data_bytes}: the file is truncated"
            )
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if num_bytes != offsets[1] - offsets[0]:
            raise CheckpointError(
                f"{where} takes {offsets[1] - offsets[0]} bytes, but {dtype} {shape} needs "
                f"{num_bytes}"
            )
        self.name, self.dtype, self.shape = name, DTYPES[dtype], tuple(shape)
        self.begin, self.end = offsets


def read_header(path: str | os.PathLike) -> tuple[dict[str, _Entry], int]:
    """Checked header of one file: entries by name, and where the data part begins.

    Raises:
      CheckpointError: On any damage; also on overlapping tensors and on unused bytes.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(f"{path}: {size} bytes are too few for a header")
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise CheckpointError(
                    f"{path}: header of {length} bytes does not fit a file of {size} bytes"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    header = parse_json(text, path)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: '__metadata__' must map strings to strings")
    data_bytes = size - 8 - length
    entries = {name: _Entry(path, name, info, data_bytes) for name, info in header.items()}
    position, previous = 0, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
        if entry.begin < position:
            raise CheckpointError(f"{path}: {entry.name!r} overlaps {previous!r}")
        if entry.begin > position:
            raise CheckpointError(
                f"{path}: hole of {entry.begin - position} bytes before {entry.name!r}"
            )
        position, previous = entry.end, entry.name
    if position != data_bytes:
        raise CheckpointError(
            f"{path}: {data_bytes - position} bytes after {previous!r} belong to no tensor"
        )
    return entries, 8 + length


class SafetensorsDir:
    """The tensors of one file or of a directory of shards, by name.

    A directory is read through its `*.safetensors.index.json` if it has one, else from
    `model.safetensors`, else from all its `.safetensors` files. Every file is opened and checked
    here.

    Args:
      path: Directory, or one `.safetensors` file.
      ignore_files: Names of files in the directory that are not part of the model.

    Raises:
      CheckpointError: Naming the file and the key.

    Example: `SafetensorsDir(path).get("norm.weight")` -> read-only np.ndarray over the file.
    """

    def __init__(self, path: str | os.PathLike, *, ignore_files: tuple[str, ...] = ()):
        self.path = Path(path)
        self._entries: dict[str, _Entry] = {}
        self._file_of: dict[str, Path] = {}
        self._data_start: dict[Path, int] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._mapped_in = ""  # the tensor whose pages were asked for last
        if not self.path.exists():
            raise CheckpointError(f"{self.path}: no such file or directory")
        weight_map = None
        if self.path.is_dir():
            indices = sorted(self.path.glob("*.safetensors.index.json"))
            if len(indices) > 1:
                raise CheckpointError(
                    f"{self.path}: two indices, {indices[0].name} and {indices[1].name}"
                )
            if indices:
                weight_map = self._read_index(indices[0])
                files = [self.path / name for name in sorted(set(weight_map.values()))]
                for file in files:
                    if not file.is_file():
                        raise CheckpointError(f"{file}: missing shard, named in {indices[0].name}")
            else:
                files = self._find_files(ignore_files)
        else:
            files = [self.path]
        for file in files:
            entries, data_start = read_header(file)
            self._data_start[file] = data_start
            for name, entry in entries.items():
                if name in self._entries:
                    raise CheckpointError(f"{file}: {name!r} is also in {self._file_of[name].name}")
                self._entries[name] = entry
                self._file_of[name] = file
        if weight_map is not None:
            self._check_index(indices[0], weight_map)

    def _read_index(self, index: Path) -> dict[str, str]:
        try:
            data = index.read_bytes()
        except OSError as error:
            raise CheckpointError(f"{index}: cannot be read: {error.strerror}") from error
        weight_map = parse_json(data, index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: 'weight_map' must be an object with entries")
        for name, file in weight_map.items():
            if not isinstance(file, str) or file in ("", ".", "..") or re.search(r"[/\\\0]", file):
                raise CheckpointError(f"{index}: {name!r} lies in {file!r}, which is no file name")
        return weight_map

    def _check_index(self, index: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self._entries:
                raise CheckpointError(f"{self.path / file}: has no {name!r}, which the index names")
            if self._file_of[name].name != file:
                raise CheckpointError(
                    f"{index}: {name!r} is in {self._file_of[name].name}, not in {file}"
                )
        for name, file in self._file_of.items():
            if name not in weight_map:
                raise CheckpointError(f"{file}: {name!r} is not in {index.name}")

    def _find_files(self, ignore_files: tuple[str, ...]) -> list[Path]:
        single = self.path / "model.safetensors"
        if single.is_file():
            return [single]
        files = [f for f in sorted(self.path.glob("*.safetensors")) if f.name not in ignore_files]
        if not files:
            raise CheckpointError(f"{self.path}: no .safetensors file")
        names = {file.name for file in files}
        for file in files:
            match = _SHARD_NAME.match(file.name)
            if match is None:
                continue
            stem, digits, total = match.groups()
            for number in range(1, int(total) + 1):
                wanted = f"{stem}-{number:0{len(digits)}d}-of-{total}.safetensors"
                if wanted not in names:
                    raise CheckpointError(f"{self.path / wanted}: missing shard, see {file.name}")
        return files

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise CheckpointError(f"{self.path}: no tensor {name!r}{nearest(name, self._entries)}")
        return self._entries[name]

    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._entry(name).dtype

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        self._entry(name)
        return self._file_of[name]

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    def prefetch(self, name: str) -> None:
        """Asks the system to read a tensor's bytes in the background."""
        first, length = self._page_range(name)
        if length and hasattr(mmap, "MADV_WILLNEED"):
            self._map(self._file_of[name]).madvise(mmap.MADV_WILLNEED, first, length)

    def _page_range(self, name: str) -> tuple[int, int]:
        """Start of a tensor's first page in its file, and the bytes from there to its end."""
        entry = self._entry(name)
        begin = self._data_start[self._file_of[name]] + entry.begin
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        return first, begin + entry.end - entry.begin - first if entry.end > entry.begin else 0

    def get(self, name: str, region: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor, or a region of it: its own memory, or a read-only view of the mapped file.

        Raises:
          CheckpointError: If the file has become shorter since it was opened.
        """
        entry = self._entry(name)
        if entry.begin == entry.end:
            empty = np.zeros(entry.shape, entry.dtype)
            return empty[region] if region else empty
        file = self._file_of[name]
        offset = self._data_start[file] + entry.begin
        array = np.ndarray(entry.shape, entry.dtype, buffer=self._map(file), offset=offset)
        part = array[region] if region else array
        if part.nbytes < _MIN_READ_BYTES:
            return part
        if not part.flags.c_contiguous:
            self._map_in(name)
            return part
        out = aligned_empty(part.shape, part.dtype)
        first = part.ctypes.data - array.ctypes.data
        self._read(file, offset + first, out)
        return out

    def _map_in(self, name: str) -> None:
        """Has the pages of a tensor mapped at once; parts of one tensor are read in turn."""
        if name == self._mapped_in:
            return
        self._mapped_in = name
        first, length = self._page_range(name)
        try:
            self._map(self._file_of[name]).madvise(_MADV_POPULATE_READ, first, length)
        except (OSError, AttributeError):  # Linux before 5.14, or another system
            return

    def _read(self, file: Path, offset: int, out: np.ndarray) -> None:
        """Fills an array from a file, several pieces at once: one thread reads 3 GB/s at best."""
        target = out.reshape(-1).view(np.uint8)
        starts = range(0, target.size, _READ_PIECE_BYTES)
        with file.open("rb") as handle, ThreadPoolExecutor(min(4, len(starts))) as pool:

            def read(start: int) -> None:
                view = memoryview(target[start : start + _READ_PIECE_BYTES])
                while view:
                    count = os.preadv(handle.fileno(), [view], offset + start)
                    if count == 0:
                        raise CheckpointError(f"{file}: has become shorter while it was read")
                    view, start = view[count:], start + count

            list(pool.map(read, starts))
