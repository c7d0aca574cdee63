"""Where training state, batches and activations lie on a mesh of sharding.TRAIN.

Every function takes `mesh=None` for one device and then changes nothing, so a train step is written
once. The dense part of a step is left to the compiler (Auto axes): state is cut as its rules say,
and `whole_over_data` brings a matrix together over "data" for its use and cuts its gradient again
(FSDP), which leaves row-parallel and tensor-parallel products. What a device can do with its own
rows alone is run on them by `on_own`: left to itself, the compiler gathers all rows where one
array indexes another (top-k and flat gathers).

Optimizer state lies as its parameter does. Trap: `jit(optimizer.init)` puts its zeros on one device
unless told otherwise, since they depend on no input.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig, require
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, named_shardings, partition_specs
from mimo_jax.models.target import Target
from mimo_jax.sharding import (
    DATA,
    SEQUENCE,
    TRAIN,
    Axes,
    check_divides,
    full_sizes,
    mesh_sizes,
    num_parts,
)
from mimo_jax.train.block_mask import ANCHOR_CHUNK_LEN

ROWS = TRAIN.cuts["batch"]
# Draft blocks stand in a stretch of a row.
BLOCKS = (*ROWS, SEQUENCE)

# Expert stacks [d, e, f]: Muon reads them as [e, d, f].
_EXPERTS_SECOND = ("experts_gate", "experts_up")


def path_names(path) -> list[str]:
    """Names along a key path. Example: layers, 0, w_qkv."""
    return [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]


def is_experts_second(path) -> bool:
    """Whether a leaf is a stack [d, e, f], which the optimizer keeps as [e, d, f]."""
    return any(name in _EXPERTS_SECOND for name in path_names(path))


def experts_first_spec(path, spec: P) -> P:
    """The spec of a parameter, axes in the order in which the optimizer keeps it."""
    if not is_experts_second(path):
        return spec
    rows, experts, width = spec
    return P(experts, rows, width)


def param_shardings(params, mesh: Mesh) -> Any:
    """The pytree of trained parameters with a NamedSharding in each leaf's place.

    Vectors (norms, sinks, biases) are whole everywhere: cutting them saves kilobytes and costs a
    gather each.

    Args:
      params: A model's parameters, or a dict of such and of bare arrays (kept whole everywhere).
      mesh: Of TRAIN.
    """
    if isinstance(params, nnx.State):
        return jax.tree.map(
            lambda sharding: sharding if len(sharding.spec) > 1 else NamedSharding(mesh, P()),
            named_shardings(params, TRAIN, mesh),
        )
    if isinstance(params, Mapping):
        return {name: param_shardings(part, mesh) for name, part in params.items()}
    return NamedSharding(mesh, P())


def state_shardings(state, mesh: Mesh):
    """The pytree of a TrainState with a NamedSharding in each leaf's place."""
    params = param_shardings(state.params, mesh)
    of_path = {tuple(path): s for path, s in jax.tree_util.tree_leaves_with_path(params)}

    def of_leaf(path, leaf):
        """A moment or momentum ends in its parameter's path; counts end in none."""
        del leaf
        for start in range(len(path)):
            sharding = of_path.get(tuple(path[start:]))
            if sharding is not None:
                return NamedSharding(mesh, experts_first_spec(path, sharding.spec))
        return NamedSharding(mesh, P())

    opt_state = jax.tree_util.tree_map_with_path(of_leaf, state.opt_state)
    return dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        ema=None if state.ema is None else params,
        **dict.fromkeys(("step", "num_bad", "num_skipped"), NamedSharding(mesh, P())),
    )


def hold_state(state, mesh: Mesh | None):
    """A TrainState inside a jitted step, held to its place."""
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(state, mesh))


def _place(x, sharding: NamedSharding) -> Array:
    """An array that every process has, each giving its own devices their parts of it.

    Not `device_put`: between processes it compares the whole array first, at every call.
    """
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def place_params(params, mesh: Mesh | None):
    """Parameters on the host or one device, alike in every process -> on the mesh."""
    return params if mesh is None else jax.tree.map(_place, params, param_shardings(params, mesh))


def place_rows(rows, mesh: Mesh | None):
    """Arrays [r, ...] of a batch, alike in every process -> on the mesh, r over the rows' axes.

    Of several processes each puts the rows of its own devices there.
    """
    if mesh is None:
        return jax.tree.map(jnp.asarray, rows)
    return jax.tree.map(lambda x: _place(x, NamedSharding(mesh, P(ROWS))), rows)


def num_row_parts(mesh: Mesh | None) -> int:
    """Devices that have rows of their own. Example: mesh 4x2x1 -> 8."""
    return 1 if mesh is None else num_parts(ROWS, mesh_sizes(mesh))


def num_sequence_parts(mesh: Mesh | None) -> int:
    """Stretches that a row is cut into."""
    return 1 if mesh is None else mesh_sizes(mesh)[SEQUENCE]


def num_block_parts(mesh: Mesh | None) -> int:
    """Devices that have draft blocks of their own. Example: mesh 4x2x3x2 -> 16."""
    return 1 if mesh is None else num_parts(BLOCKS, mesh_sizes(mesh))


def place_activation(x: Array, axes: Axes, mesh: Mesh | None) -> Array:
    """An activation inside a jitted step, held to its rule where its axes divide.

    An axis that does not divide (fewer KV heads than tensor devices) is left whole.
    """
    if mesh is None:
        return x
    sizes = mesh_sizes(mesh)
    entries = [
        entry if size % num_parts(entry, sizes) == 0 else None
        for size, entry in zip(x.shape, TRAIN.spec(axes), strict=True)
    ]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*entries)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _whole(x, cut: NamedSharding, whole: NamedSharding):
    del cut
    return jax.lax.with_sharding_constraint(x, whole)


def _whole_fwd(x, cut, whole):
    return _whole(x, cut, whole), None


def _whole_bwd(cut, whole, _, grad):
    # Whole first: asked for the cut alone, the compiler may cut the activations it is made of.
    # Compiled for GPUs, sum and cut of a stack are one reduce-scatter; a dense matrix is summed
    # over "expert" too, and stays an all-reduce and a slice.
    grad = jax.lax.with_sharding_constraint(grad, whole)
    return (jax.lax.with_sharding_constraint(grad, cut),)


_whole.defvjp(_whole_fwd, _whole_bwd)


def whole_over_data(params, mesh: Mesh | None):
    """Parameters as a forward wants them: no longer cut over "data"; gradients are cut again."""
    if mesh is None:
        return params

    def gather(x, cut: NamedSharding):
        entries = [None if entry == DATA else entry for entry in cut.spec]
        return _whole(x, cut, NamedSharding(mesh, P(*entries)))

    return jax.tree.map(gather, params, param_shardings(params, mesh))


def on_own(function: Callable, mesh: Mesh | None, in_specs, out_specs) -> Callable:
    """A function run by each device on its own rows (and positions); itself where one has all.

    Args:
      function: Of pytrees of arrays; what it does with one device's part, it does for that part.
      mesh: Of TRAIN.
      in_specs: How the arguments are cut over ROWS and SEQUENCE; cuts over "tensor" stay as they
        are and need no mention.
      out_specs: Likewise, of the results.
    """
    if num_block_parts(mesh) == 1:
        return function
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(BLOCKS)
    )


def as_own(tree, mesh: Mesh | None):
    """Inside `on_own`: values that every device has alike, as each device's own to add to.

    Without it the sum over devices of a gradient is taken where the value is first used: inside a
    loop, once per turn.
    """
    if num_block_parts(mesh) == 1:
        return tree
    return jax.tree.map(lambda x: jax.lax.pcast(x, BLOCKS, to="varying"), tree)


def sum_over_devices(tree, mesh: Mesh | None):
    """Inside `on_own`: the sum over all devices that have blocks; itself where one has all."""
    return tree if num_block_parts(mesh) == 1 else jax.lax.psum(tree, BLOCKS)


def check_mesh(
    sizes: Sequence[int],
    target: TargetConfig,
    drafter: DrafterConfig,
    rows: Mapping[str, int],
    drafter_row_len: int,
) -> None:
    """Raises ConfigError if a run does not divide over a mesh; says which axis and what would fit.

    Args:
      sizes: Devices along the axes of TRAIN; axes left out at the end have one.
      target: Its weights and query heads must divide.
      drafter: Likewise.
      rows: Rows per step of each stage; must divide by data * expert.
      drafter_row_len: A stretch of it holds whole anchor chunks and reaches over a window.

    Example: sizes (3, 1, 1), rows {"target_train.batch_rows": 8} -> "target_train.batch_rows: axis
      batch of 8 cannot be cut into 3 parts (rules train: data=3 and expert=1); 8 can be cut into
      1, 2, 4, 8".
    """
    by_axis = dict(zip(TRAIN.mesh_axes, full_sizes(TRAIN, sizes), strict=True))
    if math.prod(sizes) == 1:
        return
    for name, num_rows in rows.items():
        check_divides(name, (num_rows,), ("batch",), TRAIN, by_axis)
    heads = {f"target.attention.{kind}": target.attention[kind] for kind in target.attention}
    for name, attention in (heads | {"drafter.attention": drafter.attention}).items():
        check_divides(name, (attention.num_heads,), ("heads",), TRAIN, by_axis)
    modules: dict[str, Callable[[], Any]] = {
        "target": lambda: Target(target, rngs=nnx.Rngs(0)),
        "drafter": lambda: Drafter(drafter, rngs=nnx.Rngs(0)),
    }
    for name, make_module in modules.items():
        try:
            partition_specs(abstract(make_module)[1], TRAIN, by_axis)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from None
    parts = by_axis[SEQUENCE]
    if parts == 1:
        return
    require(
        drafter_row_len % (parts * ANCHOR_CHUNK_LEN) == 0,
        f"drafter_train.row_len of {drafter_row_len} cannot be cut into {parts} stretches of whole "
        f"anchor chunks (sequence={parts}); it must be a multiple of {parts} * {ANCHOR_CHUNK_LEN}",
    )
    longest = drafter_row_len // parts + 1
    require(
        all(window is not None and window <= longest for window in drafter.windows),
        f"drafter.windows {list(drafter.windows)} must be at most {longest} (sequence={parts}): "
        "a stretch reads from its left neighbour only",
    )
