"""A drafter for a target that exists. Run: pytest tests/train/test_distill.py [-m slow]

Whole runs are slow; the notebook 05_training runs one in the default tier.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax import LLM
from mimo_jax.checkpoint.fingerprint import fingerprint
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.config import ConfigError
from mimo_jax.models.params import flatten
from mimo_jax.train.block_step import read_target
from mimo_jax.train.config import AnswerConfig, DistillConfig, DrafterTrainConfig
from mimo_jax.train.data import Document, batch_for_step, pack, picks_for_step
from mimo_jax.train.distill import of_round, run_distillation, share_of_round
from mimo_jax.train.drafter_run import one_per_row, read_trained
from mimo_jax.train.export import save_trained
from mimo_jax.train.features import features_of, keep_features
from mimo_jax.train.metrics import read_metrics
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.start import load_frozen_target
from mimo_jax.train.step import place_batch
from tests.golden.files import arrays
from tests.serving.checkpoints import DRAFTER, make_text_checkpoint

GOLDEN = arrays("mimo_tiny_dflash")
NUM_PROMPTS = 5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_text_checkpoint(tmp_path_factory.mktemp("distill") / "model", with_drafter=False)


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> DistillConfig:
    for name, count in (("train", NUM_PROMPTS), ("heldout", 2)):
        prompts = ({"id": f"{name}{i}", "prompt": f"{name} {i}: "} for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    drafter = load_drafter(DRAFTER)[0]
    return DistillConfig(
        name="tiny",
        seed=3,
        checkpoint=str(checkpoint),
        prompts={"words": str(tmp_path / "train.jsonl")},
        heldout={"words": str(tmp_path / "heldout.jsonl")},
        answers=AnswerConfig(max_tokens=20, batch_size=2, num_heldout=2),
        drafter=dataclasses.replace(drafter, num_layers=1, windows=(9,), is_causal=(False,)),
        drafter_train=DrafterTrainConfig(
            num_steps=4,
            batch_rows=2,
            row_len=48,
            num_anchors=6,
            mix={"words": 1.0},
            warmup_steps=1,
            eval_every=4,
            save_every=4,
        ),
        rounds=2,
    )


def test_rounds_share_the_prompts():
    shares = [share_of_round(10, number, 3) for number in (1, 2, 3)]
    assert shares == [(0, 4), (4, 4), (8, 4)]
    assert [of_round("rows", number) for number in (1, 2)] == ["rows", "rows-2"]


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"heldout": {"math": "x"}}, r"heldout has the scenes \['math'\], prompts has \['words'\]"),
        ({"rounds": 0}, "rounds 0 is out of range"),
        ({"prompts": {}, "heldout": {}}, "prompts names no scene"),
        ({"dispatch": "post"}, "dispatch 'post' is unknown"),
    ],
)
def test_configs_that_cannot_run(config: DistillConfig, fields: dict, line: str):
    with pytest.raises(ConfigError, match=line):
        dataclasses.replace(config, **fields)


def test_held_out_rows_hold_one_answer_each():
    documents = [Document.of_pair([5], [6, 7]), Document.of_pair([5], [6])]
    rows = one_per_row(documents, 4, 0)
    np.testing.assert_array_equal(rows.token_ids, [[5, 6, 7, 0]])
    with pytest.raises(ConfigError, match="no answer has 2 tokens"):
        one_per_row(documents[1:], 4, 0)


def test_trained_weights_come_back(config: DistillConfig, checkpoint: Path, tmp_path: Path):
    target = load_frozen_target(checkpoint)
    trained = read_trained(DRAFTER, config_of_golden(), target)
    mask_row = flatten(target.params)["embedding"][255]
    np.testing.assert_array_equal(trained["mask_embedding"], mask_row)
    trained["mask_embedding"] = jnp.arange(64, dtype=jnp.float32)
    save_trained(tmp_path / "out", config_of_golden(), trained)
    again = read_trained(tmp_path / "out", config_of_golden(), target)
    np.testing.assert_array_equal(again["mask_embedding"], np.arange(64, dtype=np.float32))
    for name, value in flatten(trained["drafter"]).items():
        bfloat16 = value.astype(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_array_equal(flatten(again["drafter"])[name], bfloat16, err_msg=name)
    with pytest.raises(ConfigError, match="holds another architecture"):
        read_trained(tmp_path / "out", config.drafter, target)


def config_of_golden():
    return load_drafter(DRAFTER)[0]


def test_kept_features_are_the_target_s_in_bfloat16(checkpoint: Path):
    target, model = load_frozen_target(checkpoint), config_of_golden()
    objective = ObjectiveConfig()
    documents = [
        Document.of_pair(row[:16].tolist(), row[16:40].tolist())
        for row in (GOLDEN["spec0_output_ids"], GOLDEN["spec1_output_ids"])
    ]
    rows = {
        "a": pack(documents, 41, pad_id=0, seed=0),
        "b": pack(documents[:1], 41, pad_id=0, seed=0),
    }
    mix = {"a": 2.0, "b": 1.0}
    kept = keep_features(target, rows, objective, model)
    assert {scene: values.shape for scene, values in kept.items()} == {
        "a": (2, 41, 128),
        "b": (1, 41, 128),
    }
    picks = picks_for_step({"a": 2, "b": 1}, mix, 3, 7, 4)
    assert sorted(picks) == [("a", 0), ("a", 1), ("b", 0)]
    batch = place_batch(batch_for_step(rows, mix, 3, 7, 4))
    read = jax.jit(lambda p, b: read_target(nnx.merge(target.graph, p), b, objective, model))
    now = read(target.params, batch)
    np.testing.assert_allclose(
        features_of(kept, picks).astype(jnp.float32), now, rtol=2**-8, atol=1e-5
    )


@pytest.mark.slow
def test_two_rounds_and_what_they_leave(config: DistillConfig, checkpoint: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    out = run_distillation(config, run_dir)
    answered = [
        [
            json.loads(line)["id"]
            for line in (run_dir / name / "words.jsonl").read_text().splitlines()
        ]
        for name in ("answers", "answers-2")
    ]
    assert sorted(answered[0]) == ["train0", "train1", "train2"]
    assert sorted(answered[1]) == ["train3", "train4"]
    meta = json.loads((run_dir / "answers-2" / "words.jsonl.meta.json").read_text())
    assert meta["settings"]["drafter"] == fingerprint(run_dir / "drafter" / "export")
    hashes = [
        json.loads((run_dir / name / "dataset.json").read_text())["tallies"]["words"][
            "num_documents"
        ]
        for name in ("rows", "rows-2")
    ]
    assert hashes == [3, 5]  # a round learns all text so far
    first, second = (
        read_metrics(run_dir / name / "metrics.jsonl") for name in ("drafter", "drafter-2")
    )
    assert first[-1]["step"] == second[-1]["step"] == 4

    measured = json.loads((out / "measured.json").read_text())
    assert [(m["scene"], m["temperature"], m["num_prompts"]) for m in measured] == [
        ("words", 0.0, 2),
        ("words", 1.0, 2),
    ]
    card = (out / "README.md").read_text()
    assert fingerprint(checkpoint) in card
    assert "- 8 optimizer steps\n" in card

    llm = LLM.load(checkpoint, drafter=out)
    drafted, plain = (llm.generate("train 1: ", max_tokens=24, draft=d)[0] for d in (True, False))
    assert drafted.token_ids == plain.token_ids
    written = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert run_distillation(config, run_dir) == out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == written


@pytest.mark.slow
def test_kept_features_train_the_same_drafter(config: DistillConfig, tmp_path: Path):
    losses = []
    for keeps in (False, True):
        train = dataclasses.replace(config.drafter_train, keeps_features=keeps)
        run = dataclasses.replace(config, drafter_train=train, rounds=1)
        run_distillation(run, tmp_path / str(keeps))
        records = read_metrics(tmp_path / str(keeps) / "drafter" / "metrics.jsonl")
        losses.append(next(r["loss"] for r in records if "loss" in r))
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)
