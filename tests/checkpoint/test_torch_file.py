"""Plain tensors out of torch.save files; programs in them are refused, never run.

Run: .venv/bin/python -m pytest tests/checkpoint/test_torch_file.py
"""

import io
import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.checkpoint.torch_file import read_torch_file
from tests.golden.files import DATA

MASK_FILE = DATA / "pro-tiny" / "dflash" / "mask_embedding.pt"


def members() -> dict[str, bytes]:
    with zipfile.ZipFile(MASK_FILE) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write(path: Path, files: dict[str, bytes], compression=zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_torch_file(path)
    message = str(caught.value)
    assert message.count("\n") == 0
    for word in (path.name, *words):
        assert word in message, message


def test_the_golden_file_holds_what_its_safetensors_twin_holds():
    from mimo_jax.checkpoint.safetensors_reader import SafetensorsDir

    twin = SafetensorsDir(MASK_FILE.with_suffix(".safetensors"))
    values = read_torch_file(MASK_FILE)
    assert values.keys() == {"mask_token_id", "embedding"}
    assert values["mask_token_id"] == 300
    assert values["embedding"].dtype == np.dtype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(values["embedding"], twin.get("embedding"))


class Program:
    """Unpickled, it would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_program_is_refused_and_not_run(tmp_path, protocol):
    trap = str(tmp_path / "ran")
    program = pickle.dumps({"embedding": Program(trap)}, protocol=protocol)
    path = write(tmp_path / "evil.pt", members() | {"mask_embedding/data.pkl": program})
    refused(path, "mkdir" if protocol == 2 else "calls", "only a dictionary of plain tensors")
    assert not os.path.exists(trap)


def test_damaged_files(tmp_path):
    path = tmp_path / "bad.pt"
    path.write_bytes(MASK_FILE.read_bytes()[:300])
    refused(path, "torch file")
    refused(write(path, {"x": b"1"}), "data.pkl")
    whole = members()
    pkl = "mask_embedding/data.pkl"
    refused(write(path, whole | {pkl: whole[pkl][:-30]}), "damaged")
    refused(write(path, whole | {"mask_embedding/data/0": b"12"}), "not contiguous")
    del whole["mask_embedding/data/0"]
    refused(write(path, whole), "storage")
    refused(write(path, members(), zipfile.ZIP_DEFLATED), "compressed")
    refused(write(path, members() | {"mask_embedding/byteorder": b"big"}), "big-endian")
    refused(write(path, members() | {pkl: pickle.dumps([1, 2], protocol=2)}), "EMPTY_LIST")
    refused(write(path, members() | {pkl: pickle.dumps({1: 2}, protocol=2)}), "key 1")
    refused(tmp_path / "nowhere.pt", "cannot be read")


@given(st.integers(0, 196), st.integers(0, 255))
def test_any_byte_of_the_pickle_may_be_wrong(position, value):
    files = members()
    name = "mask_embedding/data.pkl"
    program = bytearray(files[name])
    program[position] = value
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key, data in (files | {name: bytes(program)}).items():
            archive.writestr(key, data)
    path = Path("/dev/shm" if os.path.isdir("/dev/shm") else ".") / f"fuzz-{os.getpid()}.pt"
    path.write_bytes(buffer.getvalue())
    message = ""
    try:
        assert isinstance(read_torch_file(path), dict)
    except CheckpointError as error:
        message = str(error)
    finally:
        path.unlink()
    assert "\n" not in message
