"""Attention against loops: grouped heads, windows, sinks, several stretches, dead slots.

Run: .venv/bin/python -m pytest tests/layers/test_attention.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch, attend, attend_in_window_chunks
from tests.oracles import attention as oracle

B, T, N, K, H, HV, S = 2, 5, 6, 3, 8, 4, 7
# Measured 4e-7: float32 against float64 sums of 7 to 12 terms.
ATOL = 3e-6


def draw(rng, t=T, s=S):
    shapes = ((B, t, N, H), (B, K, s, H), (B, K, s, HV))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@jax.jit
def attend_jit(queries, stretches, sink):
    return attend(queries, stretches, sink=sink)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("has_sink", [False, True])
def test_attend_equals_the_loops(window, has_sink):
    rng = np.random.default_rng(1)
    queries, keys, values = draw(rng)
    sink = rng.standard_normal(N).astype(np.float32) * 2 if has_sink else None
    query_pos = np.array([[2, 3, 4, 5, 6], [5, 6, 7, 8, 9]], np.int32)
    key_pos = np.array([[0, 1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, -1, -1]], np.int32)
    mask = masks.causal_mask(jnp.asarray(query_pos), jnp.asarray(key_pos), window)
    out = attend_jit(queries, [Stretch(keys, values, mask)], sink)
    expected = oracle.attention(queries, keys, values, query_pos, key_pos, window=window, sink=sink)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)


def test_two_stretches_are_one_softmax_and_dead_slots_are_nothing():
    rng = np.random.default_rng(2)
    queries, keys, values = draw(rng, s=12)
    sink = rng.standard_normal(N).astype(np.float32)
    seen = rng.random((B, T, 12)) < 0.6
    seen[:, :, 2] = seen[:, :, 9] = False
    positions = np.zeros((B, 12), np.int32)
    expected = oracle.attention(queries, keys, values, positions, positions, sink=sink, seen=seen)
    for array in (keys, values):
        array[:, :, [2, 9]] = 1e4 * rng.standard_normal((B, K, 2, array.shape[-1]))
    parts = [
        Stretch(keys[:, :, part], values[:, :, part], seen[:, :, part])
        for part in (slice(0, 7), slice(7, 12))
    ]
    out = attend_jit(queries, parts, sink)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)


def test_a_sink_of_zero_halves_one_key_of_score_zero():
    queries, keys = np.zeros((1, 1, 1, 2), np.float32), np.ones((1, 1, 1, 2), np.float32)
    values, mask = np.array([[[[4.0, -6.0]]]], np.float32), np.ones((1, 1, 1), bool)
    out = attend_jit(queries, [Stretch(keys, values, mask)], np.zeros(1, np.float32))
    np.testing.assert_allclose(out[0, 0, 0], [2.0, -3.0], atol=1e-6)


def test_a_sink_equals_plain_attention_scaled_by_a_sigmoid():
    rng = np.random.default_rng(3)
    queries, keys, values = draw(rng)
    sink = rng.standard_normal(N).astype(np.float32)
    mask = np.ones((B, T, S), bool)
    plain = attend_jit(queries, [Stretch(keys, values, mask)], None)
    spread = np.repeat(keys, N // K, axis=1)
    scores = np.einsum("btnh,bnsh->btns", queries, spread) / np.sqrt(H)
    log_total = np.log(np.exp(scores).sum(-1))
    factor = 1 / (1 + np.exp(sink - log_total))
    out = attend_jit(queries, [Stretch(keys, values, mask)], sink)
    np.testing.assert_allclose(out, plain * factor[..., None], atol=ATOL, rtol=0)


def test_a_query_that_sees_nothing_is_finite():
    queries, keys, values = draw(np.random.default_rng(4))
    mask = np.zeros((B, T, S), bool)
    assert np.isfinite(attend_jit(queries, [Stretch(keys, values, mask)], None)).all()
    sink = np.zeros(N, np.float32)
    out = attend_jit(queries, [Stretch(keys, values, mask)], sink)
    np.testing.assert_array_equal(out, np.zeros_like(out))


def test_values_set_the_dtype():
    queries, keys, values = (jnp.asarray(x, jnp.bfloat16) for x in draw(np.random.default_rng(5)))
    stretch = Stretch(keys, values, jnp.ones((B, T, S), bool))
    out = attend_jit(queries, [stretch], jnp.zeros(N, jnp.bfloat16))
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("window", [1, 3, 4])
def test_chunks_of_a_row_equal_the_loops(window):
    rng = np.random.default_rng(6)
    t = 12
    queries, keys, values = draw(rng, t=t, s=t)
    sink = rng.standard_normal(N).astype(np.float32)

    def key_mask(query_idx, key_idx):
        fold = lambda idx: idx.reshape(-1, idx.shape[-1])
        return masks.causal_mask(fold(query_idx), fold(key_idx), window)

    run = jax.jit(functools.partial(attend_in_window_chunks, key_mask_fn=key_mask, chunk_len=4))
    positions = np.broadcast_to(np.arange(t), (B, t))
    expected = oracle.attention(
        queries, keys, values, positions, positions, window=window, sink=sink
    )
    out = run(queries, keys, values, sink=sink)
    np.testing.assert_allclose(out, expected, atol=ATOL, rtol=0)
