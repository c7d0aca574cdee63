"""A drafter before its first step."""

import jax.numpy as jnp
import numpy as np

from mimo_jax.train.drafter_run import balance_taps


def test_a_first_token_a_hundred_times_as_large_does_not_silence_its_tap():
    rows, row_len, d = 3, 40, 8
    noise = np.random.default_rng(0).standard_normal((rows, row_len, 2, d)).astype(np.float32)
    features = noise * np.asarray([2.0, 8.0], np.float32)[:, None]
    features[:, 0, 1] *= 130  # by the mean over tokens the second tap would weigh 1/20 of the first
    weights = {"w_fuse": jnp.ones((2 * d, 5), jnp.float32), "final_norm": jnp.ones((d,))}

    balanced = balance_taps(weights, jnp.asarray(features))

    assert balanced["final_norm"] is weights["final_norm"]
    first, second = np.split(np.asarray(balanced["w_fuse"]), 2)
    np.testing.assert_allclose(first, 1 / 2.0, rtol=0.1)
    np.testing.assert_allclose(second, 1 / 8.0, rtol=0.1)
