"""Figures of engines that answer in turns, on answers made up by hand.

Run: .venv/bin/python -m pytest tests/bench/test_race.py
"""

import pytest

from mimo_jax.bench import race
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion
from mimo_jax.decode.request import Request


class FakeEngine(Engine):
    """Answers with given ids and steps; notes what it is asked."""

    def __init__(self, ids: list[int], per_step: list[int], decode_s: float):
        self.answer = Completion(ids, "length", per_step, per_step, per_step, 0.1, decode_s)
        self.prefilled = []

    def prefill(self, request):
        self.prefilled.append(request)


@pytest.fixture
def order(monkeypatch):
    """Names in the order in which engines answer."""
    asked = []

    def generate_all(engine, requests, **kwargs):
        asked.append(engine)
        return [engine.answer for _ in requests]

    monkeypatch.setattr(race, "generate_all", generate_all)
    return asked


def test_laps_add_up_and_turns_move_on(order):
    engines = {
        "plain": FakeEngine([5, 6, 7, 8], [1, 1, 1], 0.6),
        "fast": FakeEngine([5, 6, 7, 8], [2, 1], 0.2),
        "wrong": FakeEngine([5, 6, 9, 8], [3], 0.1),
    }
    requests = [Request([1], 4), Request([2, 3], 4)]
    seen = []
    laps = race.race(engines, {"math": requests}, on_progress=lambda: seen.append(1))["math"]
    assert [len(engine.prefilled) for engine in engines.values()] == [2, 2, 2]
    names = {id(engine): name for name, engine in engines.items()}
    turns = [names[id(engine)] for engine in order[3:]]  # the first three warm up
    assert turns == ["plain", "fast", "wrong", "fast", "wrong", "plain"]
    assert len(seen) == 4
    assert laps["plain"].tau == 1.0
    assert laps["fast"].tau == 6 / 4
    assert laps["fast"].step_ms == pytest.approx(0.4 / 4 * 1e3)
    assert laps["fast"].tokens_per_s == pytest.approx(6 / 0.4)
    assert [lap.identical for lap in laps.values()] == [True, True, False]
