"""A training run whose step compiles in no time, as a function and as a program that may be killed.

    python tests/train/toy_run.py RUN_DIR NUM_STEPS PAUSE_S

A linear map fitted by momentum to batches of (seed, step), with noise of (seed, step): what a real
run carries over a stop, in 75 numbers.
"""

import dataclasses
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mimo_jax.train import loop
from mimo_jax.train.step import init_state

SEED, SAVE_EVERY, EVAL_EVERY = 11, 7, 25


class ToyBatch(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Momentum:
    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)


def batch_of(step: int) -> ToyBatch:
    rng = np.random.default_rng([SEED, step])
    return ToyBatch(*(rng.normal(size=(6, n)).astype(np.float32) for n in (5, 7)))


def _loss(params, x, y):
    return ((x @ params["w"] + params["b"][None] - y) ** 2).mean()


@jax.jit
def toy_step(state, x, y):
    noise = jax.random.normal(jax.random.fold_in(jax.random.key(SEED), state.step), x.shape)
    loss, grads = jax.value_and_grad(_loss)(state.params, x + 0.1 * noise, y)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state.opt_state, grads)
    params = jax.tree.map(lambda p, m: p - 0.01 * m, state.params, momentum)
    state = dataclasses.replace(state, params=params, opt_state=momentum, step=state.step + 1)
    return state, {"loss": loss}


def fresh():
    return init_state({"w": jnp.ones((5, 7)), "b": jnp.zeros((7,))}, Momentum())


def train(run_dir: Path, num_steps: int, pause_s: float = 0.0, step_fn=None, **options):
    """The state after num_steps; options replace those of `loop.run`."""

    def plain_step(state, step):
        time.sleep(pause_s)
        return toy_step(state, *batch_of(step))

    settings = {
        "run_dir": run_dir,
        "num_steps": num_steps,
        "save_every": SAVE_EVERY,
        "eval_every": EVAL_EVERY,
        "eval_fn": lambda state: {
            "heldout_loss": {"toy": float(_loss(state.params, *batch_of(10**6)))}
        },
        "meta": {"seed": SEED, "config": {"lr": 0.01, "mix": {"toy": 1.0}}, "data_hash": "d0"},
        "tokens_per_step": 6,
        "batch_of": batch_of,
    }
    return loop.run("toy", fresh(), step_fn or plain_step, **settings | options)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
