"""Key/value memory against a dictionary: random writes and roll-backs around the ring's end.

Run: .venv/bin/python -m pytest tests/test_cache.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax import cache as kv

# Window 5 and slack 3 give a ring of 8 slots and 3 behind it; layer 0 is linear.
B, K, H, HV, WINDOW, SLACK, MAX_LEN, CHUNK = 2, 4, 7, 6, 5, 3, 50, 13


def empty(window=WINDOW):
    geometry = [(K, H, HV)] * 3
    windows = (None, window, window)
    return kv.make_cache(B, MAX_LEN, geometry, windows, slack=SLACK, dtype=jnp.float32)


def block(tags: np.ndarray):
    """Keys and values [b, k, t, *] whose every number is told from the token's tag."""
    per_head = tags[:, None, :, None] + 0.25 * np.arange(K)[None, :, None, None]
    keys = np.broadcast_to(per_head, (*per_head.shape[:3], H)).astype(np.float32)
    return keys, -keys[..., :HV]


@jax.jit
def write(cache, keys, values, start):
    cache = kv.advance_ring_positions(cache, start, keys.shape[2])
    layers = tuple(kv.write_block(cache, i, keys, values, start) for i in range(3))
    return kv.KVCache(layers, cache.ring_positions, cache.windows, cache.slack)


@jax.jit
def write_prompt(cache, keys, values, start, num_valid):
    layers = tuple(kv.write_chunk(cache, i, keys, values, start, num_valid) for i in range(3))
    cache = kv.KVCache(layers, cache.ring_positions, cache.windows, cache.slack)
    return kv.finish_chunk(cache, start, num_valid)


def check(cache, truth: list[dict[int, float]], end: np.ndarray, t: int, window=WINDOW):
    """What the last t queries of each row see is what the dictionary holds, each key once."""
    cache = jax.tree.map(np.asarray, cache)
    for layer_idx, held in enumerate(cache.layers):
        positions = np.asarray(cache.key_positions(layer_idx))
        reach = window if layer_idx else MAX_LEN
        for row in range(B):
            for query in range(max(end[row] - t, 0), end[row]):
                seen = (positions[row] >= 0) & (positions[row] <= query)
                seen &= query - positions[row] < reach
                slots = np.flatnonzero(seen)
                expected = list(range(max(query - reach + 1, 0), query + 1))
                assert sorted(positions[row, slots].tolist()) == expected
                tags = np.array([[truth[row][pos] for pos in positions[row, slots].tolist()]])
                keys, values = block(tags)
                np.testing.assert_array_equal(held.keys[row][:, slots], keys[0])
                np.testing.assert_array_equal(held.values[row][:, slots], values[0])


row_pair = lambda low, high: st.tuples(*[st.integers(low, high)] * B)
steps = st.lists(st.tuples(st.integers(1, SLACK), row_pair(0, SLACK)), min_size=1, max_size=14)


@settings(max_examples=25)
@given(prompt=row_pair(1, CHUNK), second=row_pair(0, CHUNK), steps=steps)
def test_any_sequence_of_blocks_and_rollbacks(prompt, second, steps):
    tag = 0.0
    truth: list[dict[int, float]] = [{} for _ in range(B)]
    cache, start = empty(), np.zeros(B, np.int32)

    def put(t):
        nonlocal tag
        tags = tag + np.arange(B * t, dtype=np.float64).reshape(B, t)
        tag += B * t
        for row in range(B):
            truth[row] |= {int(start[row]) + i: tags[row, i] for i in range(t)}
        return block(tags)

    for num_valid in (np.array(prompt, np.int32), np.array(second, np.int32)):
        cache = write_prompt(cache, *put(CHUNK), start, num_valid)
        start = start + num_valid
        check(cache, truth, start, 1)
    for t, kept in steps:
        # The end of the linear memory; each write is at most SLACK long.
        if (start + t > MAX_LEN).any():
            break
        cache = write(cache, *put(t), start)
        check(cache, truth, start + t, t)
        start = start + np.minimum(np.array(kept, np.int32), t)


@pytest.mark.parametrize("window", [WINDOW, 7])  # rings of 8 slots, none to spare, and of 16
def test_every_start_slot_around_the_ring(window):
    """Blocks of the full slack, one accepted at a time: each slot is once the start."""
    cache, start = empty(window), np.array([0, 4], np.int32)
    truth: list[dict[int, float]] = [{}, {i: float(i) for i in range(4)}]
    keys, values = block(np.broadcast_to(np.arange(CHUNK, dtype=np.float64), (B, CHUNK)))
    cache = write_prompt(cache, keys, values, np.zeros(B, np.int32), start)
    for step in range(20):
        tags = 100.0 * (step + 1) + np.arange(B * SLACK, dtype=np.float64).reshape(B, SLACK)
        for row in range(B):
            truth[row] |= {int(start[row]) + i: tags[row, i] for i in range(SLACK)}
        cache = write(cache, *block(tags), start)
        check(cache, truth, start + SLACK, SLACK, window)
        start = start + 1


def test_ring_len():
    assert kv.ring_len(128, 8) == 136
    assert kv.ring_len(5, 3) == 8
    assert kv.ring_len(5, 4) == 16


def test_shapes():
    cache = empty()
    assert cache.layers[0].keys.shape == (B, K, MAX_LEN + SLACK, H)
    assert cache.layers[1].values.shape == (B, K, 8 + SLACK, HV)
    assert cache.ring_positions.shape == (B, 8 + SLACK)
    assert (
        kv.make_cache(B, 9, [(K, H, HV)], (None,), slack=1, dtype=jnp.int8).ring_positions is None
    )
    with pytest.raises(ValueError, match="share one window"):
        kv.make_cache(B, 9, [(K, H, HV)] * 2, (4, 5), slack=1, dtype=jnp.float32)


@pytest.mark.parametrize("b", [2, 9])  # unrolled updates, and beyond eight rows the vmapped way
def test_rows_are_written_at_their_own_place(b):
    cache = kv.make_cache(b, 20, [(K, H, HV)], (None,), slack=SLACK, dtype=jnp.float32)
    start = np.arange(b, dtype=np.int32) * 2
    keys, values = block(1.0 + np.arange(b * SLACK, dtype=np.float64).reshape(b, SLACK))
    layer = jax.jit(kv.write_block, static_argnums=1)(cache, 0, keys, values, start)
    for row in range(b):
        expected = np.zeros((K, 23, H), np.float32)
        expected[:, start[row] : start[row] + SLACK] = keys[row]
        np.testing.assert_array_equal(layer.keys[row], expected)


def test_insert_row_replaces_one_row_and_nothing_else():
    keys, values = block(1.0 + np.arange(B * SLACK, dtype=np.float64).reshape(B, SLACK))
    whole = write(empty(), keys, values, np.array([0, 7], np.int32))
    make_one = functools.partial(kv.make_cache, 1, MAX_LEN, [(K, H, HV)] * 3)
    one = make_one((None, WINDOW, WINDOW), slack=SLACK, dtype=jnp.float32)
    one = write(one, keys[:1] + 50, values[:1] + 50, np.array([2], np.int32))
    merged = jax.jit(kv.insert_row)(whole, one, jnp.int32(1))
    for new, old, row in zip(*map(jax.tree.leaves, (merged, whole, one)), strict=True):
        np.testing.assert_array_equal(new[0], old[0])
        np.testing.assert_array_equal(new[1], row[0])
