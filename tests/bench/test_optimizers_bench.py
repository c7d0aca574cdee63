"""Muon against AdamW: the count of steps on literal curves, and a small race.

Run: .venv/bin/python -m pytest tests/bench/test_optimizers_bench.py -m "slow or not slow"
"""

import dataclasses
from pathlib import Path

import pytest

from configs.common import nano_target
from mimo_jax.bench import optimizers_bench as bench
from mimo_jax.bench.optimizers_bench import Run
from mimo_jax.config import GLOBAL, SLIDING
from mimo_jax.text.tokenizer import Tokenizer

NAN = float("nan")
REPO_ROOT = Path(__file__).resolve().parents[2]


def run(rate: float, *losses: float, cpu_s: float = 3.0) -> Run:
    return Run(rate, {10 * (k + 1): loss for k, loss in enumerate(losses)}, cpu_s)


def test_steps_to_the_mark():
    found = bench.compare(
        {
            "adamw": [run(0.1, 5.0, 4.0, 3.5), run(0.2, 5.5, 3.5, 3.0), run(0.4, 6.0, NAN, NAN)],
            "muon": [run(0.3, 5.0, 2.9, 2.7, cpu_s=6.0), run(0.5, 2.6, 2.9, 2.8)],
        }
    )
    assert found == {
        "mark": 3.0,
        "adamw_rate": 0.2,
        "muon_rate": 0.3,
        "steps_adamw": 30,
        "steps_muon": 20,
        "ratio": 2 / 3,
        "final_muon": 2.7,
        "is_at_edge": ["muon"],
        "cpu_s_per_step": {"adamw": 0.1, "muon": 0.2},
    }


def test_a_mark_that_is_never_met_has_no_ratio():
    found = bench.compare({"adamw": [run(0.1, 3.0)], "muon": [run(0.1, 3.1)]})
    assert (found["steps_muon"], found["ratio"]) == (None, None)


@pytest.mark.slow
def test_muon_is_at_adamws_loss_in_fewer_steps():
    """The embedded target with two of its six layers and a third of its width."""
    nano = nano_target()
    assert nano.moe is not None
    model = dataclasses.replace(
        nano,
        hidden_size=64,
        layer_kinds=(GLOBAL, SLIDING),
        dense_hidden_size=128,
        moe=dataclasses.replace(nano.moe, hidden_size=32),
        is_moe_layer=(False, True),
    )
    tokenizer = Tokenizer.from_file(REPO_ROOT / "assets" / "mimo-nano")
    text = bench.read_text(tokenizer, {"code-gen": 60_000, "math": 60_000}, row_len=64)
    grids = {"adamw": (3e-3, 1e-2), "muon": (1e-2, 3e-2)}
    runs = bench.measure(model, text, grids, num_steps=60, batch_rows=4, eval_every=5)
    found = bench.compare(runs)
    assert found["ratio"] is not None
    assert found["ratio"] <= 0.9
