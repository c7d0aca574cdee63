"""The only stopwatch: every duration this project reports is measured here.

JAX returns before the device has finished, compiles at the first call, and shares its cores with
whatever else runs. A duration taken without care measures dispatch, compilation or the neighbour.
So there are four tools, and `tests/test_architecture.py` keeps other modules from reading the
clock themselves:

- `measure` times one function: warm-up calls first, each result waited for, all durations kept.
- `alternate` compares functions: one call of each per round, so that a slow minute of the machine
  hits all of them, and the ratio is taken inside each round. Two separate `measure` calls minutes
  apart can differ by more than the effect one looks for.
- `Stopwatch` times a stretch of straight-line code, such as a training step with its host work.
- `cpu_seconds` counts processor time, for work that must cost the same on a shared machine.

Medians and minima are reported, never means: one long pause would move a mean. The spread tells
how far to trust the median; quote both.

Where neighbours take the cores away, the processor's own time (`is_processor_time`) is what is left
of a measurement: it counts the seconds that this process worked, on all cores together, so that it
says nothing about what two cores gain.

Traps: a function that donates its arguments cannot be called twice with the same arrays. Pass a
closure that makes or carries its own state. A function that returns nothing cannot be waited for;
return the arrays it produced.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

_clock = time.perf_counter  # Replaced in tests by a clock that the test moves.


def cpu_seconds() -> float:
    """Processor seconds of this process so far, all its threads together; take differences."""
    return time.process_time()


@dataclasses.dataclass(frozen=True)
class Timing:
    """Durations of repeated calls of one function, warm-up calls left out.

    Attributes:
      durations_s: One duration per measured call, in the order they ran; seconds, not empty.
    """

    durations_s: tuple[float, ...]

    def __post_init__(self):
        if not self.durations_s:
            raise ValueError("a Timing needs at least one duration, got none")

    @property
    def num_runs(self) -> int:
        """How many calls were measured."""
        return len(self.durations_s)

    @property
    def median_s(self) -> float:
        """Median duration in seconds: the figure to report."""
        return statistics.median(self.durations_s)

    @property
    def min_s(self) -> float:
        """Shortest duration in seconds: the nearest thing to an undisturbed run."""
        return min(self.durations_s)

    @property
    def max_s(self) -> float:
        """Longest duration in seconds."""
        return max(self.durations_s)

    @property
    def spread(self) -> float:
        """Width of the middle half of the durations over the median; 0.05 means 5 percent.

        0.0 for a single run. Quartiles are used because a single pause of the machine would
        decide the full range.
        """
        if self.num_runs == 1 or self.median_s == 0:
            return 0.0
        first, _, third = statistics.quantiles(self.durations_s, n=4, method="inclusive")
        return (third - first) / self.median_s

    def __str__(self) -> str:
        return (
            f"{self.median_s * 1e3:.3f} ms median of {self.num_runs}"
            f" (min {self.min_s * 1e3:.3f} ms, spread {self.spread:.0%})"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Durations of several functions measured in turns.

    Attributes:
      timings: One `Timing` per name, each with one duration per round. The first is the baseline
        that ratios are taken against.
    """

    timings: Mapping[str, Timing]

    @property
    def medians_s(self) -> dict[str, float]:
        """Median duration of each function, in seconds."""
        return {name: timing.median_s for name, timing in self.timings.items()}

    @property
    def ratios(self) -> dict[str, tuple[float, ...]]:
        """Duration over the baseline's, taken within each round; below 1 is faster."""
        reference_s = next(iter(self.timings.values())).durations_s
        return {
            name: tuple(
                own_s / base_s
                for own_s, base_s in zip(timing.durations_s, reference_s, strict=True)
            )
            for name, timing in self.timings.items()
        }

    @property
    def median_ratios(self) -> dict[str, float]:
        """Median over rounds of `ratios`: the figure to report for a comparison."""
        return {name: statistics.median(values) for name, values in self.ratios.items()}


class Stopwatch:
    """Times a `with` block; `elapsed_s` is readable inside the block and fixed after it.

    Does not wait for the device by itself, as it cannot know which arrays matter: pass them
    through `wait_for` before the block ends.

    Example:
      with Stopwatch() as watch:
          loss = watch.wait_for(train_step(state, batch))
      print(watch.elapsed_s)
    """

    def __init__(self, *, is_processor_time: bool = False):
        self._is_processor_time = is_processor_time
        self._started_s: float | None = None
        self._stopped_s: float | None = None

    @classmethod
    def started(cls) -> "Stopwatch":
        """A stopwatch that is already running, for stretches that do not nest."""
        return cls().__enter__()

    def __enter__(self) -> "Stopwatch":
        self._started_s, self._stopped_s = self._now(), None
        return self

    def _now(self) -> float:
        return time.process_time() if self._is_processor_time else _clock()

    def __exit__(self, *exc_info: object) -> None:
        self._stopped_s = self._now()

    def wait_for[Result](self, result: Result) -> Result:
        """Returns `result` once every array in it has been computed."""
        return jax.block_until_ready(result)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the block was entered, or its whole length once it has been left.

        Raises:
          RuntimeError: If the block has not been entered yet.
        """
        if self._started_s is None:
            raise RuntimeError(
                "the stopwatch has not been started: use `with Stopwatch() as watch`"
            )
        return (self._now() if self._stopped_s is None else self._stopped_s) - self._started_s


def measure(fn: Callable[..., Any], *args: Any, num_runs: int = 10, num_warmup: int = 2) -> Timing:
    """Times `fn(*args)`, each call until its result is ready.

    Does not compile ahead of time or clear caches: the warm-up calls are what keeps compilation
    out of the result.

    Args:
      fn: Called with `args`; returns the arrays to wait for, as any pytree.
      *args: Passed to every call unchanged, so `fn` must not donate them.
      num_runs: Measured calls, at least 1.
      num_warmup: Calls made first and not measured; 0 includes compilation in the first run.

    Returns:
      A `Timing` with `num_runs` durations.

    Raises:
      ValueError: If `num_runs` is below 1 or `num_warmup` below 0.

    Example: measure(jax.jit(jnp.sin), x, num_runs=5).median_s -> 1.3e-05
    """
    _check_counts("num_runs", num_runs, num_warmup)
    for _ in range(num_warmup):
        jax.block_until_ready(fn(*args))
    return Timing(tuple(_time_once(fn, args) for _ in range(num_runs)))


def alternate(
    fns: Mapping[str, Callable[[], Any]],
    rounds: int = 10,
    num_warmup: int = 1,
    *,
    is_processor_time: bool = False,
) -> Comparison:
    """Times several functions in turns and compares them within each round.

    Which function starts moves by one from round to round, so none of them always runs into the
    caches that the same other one left behind.

    Args:
      fns: Functions of no arguments by name, the baseline first; each returns the arrays to
        wait for.
      rounds: Measured calls of each function, at least 1.
      num_warmup: Calls of each function made first and not measured.
      is_processor_time: Measure what this process worked instead of what passed.

    Returns:
      A `Comparison` holding one duration per function and round.

    Raises:
      ValueError: If `fns` is empty, `rounds` is below 1 or `num_warmup` below 0.

    Example: with per-round durations plain = (4.0, 8.0) s and draft = (2.0, 5.0) s,
      medians_s = {"plain": 6.0, "draft": 3.5} and ratios["draft"] = (0.5, 0.625).
    """
    if not fns:
        raise ValueError("nothing to compare: fns is empty")
    _check_counts("rounds", rounds, num_warmup)
    for fn in fns.values():
        for _ in range(num_warmup):
            jax.block_until_ready(fn())
    names = list(fns)
    durations_s: dict[str, list[float]] = {name: [] for name in names}
    for round_idx in range(rounds):
        first = round_idx % len(names)
        for name in names[first:] + names[:first]:
            durations_s[name].append(_time_once(fns[name], (), is_processor_time))
    return Comparison({name: Timing(tuple(values)) for name, values in durations_s.items()})


def _time_once(
    fn: Callable[..., Any], args: tuple[Any, ...], is_processor_time: bool = False
) -> float:
    with Stopwatch(is_processor_time=is_processor_time) as watch:
        watch.wait_for(fn(*args))
    return watch.elapsed_s


def _check_counts(name: str, num_measured: int, num_warmup: int) -> None:
    if num_measured < 1:
        raise ValueError(f"{name} must be at least 1, got {num_measured}")
    if num_warmup < 0:
        raise ValueError(f"num_warmup must be at least 0, got {num_warmup}")
