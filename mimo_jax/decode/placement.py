"""Where a decode program's arrays live on a mesh, and the one `shard_map` around it.

Parameters are placed by `models/cut.py`. What the loop carries follows two rules: rows of a batch
over "data", KV heads over "model"; everything else of a row is the same on all its devices. The
state of a single row, which prefill makes, is not cut over "data".

Without a mesh every function here hands back what it was given.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mimo_jax.cache import KVCache
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig
from mimo_jax.models.cut import as_loaded, cut_model, cut_shapes, part_graph, replicate_model
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, flatten, named_shardings
from mimo_jax.models.target import Target
from mimo_jax.sharding import DECODE, MODEL, mesh_sizes

ONE_ROW, ROWS = None, "batch"  # logical name of the leading axis


@dataclasses.dataclass(frozen=True)
class Model[Config]:
    """A config with its split module: what checkpoint loaders return.

    Attributes:
      config: Of the whole model.
      graph: Static structure; on a mesh that of one device's part.
      params: Arrays, or jax.ShapeDtypeStruct with shardings.
      mesh: Where params are placed, or None: one device.
    """

    config: Config
    graph: Any
    params: Any
    mesh: Mesh | None = None

    @property
    def dtype(self):
        """Of the activations: that of the embedding, or of a drafter's fusion; else None."""
        flat = flatten(self.params)
        return next((flat[name].dtype for name in ("embedding", "w_fuse") if name in flat), None)


def place_on_mesh[Config](
    model: Model[Config], mesh: Mesh | None, *, is_replicated: bool = False
) -> Model[Config]:
    """A model of one memory cut over a mesh of `sharding.DECODE`; as it is if already there.

    Args:
      model: The model.
      mesh: With axes ("data", "model"), or None.
      is_replicated: Give every device a whole copy: for drafters whose heads do not divide. Costs
        its weights' bytes on every device and saves its all-reduces.

    Raises:
      ConfigError: If an axis does not divide; says which, its size and what would fit. If it is a
        drafter that decodes on one device only.
    """
    if mesh is None or model.mesh == mesh:
        return model
    if not isinstance(model.config, TargetConfig | DrafterConfig):
        name = type(model.config).__name__
        raise ConfigError(f"a model of {name} decodes on one device only; leave the mesh out")
    if is_replicated:
        return Model(model.config, model.graph, replicate_model(model.params, mesh), mesh)
    return Model(model.config, *cut_model(model.graph, model.params, model.config, mesh), mesh)


def shapes_on_mesh[Config: (TargetConfig, DrafterConfig)](
    config: Config, mesh: Mesh, dtype=jnp.bfloat16
) -> Model[Config]:
    """A model without arrays, cut over a mesh: to compile its programs for devices nobody has.

    FP8 that the mesh cannot cut counts as expanded, as loaders do.

    Raises:
      ConfigError: As `place_on_mesh`.
    """
    if isinstance(config, TargetConfig):
        config = as_loaded(config, mesh_sizes(mesh)[MODEL])
        graph, shapes = abstract(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype))
    else:
        graph, shapes = abstract(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype))
    num_parts = mesh_sizes(mesh)[MODEL]
    local = part_graph(graph, shapes, config, num_parts)
    shapes = cut_shapes(shapes, config, num_parts)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        named_shardings(shapes, DECODE, mesh),
    )
    return Model(config, local, params, mesh)


@no_type_check  # specs stand where arrays do
def cache_specs(cache: KVCache, rows: str | None, *, is_cut: bool = True) -> KVCache:
    """Partition specs in the shape of a cache; is_cut says whether its heads are cut."""
    arrays = DECODE.spec((rows, "kv_heads" if is_cut else None))
    layers = jax.tree.map(lambda _: arrays, cache.layers)
    by_row = lambda x: None if x is None else DECODE.spec((rows,))
    return dataclasses.replace(
        cache,
        layers=layers,
        ring_positions=by_row(cache.ring_positions),
        num_sealed=by_row(cache.num_sealed),
    )


def row_specs(rows_tree, rows: str | None):
    """Partition specs of arrays whose leading axis is the rows."""
    return jax.tree.map(lambda _: DECODE.spec((rows,)), rows_tree)


def rows_per_device(batch_size: int, mesh: Mesh | None) -> int:
    """Rows of one device.

    Raises:
      ConfigError: If rows do not divide over "data".
    """
    num_parts = 1 if mesh is None else mesh_sizes(mesh)["data"]
    if batch_size % num_parts:
        raise ConfigError(
            f"batch_size {batch_size} cannot be cut into {num_parts} parts (mesh data={num_parts})"
        )
    return batch_size // num_parts


def program(
    fn: Callable, mesh: Mesh | None, in_specs: tuple, out_specs: Any, donate: tuple[int, ...] = ()
):
    """`jax.jit` of a function, on a mesh wrapped into one shard_map with these specs."""
    if mesh is None:
        return jax.jit(fn, donate_argnums=donate)
    is_spec = lambda x: isinstance(x, PartitionSpec)
    place = lambda specs: jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec
    )
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
        in_shardings=place(in_specs),
        out_shardings=place(out_specs),
        donate_argnums=donate,
    )


def param_specs(model: Model):
    """Partition spec of every parameter of a placed model."""
    return jax.tree.map(lambda leaf: leaf.sharding.spec, model.params)


def is_cut(model: Model) -> bool:
    """Whether a placed model's heads are cut over the mesh rather than copied."""
    specs = jax.tree.leaves(
        param_specs(model), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
    )
    return any(MODEL in spec for spec in specs)
