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
from mimo_jax.decode.sampling import RowSampling
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, named_shardings
from mimo_jax.models.target import Target
from mimo_jax.plan.published import PublishedModel, read_config
from mimo_jax.sharding import TRAIN
from mimo_jax.train.step import (
    Batch,
    TrainState,
    init_state,
    make_drafter_step,
    make_optimizer,
    make_target_step,
)


def _engine(
    model: PublishedModel, mesh: Mesh, *, context: int, batch_size: int, draft_block_len: int
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
    )


def _params(engine: Engine):
    drafter = engine.drafter
    return engine.target.params, None if drafter is None else drafter.params


def lower_steps(
    mesh: Mesh, *, config: str, context: int, batch_size: int, draft_block_len: int
) -> jax.stages.Lowered:
    """The decode loop: draft, verify, accept, commit; with a block of 1 the plain loop."""
    engine = _engine(
        read_config(config),
        mesh,
        context=context,
        batch_size=batch_size,
        draft_block_len=draft_block_len,
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

    sampling = RowSampling(
        one(jnp.float32), one(jnp.float32), one(jnp.int32), one(jnp.int32)
    )
    return engine.prefill_program(is_first=False).lower(
        _params(engine),
        one(jnp.int32, min(PROMPT_CHUNK, engine.capacity)),
        (state.target_cache, state.drafter_cache),
        one(jnp.int32),
        one(jnp.int32),
        sampling,
    )


def _sharded(shapes, shardings):
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def _like_params(state: TrainState, params, shardings, mesh: Mesh):
    """Shardings of a train state: leaves shaped like a parameter lie where it lies."""
    where = {}
    for leaf, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        where.setdefault(leaf.shape, sharding)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: where.get(leaf.shape, everywhere), state)


def _batch(mesh: Mesh, rows: int, length: int) -> Batch:
    cut = NamedSharding(mesh, TRAIN.spec(("batch", None)))

    def array(dtype) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=cut)

    ids = array(jnp.int32)
    return Batch(ids, ids, array(jnp.bool_), ids)


def _experiment(config: str):
    experiment = read_config(config).experiment
    if experiment is None:
        raise ConfigError(f"config {config} describes no training run")
    return experiment


def lower_target_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """A whole optimizer step of the target: forward, backward, Muon, balancing; float32."""
    experiment = _experiment(config)
    graph, params = abstract(
        lambda: Target(experiment.target, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    optimizer = make_optimizer(params, experiment.target_train)
    state = jax.eval_shape(lambda p: init_state(p, optimizer), params)
    shardings = named_shardings(params, TRAIN, mesh)
    state = _sharded(state, _like_params(state, params, shardings, mesh))
    batch = _batch(mesh, experiment.target_train.batch_rows, experiment.corpus.row_len)
    return make_target_step(graph, optimizer, experiment.target_train).lower(state, batch)


def lower_drafter_step(mesh: Mesh, *, config: str) -> jax.stages.Lowered:
    """A whole optimizer step of the drafter, the frozen target's forward included; float32."""
    experiment = _experiment(config)
    make_target = lambda: Target(experiment.target, rngs=nnx.Rngs(0), dtype=jnp.float32)
    make_drafter = lambda: Drafter(experiment.drafter, rngs=nnx.Rngs(0), dtype=jnp.float32)
    target_graph, target_params = abstract(make_target)
    drafter_graph, drafter_params = abstract(make_drafter)
    everywhere = NamedSharding(mesh, PartitionSpec())
    mask = jax.ShapeDtypeStruct((experiment.drafter.hidden_size,), jnp.float32)
    trained = {"drafter": drafter_params, "mask_embedding": mask}
    optimizer = make_optimizer(trained, experiment.drafter_train)
    state = jax.eval_shape(lambda p: init_state(p, optimizer), trained)
    shardings = {
        "drafter": named_shardings(drafter_params, TRAIN, mesh),
        "mask_embedding": everywhere,
    }
    state = _sharded(state, _like_params(state, trained, shardings, mesh))
    target_params = _sharded(target_params, named_shardings(target_params, TRAIN, mesh))
    config_of = experiment.drafter_train
    batch = _batch(mesh, config_of.batch_rows, config_of.row_len)
    seed = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    step = make_drafter_step(
        target_graph, drafter_graph, optimizer, config_of, experiment.drafter
    )
    return step.lower(state, target_params, batch, seed)
