"""The benches of packed experts and FP8 weights, on small ones.

Run: .venv/bin/python -m pytest tests/bench/test_moe_bench.py
"""

import json

import jax.numpy as jnp
import pytest

from mimo_jax.bench import commands, moe_bench, options

SIZES = {"experts": 3, "width": 32, "hidden": 64, "rounds": 2}


def test_every_form_has_its_row(tmp_path, capsys):
    path = tmp_path / "figures" / "moe.json"
    assert commands.run_moe(options.Moe(**SIZES, tokens=(1, 9), json=path)) == 0
    tokens = json.loads(path.read_text())["tokens"]
    assert set(tokens["1"]) == {"packed", "dense", "grouped", "looped", "sliced", "gathered"}
    assert set(tokens["9"]) == {"packed", "dense", "grouped", "looped"}
    row = tokens["9"]["packed"]
    assert row["over_first"] == 1.0
    # Nine tokens that choose two of three leave no expert out: 3 x 3 x 32 x 64 weights.
    assert row["weights_per_ns"] == pytest.approx(3 * 6144 / row["min_ms"] / 1e6)
    assert "Sparse layer, 9 tokens" in capsys.readouterr().out


def test_a_form_that_differs_is_no_result():
    one = jnp.ones((2, 3))
    with pytest.raises(RuntimeError, match="form sliced differs by 5.0e-01"):
        moe_bench.check_equal({"packed": one, "sliced": one.at[1, 1].set(1.5)}, 1e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 40}, "width 40 is no multiple of 32"),
        ({"top_k": 4}, "top-k 4 must be in 1..experts 3"),
        ({"tokens": (1, 0)}, "tokens 0 must be >= 1"),
        ({"rounds": 0}, "rounds 0 must be >= 1"),
    ],
)
def test_wrong_sizes_get_one_line(wrong, message, capsys):
    assert commands.run_moe(options.Moe(**(SIZES | wrong))) == 2
    assert message in capsys.readouterr().out


def test_fp8_against_its_expanded_forms(tmp_path, capsys):
    path = tmp_path / "fp8.json"
    assert commands.run_fp8(options.Fp8(130, 200, (3,), 2, path)) == 0
    rows = json.loads(path.read_text())["tokens"]["3"]
    assert list(rows) == [
        "fp8", "float32 (out, in)", "float32 (in, out)", "bfloat16 (out, in)", "bfloat16 (in, out)"
    ]  # fmt: skip
    assert rows["fp8"]["weights_per_ns"] == pytest.approx(26_000 / rows["fp8"]["min_ms"] / 1e6)
    assert commands.run_fp8(options.Fp8(130, 0)) == 2
    assert "width 0 must be >= 1" in capsys.readouterr().out
