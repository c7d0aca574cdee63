"""`python -m mimo_jax.plan`: what it prints, draws and refuses.

Run: .venv/bin/python -m pytest tests/plan/test_plan_cli.py
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mimo_jax.plan import account, aot
from mimo_jax.plan.__main__ import Arguments, main, run

PRO = Path("configs/drafter_mimo_v25_pro.py")


def test_the_tables_of_a_plan(capsys):
    assert run(Arguments(PRO, analytic=True)) == 0
    shown = capsys.readouterr().out
    for words in ("531.35", "569.50", "fits, 53.7 GB to spare", "45.7% of the bound", "launches"):
        assert words in shown, words
    assert "NO" not in shown


def test_where_weights_lie(capsys):
    assert run(Arguments(PRO, only=("sharding",))) == 0
    shown = capsys.readouterr().out
    assert "expert_hidden" in shown
    assert "whole copy" in shown
    assert "Programs" not in shown


def test_json_and_overrides(capsys):
    arguments = Arguments(
        PRO, device="B200", analytic=True, json=True, only=("roofline",), context=4096,
        accept_lengths=(7.0, 6.0, 5.0), launch_s=0.5e-6, launches_per_layer=10.0,
    )  # fmt: skip
    assert run(arguments) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["request"]["device"]["name"] == "b200"
    assert plan["request"]["device"]["launch_s"] == 0.5e-6
    step = plan["speeds"][1]
    assert step["time"]["terms_s"]["launches"] == pytest.approx(75 * 10 * 0.5e-6)
    assert step["tokens_per_s"]["code"] == pytest.approx(7 / step["time"]["sum_s"])
    assert plan["request"]["context"] == 4096


def test_pictures(tmp_path, capsys):
    import matplotlib.image

    arguments = Arguments(PRO, analytic=True, plot=True, output=tmp_path, only=("roofline",))
    assert run(arguments) == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    stem = "drafter_mimo_v25_pro-8xh200"
    assert names == [f"{stem}-sensitivity.png", f"{stem}-step.png"]
    for name in names:
        picture = matplotlib.image.imread(tmp_path / name)
        assert min(picture.shape[:2]) > 300
        assert picture.std() > 0.05  # something is drawn


TINY = """\
from configs import tiny
from mimo_jax.plan.published import PublishedModel

def get_config():
    return PublishedModel("tiny", tiny.tiny_target(), tiny.tiny_drafter())
"""


def test_without_a_gpu_compiler_the_cpu_stands_in(tmp_path, monkeypatch, capsys):
    config = tmp_path / "tiny_plan.py"
    config.write_text(TINY)
    monkeypatch.setattr(aot, "plugin_folder", lambda: None)
    aot.why_not.cache_clear()
    try:
        code = run(Arguments(config, devices=1, only=("memory",), context=256))
    finally:
        aot.why_not.cache_clear()
    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "1 virtual CPU devices; for NVIDIA H200 141GB HBM3e not available because the" in shown
    assert "DFlash step" in shown
    assert "not available because" not in shown.replace("HBM3e not available because", "", 1)
    assert "prefill chunk: not available" not in shown
    assert "written in place" in shown


def test_a_program_that_cannot_be_compiled_is_a_line(monkeypatch, capsys):
    broken = {"DFlash step": aot.Job("tests.plan.stand_in:die", {}, (1, 8))}
    monkeypatch.setattr(account, "jobs", lambda *_: broken)
    monkeypatch.setattr(account, "choose_target", lambda *_: (None, "nothing"))
    assert run(Arguments(PRO, only=("memory", "launches"))) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "DFlash step: not available because the compiler died of SIGABRT" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["configs/none.py"], ["config configs/none.py is missing", "nano"]),
        ([str(PRO), "--device", "h20"], ["device 'h20' is unknown (nearest: h200)"]),
        ([str(PRO), "--devices", "7"], ["devices 7: 128 heads", "allowed: 1, 2, 4, 8"]),
        ([str(PRO), "--devices", "128"], ["cannot be cut"]),
        ([str(PRO), "--context", "2000000"], ["context 2000000", "1..1048576"]),
        ([str(PRO), "--hbm-bytes-per-s", "0"], ["hbm_bytes_per_s 0.0 must be > 0"]),
    ],
)
def test_bad_input_is_one_line(flags, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", *flags, "--analytic"])
    assert main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    for word in words:
        assert word in said.err


def test_help_names_every_flag():
    done = subprocess.run(
        [sys.executable, "-m", "mimo_jax.plan", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for flag in ("--device", "--context", "--batch", "--only", "--json", "--plot", "--launch-s"):
        assert flag in done.stdout
