"""Jitted train steps: (state, batch) -> (state, metrics). No host I/O, no clock, no data reading.

Two steps share one shape: `make_target_step` (next-token loss on packed rows) and
`make_drafter_step` (position-weighted cross-entropy of draft blocks at random anchors). Both are
pure functions of (state, batch), donate their state, and draw randomness from (seed, step) alone,
so a resumed run repeats an uninterrupted one.

A drafter step costs the same per anchor whatever the row length: context K/V is projected once
per row and each block gathers the `window - 1` positions before its anchor.

Both take a mesh (sharding.TRAIN); without one nothing about them changes. See `placement.py` for
what lies where, `sharded_muon.py` and `layers/dispatch.py` for what moves.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mimo_jax.config import DrafterConfig
from mimo_jax.layers.dispatch import PADDED, route_and_run_on_mesh, run_experts_with_capacity
from mimo_jax.layers.moe import route_and_run
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.train import block_mask, losses, muon
from mimo_jax.train.config import DrafterTrainConfig, TargetTrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.placement import (
    experts_first_spec,
    hold_state,
    is_experts_second,
    num_row_parts,
    param_shardings,
    path_names,
    per_row,
    place_activation,
    place_rows,
    state_shardings,
    whole_over_data,
)
from mimo_jax.train.sharded_muon import newton_schulz_on_mesh

# Leaves that are matrices by shape but not by role: AdamW.
_NOT_MUON = ("embedding", "head", "w_router")


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run must save: parameters, optimizer state and the step count."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]


class Batch(NamedTuple):
    """Packed rows on the device; int32 [r, s] each, loss_mask bool (see train/data.py)."""

    token_ids: Array
    segment_ids: Array
    loss_mask: Array
    positions: Array


def place_batch(rows: PackedRows, mesh: Mesh | None = None) -> Batch:
    """Packed rows on the host -> on the devices, filled up with empty rows where they are short."""
    num_missing = -len(rows.token_ids) % num_row_parts(mesh)
    padded = (np.pad(array, ((0, num_missing), (0, 0))) for array in rows)
    return place_rows(Batch._make(padded), mesh)


def _is_matrix(path, leaf) -> bool:
    return leaf.ndim >= 2 and not any(name in _NOT_MUON for name in path_names(path))


def _experts_first(tree):
    """Expert stacks [d, e, f] as [e, d, f] and back: Muon's matrix is the last two axes."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.swapaxes(leaf, 0, 1) if is_experts_second(path) else leaf, tree
    )


def _on_experts_first(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on a view of the tree in which every expert stack has its experts in front."""

    def update(updates, state, params=None):
        moved = None if params is None else _experts_first(params)
        updates, state = inner.update(_experts_first(updates), state, moved)
        return _experts_first(updates), state

    return optax.GradientTransformation(lambda params: inner.init(_experts_first(params)), update)


def make_optimizer(
    params, config: TargetTrainConfig | DrafterTrainConfig, mesh: Mesh | None = None
):
    """Muon on matrices (expert stacks batched), AdamW on the rest, global-norm clipping before."""
    options = {}
    if mesh is not None:
        shardings = jax.tree_util.tree_leaves_with_path(param_shardings(params, mesh))
        specs = {tuple(path): experts_first_spec(path, s.spec) for path, s in shardings}
        options["orthogonalise"] = lambda path, g: newton_schulz_on_mesh(
            g, specs[tuple(path)], mesh
        )
    schedules = [
        muon.wsd_or_linear_schedule(
            peak,
            num_steps=config.num_steps,
            warmup_steps=config.warmup_steps,
            decay_fraction=config.decay_fraction,
        )
        for peak in (config.muon_lr, config.adamw_lr)
    ]
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _on_experts_first(
            muon.muon_or_adamw(
                jax.eval_shape(_experts_first, params),
                muon_lr=schedules[0],
                adamw_lr=schedules[1],
                weight_decay=config.weight_decay,
                is_matrix=_is_matrix,
                **options,
            )
        ),
    )


def init_state(params, optimizer, mesh: Mesh | None = None) -> TrainState:
    """The state before the first step; on a mesh, params must lie there already."""
    make = lambda params: TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    if mesh is None:
        return make(params)
    return jax.jit(make, out_shardings=state_shardings(jax.eval_shape(make, params), mesh))(params)


def _move_selection_bias(params, routing, rate: float):
    """Auxiliary-loss-free balancing: raise the bias of experts below the mean load, lower others.

    Source: arXiv:2408.15664.
    """
    flat = flatten(params)
    names = sorted(
        (name for name in flat if name.endswith("selection_bias")),
        key=lambda name: int(name.split(".")[1]),
    )
    for name, (expert_ids, _) in zip(names, routing, strict=True):
        chosen = jax.nn.one_hot(expert_ids, flat[name].shape[0], dtype=jnp.float32)
        load = chosen.sum(axis=(0, 1, 2))
        flat[name] = flat[name] + rate * jnp.sign(load.mean() - load)
    return unflatten(params, flat)


def run_target(target, batch: Batch, mesh: Mesh | None = None, **options):
    """The target over a batch's rows, its activations on the mesh."""
    return target(
        batch.token_ids,
        segment_ids=batch.segment_ids,
        positions=batch.positions,
        place=functools.partial(place_activation, mesh=mesh),
        **options,
    )


def sparse_layer(mesh: Mesh | None, capacity_factor: float | None, dispatch: str):
    """How a step runs sparse layers, as `moe.route_and_run`; no capacity_factor: drops no token."""
    if mesh is not None:
        return functools.partial(
            route_and_run_on_mesh,
            mesh=mesh,
            capacity_factor=capacity_factor,
            dispatch=dispatch,
        )
    if capacity_factor is None:
        return route_and_run
    run = functools.partial(run_experts_with_capacity, capacity_factor=capacity_factor)
    return functools.partial(route_and_run, run=run)


def make_target_step(
    graph,
    optimizer,
    config: TargetTrainConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """Returns step(state, batch) -> (state, {"loss", "grad_norm"}); donates the state."""
    run_sparse = sparse_layer(mesh, config.capacity_factor, dispatch)

    def loss_fn(params, batch: Batch):
        target = nnx.merge(graph, whole_over_data(params, mesh))
        out = run_target(target, batch, mesh, run_sparse=run_sparse)
        everything = batch.segment_ids > 0
        labels, mask = losses.shift_labels(batch.token_ids, everything, batch.segment_ids)
        loss, _ = losses.next_token_loss(out.logits, labels, mask)
        return loss, out.routing

    def step(state: TrainState, batch: Batch):
        (loss, routing), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params = _move_selection_bias(params, routing, config.balance_rate)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return hold_state(TrainState(params, opt_state, state.step + 1), mesh), metrics

    return jax.jit(step, donate_argnums=0)


def make_target_eval(graph, mesh: Mesh | None = None, dispatch: str = PADDED):
    """Returns eval(params, batch) -> (sum of token losses, number of tokens), exact experts."""

    def evaluate(params, batch: Batch):
        target = nnx.merge(graph, whole_over_data(params, mesh))
        out = run_target(target, batch, mesh, run_sparse=sparse_layer(mesh, None, dispatch))
        everything = batch.segment_ids > 0
        labels, mask = losses.shift_labels(batch.token_ids, everything, batch.segment_ids)
        loss, aux = losses.next_token_loss(out.logits, labels, mask)
        return loss * aux.weight_sum, aux.weight_sum

    return jax.jit(evaluate)


def _gather_blocks(x, index):
    """x [b, k, s, h] at positions index [b, N, w] -> [b*N, k, w, h]."""
    b, k, s, h = x.shape
    n, w = index.shape[1:]
    rows = x.transpose(0, 2, 1, 3).reshape(b * s, k * h)
    flat = (index + (jnp.arange(b, dtype=index.dtype) * s)[:, None, None]).reshape(-1)
    return jnp.take(rows, flat, axis=0).reshape(b * n, w, k, h).transpose(0, 2, 1, 3)


def _read_rows(batch: Batch, anchor_pos, window: int):
    """What blocks need of their rows, one entry per block: where context lies, and the anchors."""
    blocks = anchor_pos.size
    index, is_valid = block_mask.gather_context_index(
        anchor_pos, window=window, segment_ids=batch.segment_ids
    )
    at = lambda x, i: jnp.take_along_axis(x, i.reshape(i.shape[0], -1), axis=1)
    context_pos = jnp.where(is_valid, at(batch.positions, index).reshape(index.shape), -1)
    return (
        index,
        context_pos.reshape(blocks, -1),
        at(batch.token_ids, anchor_pos).reshape(blocks),
        at(batch.positions, anchor_pos).reshape(blocks),
    )


def draft_logits_at_anchors(
    target,
    drafter,
    batch: Batch,
    context_features,
    anchor_pos,
    mask_embedding,
    mesh: Mesh | None = None,
):
    """Logits of the draft slots 1..m of every anchor, as the decode loop would compute them.

    Args:
      target: Merged target (its embedding and head are shared).
      drafter: Merged drafter.
      batch: Rows.
      context_features: [b, s, c] of the rows.
      anchor_pos: int32 [b, N] indices into the row.
      mask_embedding: [d], the vector at mask slots.
      mesh: Where rows lie, inside a jitted step.

    Returns:
      float32 [b, N, m, v].
    """
    config = drafter.config
    b, s = batch.token_ids.shape
    n = anchor_pos.shape[1]
    m1, d = config.draft_block_len, config.hidden_size
    context = drafter.project_context(context_features, batch.positions)
    window = min(max(w if w is not None else s + 1 for w in config.windows), s + 1)
    read_rows = per_row(functools.partial(_read_rows, window=window), mesh)
    index, context_pos, anchor_ids, block_pos = read_rows(batch, anchor_pos)
    anchors = target.embed(anchor_ids[:, None])
    block = jnp.concatenate(
        [
            jax.lax.stop_gradient(anchors),
            jnp.broadcast_to(mask_embedding[None, None, :], (b * n, m1 - 1, d)),
        ],
        axis=1,
    )
    gather = per_row(_gather_blocks, mesh)
    hidden = drafter.train_hidden(
        block,
        tuple(gather(x, index) for x in context.keys),
        tuple(gather(x, index) for x in context.values),
        context_pos,
        block_pos,
    )
    logits = target.unembed(hidden[:, 1:], config.vocab_size)
    return logits.reshape(b, n, m1 - 1, -1)


class DraftBlocks(NamedTuple):
    """Anchors int32 [b, N] of a batch; labels int32 and is_valid bool [b, N, m] of their slots."""

    anchor_pos: Array
    labels: Array
    is_valid: Array


def draw_blocks(
    seed, step, batch: Batch, num_anchors: int, draft_block_len: int, mesh: Mesh | None = None
) -> DraftBlocks:
    """Random draft blocks of a batch and their labels, without a word between devices.

    Args:
      seed: Of the run.
      step: Of the run; each step draws anew.
      batch: Rows.
      num_anchors: Per row.
      draft_block_len: Anchor included.
      mesh: Where rows lie, inside a jitted step.
    """

    def draw(batch: Batch, sequence_ids):
        key = jax.random.fold_in(jax.random.key(seed), step)
        anchor_pos, keep = block_mask.choose_anchors(
            key, batch.loss_mask, num_anchors, batch.segment_ids, sequence_ids
        )
        labels, is_valid = block_mask.draft_block_labels(
            batch.token_ids,
            batch.loss_mask,
            batch.segment_ids,
            anchor_pos,
            keep,
            draft_block_len,
        )
        return DraftBlocks(anchor_pos, labels, is_valid)

    sequence_ids = jnp.arange(batch.token_ids.shape[0], dtype=jnp.int32)
    return per_row(draw, mesh)(batch, sequence_ids)


def make_drafter_step(
    target_graph,
    drafter_graph,
    optimizer,
    config: DrafterTrainConfig,
    model: DrafterConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """Returns step(state, target_params, batch, seed) -> (state, metrics).

    The trained pytree is {"drafter": params, "mask_embedding": [d]}; the target, its embedding
    and its head are frozen. Anchors are drawn from (seed, step).
    """
    position_weights = losses.draft_position_weights(model.num_draft_tokens, config.gamma)

    def step(state: TrainState, target_params, batch: Batch, seed):
        target = nnx.merge(target_graph, whole_over_data(target_params, mesh))
        out = run_target(
            target,
            batch,
            mesh,
            tap_layer_ids=model.target_layer_ids,
            run_sparse=sparse_layer(mesh, None, dispatch),
        )
        features = jax.lax.stop_gradient(out.context_features)
        blocks = draw_blocks(
            seed, state.step, batch, config.num_anchors, model.draft_block_len, mesh
        )
        weights = jnp.where(blocks.is_valid, position_weights[None, None, :], 0.0)

        def loss_fn(trained):
            trained = whole_over_data(trained, mesh)
            drafter = nnx.merge(drafter_graph, trained["drafter"])
            logits = draft_logits_at_anchors(
                target,
                drafter,
                batch,
                features,
                blocks.anchor_pos,
                trained["mask_embedding"],
                mesh,
            )
            return losses.weighted_cross_entropy(logits, blocks.labels, weights)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "expected_accept_length": losses.expected_accept_length(
                aux.is_correct, blocks.is_valid
            ),
            "num_signals": blocks.is_valid.sum(),
        }
        return hold_state(TrainState(params, opt_state, state.step + 1), mesh), metrics

    return jax.jit(step, donate_argnums=0)
