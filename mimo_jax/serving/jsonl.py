"""Files of JSON lines that can be stopped at any time and continued.

The output is a valid prefix at every moment: a line goes to the file in one write, and a write
that fails is taken back. What a killed process may leave, a torn last line, is cut off when the
file is opened again; a file that is not ours is never touched.
"""

import collections
import errno
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, parse_json

# Every line of an output begins like this; see `OutputWriter.write`.
_LINE_START = b'{"id": '


class JobError(Exception):
    """A batch job that cannot go on; one line for the user."""


@runtime_checkable
class RawFile(Protocol):
    """What the writer needs of a file: unbuffered, so that a failed write leaves nothing behind."""

    def write(self, data: Any, /) -> int | None: ...
    def truncate(self, size: int, /) -> int: ...
    def seek(self, offset: int, /) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def is_stdio(path: Path) -> bool:
    return str(path) == "-"


def read_lines(path: Path) -> list[tuple[int, bytes]]:
    """(number from 1, line) of all lines that are not blank; - reads stdin to its end.

    Raises:
      JobError: If the file cannot be read.
    """
    try:
        data = sys.stdin.buffer.read() if is_stdio(path) else path.read_bytes()
    except OSError as error:
        raise JobError(f"input {path}: cannot be read: {error.strerror}") from error
    data = data.removeprefix(b"\xef\xbb\xbf")
    # Only \n ends a line: JSON strings may hold other separators, such as U+2028.
    return [(i, line) for i, line in enumerate(data.split(b"\n"), start=1) if line.strip()]


class Finished:
    """What an output file holds already.

    Attributes:
      ids: How many whole lines have an id (more than one where the input repeats it).
      error_ids: Ids of lines with an error.
      num_bytes: Length of the whole lines; what follows is a torn line.
    """

    def __init__(self):
        self.ids: collections.Counter[str] = collections.Counter()
        self.error_ids: set[str] = set()
        self.num_bytes = 0


def read_finished(path: Path) -> Finished:
    """Reads an output file for a rerun; does not change it.

    Raises:
      JobError: If it cannot be read, or holds something that no batch job wrote.
    """
    finished = Finished()
    if is_stdio(path) or not path.is_file():  # a device or pipe is not looked at
        return finished
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JobError(f"output {path}: cannot be read: {error.strerror}") from error
    *whole, torn = data.split(b"\n")
    for number, line in enumerate(whole, start=1):
        try:
            record = parse_json(line, number)
        except CheckpointError:
            record = {}
        if not isinstance(record.get("id"), str) or not record.keys() & {"error", "token_ids"}:
            raise JobError(
                f"output {path}: line {number} was not written by a batch job; remove the file or "
                "name another one"
            )
        finished.ids[record["id"]] += 1
        if "error" in record:
            finished.error_ids.add(record["id"])
        finished.num_bytes += len(line) + 1
    # A machine that lost power may leave zeros instead of the line.
    is_ours = torn.startswith(_LINE_START) or _LINE_START.startswith(torn) or not torn.strip(b"\0")
    if not is_ours:
        raise JobError(
            f"output {path}: its last line was not written by a batch job; remove the file or name "
            "another one"
        )
    return finished


class OutputWriter:
    """Appends records, each whole or not at all.

    Args:
      file: Unbuffered.
      name: For messages.
      num_bytes: Length of what is there already.
      is_regular: Whether the file can be cut and synced, unlike a pipe.
    """

    def __init__(self, file: RawFile, name: str, num_bytes: int = 0, is_regular: bool = True):
        self._file, self._name, self._is_regular = file, name, is_regular
        self._num_bytes = num_bytes

    @classmethod
    def open(cls, path: Path, finished: Finished) -> "OutputWriter":
        """Opens a file behind its whole lines and cuts off a torn one; - is stdout.

        Raises:
          JobError: If it cannot be opened for writing.
        """
        try:
            if is_stdio(path):
                file: BinaryIO = open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
                return cls(file, "stdout", is_regular=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if is_regular:
                file.truncate(finished.num_bytes)
                file.seek(finished.num_bytes)
            return cls(file, str(path), finished.num_bytes, is_regular)
        except OSError as error:
            raise JobError(f"output {path}: cannot be written: {error.strerror}") from error

    def write(self, record: dict) -> None:
        """Writes one record; its first key must be "id".

        Raises:
          JobError: If the file system takes no more; the file then ends with the line before.
        """
        data = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        num_bytes = len(data)
        try:
            while data:
                written = self._file.write(data)
                if not written:
                    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                data = data[written:]
        except OSError as error:
            self._take_back()
            raise JobError(
                f"output {self._name}: cannot be written: {error.strerror}; it ends after the last "
                "whole line, and the same command goes on from there"
            ) from error
        self._num_bytes += num_bytes

    def _take_back(self) -> None:
        if not self._is_regular:
            return
        try:
            self._file.truncate(self._num_bytes)
            self._file.seek(self._num_bytes)
        except OSError:
            pass  # a torn line stays; the next run cuts it off

    def __enter__(self) -> "OutputWriter":
        return self

    def __exit__(self, exc_type: object, *rest: object) -> None:
        """Closes the file; without an exception also makes it permanent, or raises JobError."""
        try:
            if exc_type is None and self._is_regular:
                os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            if exc_type is None:
                raise JobError(f"output {self._name}: not saved: {error.strerror}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a small file under another name and renames it: it exists whole or not at all.

    Raises:
      JobError: If it cannot be written.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise JobError(f"{path}: cannot be written: {error.strerror}") from error
