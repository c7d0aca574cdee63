"""A file of answers that may be stopped at any time, and the sidecar that says what made it.

OUT holds a line per answer, each written at once and whole; a torn last line, which a killed run
may leave, is cut off when the file is opened again. OUT.meta.json is written before the first line.
What decides the answers (model, drafter, sampling, thinking) must be the same in every run that
adds to a file, since a drafter learns one of them: a run with another is refused.
"""

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimo_jax.checkpoint.safetensors_reader import CheckpointError, parse_json
from mimo_jax.config import ConfigError


def meta_path(path: Path) -> Path:
    """Example: answers.jsonl -> answers.jsonl.meta.json"""
    return path.with_name(path.name + ".meta.json")


def read_meta(path: Path) -> dict[str, Any] | None:
    """What made a file of answers; None for a file without a sidecar.

    Raises:
      ConfigError: If the sidecar is damaged.
    """
    sidecar = meta_path(path)
    if not sidecar.is_file():
        return None
    try:
        meta = parse_json(sidecar.read_bytes(), sidecar)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    if not isinstance(meta.get("settings"), dict):
        raise ConfigError(f"{sidecar}: has no settings; it was not written by train.py regenerate")
    return meta


class AnswerFile:
    """Appends answers, each whole or not at all.

    Attributes:
      prompts: Prompt ids of every answer that is there, by its id.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], versions: Mapping[str, Any]):
        """Opens a file behind its whole lines, or makes it.

        Args:
          path: Of the answers.
          settings: What decides them; JSON values.
          versions: Of the programs; written down, and not compared.

        Raises:
          ConfigError: If the file was made with other settings (names the first that differs), or
            was not written by this class.
        """
        self.prompts: dict[str, list[int]] = {}
        meta, exists = read_meta(path), path.exists() and path.stat().st_size > 0
        if meta is None:
            if exists:
                raise ConfigError(
                    f"{path}: has no {meta_path(path).name}, so nobody knows what made it; name "
                    "another file"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = meta_path(path).with_suffix(".partial")
            content = {"settings": dict(settings), "versions": dict(versions)}
            partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(partial, meta_path(path))
        else:
            for name in sorted(settings.keys() | meta["settings"].keys()):
                before, now = meta["settings"].get(name), settings.get(name)
                if before != now:
                    raise ConfigError(
                        f"{path} was made with {name}={before!r}, now {now!r}; give the same, or "
                        "another --out"
                    )
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._num_bytes = self._read(path)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise ConfigError(f"{path}: another run is writing to it") from error
            raise
        self._file.truncate(self._num_bytes)
        self._file.seek(self._num_bytes)

    def _read(self, path: Path) -> int:
        """Learns what whole lines hold; returns their length in bytes."""
        num_bytes = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    record = parse_json(line, f"{path}:{number}")
                    self.prompts[record["id"]] = record["prompt_ids"]
                except (CheckpointError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"{path}:{number}: was not written by train.py regenerate; name another "
                        "file"
                    ) from error
                num_bytes += len(line)
        return num_bytes

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds an answer; its first key must be "id".

        Raises:
          OSError: If the disk takes no more; the file then ends with the line before.
        """
        data = memoryview((json.dumps(record, ensure_ascii=False) + "\n").encode())
        num_bytes = len(data)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self._file.truncate(self._num_bytes)
            raise
        self._num_bytes += num_bytes
        self.prompts[record["id"]] = record["prompt_ids"]

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()
