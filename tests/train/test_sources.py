"""Run: pytest tests/train/test_sources.py"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.train.data import pack_documents
from mimo_jax.train.records import Record, parse_record
from mimo_jax.train.row_files import write_rows
from mimo_jax.train.sources import find_files, read_source

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
LINES = [
    {"messages": [USER, ANSWER], "id": "a"},
    {"prompt": "1+1=", "response": "2", "topic": "sums"},
    {"prompt": "3+3="},
    {"prompt_ids": [5, 6], "response_ids": [7], "prompt": "the same as text"},
]


def write_lines(path: Path, lines: list) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_every_kind_of_line(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", LINES)
    path.write_text(path.read_text().replace("\n", "\n\n", 1))  # a blank line is nothing
    chat, pair, prompt, ids = read_source(path)
    assert chat == Record(f"{path}:1", "a", messages=(USER, ANSWER))
    assert pair == Record(f"{path}:3", "chats.jsonl:3", prompt="1+1=", response="2")
    assert (prompt.prompt, prompt.response) == ("3+3=", None)
    assert ids.prompt is None
    assert ids.document == ([5, 6, 7], [False, False, True])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "x.jsonl:2: not JSON"),
        ("[1]", "x.jsonl:2"),
        ('"text"', "x.jsonl:2"),
        ('{"question": "a"}', "none of the keys"),
        ('{"prompt": 5}', "prompt is 5; allowed: text"),
        ('{"prompt": "a", "response": ["b"]}', "response is"),
        ('{"prompt": "\\ud800"}', "surrogate"),
        ('{"prompt": "a", "id": 1.5}', "id is 1.5"),
        ('{"prompt": "a", "prompt": "b"}', "duplicate key"),
        ('{"messages": []}', "at least one"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "no turn of the user"),
        ('{"messages": ["hello"]}', r"messages\[0\] is 'hello'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "after nothing; allowed there"),
        ('{"messages": [{"role": "robot", "content": "a"}]}', "'robot'"),
        ('{"messages": [{"role": "user", "content": 5}]}', r"messages\[0\].content is 5"),
        ('{"messages": [{"role": "user"}]}', "content is None"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}',
            r"messages\[1\].role is 'user' after user; allowed there: assistant",
        ),
        ('{"prompt_ids": "12"}', "a list of token ids"),
        ('{"prompt_ids": [1, true]}', "prompt_ids holds True"),
        ('{"prompt_ids": [1], "response_ids": [-1]}', "response_ids holds -1"),
        ('{"prompt_ids": [4294967296]}', "ids in 0..2147483647"),
        ("[" * 100_000, "nested too deeply"),
        ('{"id": ' + "9" * 5000 + ', "prompt": "a"}', "x.jsonl:2"),
    ],
)
def test_a_bad_line_is_refused_in_one_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "good"}\n' + line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        list(read_source(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_tool_conversations(tmp_path: Path) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    tool = {"role": "tool", "content": "4"}
    tools = [{"function": {"name": "add"}}]
    system = {"role": "system", "content": "be brief"}
    messages = [system, USER, call, tool, tool, ANSWER, USER]
    record = parse_record({"messages": messages, "tools": tools}, "here:1")
    assert record.messages == tuple(messages)
    assert record.tools == tuple(tools)
    with pytest.raises(ConfigError, match="after user; allowed there: assistant"):
        parse_record({"messages": [USER, tool]}, "here:1")


def test_truncated_gzip_names_the_line_it_reached(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    text = "".join(json.dumps({"prompt": f"{i * 7919}"}) + "\n" for i in range(3000)).encode()
    path.write_bytes(gzip.compress(text))
    assert len(list(read_source(path))) == 3000
    path.write_bytes(gzip.compress(text)[:-2000])
    with pytest.raises(ConfigError, match=r"x.jsonl.gz:\d+: the gzip stream is truncated"):
        list(read_source(path))
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=r"x.jsonl.gz:1: .* damaged"):
        list(read_source(path))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(ConfigError, match="x.jsonl:1: not UTF-8"):
        list(read_source(path))


def make_dataset(directory: Path) -> list[dict]:
    """The two files of a Hugging Face dataset: one as parquet, one as save_to_disk writes it."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: data)")
    import pyarrow.parquet as pq

    rows = [{"messages": [USER, {**ANSWER, "content": str(i)}], "score": i} for i in range(5)]
    rows[1]["messages"][1]["name"] = "max"  # the others then have name None
    table = pa.Table.from_pylist(rows)
    (directory / "data").mkdir(parents=True)
    for part in range(2):
        path = directory / f"data/train-{part}-of-2.parquet"
        pq.write_table(table[part * 3 : part * 3 + 3], path)
    (directory / "saved").mkdir()
    with pa.OSFile(str(directory / "saved/data-00000-of-00001.arrow"), "wb") as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    (directory / "saved/state.json").write_text("{}")
    return rows


def test_dataset_directories(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    for source in (tmp_path / "data", tmp_path / "saved", tmp_path / "data/train-*.parquet"):
        records = list(read_source(source))
        assert [r.messages[1]["content"] for r in records if r.messages] == list("01234")
        assert records[0].messages == (USER, {"role": "assistant", "content": "0"})
        assert records[1].messages == (USER, {**ANSWER, "content": "1", "name": "max"})
    assert next(read_source(tmp_path / "data")).where.endswith("train-0-of-2.parquet:1")
    with pytest.raises(ConfigError, match="holds .arrow and .parquet; name one"):
        find_files(tmp_path)
    (tmp_path / "data/test-0-of-1.parquet").touch()
    with pytest.raises(ConfigError, match="several splits"):
        find_files(tmp_path / "data")


def test_damaged_tables(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    for name in ("data/train-0-of-2.parquet", "saved/data-00000-of-00001.arrow"):
        path = tmp_path / name
        whole = path.read_bytes()
        for length in (0, 7, len(whole) // 2, len(whole) - 40):
            path.write_bytes(whole[:length])
            with pytest.raises(ConfigError, match="truncated or damaged") as caught:
                list(read_source(path))
            assert "\n" not in str(caught.value)


def test_tables_without_a_known_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra: data)")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="has the columns question, answer; allowed: messages"):
        list(read_source(tmp_path / "x.parquet"))


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install mimo_jax\[data\]"):
        list(read_source(tmp_path))


def test_token_files(tmp_path: Path) -> None:
    flat, rows, cut, packed = (tmp_path / name for name in ("a.npy", "b.npy", "c.npz", "d.npz"))
    np.save(flat, np.arange(7, dtype=np.uint16))
    np.save(rows, np.arange(6).reshape(2, 3))
    np.savez(cut, token_ids=np.arange(5), offsets=[0, 3, 5], prompt_lens=[2, 0])
    write_rows(packed, pack_documents([([1, 2], [3])], 5, pad_id=0, seed=0))
    documents = lambda path: [record.document for record in read_source(path)]
    assert documents(flat) == [(list(range(7)), [True] * 7)]
    assert documents(rows) == [([0, 1, 2], [True] * 3), ([3, 4, 5], [True] * 3)]
    assert documents(cut) == [([0, 1, 2], [False, False, True]), ([3, 4], [True, True])]
    assert documents(packed) == [([1, 2, 3], [False, False, True])]
    assert next(read_source(cut)).where == f"{cut}:1"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"token_ids": [1, 2]}, "holds token_ids; allowed: token_ids and offsets"),
        ({"token_ids": [1.5], "offsets": [0, 1]}, "token_ids is 1-D float64"),
        ({"token_ids": [1, 2], "offsets": [0, 3]}, "offsets must rise from 0"),
        ({"token_ids": [1, 2], "offsets": [0, 2, 1, 2]}, "offsets must rise"),
        ({"token_ids": [1], "offsets": [0, 1], "prompt_lens": [0, 0]}, "2 prompt_lens for 1"),
        ({"token_ids": [-1], "offsets": [0, 1]}, "x.npz:1: document holds -1"),
        ({"token_ids": np.array([None]), "offsets": [0, 1]}, "x.npz: not a file of arrays"),
    ],
)
def test_bad_token_files(tmp_path: Path, arrays: dict, message: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ConfigError, match=message):
        list(read_source(tmp_path / "x.npz"))


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_damaged_token_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        (np.save if name == "x.npy" else np.savez)(file, np.arange(300))
    whole = path.read_bytes()
    for length in (0, 50, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=name):
            list(read_source(path))


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        list(read_source(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="no such file"):
        list(read_source(tmp_path))
    (tmp_path / "x.txt").touch()
    with pytest.raises(ConfigError, match="x.txt: unknown format; allowed: .jsonl"):
        list(read_source(tmp_path / "x.txt"))


def test_lines_of_any_kind_give_a_record_or_one_line(tmp_path: Path) -> None:
    pytest.importorskip("hypothesis", reason="hypothesis is not installed (extra: test)")
    from hypothesis import given, settings
    from hypothesis import strategies as st

    path = tmp_path / "x.jsonl"
    leaf = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6)
    value = st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), inner),
        max_leaves=6,
    )
    role = st.sampled_from(["system", "user", "assistant", "tool"])
    message = st.fixed_dictionaries({"role": role | leaf, "content": st.text(max_size=6) | value})
    names = ["id", "messages", "tools", "prompt", "response", "prompt_ids", "response_ids"]
    line = st.dictionaries(st.sampled_from(names), value | st.lists(message, max_size=4))
    raw = line.map(lambda fields: json.dumps(fields).encode()) | st.binary(max_size=40)

    def refusal() -> str:
        try:
            list(read_source(path))
        except ConfigError as error:
            return str(error)
        return ""

    @settings(max_examples=300)
    @given(raw, st.integers(0, 60))
    def check(data: bytes, cut: int) -> None:
        for content in (data, data[: len(data) - cut]):
            path.write_bytes(content.replace(b"\n", b" ") + b"\n")
            assert "\n" not in refusal()

    check()
