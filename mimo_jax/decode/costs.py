"""What a step of each rung costs on this device: measured before the first job, then kept true.

The controller weighs tokens against these. Only their ratios matter, and ratios drift: on a machine
whose cache is shared a block cost from 2.3 to 6.7 plain steps within minutes. So while a job runs,
a few steps of the rung in use and of another one are timed side by side now and then, and the
other's cost follows. Rejected: the times of whole groups of steps, since a group holds one rung,
and two rungs measured minutes apart say nothing about their ratio.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from mimo_jax.decode.controller import Control
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.request import Request
from mimo_jax.decode.step import DecodeState
from mimo_jax.timing import Stopwatch

TRIAL_STEPS = 8
_TRIAL_SHARE = 0.01  # of a job's time
_RATE = 0.3  # of a trial's ratio against what is known


def measure(engine: Engine, num_steps: int = 24, rounds: int = 7) -> None:
    """Sets engine.costs to seconds per step, or to block lengths if rows are too short to measure.

    The rungs take turns, and the medians count: what neighbours do to the shared cache lasts longer
    than one measurement.
    """
    room = engine.max_len - 2
    num_steps = min(num_steps, room // engine.draft_block_len)
    if num_steps < 4:
        engine.costs = engine.nominal_costs
        return

    def seconds(rung: int) -> float:
        row = engine.prefill(Request((0,), room))
        state = row if engine.batch_size == 1 else engine.empty_state(row)
        for slot in range(engine.batch_size if engine.batch_size > 1 else 0):
            state = engine.insert(state, row, slot)
        return _timed(engine, state, num_steps, rung)[1]

    rungs = range(len(engine.lengths))
    times = [[seconds(rung) for rung in rungs] for _ in range(rounds + 1)]
    engine.costs = np.median(times[1:], axis=0).tolist()  # the first warms up


def _timed(
    engine: Engine, state: DecodeState, num_steps: int, rung: int
) -> tuple[DecodeState, float]:
    """(the state after num_steps steps of one rung, seconds of one of them)."""
    engine.group_program(state)  # compiles outside of the clock
    with Stopwatch() as watch:
        state = engine.run(state, num_steps, rung)
        watch.wait_for(state.length)
    return state, watch.elapsed_s / num_steps


def followed(costs: list[float], kept: int, other: int, ratio: float) -> list[float]:
    """Costs after a trial in which a step of `other` took `ratio` times one of `kept`.

    Example: costs (1, 2), kept 0, other 1, ratio 4 -> (1, 2 * 2 ** 0.3).
    """
    known = costs[other] / costs[kept]
    surprise = min(max(ratio / known, 0.5), 2.0)  # one neighbour's burst is no new machine
    moved = list(costs)
    moved[other] *= surprise**_RATE
    return moved


class Learnt:
    """What jobs teach an adaptive engine; kept from one job to the next by whoever wants that.

    Attributes:
      controls: By scene, the controller's state of the row that ended last.
    """

    def __init__(self):
        self.controls: dict[str | None, Control] = {}
        self._pause_s: float | None = None  # until the next trial; None = not begun
        self._turn = 0

    def trial(self, engine: Engine, state: DecodeState, group_s: float) -> DecodeState:
        """The state after a trial, if one was due; engine.costs follows. At most 1% of the time.

        Args:
          engine: Its policy weighs costs.
          state: Between two groups.
          group_s: Seconds of the group that ended.
        """
        assert engine.costs is not None, "measured before the job"
        if self._pause_s is None:  # a job of a few answers goes by what was measured before it
            self._pause_s = TRIAL_STEPS * max(engine.costs) / _TRIAL_SHARE
        self._pause_s -= group_s
        if self._pause_s > 0 or state.control is None:
            return state
        running = np.flatnonzero(~np.asarray(state.is_done))
        if not len(running):
            return state
        kept = int(np.asarray(state.control.rung)[running].max())
        others = [rung for rung in range(len(engine.lengths)) if rung != kept]
        other = others[self._turn % len(others)]
        self._turn += 1
        before = np.asarray(state.num_steps)
        state, kept_s = _timed(engine, state, TRIAL_STEPS, kept)
        state, other_s = _timed(engine, state, TRIAL_STEPS, other)
        self._pause_s = TRIAL_STEPS * other_s / _TRIAL_SHARE
        if ((np.asarray(state.num_steps) - before)[running] < 2 * TRIAL_STEPS).all():
            return state  # all rows ended: fewer steps were taken than were counted
        assert state.control is not None
        engine.costs = followed(engine.costs, kept, other, other_s / kept_s)
        costs = jnp.broadcast_to(
            jnp.asarray(engine.costs, jnp.float32), state.control.costs.shape
        )
        control = state.control._replace(costs=engine.place_rows(costs))
        return dataclasses.replace(state, control=control)
