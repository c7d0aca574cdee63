"""The safetensors reader on whole files and on every kind of damage.

Run: .venv/bin/python -m pytest tests/checkpoint/test_safetensors_reader.py

Files are built byte by byte here; what the published library writes is read in test_hf_target.py.
"""

import json
import struct
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.checkpoint.safetensors_reader import DTYPES, CheckpointError, SafetensorsDir
from tests.golden.files import DATA


def file_bytes(header, data: bytes = b"") -> bytes:
    """A file from a header (a dict or the text itself) and its data part."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.array([7, -8, 9], np.int16)
HEADER = {"a": entry("F32", [2, 3], 0, 24), "b": entry("I16", [3], 24, 30)}
BODY = A.tobytes() + B.tobytes()


def write(path: Path, header=HEADER, body: bytes = BODY) -> Path:
    path.write_bytes(file_bytes(header, body))
    return path


def refused(path: Path, *words: str) -> None:
    """Opening fails with one line that holds the file's name and all words."""
    with pytest.raises(CheckpointError) as caught:
        SafetensorsDir(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_a_file_by_name_shape_and_value(tmp_path):
    tensors = SafetensorsDir(write(tmp_path / "model.safetensors"))
    assert tensors.names() == ["a", "b"]
    assert tensors.shape("a") == (2, 3)
    assert tensors.dtype("b") == np.int16
    assert tensors.file_of("b").name == "model.safetensors"
    np.testing.assert_array_equal(tensors.get("a"), A)
    np.testing.assert_array_equal(tensors.get("b"), B)
    assert not tensors.get("a").flags.writeable
    with pytest.raises(CheckpointError, match=r"no tensor 'bb' \(nearest: b\)"):
        tensors.get("bb")


def test_every_dtype(tmp_path):
    rng = np.random.default_rng(0)
    header, body, expected = {}, b"", {}
    for name, dtype in DTYPES.items():
        raw = rng.integers(0, 2, 5 * dtype.itemsize, np.uint8).tobytes()
        header[name] = entry(name, [5], len(body), len(body) + len(raw))
        expected[name] = np.frombuffer(raw, dtype)
        body += raw
    tensors = SafetensorsDir(write(tmp_path / "x.safetensors", header, body))
    for name, dtype in DTYPES.items():
        assert tensors.dtype(name) == dtype
        assert tensors.get(name).tobytes() == expected[name].tobytes()


def test_bits_of_the_small_floats(tmp_path):
    header = {
        "bf16": entry("BF16", [1], 0, 2),
        "e4m3": entry("F8_E4M3", [2], 2, 4),
        "e5m2": entry("F8_E5M2", [1], 4, 5),
        "e8m0": entry("F8_E8M0", [2], 5, 7),
    }
    body = bytes([0x80, 0xBF, 0x7E, 0x38, 0x3C, 127, 130])
    tensors = SafetensorsDir(write(tmp_path / "x.safetensors", header, body))
    assert tensors.get("bf16").astype(np.float32).tolist() == [-1.0]
    assert tensors.get("e4m3").astype(np.float32).tolist() == [448.0, 1.0]
    assert tensors.get("e5m2").astype(np.float32).tolist() == [1.0]
    assert tensors.get("e8m0").astype(np.float32).tolist() == [1.0, 8.0]
    assert tensors.dtype("bf16") == ml_dtypes.bfloat16


def test_scalars_and_empty_tensors(tmp_path):
    header = {"e": entry("F32", [0, 4], 0, 0), "s": entry("F32", [], 0, 4)}
    tensors = SafetensorsDir(write(tmp_path / "x.safetensors", header, A.tobytes()[4:8]))
    assert tensors.get("e").shape == (0, 4)
    assert tensors.get("s").shape == ()
    assert tensors.get("s") == 1.0


def test_a_file_of_the_published_library():
    tensors = SafetensorsDir(DATA / "mimo-tiny")
    assert tensors.file_of("lm_head.weight").name == "model-00001-of-00002.safetensors"
    assert tensors.shape("lm_head.weight") == (256, 64)
    assert "model.norm.weight" in tensors


# Each case: header, data part, words of the message.
DAMAGED = {
    "truncated": (HEADER, BODY[:-1], ["'b'", "truncated"]),
    "longer": (HEADER, BODY + b"\0", ["1 bytes after 'b'"]),
    "no data": (HEADER, b"", ["truncated"]),
    "overlap": (HEADER | {"b": entry("I16", [3], 20, 26)}, BODY[:26], ["overlaps 'a'"]),
    "same place": (HEADER | {"c": entry("I16", [3], 24, 30)}, BODY, ["overlaps"]),
    "hole": (HEADER | {"b": entry("I16", [3], 26, 32)}, BODY + b"\0\0", ["hole of 2 bytes", "'b'"]),
    "hole first": ({"a": entry("F32", [2, 3], 4, 28)}, BODY[:28], ["hole of 4 bytes"]),
    "bad dtype": (HEADER | {"b": entry("F17", [3], 24, 30)}, BODY, ["'b'", "'F17'", "BF16"]),
    "dtype no string": (HEADER | {"b": entry(["I16"], [3], 24, 30)}, BODY, ["'b'", "dtype"]),
    "span too long": (HEADER | {"b": entry("I16", [2], 24, 30)}, BODY, ["'b'", "needs 4"]),
    "span too short": (HEADER | {"b": entry("I16", [4], 24, 30)}, BODY, ["'b'", "needs 8"]),
    "negative size": (HEADER | {"b": entry("I16", [-3], 24, 30)}, BODY, ["'b'", "shape"]),
    "huge size": (HEADER | {"b": entry("I16", [0, 10**40], 24, 24)}, BODY, ["'b'", "shape"]),
    "true as size": (HEADER | {"b": entry("I16", [True], 24, 26)}, BODY, ["'b'", "shape"]),
    "backwards": (HEADER | {"b": entry("I16", [3], 30, 24)}, BODY, ["'b'", "data_offsets"]),
    "negative offset": (HEADER | {"b": entry("I16", [3], -6, 0)}, BODY, ["'b'", "data_offsets"]),
    "beyond the end": (HEADER | {"b": entry("I16", [3], 94, 100)}, BODY, ["'b'", "truncated"]),
    "no offsets": (HEADER | {"b": {"dtype": "I16", "shape": [3]}}, BODY, ["'b'", "data_offsets"]),
    "no object": (HEADER | {"b": 3}, BODY, ["'b'"]),
    "metadata": (HEADER | {"__metadata__": {"format": 1}}, BODY, ["__metadata__"]),
    "a list": (b"[1, 2]", BODY, ["list"]),
    "not json": (b'{"a": ', BODY, ["not JSON"]),
    "not utf-8": (b'{"\xff": 1}', BODY, ["not UTF-8 at byte 2"]),
    "duplicate": (b'{"a": {}, "a": {}}', BODY, ["duplicate key 'a'"]),
    "duplicate inside": (b'{"a": {"shape": [1], "shape": [2]}}', BODY, ["duplicate key 'shape'"]),
    "deep": (b"[" * 100_000, BODY, ["nested"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(tmp_path, name):
    header, body, words = DAMAGED[name]
    refused(write(tmp_path / "m.safetensors", header, body), "m.safetensors", *words)


@pytest.mark.parametrize("content", [b"", b"\x05\0\0", struct.pack("<Q", 2**63) + b"{}"])
def test_a_header_that_does_not_fit(tmp_path, content):
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    refused(path, "m.safetensors", "header")


@pytest.mark.parametrize("bit", [0, 1, 6, 13, 30, 62])
def test_a_flipped_bit_in_the_header_length(tmp_path, bit):
    content = bytearray(file_bytes(HEADER, BODY))
    content[bit // 8] ^= 1 << bit % 8
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    refused(path, "m.safetensors")


def sharded(directory: Path) -> Path:
    write(directory / "x-00001-of-00002.safetensors")
    write(directory / "x-00002-of-00002.safetensors", {"c": entry("F32", [2, 3], 0, 24)}, BODY[:24])
    first, second = "x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": {"a": first, "b": first, "c": second}}
    (directory / "x.safetensors.index.json").write_text(json.dumps(index))
    return directory


def edit_index(directory: Path, change) -> None:
    path = directory / "x.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_shards_with_and_without_an_index(tmp_path):
    for _ in range(2):
        tensors = SafetensorsDir(sharded(tmp_path))
        assert tensors.names() == ["a", "b", "c"]
        assert tensors.file_of("c").name == "x-00002-of-00002.safetensors"
        np.testing.assert_array_equal(tensors.get("c"), A)
        (tmp_path / "x.safetensors.index.json").unlink()
    write(tmp_path / "side.safetensors", {}, b"")
    assert SafetensorsDir(tmp_path, ignore_files=("side.safetensors",)).names() == ["a", "b", "c"]


def test_a_missing_shard(tmp_path):
    sharded(tmp_path)
    (tmp_path / "x-00002-of-00002.safetensors").unlink()
    refused(tmp_path, "x-00002-of-00002.safetensors", "missing shard")
    (tmp_path / "x.safetensors.index.json").unlink()
    refused(tmp_path, "x-00002-of-00002.safetensors", "missing shard")


def test_a_truncated_shard_is_seen_before_any_weight_is_read(tmp_path):
    path = sharded(tmp_path) / "x-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    refused(tmp_path, "x-00002-of-00002.safetensors", "truncated")


def test_an_index_that_does_not_match(tmp_path):
    edit_index(sharded(tmp_path), lambda weight_map: weight_map.pop("b"))
    refused(tmp_path, "x-00001-of-00002.safetensors", "'b' is not in x.safetensors.index.json")
    first = "x-00001-of-00002.safetensors"
    edit_index(sharded(tmp_path), lambda weight_map: weight_map.update(d=first))
    refused(tmp_path, first, "has no 'd'")
    edit_index(sharded(tmp_path), lambda weight_map: weight_map.update(c=first))
    refused(tmp_path, "'c'")
    edit_index(sharded(tmp_path), lambda weight_map: weight_map.update(c="../c.safetensors"))
    refused(tmp_path, "x.safetensors.index.json", "no file name")
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": []}')
    refused(tmp_path, "x.safetensors.index.json", "weight_map")
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"a": "f", "a": "f"}}')
    refused(tmp_path, "x.safetensors.index.json", "duplicate key 'a'")


def test_one_tensor_in_two_files(tmp_path):
    write(tmp_path / "one.safetensors")
    write(tmp_path / "two.safetensors")
    refused(tmp_path, "two.safetensors", "'a' is also in one.safetensors")


def test_nothing_there(tmp_path):
    refused(tmp_path, "no .safetensors file")
    refused(tmp_path / "nowhere", "nowhere", "no such file")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)


@st.composite
def mutated_headers(draw) -> bytes:
    """The good header with bytes changed, or with a wild value in the place of a right one."""
    if draw(st.booleans()):
        text = bytearray(json.dumps(HEADER).encode())
        for _ in range(draw(st.integers(1, 3))):
            where = draw(st.integers(0, len(text) - 1))
            text[where : where + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
        return bytes(text)
    header = json.loads(json.dumps(HEADER))
    name = draw(st.sampled_from(["a", "b", "__metadata__"]))
    value = draw(JSON_VALUES)
    if name == "__metadata__" or draw(st.booleans()):
        header[name] = value
    else:
        header[name][draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))] = value
    return json.dumps(header).encode()


@settings(max_examples=200)
@given(text=mutated_headers(), cut=st.integers(0, 3))
def test_any_header_is_read_or_refused_in_one_line(text, cut):
    with tempfile.TemporaryDirectory() as directory:
        path = write(Path(directory) / "m.safetensors", text, BODY[: len(BODY) - cut])
        message = ""
        try:
            tensors = SafetensorsDir(path)
            for name in tensors.names():
                assert tensors.get(name).shape == tensors.shape(name)
        except CheckpointError as error:
            message = str(error)
    assert not message or ("m.safetensors" in message and "\n" not in message)
