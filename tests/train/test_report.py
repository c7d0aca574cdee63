"""Curves and page of a run, from files alone.

Run: pytest tests/train/test_report.py
"""

import html.parser
import json

import numpy as np
import pytest

from mimo_jax.config import ConfigError
from mimo_jax.train.report import curves
from mimo_jax.train.report.__main__ import main
from mimo_jax.train.report.record import read_run

PANELS = ["accept_length", "acceptance", "grad_norm", "learning_rates", "loss", "tokens_per_s"]


@pytest.fixture
def run_dir(tmp_path):
    """A finished target, and a drafter that was killed while it wrote a line."""
    run = tmp_path / "runs" / "night"
    for stage in ("target", "drafter"):
        (run / stage).mkdir(parents=True)
    target = [
        {"step": s, "time": 100.0 + s, "loss": 3 - s / 20, "grad_norm": 1.5} for s in (10, 20)
    ]
    target += [{"step": 20, "time": 121.0, "heldout_loss": {"math": 1.25}}]
    drafter = [
        {
            "step": s, "time": 200.0 + 2 * s, "loss": None if s == 20 else 2.0, "grad_norm": 0.5,
            "lr_muon": 0.008, "num_skipped": s // 20, "tokens_per_s": 4321.0,
        }
        for s in (10, 20, 30, 40)
    ]
    drafter.insert(2, {
        "step": 20, "time": 245.0,
        "heldout_accept_length": {"math": 4.5, "chat": 2.0},
        "heldout_acceptance": {"math": [0.9, 0.8, None], "chat": [0.5, 0.25, 0.0]},
        "real_accept_length": {"math": 4.25, "chat": None},
        "real_acceptance": {"math": [0.875, 0.75, None], "chat": [None, None, None]},
    })
    for stage, records in (("target", target), ("drafter", drafter)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (run / stage / "metrics.jsonl").write_text(lines)
    with (run / "drafter" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "los')
    trainings = {"target_train": {"num_steps": 20}, "drafter_train": {"num_steps": 90}}
    config = {"name": "night", **trainings}
    made = {"command": ["train.py", "--config", "a<b.py"], "packages": {"jax": "1.2"}}
    (run / "config.json").write_text(json.dumps({**made, "config": config}))
    return run


def test_what_a_run_says(run_dir):
    target, drafter = read_run(run_dir).stages
    assert (target.name, target.progress) == ("target", "finished, 20 steps")
    assert drafter.progress == "at step 40 of 90, running or stopped"
    assert drafter.series("loss") == ([10, 30, 40], [2.0, 2.0, 2.0])
    taus = {"math": ([20], [4.5]), "chat": ([20], [2.0])}
    assert drafter.by_scene("heldout_accept_length") == taus
    assert drafter.rates == ["lr_muon"]
    assert drafter.seconds_per_step == 2.0
    assert target.final_figures() == {"grad_norm": 1.5, "heldout_loss/math": 1.25, "loss": 2.0}
    assert drafter.final_figures()["heldout_acceptance/chat/2"] == 0.25
    assert drafter.accept_table()["math"] == {
        "real_accept_length": 4.25,
        "heldout_accept_length": 4.5,
        "real_acceptance": [0.875, 0.75, None],
        "heldout_acceptance": [0.9, 0.8, None],
    }
    (run_dir / "drafter" / "bad_batch.npz").touch()
    assert read_run(run_dir).stages[1].progress == (
        "at step 40 of 90, ended by bad steps (bad_batch.npz)"
    )


class Page(html.parser.HTMLParser):
    """Tags that hold others, as a stack; sources of images; all text."""

    def __init__(self):
        super().__init__()
        self.stack, self.sources, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.sources.append(dict(attrs)["src"])
        elif tag != "meta":
            self.stack.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.text += data + "|"


def test_the_page_stands_alone_and_says_everything(run_dir, capsys):
    assert main([str(run_dir)]) == 0
    out = run_dir / "report"
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {out / 'index.html'}"
    assert sorted(path.name for path in out.glob("drafter-*.png")) == [
        f"drafter-{name}.png" for name in PANELS
    ]
    assert sorted(path.name for path in out.glob("target-*.png")) == [
        "target-grad_norm.png", "target-loss.png"
    ]
    page = Page()
    page.feed((out / "index.html").read_text())
    assert page.stack == []
    assert len(page.sources) == 8
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    for words in ("|math|4.5|4.25|0.875|0.75|–|", "|chat|2|–|–|–|–|", "|num_skipped|2|",
                  "train.py --config a<b.py", '"num_steps": 90', "|tokens_per_s|4,321|"):
        assert words in page.text, words
    report = json.loads((out / "report.json").read_text())
    assert report["stages"]["drafter"]["last_step"] == 40
    assert report["stages"]["target"]["figures"]["loss"] == 2.0
    assert report["provenance"]["packages"] == {"jax": "1.2"}


def test_a_run_of_ten_steps_and_rounds_of_a_run(tmp_path):
    stage = tmp_path / "round2" / "drafter"
    stage.mkdir(parents=True)
    (stage / "metrics.jsonl").write_text('{"step": 10, "time": 5.0, "loss": 2.5}\n')
    assert main([str(tmp_path), "--out", str(tmp_path / "page")]) == 0
    assert (tmp_path / "page" / "round2-drafter-loss.png").exists()
    assert read_run(tmp_path).stages[0].seconds_per_step is None


def test_nothing_to_report_is_one_line(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "metrics.jsonl").write_text('{"step": 1')
    for directory, words in ((tmp_path / "absent", "does not exist"), (tmp_path, "no metrics yet")):
        assert main([str(directory)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("report: ")
        assert words in line
    assert not (tmp_path / "report").exists()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json is no JSON"):
        read_run(tmp_path)


def test_smoothing_keeps_length_and_mean():
    assert curves.smoothed([3.0, 1.0, 2.0]).tolist() == [3.0, 1.0, 2.0]
    values = [0.0, 3.0, 6.0] * 80  # 240 values: a mean over 5, shorter at the ends
    smooth = curves.smoothed(values)
    assert smooth[0] == np.mean(values[:3]) == 3.0
    assert smooth[2] == np.mean(values[:5])
    assert len(smooth) == 240
