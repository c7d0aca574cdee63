"""Which leaf is updated by what, at which rate: a config made into one optax transform.

Two groups. Matrices inside the layers, expert stacks as one matrix per expert, go to Muon; the
embedding, the head, routers and everything vector-like go to AdamW. `TrainConfig.matrix_optimizer`
"adamw" puts everything into the second group: the comparison, on the same code.

Expert stacks of shape [d, e, f] are seen as [e, d, f], for Muon's matrix is the last two axes; the
optimizer's state keeps that order. On a mesh only the iteration runs inside `shard_map`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mimo_jax.train.config import TrainConfig
from mimo_jax.train.muon import ADAMW, MUON, muon_or_adamw, newton_schulz
from mimo_jax.train.placement import (
    experts_first_spec,
    is_experts_second,
    param_shardings,
    path_names,
)
from mimo_jax.train.schedule import make_schedule
from mimo_jax.train.sharded_muon import newton_schulz_on_mesh

# Leaves that are matrices by shape but not by role: AdamW.
_NOT_MUON = ("embedding", "head", "w_router")


def _group(path, leaf, config: TrainConfig) -> str:
    is_matrix = leaf.ndim >= 2 and not any(name in _NOT_MUON for name in path_names(path))
    return MUON if is_matrix and config.matrix_optimizer == MUON else ADAMW


def _experts_first(tree):
    """Expert stacks [d, e, f] as [e, d, f] and back."""
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


def rates(config: TrainConfig) -> dict[str, optax.Schedule]:
    """Group -> its learning rate as a function of the number of updates done."""
    peaks = {MUON: config.muon_lr, ADAMW: config.adamw_lr}
    return {
        group: make_schedule(
            config.schedule,
            peak,
            num_steps=config.num_steps,
            warmup_steps=config.warmup_steps,
            decay_fraction=config.decay_fraction,
        )
        for group, peak in peaks.items()
    }


def make_optimizer(
    params, config: TrainConfig, mesh: Mesh | None = None
) -> optax.GradientTransformation:
    """Muon on matrices, AdamW on the rest, the global norm clipped before.

    Args:
      params: What is trained, or its shapes: paths, shapes and logical axes are read.
      config: Of the training.
      mesh: Where parameters lie; Newton-Schulz then moves what `sharded_muon.py` says.

    Returns:
      A transform whose `update` needs `params`.
    """
    options: dict[str, Any] = {
        "num_steps": config.newton_schulz_steps,
        "dtype": jnp.dtype(config.newton_schulz_dtype),
    }
    if mesh is None:
        orthogonalise = lambda path, g: newton_schulz(g, **options)
    else:
        shardings = jax.tree_util.tree_leaves_with_path(param_shardings(params, mesh))
        specs = {tuple(path): experts_first_spec(path, s.spec) for path, s in shardings}
        orthogonalise = lambda path, g: newton_schulz_on_mesh(g, specs[path], mesh, **options)
    rate = rates(config)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        _on_experts_first(
            muon_or_adamw(
                jax.eval_shape(_experts_first, params),
                muon_lr=rate[MUON],
                adamw_lr=rate[ADAMW],
                weight_decay=config.weight_decay,
                is_matrix=lambda path, leaf: _group(path, leaf, config) == MUON,
                momentum=config.muon_momentum,
                orthogonalise=orthogonalise,
                b1=config.adam_b1,
                b2=config.adam_b2,
            )
        ),
    )


def by_group(params, config: TrainConfig) -> dict[str, dict[str, Any]]:
    """Group -> name -> leaf, of any pytree shaped like the parameters; no group is empty.

    Example: {"head": [28, 61], "layers": {0: {"w_out": [48, 28]}}}
      -> {"adamw": {"head": ...}, "muon": {"layers.0.w_out": ...}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        # The last entry of a path into a model is "value", the array in its parameter.
        name = ".".join(name for name in path_names(path) if name != "value")
        found.setdefault(_group(path, leaf, config), {})[name] = leaf
    return dict(sorted(found.items()))


def describe_optimizer(params, config: TrainConfig) -> dict[str, Any]:
    """What a run says about its optimizers before it starts; JSON can hold it.

    Args:
      params: What is trained, or its shapes.
      config: Of the training.

    Returns:
      "groups": group -> {"num_leaves", "num_parameters", "peak_lr", "leaves": name -> shape} and,
      for Muon, "num_matrices"; beside them the settings that both share.

    Example: describe_optimizer({"w": float [7, 28, 20], "norm": float [28]}, config)["groups"]
      -> {"adamw": {"num_leaves": 1, "num_parameters": 28, ...}, "muon": {"num_leaves": 1,
      "num_parameters": 3920, "num_matrices": 7, ...}}.
    """
    peaks = {MUON: config.muon_lr, ADAMW: config.adamw_lr}
    groups: dict[str, dict[str, Any]] = {}
    for group, leaves in by_group(params, config).items():
        groups[group] = {
            "num_leaves": len(leaves),
            "num_parameters": sum(int(np.prod(leaf.shape)) for leaf in leaves.values()),
            "peak_lr": peaks[group],
            "leaves": {name: list(leaf.shape) for name, leaf in leaves.items()},
        }
    if MUON in groups:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        stacks = by_group(jax.eval_shape(_experts_first, shapes), config)[MUON].values()
        groups[MUON] |= {
            "num_matrices": sum(int(np.prod(leaf.shape[:-2])) for leaf in stacks),
            "momentum": config.muon_momentum,
            "newton_schulz_steps": config.newton_schulz_steps,
            "newton_schulz_dtype": config.newton_schulz_dtype,
        }
    if ADAMW in groups:
        groups[ADAMW] |= {"b1": config.adam_b1, "b2": config.adam_b2}
    return {
        "groups": groups,
        "schedule": config.schedule,
        "warmup_steps": config.warmup_steps,
        "decay_fraction": config.decay_fraction,
        "weight_decay": config.weight_decay,
        "clip_norm": config.clip_norm,
        "ema_decay": config.ema_decay,
    }
