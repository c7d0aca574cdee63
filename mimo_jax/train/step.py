"""Jitted train steps: (state, batch) -> (state, metrics). No host I/O, no clock, no data reading.

State, what a step does with its gradients, and the target's step are here, the drafter's step in
`drafter_step.py`. Both are pure functions of (state, batch), donate their state, and draw
randomness from (seed, step) alone, so a resumed run repeats an uninterrupted one.

Both take a mesh (sharding.TRAIN); without one nothing about them changes. See `placement.py` for
what lies where, `sharded_muon.py` and `layers/dispatch.py` for what moves.

A bad step (NaN, Inf) is undone by a `where` over the whole new state, which the compiler fuses into
the writes. Rejected: `lax.cond` around the update: LOG.md has both times.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Int

from mimo_jax.config import require
from mimo_jax.layers.dispatch import PADDED, route_and_run_on_mesh, run_experts_with_capacity
from mimo_jax.layers.moe import route_and_run
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.quant.qat import fake_quantize_params
from mimo_jax.train import losses
from mimo_jax.train.config import QatConfig, TargetTrainConfig, TrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.optimizer import by_group, rates
from mimo_jax.train.placement import (
    hold_state,
    num_row_parts,
    place_activation,
    place_rows,
    state_shardings,
    whole_over_data,
)


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a run must save.

    Attributes:
      params: What is trained.
      opt_state: Of the optimizer.
      step: Steps taken, bad ones included; batches and randomness follow from it.
      ema: Average of params, float32, lying as they do; None where `ema_decay` is 0.
      num_bad: Bad steps in a row, up to now; see `apply_gradients`.
      num_skipped: Bad steps in all.
    """

    params: Any
    opt_state: Any
    step: Int[Array, ""]
    ema: Any
    num_bad: Int[Array, ""]
    num_skipped: Int[Array, ""]


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


def init_state(
    params, optimizer, mesh: Mesh | None = None, *, has_ema: bool = False
) -> TrainState:
    """The state before the first step.

    Args:
      params: What is trained; on a mesh it must lie there already.
      optimizer: From `make_optimizer`.
      mesh: Of TRAIN.
      has_ema: Whether weights are averaged, as `TrainConfig.ema_decay` above 0 asks.
    """

    def make(params) -> TrainState:
        zero = lambda: jnp.zeros((), jnp.int32)
        # A copy: a donated state may hold no array twice.
        average = lambda p: jnp.array(p, jnp.float32, copy=True)
        ema = jax.tree.map(average, params) if has_ema else None
        return TrainState(params, optimizer.init(params), zero(), ema, zero(), zero())

    if mesh is None:
        return make(params)
    return jax.jit(make, out_shardings=state_shardings(jax.eval_shape(make, params), mesh))(params)


def eval_params(state: TrainState):
    """The weights to evaluate and export: their average where there is one."""
    return state.params if state.ema is None else state.ema


def _move_ema(ema, params, decay: float, num_updates: Array):
    """One step of the average. Early on it forgets faster: start weights must not stay in it.

    decay_t = min(decay, (1 + t) / (10 + t)), t updates before this one: .1, .18, .25, ... Not the
    division by 1 - decay ** t, because the average can then be read as it lies.
    """
    t = num_updates.astype(jnp.float32)
    kept = jnp.minimum(decay, (1 + t) / (10 + t))
    return jax.tree.map(lambda e, p: e + (1 - kept) * (p.astype(jnp.float32) - e), ema, params)


def apply_gradients(
    state: TrainState,
    grads,
    loss: Array,
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    after_update: Callable[[Any], Any] = lambda params: params,
) -> tuple[TrainState, dict[str, Any]]:
    """One update of parameters, optimizer state and average, or none if the step is bad.

    Bad is a step whose loss or gradient norm is not finite. It changes `step`, `num_bad` and
    `num_skipped` and not one bit besides; learning rates follow the updates that were done. Chosen
    inside the program, without asking the host.

    Args:
      state: Before the step.
      grads: Like state.params, not clipped.
      loss: Scalar.
      optimizer: From `make_optimizer` of the same config.
      config: Of the training.
      after_update: What else moves parameters in a good step, of them alone.

    Returns:
      (state, metrics): "loss", "grad_norm" (before clipping), "is_bad" 0 or 1, "num_bad" and
      "num_skipped" after this step, and for each group G of the optimizer "lr_G" and
      "update_norm_G" (with rate and decay; 0 in a bad step).

    Raises:
      ConfigError: If the state has an average and the config none, or the reverse.
    """
    require(
        (state.ema is not None) == (config.ema_decay > 0),
        f"ema_decay {config.ema_decay} does not go with a state "
        f"{'without' if state.ema is None else 'with'} an average: see has_ema of init_state",
    )
    grad_norm = optax.tree.norm(grads)
    is_good = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    num_updates = state.step - state.num_skipped
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = after_update(optax.apply_updates(state.params, updates))
    ema = state.ema
    if ema is not None:
        ema = _move_ema(ema, params, config.ema_decay, num_updates)
    new = (params, opt_state, ema)
    old = (state.params, state.opt_state, state.ema)
    params, opt_state, ema = jax.tree.map(functools.partial(jnp.where, is_good), new, old)
    is_bad = (~is_good).astype(jnp.int32)
    new_state = TrainState(
        params,
        opt_state,
        step=state.step + 1,
        ema=ema,
        num_bad=(state.num_bad + 1) * is_bad,
        num_skipped=state.num_skipped + is_bad,
    )
    metrics: dict[str, Any] = {
        "loss": loss,
        "grad_norm": grad_norm,
        "is_bad": is_bad,
        "num_bad": new_state.num_bad,
        "num_skipped": new_state.num_skipped,
    }
    rate_of = rates(config)
    for group, leaves in by_group(updates, config).items():
        metrics[f"lr_{group}"] = rate_of[group](num_updates)
        metrics[f"update_norm_{group}"] = jnp.where(is_good, optax.tree.norm(leaves), 0.0)
    return new_state, metrics


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
    """Returns step(state, batch) -> (state, metrics of `apply_gradients`); donates the state."""
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
        balance = lambda params: _move_selection_bias(params, routing, config.balance_rate)
        state, metrics = apply_gradients(state, grads, loss, optimizer, config, balance)
        return hold_state(state, mesh), metrics

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
