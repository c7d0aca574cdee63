"""Run: pytest tests/train/test_dataset.py"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train.config import DataConfig
from mimo_jax.train.conversations import TextFormat
from mimo_jax.train.data import DROP, documents_of
from mimo_jax.train.dataset import make_dataset
from mimo_jax.train.thinking import OFF

NANO = Path(__file__).parents[2] / "assets" / "mimo-nano"
PAD = 9


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    lines = [{"prompt": "1+1=", "response": " 2, I"}, {"prompt": "what?"}]
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps(line) + "\n" for line in lines))
    np.save(tmp_path / "book.npy", np.arange(10, 27))
    return DataConfig({"sums": str(sums), "book": str(tmp_path / "book.npy")}, row_len=8)


@pytest.fixture(scope="module")
def text_format() -> TextFormat:
    return TextFormat(Tokenizer.from_file(NANO), None, 2048)


def test_sources_become_rows_once(
    tmp_path: Path, config: DataConfig, text_format: TextFormat
) -> None:
    out = tmp_path / "rows"
    rows = make_dataset(config, text_format, PAD, out)
    assert sorted(rows["book"].token_ids.tolist()) == [  # 17 tokens in rows of 8
        [*range(10, 18)], [*range(18, 26)], [26, *[PAD] * 7]
    ]
    (document,) = documents_of(rows["sums"])
    tokenizer = text_format.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("1+1=")
    assert document.token_ids[: len(prompt)] == prompt
    assert document.loss_mask.index(True) == len(prompt)
    record = json.loads((out / "dataset.json").read_text())
    assert record["tallies"]["sums"]["num_unanswered"] == 1
    assert record["tallies"]["book"]["num_learned"] == 17

    Path(config.sources["sums"]).write_text("not read again")
    again = make_dataset(config, text_format, PAD, out)
    np.testing.assert_array_equal(again["sums"].token_ids, rows["sums"].token_ids)
    with pytest.raises(ConfigError, match="was made with long_documents='split', now 'drop'"):
        make_dataset(dataclasses.replace(config, long_documents=DROP), text_format, PAD, out)


def test_changed_rows_are_noticed(
    tmp_path: Path, config: DataConfig, text_format: TextFormat
) -> None:
    out = tmp_path / "rows"
    make_dataset(config, text_format, PAD, out)
    path = out / "book.npz"
    whole = path.read_bytes()
    at = whole.index(np.arange(10, 13, dtype=np.int32).tobytes())
    path.write_bytes(whole[:at] + b"\x0b" + whole[at + 1 :])
    with pytest.raises(ConfigError, match="not those that dataset.json describes"):
        make_dataset(config, text_format, PAD, out)


def test_bad_configs_and_sources(
    tmp_path: Path, config: DataConfig, text_format: TextFormat
) -> None:
    with pytest.raises(ConfigError, match="long_documents 'wrap'.*truncate, split, drop"):
        dataclasses.replace(config, long_documents="wrap")
    with pytest.raises(ConfigError, match="thinking 'maybe'"):
        dataclasses.replace(config, thinking="maybe")
    with pytest.raises(ConfigError, match="row_len 1"):
        dataclasses.replace(config, row_len=1)
    with pytest.raises(ConfigError, match="sources is empty"):
        dataclasses.replace(config, sources={})
    with pytest.raises(ConfigError, match="thinking 'off' differs"):
        make_dataset(dataclasses.replace(config, thinking=OFF), text_format, PAD, tmp_path / "a")
    Path(config.sources["sums"]).write_text('{"prompt": "a"}\n{"prompt": "b", "response": ""}\n')
    message = "sums.*nothing to learn: 0 of 2 records .* 1 with fewer than 2 tokens.*, 1 without"
    with pytest.raises(ConfigError, match=message):
        make_dataset(config, text_format, PAD, tmp_path / "b")
    assert not (tmp_path / "b" / "dataset.json").exists()
