"""Training text from files: JSON lines, Hugging Face dataset directories, files of token ids.

Problem: text lies in many formats, and most of it is larger than memory. Choice: every source is an
iterator of `Record`s, read file by file; a file that is truncated or holds something else is
refused in one line, naming it and the place that was reached.

Rejected: the `datasets` library, which brings pandas, aiohttp and more for reading two formats.
Trap: a directory may hold several splits (train-*, test-*); they are never mixed silently.
"""

import glob
import gzip
import importlib
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, parse_json
from mimo_jax.config import ConfigError, require
from mimo_jax.train.data import Document, PackedRows, documents_of
from mimo_jax.train.records import ALLOWED, COLUMNS, Record, check_ids, parse_record
from mimo_jax.train.row_files import open_rows

JSONL, GZIP, PARQUET, ARROW, ARRAY, ARRAYS = (
    ".jsonl", ".jsonl.gz", ".parquet", ".arrow", ".npy", ".npz"
)
FORMATS = (JSONL, GZIP, PARQUET, ARROW, ARRAY, ARRAYS)


def _read_jsonl(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with gzip.open(path) if path.name.endswith(GZIP) else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    fields = parse_json(line, where)
                except CheckpointError as error:
                    raise ConfigError(f"{error}; allowed: one JSON object per line") from error
                yield parse_record(fields, where)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(
            f"{path}:{number + 1}: the gzip stream is truncated or damaged: {error}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _import_pyarrow(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{path}: reading it needs pyarrow, which is not installed: pip install mimo_jax[data]"
        ) from error


def _read_table(path: Path) -> Iterator[Record]:
    """Rows of a parquet file, or of an arrow file in the streaming form of `save_to_disk`."""
    arrow = _import_pyarrow("pyarrow", path)
    number = 0
    try:
        if path.suffix == PARQUET:
            file = _import_pyarrow("pyarrow.parquet", path).ParquetFile(path)
            schema, batches = file.schema_arrow, None
        else:
            file = _import_pyarrow("pyarrow.ipc", path).open_stream(arrow.memory_map(str(path)))
            schema, batches = file.schema, file
        columns = [name for name in COLUMNS if name in schema.names]
        require(
            bool({"messages", "prompt", "prompt_ids"} & set(columns)),
            f"{path}: has the columns {', '.join(map(str, schema.names))}; {ALLOWED}",
        )
        if batches is None:
            batches = file.iter_batches(batch_size=256, columns=columns)
        for batch in batches:
            for fields in batch.select(columns).to_pylist():
                number += 1
                yield parse_record(fields, f"{path}:{number}")
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{path}:{number + 1}: truncated or damaged: {reason}") from error


def _check_array(array: np.ndarray, path: Path, name: str, ndims: tuple[int, ...]) -> None:
    allowed = " or ".join(f"{ndim}-D" for ndim in ndims)
    require(
        array.ndim in ndims and array.dtype.kind in "iu",
        f"{path}: {name} is {array.ndim}-D {array.dtype}; allowed: integers, {allowed}",
    )


def _read_arrays(path: Path) -> Iterator[Record]:
    """Documents of token files; where nothing says what is learned, everything is."""
    try:
        with path.open("rb") as file:
            for number, (ids, mask) in enumerate(_documents(path, file), start=1):
                where, ids = f"{path}:{number}", np.asarray(ids).tolist()
                ids = check_ids(ids, where, "document")
                mask = [True] * len(ids) if mask is None else list(mask)
                yield Record(where, f"{path.name}:{number}", document=Document(ids, mask))
    except (EOFError, zipfile.BadZipFile, zlib.error, OSError, KeyError) as error:
        raise ConfigError(f"{path}: truncated or damaged: {error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a file of arrays: {error}") from error


def _documents(path: Path, file: BinaryIO) -> Iterable[tuple[Any, Any]]:
    """(ids, which of them are learned, None = all) of each document."""
    if path.suffix == ARRAY:
        rows = np.load(path, mmap_mode="r")
        _check_array(rows, path, "the array", (1, 2))
        return ((row, None) for row in (rows if rows.ndim == 2 else rows[None]))
    arrays = np.load(file)
    if set(PackedRows._fields) <= set(arrays.files):
        return documents_of(open_rows(path))
    return _cut_at_offsets(path, arrays)


def _cut_at_offsets(path: Path, arrays: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Documents token_ids[offsets[i] : offsets[i + 1]]; the first prompt_lens[i] are no answer."""
    require(
        {"token_ids", "offsets"} <= set(arrays.files),
        f"{path}: holds {', '.join(arrays.files) or 'nothing'}; allowed: token_ids and offsets "
        f"(and prompt_lens), or {', '.join(PackedRows._fields)}",
    )
    ids, offsets = arrays["token_ids"], arrays["offsets"]
    _check_array(ids, path, "token_ids", (1,))
    _check_array(offsets, path, "offsets", (1,))
    is_cut = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == len(ids)
    require(
        bool(is_cut and (np.diff(offsets.astype(np.int64)) >= 0).all()),
        f"{path}: offsets must rise from 0 to the number of token_ids, {len(ids)}",
    )
    has_lens = "prompt_lens" in arrays.files
    lens = arrays["prompt_lens"] if has_lens else np.zeros(len(offsets) - 1, np.int64)
    _check_array(lens, path, "prompt_lens", (1,))
    is_right = len(lens) == len(offsets) - 1
    require(is_right, f"{path}: {len(lens)} prompt_lens for {len(offsets) - 1} documents")
    for first, last, prompt_len in zip(offsets[:-1], offsets[1:], lens, strict=True):
        yield ids[first:last], np.arange(last - first) >= prompt_len


_READERS = {
    JSONL: _read_jsonl,
    GZIP: _read_jsonl,
    PARQUET: _read_table,
    ARROW: _read_table,
    ARRAY: _read_arrays,
    ARRAYS: _read_arrays,
}


def _format_of(path: Path) -> str | None:
    return next((form for form in FORMATS if path.name.endswith(form)), None)


def find_files(source: str | Path) -> list[Path]:
    """The files of a source, in the order of their names.

    Args:
      source: A file, a directory (searched through), or a pattern such as data/train-*.parquet.

    Raises:
      ConfigError: If there are none, or a directory holds several splits or formats.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _format_of(file) and file.is_file())
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(name) for name in glob.glob(str(source), recursive=True))
    require(
        len(files) > 0,
        f"{source}: no such file, and no directory or pattern with any; allowed: "
        f"{', '.join(FORMATS)}",
    )
    unknown = [file for file in files if _format_of(file) is None]
    require(not unknown, f"{(unknown or [''])[0]}: unknown format; allowed: {', '.join(FORMATS)}")
    formats = sorted({_format_of(file) or "" for file in files})
    require(len(formats) == 1, f"{source}: holds {' and '.join(formats)}; name one of them")
    numbered = [re.fullmatch(r"(.+)-\d+-of-\d+", file.stem) for file in files]
    splits = sorted({f"{f.parent}/{m[1]}" for f, m in zip(files, numbered, strict=True) if m})
    require(
        len(splits) <= 1,
        f"{source}: holds several splits; name one, as in '{(splits or [''])[0]}-*'",
    )
    return files


def read_source(source: str | Path) -> Iterator[Record]:
    """All records of a source, file by file; nothing is kept in memory.

    Args:
      source: See `find_files`.

    Raises:
      ConfigError: In one line, naming file and line, once the iteration comes to what is wrong.
    """
    for path in find_files(source):
        yield from _READERS[_format_of(path) or ""](path)
