"""Rotary embedding against literal numbers.

Run: .venv/bin/python -m pytest tests/layers/test_rope.py
"""

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.config import RopeScaling
from mimo_jax.layers.rope import apply_rope, inverse_frequencies, rope_tables


def test_frequencies():
    np.testing.assert_allclose(inverse_frequencies(4, 100.0, None), [1.0, 0.1], rtol=1e-6)
    np.testing.assert_allclose(inverse_frequencies(6, 1e6, None), [1.0, 1e-2, 1e-4], rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    scaling = RopeScaling("linear", 4.0)
    np.testing.assert_allclose(inverse_frequencies(4, 100.0, scaling), [0.25, 0.025], rtol=1e-6)


def test_llama3_scaling_keeps_blends_and_divides():
    # Wavelengths 6.28, 628 and 62832 with bounds 250 and 1000: kept, blended, divided by 8.
    # Blend: (1000 / 628.3185 - 1) / 3 = 0.1971831 of the old, the rest of the divided one.
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 1000)
    np.testing.assert_allclose(
        inverse_frequencies(6, 1e6, scaling), [1.0, 2.9753523e-3, 1.25e-5], rtol=1e-6
    )


def test_llama31_constants():
    # theta 5e5, 128 dims, factor 8, 8192 positions: pair 0 kept; pair 63 divided by 8; pair 33
    # (wavelength 5453 between 2048 and 8192) blends with (8192 / 5452.9 - 1) / 3 = 0.16744.
    freqs = inverse_frequencies(128, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192))
    plain = inverse_frequencies(128, 5e5, None)
    np.testing.assert_allclose(freqs[0], 1.0)
    np.testing.assert_allclose(freqs[63], plain[63] / 8, rtol=1e-6)
    np.testing.assert_allclose(plain[33], 1.1520427e-03, rtol=1e-5)
    np.testing.assert_allclose(freqs[33], 3.1269375e-04, rtol=1e-5)


def test_rotation_pairs_halves_and_leaves_the_rest():
    x = np.array([[[[1.0, 0.0, 5.0]]]], np.float32)
    quarter_turn = np.zeros((1, 1, 1), np.float32), np.ones((1, 1, 1), np.float32)
    np.testing.assert_allclose(jax.jit(apply_rope)(x, *quarter_turn)[0, 0, 0], [0, 1, 5])
    # Four dims rotate as (0, 2) and (1, 3); dims 4 and 5 pass.
    x = np.array([[[[1.0, 2.0, 3.0, 4.0, 9.0, 8.0]]]], np.float32)
    turns = np.array([[[0.0, 1.0]]], np.float32), np.array([[[1.0, 0.0]]], np.float32)
    np.testing.assert_allclose(jax.jit(apply_rope)(x, *turns)[0, 0, 0], [-3, 2, 1, 4, 9, 8])


def test_scores_depend_on_distance_alone_also_far_away():
    inv_freq = inverse_frequencies(6, 1e4, None)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    @jax.jit
    def score(query_pos, key_pos):
        turn = lambda x, pos: apply_rope(x, *rope_tables(pos[None, None], inv_freq))
        return jnp.sum(turn(q, query_pos) * turn(k, key_pos))

    near = score(jnp.int32(5), jnp.int32(2))
    # Float32 angles near 1000 are exact to 6e-5.
    np.testing.assert_allclose(score(jnp.int32(1005), jnp.int32(1002)), near, atol=1e-3)
    assert abs(float(score(jnp.int32(5), jnp.int32(3)) - near)) > 1e-2
