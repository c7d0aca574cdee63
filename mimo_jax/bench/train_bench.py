"""Signals per second and memory of the drafter's loss and gradient, and of a step on a long row.

The two forms of the loss (blocks a chunk at a time with gathered context, and one dense mask) get
the same models, row, anchors and features in turns; both give value and gradient. The target's
forward and the optimizer, which both would share, are left out of that comparison and counted in
the whole step. Memory is what the compiled program needs beside its arguments and results.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.bench.dense_mask import dense_loss
from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.decode.placement import Model
from mimo_jax.models.params import flatten
from mimo_jax.timing import alternate, measure
from mimo_jax.train.block_rows import draw_blocks, read_rows
from mimo_jax.train.block_step import block_sums_and_gradient
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.drafter_step import drafter_forward, make_drafter_step
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.start import load_float_target
from mimo_jax.train.step import Batch, init_state

OURS, DENSE = "ours", "dense mask"
OBJECTIVE = ObjectiveConfig()
BLOCK_CHUNK = DrafterTrainConfig().block_chunk
# A chunk's gradient is added to that of the whole row's context: fewer and larger ones pay there.
LONG_BLOCK_CHUNK = 256
_MB = 1e6


class Pair(NamedTuple):
    """A target, a drafter without a mask vector of its own, and what is trained."""

    target: Model
    drafter: Model
    trained: Any


def _scratch_mb(program) -> float:
    """Scratch memory of a compiled program."""
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes / _MB


def load_pair(checkpoint: Path) -> Pair:
    """The models of a checkpoint directory with a drafter in dflash/, in float32."""
    target = load_float_target(checkpoint)
    drafter = Model(*load_drafter(checkpoint / "dflash", jnp.float32))
    flat = flatten(drafter.params)
    row = flatten(target.params)["embedding"][drafter.config.mask_token_id]
    mask_embedding = flat.get("mask_embedding", row)
    return Pair(target, drafter, {"drafter": drafter.params, "mask_embedding": mask_embedding})


def random_row(vocab_size: int, row_len: int) -> Batch:
    """One document of random ids, every token to be learned."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, row_len)).astype(np.int32)
    ones = np.ones((1, row_len), np.int32)
    positions = np.arange(row_len, dtype=np.int32)[None]
    return Batch(*map(jnp.asarray, (ids, ones, ones > 0, positions)))


def make_loss(pair: Pair, form: str, num_anchors: int, block_chunk: int | None):
    """Jitted (target params, trained, row, features) -> (loss, gradient, number of signals)."""
    config = pair.drafter.config
    forward = drafter_forward(pair.drafter.graph, config)

    @jax.jit
    def run(target_params, trained, batch: Batch, features):
        target = nnx.merge(pair.target.graph, target_params)
        blocks = draw_blocks(0, jnp.int32(0), batch, num_anchors, config.draft_block_len)
        if form == OURS:
            window = forward.window(batch.token_ids.shape[1])
            rows = read_rows(batch, features, None, window, config.draft_block_len)
            sums, grads = block_sums_and_gradient(
                forward, target, trained, rows, blocks, OBJECTIVE, block_chunk
            )
            grads = jax.tree.map(lambda g: g / sums.weight, grads)
            return sums.loss / sums.weight, grads, sums.num_signals

        def loss_fn(trained):
            drafter = nnx.merge(pair.drafter.graph, trained["drafter"])
            mask = trained["mask_embedding"]
            return dense_loss(target, drafter, mask, batch, features, blocks, OBJECTIVE.gamma)

        loss, grads = jax.value_and_grad(loss_fn)(trained)
        return loss, grads, blocks.is_valid.sum()

    return run


def time_losses(
    pair: Pair,
    cases: dict[str, tuple[str, int, int, int | None]],
    *,
    rounds: int,
    is_processor_time: bool = False,
) -> dict[str, dict]:
    """Loss and gradient of several cases in turns.

    Args:
      pair: The models.
      cases: Name -> (form, row length, anchors, blocks per chunk), the first the baseline.
      rounds: Calls of each.
      is_processor_time: Measure what the process worked instead of what passed.

    Returns:
      Name -> signals, seconds, signals_per_s, ms_per_anchor, over_first (seconds over the first
      case's, median over rounds), temp_mb, loss, grad_norm.
    """
    calls, found = {}, {}
    width = pair.drafter.config.context_width
    for name, (form, row_len, num_anchors, block_chunk) in cases.items():
        batch = random_row(pair.drafter.config.vocab_size, row_len)
        features = jax.random.normal(jax.random.key(1), (1, row_len, width))
        run = make_loss(pair, form, num_anchors, block_chunk)
        arguments = (pair.target.params, pair.trained, batch, features)
        program = run.lower(*arguments).compile()
        loss, grads, signals = program(*arguments)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        found[name] = {
            "signals": int(signals),
            "temp_mb": _scratch_mb(program),
            "loss": float(loss),
            "grad_norm": float(norm),
        }
        calls[name] = lambda program=program, arguments=arguments: program(*arguments)
    taken = alternate(calls, rounds, is_processor_time=is_processor_time)
    for name, timing in taken.timings.items():
        row = found[name]
        row["seconds"] = timing.median_s
        row["signals_per_s"] = row["signals"] / timing.median_s
        row["ms_per_anchor"] = 1e3 * timing.median_s / cases[name][2]
        row["over_first"] = taken.median_ratios[name]
    return found


def long_step(pair: Pair, row_len: int, num_anchors: int, block_chunk: int | None) -> dict:
    """One whole train step on one long row: its signals, memory and time.

    Args:
      pair: The models; their longest position is raised to the row's.
      row_len: Tokens; above 8,192 a multiple of 1,024.
      num_anchors: Draft blocks.
      block_chunk: Blocks at a time.

    Returns:
      signals, temp_mb, seconds (second of two steps), loss.
    """
    longer = dataclasses.replace(pair.drafter.config, max_position=row_len)
    config = DrafterTrainConfig(
        num_anchors=num_anchors, batch_rows=1, row_len=row_len, block_chunk=block_chunk
    )
    trained = jax.tree.map(jnp.copy, pair.trained)
    optimizer = make_optimizer(trained, config)
    step = make_drafter_step(pair.target.graph, pair.drafter.graph, optimizer, config, longer)
    state = init_state(trained, optimizer)
    batch = random_row(longer.vocab_size, row_len)
    program = step.lower(state, pair.target.params, batch, np.int32(0)).compile()
    metrics: dict[str, Any] = {}

    def run():
        nonlocal state, metrics
        state, metrics = program(state, pair.target.params, batch, np.int32(0))
        return metrics

    seconds = measure(run, num_runs=1, num_warmup=1).median_s
    return {
        "signals": int(metrics["num_signals"]),
        "temp_mb": _scratch_mb(program),
        "seconds": seconds,
        "loss": float(metrics["loss"]),
    }
