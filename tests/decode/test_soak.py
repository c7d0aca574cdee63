"""Thousands of sampled steps with refilled rows write nothing outside of their rows' memory.

Run: .venv/bin/python -m pytest tests/decode/test_soak.py [-m slow]

XLA clamps a write that would leave an array, so that it lands on what is still needed: no crash,
another text. Every row starts with poison wherever nothing has been written yet: in its tokens, in
the slots of both memories, in slots of rings that hold nothing. After each group what lies past the
row's last block must be poison still, and each answer must be that of a plain engine that was never
poisoned (sampled noise is keyed by position, so it is the same token for token).

Seen red: a block written one slot late, tokens one column late, rows exchanged.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import SAMPLED
from tests.decode import smallest

POISON_ID, POISON = 2**30, 1e4  # finite: masked slots may hold anything that is
ROWS = 3


def _poison_cache(cache, prompt_len: int):
    """A one-row memory with poison in every slot that holds no prompt position."""
    layers = []
    for layer, window in zip(cache.layers, cache.windows, strict=True):
        if window is None:
            is_free = np.arange(layer.keys.shape[2]) >= prompt_len
        else:
            is_free = np.asarray(cache.ring_positions)[0] < 0
        spoil = lambda x, is_free=is_free: jnp.where(is_free[None, None, :, None], POISON, x)
        layers.append(layer._replace(keys=spoil(layer.keys), values=spoil(layer.values)))
    return dataclasses.replace(cache, layers=tuple(layers))


class PoisoningEngine(smallest.CheckedEngine):
    """Poisons every row that it takes in and looks for the poison after every group."""

    num_row_steps = 0

    def start(self, request, memory, earlier=None):
        state = super().start(request, memory, earlier)
        p = len(request.prompt_ids)
        column = jnp.arange(state.tokens.shape[1])[None, :]
        return dataclasses.replace(
            state,
            tokens=jnp.where(column > p, POISON_ID, state.tokens),
            target_cache=_poison_cache(state.target_cache, p),
            drafter_cache=_poison_cache(state.drafter_cache, p),
        )

    def insert(self, state, row_state, row):
        self.num_row_steps += int(state.num_steps[row])
        return super().insert(state, row_state, row)

    def run(self, state, num_steps):
        state = super().run(state, num_steps)
        host = jax.device_get((state.tokens, state.max_len, state.target_cache, state.length))
        tokens, max_len, cache, length = host
        for row in range(self.batch_size):
            if max_len[row] == 1:  # never held a request
                continue
            # The last block begins at the last anchor, one place before the row's end at most.
            end = int(max_len[row]) + self.draft_block_len
            assert (tokens[row, end:] == POISON_ID).all()
            assert (tokens[row, : length[row]] < smallest.V).all()
            for layer, window in zip(cache.layers, cache.windows, strict=True):
                if window is None:
                    assert (layer.keys[row, :, end - 1 :] == POISON).all()
                    assert (layer.values[row, :, end - 1 :] == POISON).all()
        return state


@pytest.mark.parametrize(
    ("num_row_steps", "policy"),
    [
        (1_500, None),
        pytest.param(20_000, None, marks=pytest.mark.slow),
        pytest.param(5_000, "profile", marks=pytest.mark.slow),
    ],
)
def test_sampled_steps_stay_inside_their_rows(num_row_steps, policy):
    target, drafter = smallest.pair()
    options = {"max_len": smallest.MAX_LEN, "batch_size": ROWS, "mode": SAMPLED}
    engine = PoisoningEngine(target, drafter, policy=policy, **options)
    plain = Engine(target, **options)
    rng = np.random.default_rng(8)
    number = 0
    while engine.num_row_steps < num_row_steps:
        requests = []
        for _ in range(40):
            prompt_len = int(rng.integers(1, 60))
            requests.append(
                Request(
                    rng.integers(0, smallest.V, prompt_len).tolist(),
                    int(rng.integers(1, smallest.MAX_LEN - prompt_len + 1)),
                    tuple(rng.integers(0, smallest.V, int(rng.integers(0, 2))).tolist()),
                    temperature=float(rng.choice([0.5, 0.8, 1.2])),
                    seed=number,
                )
            )
            number += 1
        got = generate_all(engine, requests, steps_per_group=16)
        want = generate_all(plain, requests, steps_per_group=16)
        assert [c.token_ids for c in got] == [c.token_ids for c in want]
