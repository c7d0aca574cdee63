"""Jitted train steps: (state, batch) -> (state, metrics). No host I/O, no clock, no data reading.

State, optimizer and the target's step are here, the drafter's step in `drafter_step.py`. Both are
pure functions of (state, batch), donate their state, and draw randomness from (seed, step) alone,
so a resumed run repeats an uninterrupted one.

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

from mimo_jax.layers.dispatch import PADDED, route_and_run_on_mesh, run_experts_with_capacity
from mimo_jax.layers.moe import route_and_run
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.quant.qat import fake_quantize_params
from mimo_jax.train import losses, muon
from mimo_jax.train.config import QatConfig, TargetTrainConfig, TrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.placement import (
    experts_first_spec,
    hold_state,
    is_experts_second,
    num_row_parts,
    param_shardings,
    path_names,
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
    params, config: TrainConfig, mesh: Mesh | None = None
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


def quantized_view(params, qat: QatConfig | None):
    """Parameters as the forward of quantization-aware training sees them."""
    if qat is None:
        return params
    return unflatten(params, fake_quantize_params(flatten(params), qat.rule))


def make_target_step(
    graph,
    optimizer,
    config: TargetTrainConfig,
    mesh: Mesh | None = None,
    dispatch: str = PADDED,
):
    """Returns step(state, batch) -> (state, {"loss", "grad_norm"}); donates the state."""
    run_sparse = sparse_layer(mesh, config.capacity_factor, dispatch)
    distill_weight = 0.0 if config.qat is None else config.qat.distill_weight

    def loss_fn(params, batch: Batch):
        params = whole_over_data(params, mesh)
        target = nnx.merge(graph, quantized_view(params, config.qat))
        out = run_target(target, batch, mesh, run_sparse=run_sparse)
        everything = batch.segment_ids > 0
        labels, mask = losses.shift_labels(batch.token_ids, everything, batch.segment_ids)
        loss, _ = losses.next_token_loss(out.logits, labels, mask)
        if distill_weight:
            teacher = nnx.merge(graph, jax.lax.stop_gradient(params))
            theirs = run_target(teacher, batch, mesh, run_sparse=run_sparse).logits
            apart = losses.divergence(out.logits, jax.lax.stop_gradient(theirs), mask)
            loss = (1 - distill_weight) * loss + distill_weight * apart
        return loss, out.routing

    def step(state: TrainState, batch: Batch):
        (loss, routing), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        params = _move_selection_bias(params, routing, config.balance_rate)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return hold_state(TrainState(params, opt_state, state.step + 1), mesh), metrics

    return jax.jit(step, donate_argnums=0)


def make_target_eval(
    graph, mesh: Mesh | None = None, dispatch: str = PADDED, qat: QatConfig | None = None
):
    """Returns eval(params, batch) -> (sum of token losses, number of tokens), exact experts."""

    def evaluate(params, batch: Batch):
        target = nnx.merge(graph, quantized_view(whole_over_data(params, mesh), qat))
        out = run_target(target, batch, mesh, run_sparse=sparse_layer(mesh, None, dispatch))
        everything = batch.segment_ids > 0
        labels, mask = losses.shift_labels(batch.token_ids, everything, batch.segment_ids)
        loss, aux = losses.next_token_loss(out.logits, labels, mask)
        return loss * aux.weight_sum, aux.weight_sum

    return jax.jit(evaluate)
