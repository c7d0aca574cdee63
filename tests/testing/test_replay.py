"""The compiled loop against its NumPy interpreter: every carried integer after every dispatch.

Run: .venv/bin/python -m pytest tests/testing/test_replay.py
"""

import dataclasses

import pytest

from mimo_jax.testing.recording import recording_engine
from mimo_jax.testing.replay import replay_requests
from tests.decode import smallest

# Between them: plain and drafted steps, all filters and penalties, two rules, both policies.
QUICK = ("block", "costs", "profile", "tree")
CASES = [
    pytest.param(name, rows, marks=[] if rows == 3 and name in QUICK else [pytest.mark.slow])
    for name in smallest.MODES
    for rows in (3, 1)
]


@pytest.mark.parametrize(("name", "batch_size"), CASES)
def test_every_carried_integer(name, batch_size):
    target, drafter = smallest.pair()
    options = {"max_len": smallest.MAX_LEN, **smallest.MODES[name][1]}
    engine, recorder = recording_engine(
        target, None if name == "off" else drafter, batch_size=batch_size, **options
    )
    engine.costs = smallest.COSTS
    requests = smallest.requests_of(name, 9, seed=2)
    for number in range(3):  # long enough for probes, which wait for 32 steps and more
        long = dataclasses.replace(requests[number + 4], prompt_ids=[7, number], stop_ids=())
        requests.append(dataclasses.replace(long, max_tokens=115))
    num_compared, outputs = replay_requests(engine, recorder, requests, steps_per_group=5)
    assert num_compared >= 8
    assert all(outputs)
