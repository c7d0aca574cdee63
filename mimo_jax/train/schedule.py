"""Learning rates as functions of the step: one warm-up, three ways down.

All three are the smaller of a rising and a falling line, so that a run shorter than its warm-up
still has a rate. "wsd" (warm-up, stable, decay) is the default: its plateau does not know the end
of the run, so a run can be prolonged from any checkpoint of it, and only the last part is anew.

Trap: the step is that of the optimizer, which does not count skipped steps (`step.py`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

LINEAR, COSINE, WSD = "linear", "cosine", "wsd"
SCHEDULES = (LINEAR, COSINE, WSD)


def make_schedule(
    shape: str, peak: float, *, num_steps: int, warmup_steps: int, decay_fraction: float
) -> optax.Schedule:
    """Linear warm-up, then down to zero at the end of the run.

    Knows nothing about epochs; a step is one optimizer update, counted from 0. Ranges are checked
    by `TrainConfig`, not here.

    Args:
      shape: Of SCHEDULES: "linear" and "cosine" fall from the end of the warm-up, "wsd" stays and
        falls linearly over the last `decay_fraction` of the run.
      peak: Highest rate.
      num_steps: Updates in the run, >= 1; the rate is 0 from here on.
      warmup_steps: Updates to reach the peak; the first update already moves (rate peak / warmup).
      decay_fraction: In (0, 1]; read by "wsd" alone.

    Returns:
      A function of the step (int or int32 array) to a float32 rate.

    Example: peak=1, num_steps=10, warmup_steps=2, decay_fraction=.4
      wsd -> .5, 1, 1, 1, 1, 1, 1, .75, .5, .25 and then 0
      linear -> .5, 1, 1, .875, .75, .625, .5, .375, .25, .125 and then 0
    """
    decay_steps = decay_fraction * num_steps if shape == WSD else max(num_steps - warmup_steps, 1)

    def schedule(step: Any) -> jax.Array:
        step_f = jnp.asarray(step).astype(jnp.float32)
        rising = jnp.minimum((step_f + 1) / max(warmup_steps, 1), 1.0)
        falling = jnp.clip((num_steps - step_f) / decay_steps, 0.0, 1.0)
        if shape == COSINE:
            falling = 0.5 * (1 - jnp.cos(math.pi * falling))
        return peak * jnp.minimum(rising, falling)

    return schedule
