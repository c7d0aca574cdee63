"""The real programs, lowered for a mesh with shapes in place of arrays.

What is compiled here is what `Engine` and the trainer run, from the same functions; nothing is
rewritten for the plan. Builders are called in a worker process (plan/worker.py) by name, with plain
values: they read the config file themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import PROMPT_CHUNK, Engine
from mimo_jax.decode.placement import shapes_on_mesh
from mimo_jax.plan.published import PublishedModel, read_config
from mimo_jax.train import dry_run


def _engine(
    model: PublishedModel,
    mesh: Mesh,
    *,
    context: int,
    batch_size: int,
    draft_block_len: int,
    implementation: str | None = None,
) -> Engine:
    """An engine without arrays; a block of 1 decodes plainly."""
    drafter = None
    if draft_block_len > 1:
        if model.drafter is None:
            raise ConfigError(f"{model.name} has no drafter; a plain step is a block of 1")
        drafter = shapes_on_mesh(model.drafter, mesh)
    return Engine(
        shapes_on_mesh(model.target, mesh),
        drafter,
        max_len=context,
        batch_size=batch_size,
        draft_block_len=draft_block_len if drafter is not None else None,
        implementation=implementation,
    )


def _params(engine: Engine):
    drafter = engine.drafter
    return engine.target.params, None if drafter is None else drafter.params


def lower_steps(
    mesh: Mesh,
    *,
    config: str,
    context: int,
    batch_size: int,
    draft_block_len: int,
    implementation: str | None = None,
) -> jax.stages.Lowered:
    """The decode loop: draft, verify, accept, commit; with a block of 1 the plain loop.

    With the kernels where the devices run them, or as `implementation` says.
    """
    engine = _engine(
        read_config(config),
        mesh,
        context=context,
        batch_size=batch_size,
        draft_block_len=draft_block_len,
        implementation=implementation,
    )
    state = engine.state_shapes()
    num_steps = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return engine.steps_program(state).lower(_params(engine), state, num_steps)


def lower_prefill(
    mesh: Mesh, *, config: str, context: int, draft_block_len: int
) -> jax.stages.Lowered:
    """One chunk of a prompt that continues one already read: the costliest prefill program."""
    engine = _engine(
        read_config(config), mesh, context=context, batch_size=1, draft_block_len=draft_block_len
    )
    state = engine.state_shapes()
    everywhere = NamedSharding(mesh, PartitionSpec())

    def one(dtype, *shape) -> Any:
        return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=everywhere)

    return engine.prefill_program(is_first=False).lower(
        _params(engine),
        one(jnp.int32, min(PROMPT_CHUNK, engine.capacity)),
        (state.target_cache, state.drafter_cache),
        one(jnp.int32),
        one(jnp.int32),
    )


def _experiment(config: str):
    experiment = read_config(config).experiment
    if experiment is None:
        raise ConfigError(f"config {config} describes no training run")
    return experiment


def lower_target_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """The target's train step of a config that describes a run."""
    return dry_run.lower_target_step(_experiment(config), mesh)


def lower_drafter_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """The drafter's, the frozen target's forward included."""
    return dry_run.lower_drafter_step(_experiment(config), mesh)
