"""How a module's parameters shall lie in memory: turned or as the file has them, whole or cut.

Files hold matrices as [out, in]. A small model wants [in, out], a large one on a CPU keeps the
order of the file (layers/linear.py); on a mesh every device gets its part, fused projections in
device order (models/cut.py). Decided before reading, so that no parameter is ever moved twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh, NamedSharding

from mimo_jax.checkpoint.name_map import Leaf
from mimo_jax.config import DrafterConfig, TargetConfig
from mimo_jax.models.cut import cut_shapes, device_order, fused_groups, part_graph
from mimo_jax.models.params import abstract, flatten, named_shardings, transpose_weights
from mimo_jax.sharding import DECODE, MODEL, mesh_sizes


class MemoryLayout(NamedTuple):
    """What reading a module needs to know.

    Attributes:
      graph: Of the module as it will be used.
      like: Its parameters as shapes.
      lay_out: Leaf of the name map -> the leaf as it shall be in memory.
      sharding_of: Parameter name -> NamedSharding; None without a mesh.
    """

    graph: Any
    like: Any
    lay_out: Callable[[Leaf], Leaf]
    sharding_of: Callable[[str], NamedSharding] | None


def memory_layout(
    make_module: Callable,
    config: TargetConfig | DrafterConfig,
    *,
    mesh: Mesh | None = None,
    is_transposed: bool = False,
) -> MemoryLayout:
    """The layout of a module that is to be read.

    Args:
      make_module: Makes the module; only its shapes are used.
      config: Of the whole model.
      mesh: Of `sharding.DECODE`, or None: one device.
      is_transposed: Keep matrices [out, in].

    Raises:
      ConfigError: If an axis does not divide over the mesh.
    """
    graph, like = abstract(make_module)
    if is_transposed:
        graph, like = transpose_weights(graph, like)
    num_parts, sharding_of = 1, None
    if mesh is not None:
        num_parts = mesh_sizes(mesh)[MODEL]
        graph = part_graph(graph, like, config, num_parts)
        like = cut_shapes(like, config, num_parts)
        sharding_of = flatten(named_shardings(like, DECODE, mesh)).__getitem__

    def lay_out(leaf: Leaf) -> Leaf:
        groups = fused_groups(config, leaf.name)
        if groups is not None and num_parts > 1:
            leaf = leaf.in_rows(device_order(groups, num_parts))
        return leaf.in_file_order() if is_transposed else leaf

    return MemoryLayout(graph, like, lay_out, sharding_of)
