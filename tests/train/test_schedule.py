"""Learning rates against literal values.

Run: .venv/bin/python -m pytest tests/train/test_schedule.py
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.train.schedule import COSINE, LINEAR, SCHEDULES, WSD, make_schedule

# Ten steps, two of them warm-up; the last four decay where there is a plateau. Cosine:
# (1 + cos(pi k / 8)) / 2 for k = 0 .. 7.
EXPECTED = {
    WSD: [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0, 0],
    LINEAR: [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0, 0],
    COSINE: [
        0.5, 1, 1, 0.961940, 0.853553, 0.691342, 0.5, 0.308658, 0.146447, 0.038060, 0, 0
    ],
}  # fmt: skip


@pytest.mark.parametrize("shape", SCHEDULES)
def test_worked_example(shape):
    rate = make_schedule(shape, 3.0, num_steps=10, warmup_steps=2, decay_fraction=0.4)
    expected = 3 * np.asarray(EXPECTED[shape])
    np.testing.assert_allclose([rate(step) for step in range(12)], expected, atol=2e-6)
    np.testing.assert_allclose(rate(jnp.arange(12)), expected, atol=2e-6)
    assert rate(0).dtype == jnp.float32


def test_without_plateau_and_without_warm_up():
    rate = make_schedule(WSD, 2.0, num_steps=4, warmup_steps=0, decay_fraction=1.0)
    np.testing.assert_allclose(rate(jnp.arange(5)), [2, 1.5, 1, 0.5, 0], atol=1e-6)


@pytest.mark.parametrize("shape", SCHEDULES)
def test_a_run_shorter_than_its_warm_up_still_moves(shape):
    rate = make_schedule(shape, 1.0, num_steps=3, warmup_steps=5, decay_fraction=0.4)
    values = np.asarray(rate(jnp.arange(4)))
    assert (values[:3] > 0).all()
    assert (values <= 0.6 + 1e-6).all()
