"""What the training loop does when something goes wrong, in one process.

Run: pytest tests/train/test_loop.py
"""

import builtins
import dataclasses
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.checkpoint.store import CheckpointStore, DiskFullError
from mimo_jax.config import ConfigError
from mimo_jax.train import loop, metrics, stopping
from mimo_jax.train.data import PackedRows
from mimo_jax.train.row_files import dataset_hash
from tests.train import toy_run


def lines_of(run_dir):
    """Metrics of a run, without the clock."""
    lines = metrics.read_metrics(run_dir / "toy" / "metrics.jsonl")
    return [{k: v for k, v in line.items() if k not in ("time", "tokens_per_s")} for line in lines]


def steps_of(run_dir):
    return CheckpointStore(run_dir / "toy" / "checkpoints").steps()


def assert_same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def stepping(before):
    """The toy step, with before(step) called first."""

    def step_fn(state, step):
        before(step)
        return toy_run.toy_step(state, *toy_run.batch_of(step))

    return step_fn


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_saves_and_the_run_goes_on_as_if_nothing_had_been(tmp_path, number):
    handlers = [signal.getsignal(n) for n in stopping.SIGNALS]
    send = stepping(lambda step: step == 22 and os.kill(os.getpid(), number))
    name = signal.Signals(number).name
    with pytest.raises(stopping.Stopped, match=f"stopped by {name} after step 23 of 30") as caught:
        toy_run.train(tmp_path / "a", 30, step_fn=send)
    assert caught.value.is_agreed
    assert steps_of(tmp_path / "a") == [21, 23]
    assert [signal.getsignal(n) for n in stopping.SIGNALS] == handlers
    resumed = toy_run.train(tmp_path / "a", 30)
    assert_same(resumed, toy_run.train(tmp_path / "b", 30))
    assert lines_of(tmp_path / "a") == lines_of(tmp_path / "b")
    assert [line["step"] for line in lines_of(tmp_path / "a")] == [10, 20, 25, 30, 30]


def test_a_second_signal_interrupts_at_once(tmp_path):
    def send(step):
        if step == 9:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        toy_run.train(tmp_path, 30, step_fn=stepping(send))
    assert not isinstance(caught.value, stopping.Stopped)
    assert steps_of(tmp_path) == [7]


def test_a_signal_in_the_last_step_is_no_stop(tmp_path):
    send = stepping(lambda step: step == 7 and os.kill(os.getpid(), signal.SIGTERM))
    assert int(toy_run.train(tmp_path, 8, step_fn=send).step) == 8


def test_outside_the_loop_a_signal_raises_and_passes_every_handler_of_failures():
    def careless():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 1)  # some bytecode for the handler to run at
        except Exception:
            return "swallowed"

    with pytest.raises(stopping.Stopped, match="SIGTERM") as caught, stopping.raising_stop():
        careless()
    assert not caught.value.is_agreed


def test_another_thread_trains_without_signals(tmp_path):
    done = []
    thread = threading.Thread(target=lambda: done.append(toy_run.train(tmp_path, 3)))
    thread.start()
    thread.join()
    assert int(done[0].step) == 3


def bad_from(first, last=10**9):
    """The toy step, which skips steps first..last as guarded steps do: they count, no more."""
    in_a_row = 0

    def step_fn(state, step):
        nonlocal in_a_row
        new, values = toy_run.toy_step(state, *toy_run.batch_of(step))
        is_bad = first <= step <= last
        in_a_row = in_a_row + 1 if is_bad else 0
        num_skipped = max(min(step, last) - first + 1, 0)
        loss = jnp.float32("nan") if is_bad else values["loss"]
        return (state if is_bad else new), {
            "loss": loss,
            "is_bad": is_bad,
            "num_bad": in_a_row,
            "num_skipped": num_skipped,
        }

    return step_fn


def test_bad_steps_in_a_row_stop_the_run_with_their_batch(tmp_path):
    expected = r"toy: 4 steps in a row .* at step 20; the batch of step 19 is in .*bad_batch.npz"
    with pytest.raises(FloatingPointError, match=expected):
        toy_run.train(tmp_path, 40, step_fn=bad_from(16), max_bad_steps=4)
    with np.load(tmp_path / "toy" / "bad_batch.npz") as kept:
        assert (int(kept["step"]), int(kept["seed"])) == (19, 11)
        np.testing.assert_array_equal(kept["x"], toy_run.batch_of(19).x)
    assert steps_of(tmp_path) == [7, 14]


def test_fewer_bad_steps_are_counted_and_survived(tmp_path):
    state = toy_run.train(tmp_path, 30, step_fn=bad_from(17, 19), max_bad_steps=4)
    assert bool(jnp.isfinite(state.params["w"]).all())
    counted = {line["step"]: line["num_skipped"] for line in lines_of(tmp_path) if "loss" in line}
    assert counted == {10: 0, 20: 3, 30: 3}
    assert [line["loss"] for line in lines_of(tmp_path) if line["step"] == 20] == [None]


def test_what_is_not_finite_is_not_saved(tmp_path):
    """A step without a guard breaks the parameters between two looks at the loss."""

    def step_fn(state, step):
        state, values = toy_run.toy_step(state, *toy_run.batch_of(step))
        w = state.params["w"].at[2, 3].set(jnp.inf if step == 12 else state.params["w"][2, 3])
        return dataclasses.replace(state, params=state.params | {"w": w}), values

    with pytest.raises(FloatingPointError, match="not finite .it is not saved. at step 14; the"):
        toy_run.train(tmp_path, 40, step_fn=step_fn)
    assert steps_of(tmp_path) == [7]


def test_resume_names_every_field_that_differs(tmp_path):
    toy_run.train(tmp_path, 3)
    meta = {"seed": 12, "data_hash": "d0", "config": {"lr": 0.02, "mix": {"toy": 1.0, "b": 0}}}
    with pytest.raises(ConfigError) as caught:
        toy_run.train(tmp_path, 6, meta=meta)
    assert str(caught.value) == (
        f"{tmp_path / 'toy'} was run with another config: config.lr: stored 0.01, now 0.02; "
        "config.mix.b: stored absent, now 0; seed: stored 11, now 12; give the run another "
        "--run-dir or the same config"
    )
    many = {f"f{i}": i for i in range(9)}  # and lr, mix, seed, data_hash are absent
    with pytest.raises(ConfigError, match="and 7 more; give"):
        toy_run.train(tmp_path, 6, meta={"config": many})


def test_resume_on_other_rows_says_so(tmp_path):
    toy_run.train(tmp_path, 3)
    meta = {"seed": 11, "data_hash": "d1", "config": {}}
    with pytest.raises(ConfigError, match="rows of .*toy have changed .*hash d0, now d1"):
        toy_run.train(tmp_path, 6, meta=meta)


def test_the_hash_of_rows_sees_every_change():
    def rows(seed=0, length=6):
        ids = np.random.default_rng(seed).integers(0, 9, (3, length)).astype(np.int32)
        return PackedRows(ids, np.ones_like(ids), ids > 4, ids)

    changed = rows()._replace(loss_mask=~rows().loss_mask)
    others = [
        {"b": rows()},
        {"a": rows(1)},
        {"a": rows(length=5)},
        {"a": changed},
        {"a": rows(), "b": rows()},
    ]
    assert len({dataset_hash(x) for x in [{"a": rows()}, *others]}) == 6
    assert dataset_hash({"a": rows(), "b": rows(1)}) == dataset_hash({"b": rows(1), "a": rows()})


def test_a_full_disk_under_the_metrics_is_one_line(tmp_path):
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl", 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(DiskFullError, match=rf"no space left in {tmp_path} \([\d,.]+ MB free\)$"):
        file.write(3, {"loss": 1.0})


def test_lines_past_the_checkpoint_and_torn_ones_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "loss": 2.5}\n{"step": 6, "loss": 1.5}\n{"step": 9, "lo')
    assert [record["step"] for record in metrics.read_metrics(path)] == [3, 6]
    file = metrics.MetricsFile(path, 3)
    file.write(6, {"loss": 1.25, "tau": {"math": [1.0, None, float("nan")]}})
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"step": 3, "loss": 2.5}
    assert second.pop("time") > 0
    assert second == {"step": 6, "loss": 1.25, "tau": {"math": [1.0, None, None]}}
    assert dict(metrics.scalars(second)) == {"step": 6, "loss": 1.25, "tau/math/1": 1.0}


def test_mean_accept_length_prefers_the_real_one():
    simulated = {"heldout_accept_length": {"math": 5.0, "chat": 2.0, "code": None}}
    assert metrics.mean_accept_length(simulated) == 3.5
    assert metrics.mean_accept_length(simulated | {"real_accept_length": {"math": 4.5}}) == 4.5
    assert metrics.mean_accept_length({"heldout_loss": {"math": 1.0}}) is None


def test_tensorboard_has_the_same_figures_and_is_optional(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX", reason="needs tensorboardX (pip install tensorboardX)")
    toy_run.train(tmp_path, 10, has_tensorboard=True)
    (events,) = (tmp_path / "toy" / "tensorboard").iterdir()
    assert b"heldout_loss/toy" in events.read_bytes()
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tensorboardX":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="--tensorboard needs the package tensorboardX"):
        metrics.MetricsFile(tmp_path / "m.jsonl", 0, has_tensorboard=True)


def test_differing_fields_literal():
    stored = {"a": {"b": 1, "c": [1, 2]}, "d": None}
    now = {"a": {"b": 1, "c": [1, 3]}, "d": None, "e": {"f": 0}}
    assert loop.differing_fields(stored, now) == [
        "a.c: stored [1, 2], now [1, 3]",
        "e: stored absent, now {'f': 0}",
    ]
