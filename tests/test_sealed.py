"""Quantised memory against dictionaries: what each query sees in codes and what in float.

Run: .venv/bin/python -m pytest tests/test_sealed.py

Seen red: sealing at the end of the tail instead of one group earlier; a tail that starts at 0; a
border by the block's start instead of the query's own position; rotation of the output left out.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax import cache as kv
from mimo_jax import recall, sealed
from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch
from mimo_jax.quant.kv import KVFormat, rotate, seal, unseal
from tests.oracles import attention as oracle

B, N, K, H, HV, G, SLACK, MAX_LEN, CHUNK, PIECE = 2, 6, 2, 12, 4, 8, 5, 60, 16, 16
FORM = KVFormat(4, is_evened=True, group_len=G)
WINDOW = 7


def empty():
    geometry, windows = [(K, H, HV), (3, 5, 6)], (None, WINDOW)
    return kv.make_cache(
        B, MAX_LEN, geometry, windows, slack=SLACK, dtype=jnp.float32, piece_len=PIECE, form=FORM
    )


def draw(rng, t):
    shapes = ((B, t, N, H), (B, K, t, H), (B, K, t, HV))
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@jax.jit
def step(cache, queries, keys, values, start):
    cache = kv.seal_full_groups(cache, start)
    positions = start[:, None] + jnp.arange(keys.shape[2], dtype=jnp.int32)[None, :]
    own = Stretch(keys, values, masks.causal_mask(positions, positions, None))
    write = lambda cache, k, v: kv.write_block(cache, 0, k, v, start)
    out, layer = recall.attend_long(queries, own, cache, 0, start, positions, write=write)
    return out, dataclasses.replace(cache, layers=(layer, cache.layers[1]))


@jax.jit
def prefill(cache, queries, keys, values, start, num_valid):
    index = jnp.arange(keys.shape[2], dtype=jnp.int32)[None, :]
    positions = start[:, None] + index
    there = jnp.where(index < num_valid[:, None], positions, -1)
    own = Stretch(keys, values, masks.causal_mask(positions, there, None))
    write = lambda cache, k, v: kv.write_chunk(cache, 0, k, v, start, num_valid)
    out, layer = recall.attend_long(queries, own, cache, 0, start, positions, write=write)
    cache = dataclasses.replace(cache, layers=(layer, cache.layers[1]))
    return out, kv.finish_chunk(cache, start, num_valid)


@jax.jit
def through_codes(keys, values):
    """Whole rows [B, K, MAX_LEN, *] as codes would give them, back in the model's channels."""

    def back(x, is_by_token):
        groups = rotate(x[:, :, : MAX_LEN // G * G]).reshape(B, K, MAX_LEN // G, G, -1)
        kept = unseal(seal(groups, FORM, is_by_token=is_by_token), FORM, jnp.float32)
        return rotate(kept).reshape(B, K, -1, x.shape[-1])

    return back(keys, False), back(values, True)


def expected(queries, keys, values, start, t):
    """Each query over codes below its own border and floats from there."""
    coded = through_codes(keys, values)
    out = np.zeros((B, t, N, HV))
    for query in range(t):
        for row in range(B):
            position = start[row] + query
            border = max((position // G - 1) * G, 0)
            seen_keys, seen_values = np.array(keys[row]), np.array(values[row])
            seen_keys[:, :border] = coded[0][row][:, :border]
            seen_values[:, :border] = coded[1][row][:, :border]
            out[row, query] = oracle.attention(
                queries[row : row + 1, query : query + 1],
                seen_keys[None],
                seen_values[None],
                np.array([[position]]),
                np.arange(MAX_LEN)[None],
            )[0, 0]
    return out


row_pair = lambda low, high: st.tuples(*[st.integers(low, high)] * B)
steps = st.lists(st.tuples(st.sampled_from([1, SLACK]), row_pair(0, SLACK)), min_size=6, max_size=9)


@settings(max_examples=6)
@given(prompt=row_pair(1, CHUNK), steps=steps, seed=st.integers(0, 99))
def test_blocks_and_rollbacks_see_codes_below_their_own_border(prompt, steps, seed):
    rng = np.random.default_rng(seed)
    truth = [np.zeros((B, K, MAX_LEN, width), np.float32) for width in (H, HV)]
    cache, start = empty(), np.zeros(B, np.int32)
    rings = cache.layers[1]

    def note(keys, values):
        for row in range(B):
            there = slice(start[row], start[row] + keys.shape[2])
            for whole, part in zip(truth, (keys, values), strict=True):
                whole[row][:, there] = part[row][:, : MAX_LEN - start[row]]

    for t in (CHUNK, CHUNK):  # the first whole, the second shorter in each row
        queries, keys, values = draw(rng, t)
        valid = np.full(B, CHUNK, np.int32) if start[0] == 0 else np.array(prompt, np.int32)
        note(keys, values)
        _, cache = prefill(cache, queries, keys, values, start, valid)
        start = start + valid
    for t, kept in steps:
        if (start + t > MAX_LEN).any():
            break
        queries, keys, values = draw(rng, t)
        note(keys, values)
        out, cache = step(cache, queries, keys, values, start)
        want = expected(queries, *truth, start, t)
        np.testing.assert_allclose(out, want, atol=2e-5, rtol=0)
        start = start + np.minimum(np.array(kept, np.int32), t)
    for now, then in zip(cache.layers[1], rings, strict=True):
        np.testing.assert_array_equal(now, then)


def test_num_in_codes():
    positions = jnp.asarray([[0, 15, 16, 23, 24]], jnp.int32)
    assert np.asarray(sealed.num_in_codes(positions, 8)).tolist() == [[0, 0, 8, 8, 16]]


def test_shapes_and_refusals():
    layer = empty().layers[0]
    assert isinstance(layer, sealed.SealedLayer)
    assert layer.tail_keys.shape == (B, K, 2 * G + SLACK, H)
    assert layer.keys.codes.shape == (B, K, 8, G // 2, H)
    assert layer.keys.step.shape == (B, K, 8, 1, H)
    assert layer.values.step.shape == (B, K, 8, G, 1)
    assert isinstance(empty().layers[1], kv.LayerCache)
    for changed in ({"slack": 9}, {"piece_len": 12}):
        sizes = {"slack": SLACK, "piece_len": PIECE} | changed
        with pytest.raises(ValueError, match="group_len 8 must divide a piece of"):
            kv.make_cache(B, 9, [(K, H, HV)], (None,), dtype=jnp.float32, form=FORM, **sizes)
