"""`serve.py` as a command. Few processes: each imports JAX, which takes seconds.

Run: pytest tests/serving/test_serve_cli.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import serve
from tests.golden.files import DATA, arrays
from tests.serving.checkpoints import DRAFTER, TARGET, make_text_checkpoint

ROOT = Path(__file__).resolve().parents[2]
PLAIN = arrays("mimo_tiny_dflash")["plain0_output_ids"].tolist()


def test_help_and_imports_need_no_jax():
    code = (
        "import sys, mimo_jax, serve\n"
        "try: serve.main(['batch', '--help'])\n"
        "finally: print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("False\n")
    for flag in ("--checkpoint", "--drafter", "--draft-block-len", "--metrics-json", "--stop"):
        assert flag in done.stdout


@pytest.mark.e2e
def test_pipe_through_a_process():
    lines = [{"prompt_token_ids": PLAIN[:16], "max_tokens": 6}, {"prompt_token_ids": []}]
    # The compile cache of this test run, so that a second run is quick.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    done = subprocess.run(
        [sys.executable, "serve.py", "batch", "--checkpoint", str(TARGET), "--drafter"]
        + [str(DRAFTER), "--draft", "off", "--input", "-", "--output", "-"],
        input="".join(json.dumps(line) + "\n" for line in lines),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["token_ids"] == PLAIN[16:22]
    assert (first["id"], first["text"]) == ("1", None)
    assert first["accept_stats"]["tau"] == 1.0
    assert second["error"] == "line 2: prompt is empty; at least one token is needed"
    assert "tokens/s" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def run(tmp_path, capsys):
    """Runs `serve.py batch` in this process; gives (exit code, the one line on stderr)."""
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [1]}\n')

    def main(checkpoint, *flags):
        paths = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
        code = serve.main(["batch", "--checkpoint", str(checkpoint), *paths, *flags])
        assert not (tmp_path / "out.jsonl").exists(), "a job that cannot run leaves no output"
        (line,) = capsys.readouterr().err.splitlines()
        return code, line

    return main


def edited(directory: Path, source: Path, **changes) -> Path:
    """A copy of a checkpoint with other values in its config.json."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_unusable_checkpoints(run, tmp_path):
    code, line = run(tmp_path / "nowhere")
    assert code == 2
    assert line.startswith("serve.py: ")
    assert "nowhere/config.json: cannot be read: No such file or directory" in line

    uneven = edited(tmp_path / "uneven", TARGET, num_attention_heads=7)
    assert "num_heads 7 is not divisible by num_kv_heads 2" in run(uneven)[1]

    wide = edited(tmp_path / "wide", TARGET, vocab_size=300)
    code, line = run(wide)
    assert code == 2
    assert "'model.embed_tokens.weight' has shape [256, 64], expected [300, 64]" in line

    torn = edited(tmp_path / "torn", TARGET)
    shard = torn / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data[:-100])
    assert "the file is truncated" in run(torn)[1]
    shard.unlink()
    assert "model-00001-of-00002.safetensors: missing shard" in run(torn)[1]


def test_drafters_that_do_not_fit(run, tmp_path):
    assert run(TARGET, "--draft", "chain") == (
        2,
        f"serve.py: draft chain needs a drafter, and {TARGET}/dflash holds none; name one with "
        "--drafter",
    )
    code, line = run(TARGET, "--drafter", str(DATA / "qwen3-tiny-dflash"))
    assert (code, "num_target_layers is 6, expected 7" in line) == (2, True)
    checkpoint = make_text_checkpoint(tmp_path / "whole")
    code, line = run(checkpoint, "--draft-block-len", "9")
    assert code == 2
    assert "draft_block_len 9 is out of range; allowed: 2..8" in line


def test_wrong_usage(capsys):
    for args in ([], ["batch"], ["batch", "--checkpoint", "x", "--draft", "tree"], ["http"]):
        with pytest.raises(SystemExit) as caught:
            serve.main(args)
        assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err
