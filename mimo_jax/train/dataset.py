"""Text from files as the packed rows of a run: SOURCE.npz for each source, and what made them.

Rows are made once and kept in a directory, so that a resumed run trains on the same ones even if
the text has changed meanwhile. dataset.json, written last, says that they are whole: which config
and model they were made by, what was left out, and their hash (`row_files.dataset_hash`).
"""

import dataclasses
import json
import os
from pathlib import Path

from absl import logging

from mimo_jax.config import ConfigError, require
from mimo_jax.train.answer_file import read_meta
from mimo_jax.train.config import DataConfig
from mimo_jax.train.conversations import Tally, TextFormat, documents
from mimo_jax.train.data import PackedRows, pack
from mimo_jax.train.row_files import dataset_hash, read_rows, write_rows
from mimo_jax.train.sources import find_files, read_source


def describe(tally: Tally) -> str:
    """What was taken and left out, in one line.

    Example: "2 of 7 records taken, 9 tokens learned; left out: 3 with fewer than 2 tokens of
      response, 2 without a response".
    """
    left_out = {
        "with fewer than 2 tokens of response": tally.num_short,
        "without a response": tally.num_unanswered,
    }
    parts = [f"{count} {what}" for what, count in left_out.items() if count]
    line = (
        f"{tally.num_documents} of {tally.num_records} records taken, "
        f"{tally.num_learned} tokens learned"
    )
    line += f"; left out: {', '.join(parts)}" if parts else ""
    if tally.num_last_turn_only:
        line += f"; learned by their last turn alone: {tally.num_last_turn_only} conversations"
    return line


def _check_thinking(config: DataConfig, name: str) -> None:
    """Refuses answers that were made with another `thinking` than the run's."""
    for file in find_files(config.sources[name]):
        meta = read_meta(file)
        thinking = config.thinking if meta is None else meta["settings"].get("thinking")
        require(
            thinking == config.thinking,
            f"data.sources[{name!r}] {file} was made with thinking {thinking!r}, and the run is "
            f"for {config.thinking!r}; a drafter learns one of them",
        )


def make_dataset(
    config: DataConfig, text_format: TextFormat, pad_id: int, directory: Path
) -> dict[str, PackedRows]:
    """Packs all sources into a directory, or opens what an earlier run has packed there.

    Args:
      config: Of the data.
      text_format: Of the model; its `thinking` is the config's.
      pad_id: Fills rows up.
      directory: Belongs to this dataset alone.

    Returns:
      Mapped rows of each source.

    Raises:
      ConfigError: In one line: for a bad line of text; if a source has nothing to learn; if the
        directory was made by another config (names the field) or its files have changed.
    """
    done = directory / "dataset.json"
    wanted = {**dataclasses.asdict(config), "vocab_size": text_format.vocab_size, "pad_id": pad_id}
    require(
        config.thinking == text_format.thinking,
        f"data.thinking {config.thinking!r} differs from the text format's "
        f"{text_format.thinking!r}",
    )
    if not done.exists():
        tallies = {}
        for name, source in config.sources.items():
            _check_thinking(config, name)
            tally = tallies[name] = Tally()
            found = documents(text_format, read_source(source), tally)
            rows = pack(
                found, config.row_len, pad_id=pad_id, seed=config.seed,
                long_documents=config.long_documents,
            )
            require(
                len(rows.token_ids) > 0,
                f"data.sources[{name!r}] {source}: nothing to learn: {describe(tally)}",
            )
            write_rows(directory / f"{name}.npz", rows)
            has_left_out = tally.num_documents < tally.num_records or tally.num_last_turn_only
            (logging.warning if has_left_out else logging.info)("%s: %s", name, describe(tally))
        record = {
            "config": wanted,
            "hash": dataset_hash(read_rows(directory)),
            "tallies": {name: dataclasses.asdict(tally) for name, tally in tallies.items()},
        }
        partial = done.with_name(done.name + ".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, done)
    rows_by_source = read_rows(directory)
    record = json.loads(done.read_text(encoding="utf-8"))
    for field, value in wanted.items():
        if record["config"].get(field) != value:
            raise ConfigError(
                f"{directory} was made with {field}={record['config'].get(field)!r}, now "
                f"{value!r}; give it another directory or the same config"
            )
    if record["hash"] != dataset_hash(rows_by_source):
        raise ConfigError(f"{directory}: its rows are not those that {done.name} describes")
    return rows_by_source
