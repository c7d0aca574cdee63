"""`make demo`: its figures follow from its results file, and a changed text fails it.

Run: .venv/bin/python -m pytest tests/test_demo.py

Uses the golden tiny models, whose drafter knows nothing: accept lengths are near 1, and the answers
must be identical all the same.
"""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from mimo_jax import demo
from mimo_jax.config import ConfigError
from mimo_jax.decode.generate import Completion
from mimo_jax.decode.jobs import Job, Output
from mimo_jax.decode.llm import LLM
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.text.tokenizer import Tokenizer
from tests.serving.checkpoints import byte_tokenizer, make_text_checkpoint

LINES = {
    "math": [{"prompt": "What is 2+2?"}, {"prompt": "7*6="}, {"prompt": "x" * 200}],
    "agent": [{"prompt": "Book a train", "stop_token_ids": [7]}, {"prompt": "Call Ann"}],
}
JOB = Job(Request([1, 2], max_tokens=8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_text_checkpoint(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture
def arguments(checkpoint, tmp_path):
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for scene, lines in LINES.items():
        named = [{"id": f"{scene}-{i}", "scene": scene} | line for i, line in enumerate(lines)]
        text = "".join(json.dumps(line) + "\n" for line in named)
        (prompts / f"{scene}.jsonl").write_text(text, encoding="utf-8")
    return demo.Arguments(checkpoint, prompts, 2, 12, tmp_path / "out")


def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def output_of(token_ids, committed, ttft_s=0.1, decode_s=0.2) -> Output:
    accepted = [count - 1 for count in committed]
    offered = [7] * len(committed)
    completion = Completion(token_ids, "length", committed, accepted, offered, ttft_s, decode_s)
    stats = AcceptStats.of([completion], 8)
    return Output([1, 2], token_ids, "text", "length", completion, stats)


def pair_of(plain: Output, dflash: Output) -> demo.Pair:
    return demo.Pair(demo.Prompt("math-1", "math", JOB), plain, dflash)


# --- figures --------------------------------------------------------------------------------


def test_figures_of_a_scene():
    # 8 tokens: plain 0.1 + 0.7 s; drafted 0.1 + 0.3 s in steps of 4, 2 and 1.
    plain = output_of(list(range(8)), [1] * 7, decode_s=0.7)
    dflash = output_of(list(range(8)), [4, 2, 1], decode_s=0.3)
    pairs = [pair_of(plain, dflash)] * 2
    row = demo.figures(pairs)
    assert row.tau == pytest.approx(7 / 3)
    assert row.plain_tokens_per_s == pytest.approx(8 / 0.8)
    assert row.dflash_tokens_per_s == pytest.approx(8 / 0.4)
    assert row.speedup == pytest.approx(2.0)
    assert row.num_prompts == 2
    # A drafted step takes 0.1 s and so does a plain one.
    assert demo.break_even_tau(pairs) == pytest.approx(1.0)


def test_a_scene_without_a_single_step_is_an_error():
    only = output_of([5], [])
    with pytest.raises(ConfigError, match="math: every answer ends with its first token"):
        demo.figures([pair_of(only, only)])


def test_where_answers_part():
    plain = output_of([1, 2, 3, 4], [1, 1, 1])
    assert pair_of(plain, plain).is_identical
    changed = pair_of(plain, output_of([1, 2, 9, 4], [3]))
    assert not changed.is_identical
    assert changed.difference().startswith("math-1: token 2 is 9 with DFlash, 3 plain")
    shorter = pair_of(plain, output_of([1, 2], [1]))
    assert shorter.difference().startswith("math-1: token 2 is the end with DFlash, 3 plain")


def test_the_shown_text_is_cut_where_steps_end():
    tokenizer = Tokenizer(byte_tokenizer())
    output = output_of(tokenizer.encode("abc dé"), [2, 3, 1])
    assert demo.shaded(output, tokenizer, has_color=False).plain == "a│bc│ d│é│"
    text = demo.shaded(output, tokenizer, has_color=True)
    assert text.plain == "abc dé"
    styles = [span.style for span in text.spans]
    first, second = demo.RUN_STYLES
    assert styles[:3] == [demo.FIRST_TOKEN_STYLE, second, first]


# --- prompts --------------------------------------------------------------------------------


def test_prompts_and_their_stop_ids(arguments):
    llm = LLM.load(arguments.checkpoint)
    llm.stop_ids = (2, 3)
    scenes = demo.read_prompts(arguments.prompts, 2, 12, llm)
    assert list(scenes) == ["math", "agent"]
    assert [p.id for p in scenes["math"]] == ["math-0", "math-1"]
    assert [p.job.request.stop_ids for p in scenes["math"]] == [(2, 3), (2, 3)]
    # Its own before the checkpoint's.
    assert [p.job.request.stop_ids for p in scenes["agent"]] == [(7,), (2, 3)]
    assert all(p.job.request.max_tokens == 12 for p in scenes["math"])
    # The long prompt is left out, so that it compiles no further program.
    assert len(demo.read_prompts(arguments.prompts, 3, 12, llm)["math"]) == 2


def test_missing_files_are_named(arguments, tmp_path):
    nowhere = dataclasses.replace(arguments, checkpoint=tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no checkpoint in .*nowhere; run this from"):
        demo.run(nowhere, console())
    with pytest.raises(ConfigError, match=r"no prompts in .*; expected SCENE\.jsonl"):
        demo.run(dataclasses.replace(arguments, prompts=tmp_path), console())
    with pytest.raises(ConfigError, match="num_prompts 0 is out of range; allowed: >= 1"):
        demo.run(dataclasses.replace(arguments, num_prompts=0), console())


def test_a_checkpoint_without_a_drafter_is_refused(arguments, tmp_path):
    bare = make_text_checkpoint(tmp_path / "bare", with_drafter=False)
    with pytest.raises(ConfigError, match="no drafter in .*dflash: nothing to compare"):
        demo.run(dataclasses.replace(arguments, checkpoint=bare), console())


# --- the whole of it ----------------------------------------------------------------------


@pytest.mark.e2e
def test_the_demo_writes_what_it_shows(arguments):
    shell = console()
    assert demo.run(arguments, shell) == 0
    out = arguments.output_dir
    summary = json.loads((out / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert summary["identical"] is True
    assert list(summary["scenes"]) == ["math", "agent"]
    assert [line["id"] for line in lines] == ["math-0", "math-1", "agent-0", "agent-1"]
    for scene, row in summary["scenes"].items():
        own = [line for line in lines if line["scene"] == scene]
        committed = [n for line in own for n in line["num_committed_per_step"]]
        num_tokens = sum(line["num_tokens"] for line in own)
        assert all(line["identical"] for line in own)
        assert sum(committed) == num_tokens - len(own)
        assert row["tau"] == pytest.approx(sum(committed) / len(committed))
        plain_s = sum(line["plain_s"] for line in own)
        assert row["plain_tokens_per_s"] == pytest.approx(num_tokens / plain_s, rel=1e-3)
        assert row["speedup"] == pytest.approx(
            row["dflash_tokens_per_s"] / row["plain_tokens_per_s"]
        )
        assert row["num_prompts"] == 2
    assert (out / "accept_lengths.png").read_bytes().startswith(b"\x89PNG")
    screen = shell.file.getvalue()
    for shown in ("math", "agent", "identical", "break-even", "one stretch between bars", "│"):
        assert shown in screen


def test_a_changed_text_fails_the_demo(arguments, monkeypatch, capsys):
    """The engines are replaced: no program is compiled."""
    plain, wrong = output_of([1, 2, 3], [1, 1]), output_of([1, 2, 4], [2])
    num_prompt_ids = len(LINES["math"][1]["prompt"])

    def fake_answer(engine, job, tokenizer):
        is_second = len(job.request.prompt_ids) == num_prompt_ids
        return wrong if engine.drafter is not None and is_second else plain

    monkeypatch.setattr(demo, "answer", fake_answer)
    assert demo.run(arguments, console()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("demo: math-1: token 2 is 4 with DFlash, 3 plain")
    summary = json.loads((arguments.output_dir / "summary.json").read_text())
    assert summary["identical"] is False


def test_a_near_tie_is_reported_and_passes(arguments, monkeypatch):
    """Two right texts: the target itself does not prefer one."""
    plain, other = output_of([1, 2, 3], [1, 1]), output_of([1, 2, 4], [2])
    choose = lambda engine, job, tokenizer: plain if engine.drafter is None else other
    monkeypatch.setattr(demo, "answer", choose)
    monkeypatch.setattr(demo, "margin", lambda llm, pair: 1e-5)
    shell = console()
    assert demo.run(arguments, shell) == 0
    assert "near tie" in shell.file.getvalue()
    summary = json.loads((arguments.output_dir / "summary.json").read_text())
    assert summary["identical"] is False
    assert summary["num_near_ties"] == 4
