"""The train step of any drafter: losses of draft blocks at random anchors, a chunk at a time.

What a row gives to its blocks (context K/V) is made once per row; everything per block is made for
`block_chunk` blocks at a time, gradient included, so that a step's memory is that of its rows and
of one chunk, and a block costs the same in a row of any length: it gathers the `window - 1`
positions before its anchor. The logits of all slots, and the gathered context of all blocks, are
never there at once: for 2,900 blocks of 8 over 2,048 ids they are 0.6 GB, and as much again on the
way back.

The gradient of a chunk is taken inside the loop, beside its loss, and only added up: the loss is a
sum until it is divided at the end. Rejected: differentiating the loop, with `jax.checkpoint` around
its body, which bounds the memory alike but computes every chunk's forward twice.

On a mesh all of it runs on each device's own blocks (see `block_rows.py`); sums and gradients are
added up over devices once, after the loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mimo_jax.config import DraftConfig
from mimo_jax.layers.dispatch import PADDED
from mimo_jax.layers.norm import rms_norm
from mimo_jax.sharding import SEQUENCE
from mimo_jax.train import losses
from mimo_jax.train.block_rows import (
    BLOCK_SPECS,
    DraftBlocks,
    Rows,
    cut_blocks,
    draw_blocks,
    read_rows,
    states_before_slots,
)
from mimo_jax.train.config import DrafterTrainConfig
from mimo_jax.train.objectives import ObjectiveConfig, score_slots
from mimo_jax.train.placement import (
    BLOCKS,
    ROWS,
    as_own,
    hold_state,
    on_own,
    sum_over_devices,
    whole_over_data,
)
from mimo_jax.train.step import Batch, TrainState, apply_gradients, run_target, sparse_layer


class BlockForward(NamedTuple):
    """How a kind of drafter gets to the logits of draft slots.

    Attributes:
      window: Row length -> positions before an anchor that a block looks back to, plus one.
      read: (target, trained, rows) -> a pytree that all blocks of the rows share.
      draft: (target, trained, rows, what was read, blocks) -> logits of their slots 1..m, float32
        [blocks, m, v].
    """

    window: Callable[[int], int]
    read: Callable[..., Any]
    draft: Callable[..., Array]


class BlockSums(NamedTuple):
    """Sums over draft blocks: of weighted slot losses, their weights, and what is reported."""

    loss: Array
    weight: Array
    accept_len: Array
    num_blocks: Array
    num_signals: Array


def _score_blocks(
    logits, target_logits, blocks: DraftBlocks, objective: ObjectiveConfig
) -> BlockSums:
    # A label outside of the drafter's vocabulary cannot be drafted.
    is_valid = blocks.is_valid & (blocks.labels < logits.shape[-1])
    scores = score_slots(objective, logits, blocks.labels, is_valid, target_logits)
    accept_len, is_counted = losses.accept_lengths(scores.is_correct, is_valid)
    return BlockSums(
        jnp.sum(scores.weight * scores.loss),
        jnp.sum(scores.weight),
        jnp.sum(accept_len),
        jnp.sum(is_counted.astype(jnp.float32)),
        jnp.sum(is_valid.astype(jnp.int32)),
    )


def _target_logits(target, rows: Rows, blocks: DraftBlocks, vocab_size: int):
    """The target's logits of the slots of blocks, over the first vocab_size ids."""
    states = states_before_slots(rows, blocks.anchor_pos, blocks.labels.shape[1])
    normed = rms_norm(states, target.final_norm[...], eps=target.config.norm_eps)
    return target.unembed(normed, vocab_size)


def block_sums_and_gradient(
    forward: BlockForward,
    target,
    trained,
    rows: Rows,
    blocks: DraftBlocks,
    objective: ObjectiveConfig,
    block_chunk: int | None,
    mesh: Mesh | None = None,
) -> tuple[BlockSums, Any]:
    """Sums over one device's blocks and the gradient of `loss`, the sum of weighted slot losses.

    Args:
      forward: Of the kind of drafter.
      target: Merged, frozen.
      trained: What the gradient is of.
      rows: This device's.
      blocks: This device's.
      objective: Of a slot.
      block_chunk: See `cut_blocks`.
      mesh: Where rows lie, inside `on_own`.
    """
    trained = as_own(trained, mesh)
    shared, pull_back = jax.vjp(lambda t: forward.read(target, t, rows), trained)

    def of_chunk(differentiated, chunk: DraftBlocks):
        trained, shared = differentiated
        logits = forward.draft(target, trained, rows, shared, chunk)
        target_logits = None
        if objective.needs_target:
            target_logits = _target_logits(target, rows, chunk, logits.shape[-1])
        sums = _score_blocks(logits, target_logits, chunk, objective)
        return sums.loss, sums

    def with_gradient(chunk: DraftBlocks):
        (_, sums), grads = jax.value_and_grad(of_chunk, has_aux=True)((trained, shared), chunk)
        return sums, grads

    chunks = cut_blocks(blocks, block_chunk)
    if len(chunks.anchor_pos) == 1:
        sums, grads = with_gradient(jax.tree.map(lambda x: x[0], chunks))
    else:
        one = jax.tree.map(lambda x: x[0], chunks)
        like = jax.eval_shape(with_gradient, one)
        zeros = as_own(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like), mesh)
        add = lambda total, chunk: (jax.tree.map(jnp.add, total, with_gradient(chunk)), None)
        (sums, grads), _ = jax.lax.scan(add, zeros, chunks)
    of_trained, of_shared = grads
    (through_rows,) = pull_back(of_shared)
    return sums, jax.tree.map(jnp.add, of_trained, through_rows)


def block_logits(
    forward: BlockForward,
    target,
    trained,
    batch: Batch,
    features,
    blocks: DraftBlocks,
    mesh: Mesh | None = None,
):
    """Logits of the draft slots 1..m of every block, as the decode loop would compute them.

    Args:
      forward: Of the kind of drafter.
      target: Merged target (its embedding and head are shared).
      trained: What `forward` reads.
      batch: Rows.
      features: [b, s, c] context features of the rows.
      blocks: Anchors; labels where the drafter reads them.
      mesh: Where rows lie, inside a jitted function.

    Returns:
      float32 [blocks, m, v]; row by row unless the mesh cuts the sequence.
    """
    window = forward.window(batch.token_ids.shape[1])

    def own(batch: Batch, features, blocks: DraftBlocks):
        rows = read_rows(batch, features, None, window, blocks.labels.shape[1] + 1, mesh)
        shared = forward.read(target, trained, rows)
        return forward.draft(target, trained, rows, shared, blocks)

    cut = P(ROWS, SEQUENCE)
    return on_own(own, mesh, (P(ROWS), cut, BLOCK_SPECS), P(BLOCKS))(batch, features, blocks)


def make_block_step(
    target_graph,
    forward: BlockForward,
    optimizer,
    config: DrafterTrainConfig,
    model: DraftConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """The train step of any drafter that is taught by draft blocks at random anchors.

    Args:
      target_graph: Frozen, with its embedding and its head.
      forward: Of the kind of drafter.
      optimizer: From `make_optimizer`.
      config: Of the training.
      model: Of the drafter.
      mesh: Where rows lie.
      dispatch: How tokens travel to experts.

    Returns:
      step(state, target_params, batch, seed) -> (state, metrics); donates the state. Anchors are
      drawn from (seed, step). A batch without a valid anchor has loss 0, gradient 0 and
      "num_signals" 0.

    Raises:
      ConfigError: At the first step, if the drafter was made for another target.
    """
    objective, m1 = config.objective, model.draft_block_len

    def step(state: TrainState, target_params, batch: Batch, seed):
        target = nnx.merge(target_graph, whole_over_data(target_params, mesh))
        model.check_fits(target.config)
        last_layer = (target.config.num_layers - 1,) if objective.needs_target else ()
        out = run_target(
            target,
            batch,
            mesh,
            tap_layer_ids=(*model.target_layer_ids, *last_layer),
            run_sparse=sparse_layer(mesh, None, dispatch),
        )
        features, states = jnp.split(out.context_features, [model.context_width], axis=-1)
        blocks = draw_blocks(seed, state.step, batch, config.num_anchors, m1, mesh)
        window = forward.window(batch.token_ids.shape[1])

        def own(trained, batch: Batch, features, states, blocks: DraftBlocks):
            kept = states if objective.needs_target else None
            rows = read_rows(batch, features, kept, window, m1, mesh)
            found = block_sums_and_gradient(
                forward, target, trained, rows, blocks, objective, config.block_chunk, mesh
            )
            return sum_over_devices(found, mesh)

        cut = P(ROWS, SEQUENCE)
        run = on_own(own, mesh, (P(), P(ROWS), cut, cut, BLOCK_SPECS), P())
        whole, cut_again = jax.vjp(lambda params: whole_over_data(params, mesh), state.params)
        sums, grads = run(whole, batch, features, states, blocks)
        # Without a signal there is no loss, and nothing to divide.
        share = 1.0 / jnp.where(sums.weight > 0, sums.weight, 1.0)
        (grads,) = cut_again(jax.tree.map(lambda g: g * share.astype(g.dtype), grads))
        loss = sums.loss * share
        state, metrics = apply_gradients(state, grads, loss, optimizer, config)
        metrics |= {
            "expected_accept_length": sums.accept_len / jnp.maximum(sums.num_blocks, 1.0),
            "num_signals": sums.num_signals,
        }
        return hold_state(state, mesh), metrics

    return jax.jit(step, donate_argnums=0)
