"""Experts run from MXFP4 against experts decoded first, in every form and at every edge.

Run: .venv/bin/python -m pytest tests/layers/test_packed.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.layers import moe, packed
from pallas_kernels.formats import E2M1_TABLE

E, TOP_K = 5, 2
WAYS = {
    "tiles": packed.run_by_tiles,
    "gathered": packed._run_gathered,
    "one by one": packed._run_one_by_one,
    "the platform's": packed.run_packed,
}


def draw(d, f, seed=0):
    rng = np.random.default_rng(seed)

    def codes(rows, width):
        yield rng.integers(0, 256, (E, rows, width // 2), dtype=np.uint8)
        yield rng.integers(122, 126, (E, rows, width // 32), dtype=np.uint8)

    return moe.PackedExperts(*map(jnp.asarray, (*codes(f, d), *codes(f, d), *codes(d, f))))


def decode(codes, scale):
    """As the format says it, in NumPy: low nibble first, a power of two for every 32."""
    codes, scale = np.asarray(codes), np.asarray(scale)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
    factor = np.where(scale == 255, np.nan, 2.0 ** (scale.astype(np.float64) - 127))
    return E2M1_TABLE[nibbles].astype(np.float64) * np.repeat(factor, 32, axis=-1)


def by_loop(x, expert_ids, weights, experts):
    """Token by token, float64."""
    gate, up, down = (
        decode(getattr(experts, n), getattr(experts, f"{n}_scale")) for n in ("gate", "up", "down")
    )
    out = np.zeros(x.shape)
    for i, token in enumerate(np.asarray(x, np.float64)):
        for e, weight in zip(np.asarray(expert_ids)[i], np.asarray(weights)[i], strict=True):
            h = gate[e] @ token
            out[i] += weight * (down[e] @ (h / (1 + np.exp(-h)) * (up[e] @ token)))
    return out


def tokens(t, d, seed=1, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(E)[:TOP_K] for _ in range(t)]) if t else np.zeros((0, TOP_K))
    x = jnp.asarray(rng.normal(size=(t, d)), dtype)
    return x, jnp.asarray(ids, jnp.int32), jnp.asarray(rng.random((t, TOP_K)), jnp.float32)


@pytest.fixture
def small_tiles(monkeypatch):
    """Weights cut into several tiles, rows too: 96 x 64 by 24 x 64, and 8 rows at once."""
    monkeypatch.setattr(packed, "_TILE_WEIGHTS", 24 * 64)
    monkeypatch.setattr(packed, "_MOST_ROWS", 8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("t", [1, 7, 41])
def test_all_ways_equal_the_loop(way, t, small_tiles):
    args = (*tokens(t, 64), draw(64, 96))
    want = by_loop(*args)
    assert np.abs(want).max() > 10
    np.testing.assert_allclose(jax.jit(lambda *a: WAYS[way](*a))(*args), want, rtol=1e-4, atol=1e-3)


def test_rows_and_tiles_are_literal():
    assert packed.tile_rows(1024, 1024) == 256
    assert packed.tile_rows(96, 192) == 96
    assert packed.tile_rows(300, 4096) == 75
    rows = [packed._rows_at_once(t, 2, 16) for t in (1, 8, 64, 512, 1024)]
    assert rows == [1, 8, 8, 64, 64]


def test_no_token_makes_no_row():
    args = (*tokens(0, 64), draw(64, 96))
    assert jax.jit(packed.run_by_tiles)(*args).shape == (0, 64)


def test_all_tokens_on_one_expert(small_tiles):
    """Five row tiles of one expert, one of another, none of three."""
    x, _, weights = tokens(33, 64)
    ids = jnp.broadcast_to(jnp.asarray([3, 1], jnp.int32), (33, 2))
    experts = draw(64, 96)
    got = jax.jit(packed.run_by_tiles)(x, ids, weights, experts)
    np.testing.assert_allclose(got, by_loop(x, ids, weights, experts), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["gate_scale", "up_scale", "down_scale"])
def test_a_scale_that_is_no_number_reaches_those_who_chose_it(name, small_tiles):
    x, ids, weights = tokens(19, 64)
    experts = draw(64, 96)
    scale = getattr(experts, name).at[2, 5, 0].set(255)
    broken = experts._replace(**{name: scale})
    got = np.asarray(jax.jit(packed.run_by_tiles)(x, ids, weights, broken))
    want = by_loop(x, ids, weights, broken)
    chose = (np.asarray(ids) == 2).any(axis=1)
    assert 0 < chose.sum() < 19
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), chose)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got[~chose], want[~chose], rtol=1e-4, atol=1e-3)


def test_a_broken_token_harms_no_other(small_tiles):
    x, ids, weights = tokens(19, 64)
    run = jax.jit(functools.partial(packed.run_by_tiles, experts=draw(64, 96)))
    got = np.asarray(run(x.at[4].set(jnp.nan), ids, weights))
    others = np.arange(19) != 4
    assert np.isnan(got[4]).all()
    np.testing.assert_array_equal(got[others], np.asarray(run(x, ids, weights))[others])


def test_bfloat16_tokens_are_summed_in_float32():
    x, ids, weights = tokens(6, 64, dtype=jnp.bfloat16)
    got = jax.jit(packed.run_by_tiles)(x, ids, weights, draw(64, 96))
    assert got.dtype == jnp.bfloat16
    want = by_loop(x.astype(jnp.float32), ids, weights, draw(64, 96))
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-8, atol=1e-2)


def test_scratch_is_less_than_one_expert_in_float32():
    """The layer that the bench measures: 16 experts of 1024 x 1024, 8 tokens. Nothing is run."""
    shape = jax.ShapeDtypeStruct
    pair = [shape((16, 1024, 512), jnp.uint8), shape((16, 1024, 32), jnp.uint8)]
    program = jax.jit(packed.run_by_tiles).lower(
        shape((8, 1024), jnp.float32),
        shape((8, 2), jnp.int32),
        shape((8, 2), jnp.float32),
        moe.PackedExperts(*pair, *pair, *pair),
    )
    assert program.compile().memory_analysis().temp_size_in_bytes < 3 * 1024 * 1024 * 4 / 4
