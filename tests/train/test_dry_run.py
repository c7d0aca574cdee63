"""What --dry-run says, and that it says it without a trace.

Run: pytest tests/train/test_dry_run.py
"""

import dataclasses
import io
import json

import jax
import pytest
from rich.console import Console

from configs import nano, nano_smoke
from mimo_jax.config import GLOBAL, ConfigError
from mimo_jax.sharding import TRAIN, make_mesh
from mimo_jax.train import dry_run
from tests import groups
from tests.train import smallest_run


def test_configs_build_and_count():
    full, smoke = nano.get_config(), nano_smoke.get_config()
    assert full.target == smoke.target
    counts = dry_run.counts(full)
    assert counts["target"] == {
        "parameters": 2_826_476, "steps": 2800, "tokens": 2800 * 8 * 512
    }
    assert counts["drafter"]["parameters"] < 800_000
    train = full.drafter_train
    assert counts["drafter"]["blocks"] == train.num_steps * train.batch_rows * train.num_anchors
    assert counts["mesh"] == {"data": 1, "expert": 1, "tensor": 1, "sequence": 1}


@pytest.mark.multi_device
def test_features_are_kept_on_one_device_only():
    config = nano.get_config()
    kept = dry_run._kept_shapes(config, config.target, None)
    assert kept is not None
    assert kept.shape == (4, 256, 4 * 192)
    assert dry_run._kept_shapes(config, config.target, make_mesh(TRAIN, (2, 2, 1))) is None


def one_layer():
    """A run of one dense layer each, which compiles in seconds."""
    config = smallest_run.get_config()
    target = dataclasses.replace(
        config.target, layer_kinds=(GLOBAL,), moe=None, is_moe_layer=(False,),
        attention={GLOBAL: config.target.attention[GLOBAL]}, max_position=64,
    )
    drafter = dataclasses.replace(
        config.drafter, target_layer_ids=(0,), num_target_layers=1, max_position=64
    )
    train = dataclasses.replace(config.drafter_train, row_len=32)
    return dataclasses.replace(
        config,
        corpus=dataclasses.replace(config.corpus, row_len=32),
        target=target, drafter=drafter, drafter_train=train,
    )


@pytest.fixture(scope="module")
def found():
    with jax.numpy_dtype_promotion("standard"):
        return dry_run.dry_run(one_layer())


def test_memory_and_time_of_the_real_steps(found):
    for name, steps in (("target", 6), ("drafter", 4)):
        stage = found[name]
        assert stage["steps"] == steps
        assert stage["peak_bytes"] >= stage["state_bytes"] + stage["scratch_bytes"] > 0
        assert stage["seconds"] == pytest.approx(steps * stage["seconds_per_step"], abs=0.002)
    # Parameters and at least one moment of each, in float32.
    assert found["target"]["state_bytes"] > 8 * found["target"]["parameters"]
    # The drafter's step holds the frozen target as well.
    held = 8 * found["drafter"]["parameters"] + 4 * found["target"]["parameters"]
    assert found["drafter"]["state_bytes"] > held
    assert found["seconds"] == found["target"]["seconds"] + found["drafter"]["seconds"]
    assert found["why_untimed"] is None
    json.dumps(found)


def test_the_table_is_for_people(found):
    def shown(found):
        text = io.StringIO()
        Console(file=text, width=100).print(dry_run.table(found))
        return " ".join(text.getvalue().split())

    number = f"{found['target']['parameters']:,}"
    for words in ("smallest, mesh 1x1x1x1", number, "peak on a device", "saving not counted."):
        assert words in shown(found)
    untimed = found | {"seconds": None, "why_untimed": "no reason"}
    assert "Not timed: no reason." in shown(untimed)


def test_durations_literal():
    shown = {None: "–", 0.0125: "12.5 ms", 2.5: "2.5 s", 75.0: "1 min 15 s", 5025.0: "1 h 23 min",
             119.9: "2 min 0 s", 1e7: "2,777 h 46 min"}
    assert {seconds: dry_run._duration(seconds) for seconds in shown} == shown


def test_what_cannot_be_timed_says_why():
    assert dry_run._why_untimed(None, 10**6) is None
    reason = dry_run._why_untimed(None, 10**18)
    assert reason is not None
    assert reason.startswith("a step needs 1,000,000,000.0 GB and there are ")


@pytest.mark.slow
@pytest.mark.multi_device
def test_eight_devices_hold_less_each(found, standard_promotion):
    config = smallest_run.get_config()
    model = dataclasses.replace(
        config.target,
        hidden_size=32,
        dense_hidden_size=48,
        moe=dataclasses.replace(config.target.moe, num_experts=8, hidden_size=24),
    )
    drafter = dataclasses.replace(config.drafter, hidden_size=32, target_hidden_size=32)
    config = dataclasses.replace(config, target=model, drafter=drafter)
    one = dry_run.dry_run(config)
    cut = dry_run.dry_run(dataclasses.replace(config, mesh=(2, 2, 2)))
    assert cut["target"]["state_bytes"] < one["target"]["state_bytes"] / 2
    assert cut["seconds"] is None
    assert cut["target"]["seconds_per_step"] is None
    assert cut["why_untimed"] == "steps on a mesh of 8 devices are compiled here, not run"
    with pytest.raises(ConfigError, match="needs 16 devices; there are 8"):
        dry_run.dry_run(dataclasses.replace(config, mesh=(4, 1, 4)))


@pytest.mark.slow
def test_the_command_line_leaves_nothing_behind(tmp_path):
    command = ["train.py", "--config", "tests/train/smallest_run.py", "--dry-run", "--json"]
    ((code, out, stderr),) = groups.run([*command, "--run-dir", str(tmp_path / "run")], 1)
    assert code == 0, stderr
    assert json.loads(out)["target"]["parameters"] == 37_838
    assert not (tmp_path / "run").exists()
    ((code, _, stderr),) = groups.run([*command[:3], "--json"], 1)
    assert (code, stderr) == (2, "train.py: --json belongs to --dry-run\n")
