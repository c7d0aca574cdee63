"""The stopwatch, run against a clock that the test moves.

Run: .venv/bin/python -m pytest tests/test_timing.py
"""

import jax
import jax.numpy as jnp
import pytest

from mimo_jax import timing


class FakeClock:
    """A clock that stands still until a function under test takes its time."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def takes(self, *durations_s: float):
        """Returns a function whose successive calls take these durations, the last one for ever."""
        remaining_s = list(durations_s)

        def fn(*args):
            self.now_s += remaining_s.pop(0) if len(remaining_s) > 1 else remaining_s[0]
            return args

        return fn


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(timing, "_clock", clock)
    return clock


def test_measure_leaves_the_warm_up_out(clock):
    result = timing.measure(clock.takes(50.0, 40.0, 3.0, 1.0, 2.0), num_runs=3, num_warmup=2)
    assert result.durations_s == (3.0, 1.0, 2.0)
    assert (result.num_runs, result.median_s, result.min_s, result.max_s) == (3, 2.0, 1.0, 3.0)


def test_measure_without_warm_up_includes_the_first_call(clock):
    assert timing.measure(clock.takes(50.0, 3.0), num_runs=2, num_warmup=0).max_s == 50.0


def test_measure_passes_its_arguments(clock):
    seen = []
    timing.measure(lambda *args: seen.append(args), 3, "five", num_runs=2, num_warmup=1)
    assert seen == [(3, "five")] * 3


def test_spread_is_the_middle_half_over_the_median():
    # Quartiles of 1..5 are 2 and 4, the median is 3; the pause of 500 s must not count.
    assert timing.Timing((1.0, 2.0, 3.0, 4.0, 500.0)).spread == pytest.approx(2 / 3)
    assert timing.Timing((7.0,)).spread == 0.0


def test_timing_says_what_it_is():
    text = str(timing.Timing((0.002, 0.001, 0.003)))
    assert text == "2.000 ms median of 3 (min 1.000 ms, spread 50%)"


def test_alternate_compares_within_each_round(clock):
    comparison = timing.alternate(
        {"plain": clock.takes(0.0, 4.0, 8.0), "draft": clock.takes(0.0, 2.0, 5.0)}, rounds=2
    )
    assert comparison.medians_s == {"plain": 6.0, "draft": 3.5}
    assert comparison.ratios == {"plain": (1.0, 1.0), "draft": (0.5, 0.625)}
    assert comparison.median_ratios["draft"] == 0.5625


def test_alternate_cancels_a_machine_that_slows_down(clock):
    # Both take the same share of a machine that gets slower with every round.
    slowing = [float(2**round_idx) for round_idx in range(5)]
    comparison = timing.alternate(
        {"a": clock.takes(9.0, *slowing), "b": clock.takes(9.0, *slowing)}, rounds=5
    )
    assert comparison.median_ratios == {"a": 1.0, "b": 1.0}


def test_alternate_changes_who_starts():
    calls = []
    fns = {name: lambda name=name: calls.append(name) for name in "abc"}
    timing.alternate(fns, rounds=3, num_warmup=0)
    assert calls == list("abcbcacab")


def test_stopwatch_runs_inside_the_block_and_stops_after_it(clock):
    with timing.Stopwatch() as watch:
        clock.now_s += 2.0
        assert watch.elapsed_s == 2.0
        clock.now_s += 3.0
    clock.now_s += 7.0
    assert watch.elapsed_s == 5.0
    with watch:
        clock.now_s += 1.0
    assert watch.elapsed_s == 1.0


def test_stopwatch_stops_when_the_block_fails(clock):
    watch = timing.Stopwatch()

    def fail_after_two_seconds():
        with watch:
            clock.now_s += 2.0
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail_after_two_seconds()
    clock.now_s += 7.0
    assert watch.elapsed_s == 2.0


def test_stopwatch_refuses_to_tell_before_it_started():
    with pytest.raises(RuntimeError, match="not been started"):
        _ = timing.Stopwatch().elapsed_s


@pytest.mark.parametrize("call", ["measure", "alternate", "stopwatch"])
def test_waits_for_the_result(monkeypatch, call):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", lambda result: waited.append(result) or result)
    result = {"loss": jnp.ones(())}
    if call == "measure":
        timing.measure(lambda: result, num_runs=2, num_warmup=1)
        assert len(waited) == 3
    elif call == "alternate":
        timing.alternate({"a": lambda: result, "b": lambda: result}, rounds=2, num_warmup=1)
        assert len(waited) == 6
    else:
        with timing.Stopwatch() as watch:
            assert watch.wait_for(result) is result
    assert all(each is result for each in waited)
    assert waited


def test_measures_a_real_computation():
    result = timing.measure(jax.jit(lambda x: x @ x), jnp.ones((64, 64)), num_runs=3)
    assert 0 < result.min_s <= result.median_s <= result.max_s < 10


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: timing.measure(abs, 1, num_runs=0), "num_runs must be at least 1, got 0"),
        (lambda: timing.measure(abs, 1, num_warmup=-1), "num_warmup must be at least 0, got -1"),
        (lambda: timing.alternate({"a": list}, rounds=0), "rounds must be at least 1, got 0"),
        (lambda: timing.alternate({}), "fns is empty"),
        (lambda: timing.Timing(()), "at least one duration"),
    ],
)
def test_refuses_what_cannot_be_measured(call, message):
    with pytest.raises(ValueError, match=message):
        call()
