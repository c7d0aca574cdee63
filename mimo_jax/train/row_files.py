"""Packed rows as files: written whole, read through a memory map, named by a hash.

Problem: rows of a large corpus do not fit into memory, and each of several processes needs only its
own. Choice: NumPy's .npz, stored and not compressed: its members are .npy files inside a zip, so
each can be mapped at its offset, and a batch reads the pages of its rows. `np.load(mmap_mode=...)`
does not do that for .npz; it ignores the argument and reads everything.
"""

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mimo_jax.config import ConfigError
from mimo_jax.train.data import PackedRows

_LOCAL_HEADER_LEN = 30  # of a zip member, before its name and its extra field


def write_rows(path: Path, rows: PackedRows) -> None:
    """Writes packed rows to an .npz that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        np.savez(file, **rows._asdict())
    os.replace(temporary, path)


def _map_member(path: Path, name: str) -> np.ndarray:
    """The array of one member of an .npz, mapped read-only (copied if it has no bytes)."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{name} is compressed, expected np.savez's form")
    with path.open("rb") as file:
        file.seek(info.header_offset)
        header = file.read(_LOCAL_HEADER_LEN)
        lengths = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
        file.seek(info.header_offset + _LOCAL_HEADER_LEN + sum(lengths))
        np.lib.format.read_magic(file)
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if is_fortran or dtype.hasobject:
            raise ValueError(f"{name} is not a plain array in C order")
        if 0 in shape:
            return np.zeros(shape, dtype)
        return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape)


def open_rows(path: Path) -> PackedRows:
    """Maps the rows of a file that `write_rows` made; reads nothing but its headers.

    Raises:
      ConfigError: If the file is damaged or holds something else.
    """
    try:
        rows = PackedRows(*(_map_member(path, name) for name in PackedRows._fields))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path}: not a file of packed rows: {error}") from error
    shapes = {array.shape for array in rows}
    kinds = "".join(array.dtype.kind for array in rows)
    if len(shapes) != 1 or len(rows.token_ids.shape) != 2 or kinds != "iibi":
        raise ConfigError(
            f"{path}: not a file of packed rows: expected {', '.join(PackedRows._fields)} of one "
            f"shape [rows, row_len], int32 and (loss_mask) bool; found {sorted(map(str, shapes))}"
        )
    return rows


def read_rows(directory: Path) -> dict[str, PackedRows]:
    """Rows of each source in a directory of SOURCE.npz files, mapped."""
    return {path.stem: open_rows(path) for path in sorted(directory.glob("*.npz"))}


def dataset_hash(rows_by_source: Mapping[str, PackedRows]) -> str:
    """BLAKE2b of all rows of a run, order included: a checkpoint says what it was trained on.

    Reads everything once, 0.6 GB/s on one core (Zen 4, 2026-11-30).

    Args:
      rows_by_source: As `data.batch_for_step` takes them.

    Returns:
      32 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(rows_by_source):
        digest.update(f"{source}\0".encode())
        for name, array in zip(PackedRows._fields, rows_by_source[source], strict=True):
            digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
