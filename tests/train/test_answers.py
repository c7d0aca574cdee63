"""`train.py regenerate` on the golden checkpoint. Run: pytest tests/train/test_answers.py"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from mimo_jax import LLM, ConfigError
from mimo_jax.checkpoint.fingerprint import fingerprint
from mimo_jax.train.answer_file import AnswerFile, read_meta
from mimo_jax.train.answer_job import answer_seed, run_answer_job
from mimo_jax.train.answer_options import NONE, AnswerOptions
from mimo_jax.train.config import DataConfig, RegenerateConfig
from mimo_jax.train.conversations import TextFormat
from mimo_jax.train.data import documents_of
from mimo_jax.train.dataset import make_dataset
from mimo_jax.train.regenerate import regenerate
from mimo_jax.train.sources import read_source
from tests.golden.files import arrays
from tests.serving.checkpoints import make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
PROMPTS = [GOLDEN[f"spec{b}_output_ids"][:16].tolist() for b in (0, 1)]
ANSWERS = [GOLDEN[f"spec{b}_output_ids"][16:].tolist() for b in (0, 1)]
USER = {"role": "user", "content": "q"}
LINES = [
    {"id": "a", "prompt_ids": PROMPTS[0]},
    {"id": "b", "prompt_ids": PROMPTS[1], "response_ids": [1, 2]},
    {"id": "c", "messages": [USER, {"role": "assistant", "content": "old"}]},
    {"id": "d", "prompt": "hello"},
    {"id": "e", "prompt": ""},
    {"id": "f", "prompt_ids": [7] * 512},
    {"id": "g", "messages": [{"role": "system", "content": "s"}, {**USER, "content": " held\n"}]},
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM.load(make_text_checkpoint(tmp_path_factory.mktemp("answers") / "model"))


@pytest.fixture
def options(llm: LLM, tmp_path: Path):
    """Makes options for LINES; files lie in tmp_path."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "heldout.jsonl").write_text('{"prompt": "held"}\n')
    assert llm.directory is not None
    common = {"model": llm.directory, "data": str(data), "out": tmp_path / "out.jsonl"}
    common |= {"max_tokens": 12, "batch_size": 2, "quiet": True}
    common["exclude"] = (str(tmp_path / "heldout.jsonl"),)
    return lambda **fields: AnswerOptions(**(common | fields))


def records(path: Path) -> dict[str, dict]:
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())}


def test_answers_are_the_target_s_and_can_be_trained_on(options, llm: LLM, tmp_path: Path) -> None:
    summary = run_answer_job(options(), llm)
    lines = records(tmp_path / "out.jsonl")
    assert sorted(lines) == ["a", "b", "c", "d"]
    for line_id, b in (("a", 0), ("b", 1)):
        assert lines[line_id] == {
            "id": line_id, "prompt_ids": PROMPTS[b], "response_ids": ANSWERS[b][:12],
            "finish_reason": "length",
        }
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode(lines["c"]["response_ids"])
    assert lines["c"]["messages"] == [USER, {"role": "assistant", "content": text}]
    assert lines["c"]["prompt_ids"] == llm.tokenizer.encode("user:q\n>")
    assert lines["d"]["prompt"] == "hello"
    assert lines["d"]["response"] == llm.tokenizer.decode(lines["d"]["response_ids"])
    assert summary["left_out"] == {"empty": 1, "too_long": 1, "held_out": 1}
    assert (summary["prompts"], summary["answers"], summary["tokens"]) == (4, 4, 48)
    assert summary["finish_reasons"] == {"length": 4}
    assert 1 < summary["accept_length"] <= 8

    documents = [record.document for record in read_source(tmp_path / "out.jsonl")]
    by_prompt = {tuple(d.token_ids[:16]): d for d in documents if d is not None}
    assert by_prompt[tuple(PROMPTS[1])] == (
        PROMPTS[1] + ANSWERS[1][:12], [False] * 16 + [True] * 12
    )
    config = DataConfig({"math": str(tmp_path / "out.jsonl")}, row_len=64)
    text_format = TextFormat(None, None, vocab_size=256)
    rows = make_dataset(config, text_format, 0, tmp_path / "rows")["math"]
    assert sum(sum(d.loss_mask) for d in documents_of(rows)) == 48
    with pytest.raises(ConfigError, match="made with thinking 'default'.*the run is for 'off'"):
        make_dataset(
            DataConfig(config.sources, row_len=64, thinking="off"),
            TextFormat(None, None, 256, "off"), 0, tmp_path / "other",
        )


def test_a_stopped_run_goes_on(options, llm: LLM, tmp_path: Path) -> None:
    """Stopped in the middle of the third line: two answers stay, all are as if never stopped."""
    out = tmp_path / "out.jsonl"
    fields = {"temperature": 0.8, "seed": 3}
    run_answer_job(options(**fields), llm)
    whole = records(out)
    content = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(content[:2]) + content[2][:20])
    summary = run_answer_job(options(**fields), llm)
    assert (summary["skipped"], summary["answers"]) == (2, 2)
    assert records(out) == whole
    assert out.read_bytes().startswith(b"".join(content[:2]))
    assert run_answer_job(options(**fields), llm) == {
        "out": str(out), "prompts": 4, "skipped": 4,
        "left_out": {"empty": 1, "too_long": 1, "held_out": 1},
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafting_changes_no_answer(
    options, llm: LLM, tmp_path: Path, temperature: float
) -> None:
    fields = {"temperature": temperature, "seed": 5}
    with_drafter = run_answer_job(options(**fields), llm)
    assert llm.directory is not None
    plain = LLM(llm.target, tokenizer=llm.tokenizer, directory=llm.directory)
    out = tmp_path / "plain.jsonl"
    without = run_answer_job(options(**fields, drafter=NONE, out=out), plain)
    assert records(out) == records(tmp_path / "out.jsonl")
    assert without["accept_length"] is None
    assert with_drafter["accept_length"] >= 1  # the golden drafter is no good at a temperature


def test_several_samples_have_seeds_of_their_own(options, llm: LLM, tmp_path: Path) -> None:
    run_answer_job(options(temperature=1.0, samples=3, limit=2), llm)
    lines = records(tmp_path / "out.jsonl")
    assert sorted(lines) == ["a#0", "a#1", "a#2", "b#0", "b#1", "b#2"]
    assert len({tuple(line["response_ids"]) for line in lines.values()}) == 6
    assert answer_seed(0, "a") == 1947945454
    with pytest.raises(ConfigError, match="samples 2 has no meaning at temperature 0"):
        run_answer_job(options(samples=2), llm)
    with pytest.raises(ConfigError, match="batch_size 0"):
        run_answer_job(options(batch_size=0), llm)
    with pytest.raises(ConfigError, match="top_p"):
        run_answer_job(options(top_p=0.0), llm)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"thinking": "on"}, "was made with thinking='default', now 'on'"),
        ({"temperature": 0.5}, "was made with temperature=0.0, now 0.5"),
        ({"max_tokens": 13}, "was made with max_tokens=12, now 13"),
        ({"drafter": NONE}, "was made with drafter='.{32}', now None"),
    ],
)
def test_other_settings_are_refused(
    options, llm: LLM, tmp_path: Path, fields: dict, message: str
) -> None:
    run_answer_job(options(limit=1), llm)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=message):
        run_answer_job(options(**fields), llm)
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_bad_data_and_files_are_refused_in_one_line(options, llm: LLM, tmp_path: Path) -> None:
    out, data = tmp_path / "out.jsonl", tmp_path / "prompts.jsonl"
    run_answer_job(options(limit=1), llm)
    data.write_text('{"id": "a", "prompt": "another"}\n')
    with pytest.raises(ConfigError, match="prompts.jsonl:1: .* answers another prompt with id 'a'"):
        run_answer_job(options(), llm)
    data.write_text('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}\n')
    with pytest.raises(ConfigError, match="prompts.jsonl:2: id 'a' is already that of .*jsonl:1"):
        run_answer_job(options(), llm)
    data.write_text('{"prompt_ids": [256]}\n')
    with pytest.raises(ConfigError, match="prompts.jsonl:1: id 256 is beyond the vocabulary"):
        run_answer_job(options(), llm)
    with pytest.raises(ConfigError, match="none.jsonl: no such file"):
        run_answer_job(options(data=str(tmp_path / "none.jsonl")), llm)
    data.write_text('{"prompt": "x"}\n')
    out.write_text('{"id": "a"}\n')
    with pytest.raises(ConfigError, match="out.jsonl:1: was not written by train.py regenerate"):
        run_answer_job(options(), llm)
    (tmp_path / "out.jsonl.meta.json").unlink()
    with pytest.raises(ConfigError, match="has no out.jsonl.meta.json"):
        run_answer_job(options(), llm)


def test_one_writer_at_a_time_and_whole_lines(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    line = {"id": "a", "prompt_ids": [1], "response_ids": [2]}
    with AnswerFile(path, {"seed": 0}, {}) as file:
        file.write(line)
        with pytest.raises(ConfigError, match="another run is writing"):
            AnswerFile(path, {"seed": 0}, {})

        class FullDisk:
            def __init__(self, raw):
                self.raw, self.truncate = raw, raw.truncate

            def write(self, data) -> int:
                if len(data) > 10:
                    return self.raw.write(data[:10])
                raise OSError(28, "No space left on device")

        whole, raw = path.read_bytes(), file._file
        file._file = FullDisk(raw)  # type: ignore[assignment]
        with pytest.raises(OSError, match="No space"):
            file.write({**line, "id": "b" * 2})
        file._file = raw
        assert path.read_bytes() == whole
    with AnswerFile(path, {"seed": 0}, {"jax": "newer"}) as file:
        assert file.prompts == {"a": [1]}
    assert read_meta(path) == {"settings": {"seed": 0}, "versions": {}}


def test_fingerprint_follows_the_files_and_not_the_place(llm: LLM, tmp_path: Path) -> None:
    assert llm.directory is not None
    copy = tmp_path / "copy"
    shutil.copytree(llm.directory, copy)
    assert fingerprint(copy) == fingerprint(llm.directory)
    (copy / "README.md").write_text("a card")
    assert fingerprint(copy) == fingerprint(llm.directory)
    (copy / "chat_template.jinja").write_text("other")
    assert fingerprint(copy) != fingerprint(llm.directory)


def test_command_line(options, tmp_path: Path, monkeypatch, capsys) -> None:
    import train

    o = options()
    flags = ["--model", str(o.model), "--data", o.data, "--out", str(o.out), "--quiet"]
    run = lambda *more: monkeypatch.setattr(sys, "argv", ["train.py", "regenerate", *flags, *more])
    run("--limit", "1", "--max-tokens", "12", "--batch-size", "2")
    assert train.main() == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 12
    assert records(tmp_path / "out.jsonl")["a"]["response_ids"] == ANSWERS[0][:12]
    run("--limit", "1")
    assert train.main() == 2
    assert "train.py: " in (line := capsys.readouterr().err)
    assert "max_tokens=12, now 256" in line
    run("--samples", "2")
    assert train.main() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_recipe_s_rounds_may_draft(llm: LLM) -> None:
    """Greedy text of `regenerate` is the same with a drafter, prompt by prompt."""
    config = RegenerateConfig(max_tokens=12, batch_size=2)
    prompts = [*PROMPTS, [5, 6, 7], [9] * 30]
    answer = lambda drafter: regenerate(
        llm.target, prompts, config, stop_ids=(), row_len=64, num_tokens=10**6, seed=3,
        greedy_only=True, drafter=drafter,
    )
    plain = answer(None)
    assert len(plain) == 4
    assert (PROMPTS[0], ANSWERS[0][:12]) in plain
    assert answer(llm.drafter) == plain
