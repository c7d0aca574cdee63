"""The real programs, lowered for a mesh with shapes in place of arrays.

What is compiled here is what `Engine` and the trainer run, from the same functions; nothing is
rewritten for the plan. Builders are called in a worker process (plan/worker.py) by name, with plain
values: they read the config file themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import PROMPT_CHUNK, Engine
from mimo_jax.decode.placement import shapes_on_mesh
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract
from mimo_jax.models.target import Target
from mimo_jax.plan.published import PublishedModel, read_config
from mimo_jax.train.config import TrainConfig
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.placement import ROWS, num_row_parts, param_shardings, state_shardings
from mimo_jax.train.step import Batch, init_state, make_target_step


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


def _sharded(shapes, shardings):
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def _batch(mesh: Mesh, rows: int, length: int) -> Batch:
    cut = NamedSharding(mesh, PartitionSpec(ROWS))
    rows += -rows % num_row_parts(mesh)

    def array(dtype) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=cut)

    ids = array(jnp.int32)
    return Batch(ids, ids, array(jnp.bool_), ids)


def _experiment(config: str):
    experiment = read_config(config).experiment
    if experiment is None:
        raise ConfigError(f"config {config} describes no training run")
    return experiment


def _train_state(params, optimizer, options: TrainConfig, mesh: Mesh) -> Any:
    has_ema = options.ema_decay > 0
    state = jax.eval_shape(lambda p: init_state(p, optimizer, has_ema=has_ema), params)
    return _sharded(state, state_shardings(state, mesh))


def lower_target_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """A whole optimizer step of the target: forward, backward, Muon, balancing; float32."""
    experiment = _experiment(config)
    options = experiment.target_train
    graph, params = abstract(
        lambda: Target(experiment.target, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    optimizer = make_optimizer(params, options, mesh)
    batch = _batch(mesh, options.batch_rows, experiment.corpus.row_len)
    state = _train_state(params, optimizer, options, mesh)
    return make_target_step(graph, optimizer, options, mesh).lower(state, batch)


def lower_drafter_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """A whole optimizer step of the drafter, the frozen target's forward included; float32."""
    experiment = _experiment(config)
    options = experiment.drafter_train
    make_target = lambda: Target(experiment.target, rngs=nnx.Rngs(0), dtype=jnp.float32)
    make_drafter = lambda: Drafter(experiment.drafter, rngs=nnx.Rngs(0), dtype=jnp.float32)
    target_graph, target_params = abstract(make_target)
    drafter_graph, drafter_params = abstract(make_drafter)
    mask = jax.ShapeDtypeStruct((experiment.drafter.hidden_size,), jnp.float32)
    trained = {"drafter": drafter_params, "mask_embedding": mask}
    optimizer = make_optimizer(trained, options, mesh)
    step = make_drafter_step(
        target_graph, drafter_graph, optimizer, options, experiment.drafter, mesh
    )
    return step.lower(
        _train_state(trained, optimizer, options, mesh),
        _sharded(target_params, param_shardings(target_params, mesh)),
        _batch(mesh, options.batch_rows, options.row_len),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
    )
