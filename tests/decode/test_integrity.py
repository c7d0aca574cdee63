"""States keep their invariants through long random runs, and every broken one is named.

Run: .venv/bin/python -m pytest tests/decode/test_integrity.py
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.decode import accept
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.integrity import IntegrityError, violations
from mimo_jax.decode.placement import place_on_mesh
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED
from mimo_jax.sharding import DECODE, make_mesh
from tests.decode import smallest

# Every mode is checked in three rows by tests/testing/test_replay.py too, whose loop is the same.
CASES = [
    pytest.param(name, rows, marks=[] if (name, rows) == ("off", 3) else [pytest.mark.slow])
    for name in smallest.MODES
    for rows in (3, 1)
]


@pytest.mark.parametrize(("name", "batch_size"), CASES)
def test_every_group_of_a_long_random_run(name, batch_size):
    target, drafter = smallest.pair()
    engine = smallest.CheckedEngine(
        target,
        None if name == "off" else drafter,
        max_len=smallest.MAX_LEN,
        batch_size=batch_size,
        **smallest.MODES[name][1],
    )
    engine.costs = smallest.COSTS
    requests = smallest.requests_of(name, 24)
    # A host that ends a row early, as a stop string does.
    done = generate_all(
        engine, requests, steps_per_group=3, on_tokens=lambda index, ids: index % 5 == 4
    )
    assert len(done) == 24
    assert engine.num_checks > 20


@pytest.mark.multi_device
@pytest.mark.slow
def test_on_a_mesh():
    mesh = make_mesh(DECODE, (2, 1))
    target, drafter = (place_on_mesh(model, mesh) for model in smallest.pair())
    engine = smallest.CheckedEngine(
        target, drafter, max_len=smallest.MAX_LEN, batch_size=2, **smallest.MODES["profile"][1]
    )
    assert len(generate_all(engine, smallest.requests_of("profile", 6), steps_per_group=5)) == 6


@pytest.fixture(scope="module")
def sound():
    """(engine, state of one running and one finished row) with every part that a state can have."""
    target, drafter = smallest.pair()
    engine = Engine(
        target,
        drafter,
        max_len=smallest.MAX_LEN,
        batch_size=2,
        mode=ADJUSTED,
        policy="profile",
        max_bias_ids=2,
        num_logprobs=2,
    )
    row = engine.prefill(Request(list(range(9)), 90, seed=1, **smallest.PENALTIES))
    state = engine.insert(engine.empty_state(row), row, 0)
    state = engine.insert(state, engine.prefill(Request([5, 6], 12)), 1)
    return engine, engine.run(state, 24)


def _violations(engine, state, prompt_lens=(9, 2)):
    return violations(
        state, draft_block_len=engine.draft_block_len, vocab_size=23, prompt_lens=prompt_lens
    )


def test_a_sound_state_has_none(sound):
    engine, state = sound
    assert state.finish.tolist() == [accept.RUNNING, accept.LENGTH]
    assert int(state.control.num_blocks[0]) > 0
    assert _violations(engine, state) == []
    engine.check_integrity(state)


def _set(state, path, index, value):
    """The state with one number replaced; path as in "control.rung"."""
    head, _, rest = path.partition(".")
    old = getattr(state, head)
    if rest:
        new = _set(old, rest, index, value)
    else:
        new = old.at[index].set(value if not callable(value) else value(old[index]))
    is_tuple = isinstance(state, tuple)
    return state._replace(**{head: new}) if is_tuple else dataclasses.replace(state, **{head: new})


PLUS, MINUS = (lambda x: x + 1), (lambda x: x - 1)
# (field, index, new value, what the line says)
BROKEN = [
    ("length", 0, 0, "row 0: length 0 is below 1"),
    ("length", 1, 15, "row 1: length 15 is past max_len 14"),
    ("max_len", 0, 129, "row 0: max_len 129 leaves no room for a block in tokens: 128"),
    ("tokens", (0, 4), 23, "row 0: tokens hold 23 before length"),
    ("tokens", (0, 4), -1, "row 0: tokens hold -1 before length"),
    ("num_steps", 0, MINUS, "row 0: committed_per_step holds"),
    ("num_steps", 0, 500, "row 0: num_steps 500 is out of range"),
    ("committed_per_step", (0, 2), PLUS, "row 0: committed_per_step sums to"),
    ("length", 0, PLUS, "row 0: committed_per_step sums to"),
    ("committed_per_step", (0, 0), 0, "row 0: committed_per_step has 0; a step commits 1"),
    ("accepted_per_step", (0, 1), 4, "row 0: accepted_per_step 4 exceeds offered"),
    ("accepted_per_step", (0, 0), PLUS, "row 0: committed_per_step"),
    ("offered_per_step", (0, 3), 3, "row 0: offered_per_step is 3 at step 3; blocks of 1, 2, 5"),
    ("offered_per_step", (0, 80), 1, "row 0: offered_per_step holds 1 at or past num_steps"),
    ("finish", 0, 9, "row 0: finish 9 is unknown; allowed: 0..4"),
    ("finish", 0, accept.STOPPED, "row 0: finish STOPPED with stop ids at no place"),
    ("finish", 0, accept.LENGTH, "row 0: finish LENGTH at length"),
    ("finish", 1, accept.RUNNING, "row 1: finish RUNNING at length 14, which is max_len"),
    ("stop_ids", (0, 0), "last", "row 0: finish RUNNING with stop ids at"),
    ("seen.num_emitted", (0, 7), PLUS, "row 0: seen.num_emitted of id 7 is"),
    ("seen.is_in_prompt", (0, 7), False, "row 0: seen.is_in_prompt holds ids"),
    ("logprobs.chosen", (0, 12), 0.5, "row 0: logprobs.chosen reaches 0.5"),
    ("logprobs.chosen", (0, 12), jnp.nan, "row 0: logprobs.chosen reaches nan"),
    ("logprobs.top", (0, 12, 1), 0.0, "row 0: logprobs.top is not sorted"),
    ("logprobs.top", (0, 12), -90.0, "row 0: logprobs.chosen is above the likeliest"),
    ("pending.num", 0, 129, "row 0: pending.num 129 is out of range; allowed: 0..128"),
    ("pending.num", 0, 70, "row 0: pending.num 70 after"),
    ("control.rung", 0, 3, "row 0: control.rung 3 is out of range; allowed: 0..2"),
    ("control.num_blocks", 0, 0, "row 0: control.num_blocks 0 is below the"),
    ("control.since_probe", 0, -4, "row 0: control.since_probe -4 is below a burst's -3"),
    ("control.alpha", (0, 1), 1.5, "row 0: control.alpha"),
]


@pytest.mark.parametrize(("path", "index", "value", "message"), BROKEN)
def test_every_violation_is_one_line(sound, path, index, value, message):
    engine, state = sound
    if value == "last":
        value = state.tokens[0, state.length[0] - 2]
    broken = _set(state, path, index, value)
    found = _violations(engine, broken)
    assert any(line.startswith(message) for line in found), found
    assert all("\n" not in line for line in found)
    with pytest.raises(IntegrityError, match=message[:12]):
        engine.check_integrity(broken, (9, 2))


def _with_ring(state, which, change):
    cache = getattr(state, which)
    table = np.array(cache.ring_positions)
    change(table[0], table.shape[1] - cache.slack)
    cache = dataclasses.replace(cache, ring_positions=jnp.asarray(table))
    return dataclasses.replace(state, **{which: cache})


@pytest.mark.parametrize("which", ["target_cache", "drafter_cache"])
def test_rings(sound, which):
    engine, state = sound
    name, length = which.split("_")[0], int(state.length[0])

    def newest(row):
        return int(np.flatnonzero(row == length - 2 - int(pending))[0])

    pending = state.pending.num[0] if name == "drafter" else 0

    def lose(row, num_slots):
        row[newest(row)] = -1

    def shift(row, num_slots):
        row[:num_slots] = np.roll(row[:num_slots], 1)

    def double(row, num_slots):
        row[num_slots] = row[0] = num_slots * (length // num_slots)

    def overrun(row, num_slots):
        row[:num_slots] += 3 * num_slots

    for change, message in (
        (lose, f"row 0: {name} ring: position {length - 2 - int(pending)} is missing at length"),
        (shift, f"row 0: {name} ring: slot "),
        (double, f"row 0: {name} ring: position"),
        (overrun, f"row 0: {name} ring: position"),
    ):
        found = _violations(engine, _with_ring(state, which, change))
        assert any(line.startswith(message) for line in found), (change.__name__, found)
    texts = " ".join(_violations(engine, _with_ring(state, which, double)))
    assert "stands twice" in texts
    texts = " ".join(_violations(engine, _with_ring(state, which, overrun)))
    assert "which no block can reach" in texts


def test_a_linear_memory_that_is_too_short(sound):
    engine, state = sound
    layers = list(state.target_cache.layers)
    layers[0] = layers[0]._replace(keys=layers[0].keys[:, :, : int(state.length[0])])
    cache = dataclasses.replace(state.target_cache, layers=tuple(layers))
    (line, *_) = _violations(engine, dataclasses.replace(state, target_cache=cache))
    assert line.startswith("row 0: target memory has")
