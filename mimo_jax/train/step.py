"""Jitted train steps: (state, batch) -> (state, metrics). No host I/O, no clock, no data reading.

Two steps share one shape: `make_target_step` (next-token loss on packed rows) and
`make_drafter_step` (position-weighted cross-entropy of draft blocks at random anchors). Both are
pure functions of (state, batch), donate their state, and draw randomness from (seed, step) alone,
so a resumed run repeats an uninterrupted one.

A drafter step costs the same per anchor whatever the row length: context K/V is projected once
per row and each block gathers the `window - 1` positions before its anchor.
"""

import dataclasses
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from mimo_jax.config import DrafterConfig
from mimo_jax.models.params import flatten, unflatten
from mimo_jax.train import block_mask, losses, muon
from mimo_jax.train.config import DrafterTrainConfig, TargetTrainConfig

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


def _is_matrix(path, leaf) -> bool:
    names = [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]
    return leaf.ndim >= 2 and not any(name in _NOT_MUON for name in names)


def _experts_first(tree):
    """Expert stacks [d, e, f] as [e, d, f] and back: Muon's matrix is the last two axes."""

    def move(path, leaf):
        names = [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]
        is_stack = any(name in ("experts_gate", "experts_up") for name in names)
        return jnp.swapaxes(leaf, 0, 1) if is_stack else leaf

    return jax.tree_util.tree_map_with_path(move, tree)


def _on_experts_first(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on a view of the tree in which every expert stack has its experts in front."""

    def update(updates, state, params=None):
        moved = None if params is None else _experts_first(params)
        updates, state = inner.update(_experts_first(updates), state, moved)
        return _experts_first(updates), state

    return optax.GradientTransformation(lambda params: inner.init(_experts_first(params)), update)


def make_optimizer(params, config: TargetTrainConfig | DrafterTrainConfig):
    """Muon on matrices (expert stacks batched), AdamW on the rest, global-norm clipping before."""
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
            )
        ),
    )


def init_state(params, optimizer) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


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


def make_target_step(graph, optimizer, config: TargetTrainConfig):
    """Returns step(state, batch) -> (state, {"loss", "grad_norm"}); donates the state."""

    def loss_fn(params, batch: Batch):
        target = nnx.merge(graph, params)
        out = target(
            batch.token_ids,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            capacity_factor=config.capacity_factor,
        )
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
        return TrainState(params, opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def make_target_eval(graph):
    """Returns eval(params, batch) -> (sum of token losses, number of tokens), exact experts."""

    def evaluate(params, batch: Batch):
        target = nnx.merge(graph, params)
        out = target(
            batch.token_ids, segment_ids=batch.segment_ids, positions=batch.positions
        )
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


def draft_logits_at_anchors(
    target, drafter, batch: Batch, context_features, anchor_pos, mask_embedding
):
    """Logits of the draft slots 1..m of every anchor, as the decode loop would compute them.

    Args:
      target: Merged target (its embedding and head are shared).
      drafter: Merged drafter.
      batch: Rows.
      context_features: [b, s, c] of the rows.
      anchor_pos: int32 [b, N] indices into the row.
      mask_embedding: [d], the vector at mask slots.

    Returns:
      float32 [b, N, m, v].
    """
    config = drafter.config
    b, s = batch.token_ids.shape
    n = anchor_pos.shape[1]
    m1, d = config.draft_block_len, config.hidden_size
    context = drafter.project_context(context_features, batch.positions)
    window = max(w if w is not None else s + 1 for w in config.windows)
    index, is_valid = block_mask.gather_context_index(
        anchor_pos, window=min(window, s + 1), segment_ids=batch.segment_ids
    )
    at = lambda x, i: jnp.take_along_axis(x, i.reshape(b, -1), axis=1)
    context_pos = jnp.where(is_valid, at(batch.positions, index).reshape(index.shape), -1)
    anchors = target.embed(at(batch.token_ids, anchor_pos)).reshape(b * n, 1, d)
    block = jnp.concatenate(
        [
            jax.lax.stop_gradient(anchors),
            jnp.broadcast_to(mask_embedding[None, None, :], (b * n, m1 - 1, d)),
        ],
        axis=1,
    )
    hidden = drafter.train_hidden(
        block,
        tuple(_gather_blocks(x, index) for x in context.keys),
        tuple(_gather_blocks(x, index) for x in context.values),
        context_pos.reshape(b * n, -1),
        at(batch.positions, anchor_pos).reshape(b * n),
    )
    logits = target.unembed(hidden[:, 1:], config.vocab_size)
    return logits.reshape(b, n, m1 - 1, -1)


def make_drafter_step(
    target_graph, drafter_graph, optimizer, config: DrafterTrainConfig, model: DrafterConfig
):
    """Returns step(state, target_params, batch, seed) -> (state, metrics).

    The trained pytree is {"drafter": params, "mask_embedding": [d]}; the target, its embedding
    and its head are frozen. Anchors are drawn from (seed, step).
    """
    position_weights = losses.draft_position_weights(model.num_draft_tokens, config.gamma)

    def step(state: TrainState, target_params, batch: Batch, seed):
        target = nnx.merge(target_graph, target_params)
        out = target(
            batch.token_ids,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            tap_layer_ids=model.target_layer_ids,
        )
        features = jax.lax.stop_gradient(out.context_features)
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        anchor_pos, keep = block_mask.choose_anchors(
            key, batch.loss_mask, config.num_anchors, batch.segment_ids
        )
        labels, is_valid = block_mask.draft_block_labels(
            batch.token_ids,
            batch.loss_mask,
            batch.segment_ids,
            anchor_pos,
            keep,
            model.draft_block_len,
        )
        weights = jnp.where(is_valid, position_weights[None, None, :], 0.0)

        def loss_fn(trained):
            drafter = nnx.merge(drafter_graph, trained["drafter"])
            logits = draft_logits_at_anchors(
                target, drafter, batch, features, anchor_pos, trained["mask_embedding"]
            )
            return losses.weighted_cross_entropy(logits, labels, weights)

        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "expected_accept_length": losses.expected_accept_length(aux.is_correct, is_valid),
            "num_signals": is_valid.sum(),
        }
        return TrainState(params, opt_state, state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)
