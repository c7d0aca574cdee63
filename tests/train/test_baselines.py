"""Training of the baseline drafters: they learn, and a budget of processor seconds is kept.

Run: .venv/bin/python -m pytest tests/train/test_baselines.py
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_target
from mimo_jax.config import ConfigError
from mimo_jax.decode.placement import Model
from mimo_jax.models.params import flatten, split
from mimo_jax.models.target import Target
from mimo_jax.train import baselines, budget
from mimo_jax.train.budget import Training, train_for_seconds
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.data import pack_documents
from mimo_jax.train.mtp_step import make_mtp_step
from mimo_jax.train.step import TrainState, init_state


@pytest.fixture(scope="module")
def target() -> Model:
    module = Target(tiny_target(), rngs=nnx.Rngs(0))
    return Model(module.config, *split(module))


@pytest.mark.parametrize(("kind", "num_leaves"), [("eagle3", 10), ("mtp", 36)])
@pytest.mark.usefixtures("standard_promotion")
def test_a_baseline_learns_a_text_by_heart(target, tmp_path, monkeypatch, kind, num_leaves):
    """Two rows that count upwards: from chance, ln 61 = 4.1 nats, to under 2 in 120 steps."""
    documents = [([4], list(range(5 + i, 29 + i))) for i in range(4)]
    rows = {"math": pack_documents(documents, 50, pad_id=0, seed=0)}
    settings = DrafterTrainConfig(
        batch_rows=2, row_len=50, num_anchors=16, mix={"math": 1.0}, warmup_steps=4
    )
    monkeypatch.setattr(baselines, "train_config", lambda kind, scenes: settings)
    monkeypatch.setattr(budget, "step_cost", lambda training: 0.1)
    drafter, spent = baselines.train_baseline(kind, target, tiny_drafter(), rows, 12.0, tmp_path)
    assert spent.num_steps == 120
    lines = (tmp_path / "12s" / kind / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert 1.0 < losses[0] < 5.0
    assert losses[-1] < min(2.0, losses[0] - 0.5)
    assert len(flatten(drafter.params)) == num_leaves


def test_shapes_of_the_contenders():
    target = tiny_target()
    eagle = baselines.fresh("eagle3", tiny_drafter(), target, seed=1).config
    assert eagle.target_layer_ids == (0, 1, 2)
    assert (eagle.attention.window, eagle.draft_block_len) == (11, 5)
    mtp = baselines.fresh("mtp", tiny_drafter(), target, seed=1)
    assert (mtp.config.draft_block_len, mtp.config.target_layer_ids) == (4, (3,))
    dflash = baselines.fresh("dflash", tiny_drafter(), target, seed=1)
    assert "mask_embedding" in flatten(dflash.params)


def test_a_chain_is_not_trained(target):
    config = baselines.MtpConfig(target.config, 5, is_chained=True)
    with pytest.raises(ConfigError, match="trained apart"):
        make_mtp_step(target.graph, None, None, DrafterTrainConfig(), config)


def _counting(calls: list[int], fail_at: int | None = None):
    """A run whose parameter counts its steps."""

    def make(config: DrafterTrainConfig) -> Training:
        def step_fn(state: TrainState, number: int):
            if number == fail_at:
                raise KeyboardInterrupt
            calls.append(number)
            params = jax.tree.map(lambda x: x + 1, state.params)
            state = dataclasses.replace(state, params=params, step=state.step + 1)
            return state, {"loss": np.float32(1.0)}

        return Training(init_state({"w": jnp.zeros(3)}, optax.identity()), step_fn)

    return make


def test_a_budget_is_spent_once_and_a_stopped_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "step_cost", lambda training: 0.5)
    config, calls = DrafterTrainConfig(mix={"math": 1.0}), []
    with pytest.raises(KeyboardInterrupt):
        train_for_seconds("a", _counting(calls, fail_at=9), config, 6.0, tmp_path)
    monkeypatch.setattr(budget, "step_cost", lambda training: 1 / 0)  # not asked again
    calls.clear()
    state, spent = train_for_seconds("a", _counting(calls), config, 6.0, tmp_path)
    assert (spent.num_steps, spent.cpu_s) == (12, 6.0)
    assert calls == [9, 10, 11]  # saved every third step
    assert np.asarray(state.params["w"]).tolist() == [12.0] * 3
    calls.clear()
    state, again = train_for_seconds("a", _counting(calls), config, 6.0, tmp_path)
    assert (calls, again) == ([], spent)
    assert np.asarray(state.params["w"]).tolist() == [12.0] * 3
