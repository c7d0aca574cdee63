"""Compiles the ragged dispatch, forward and backward, for eight H200s that are not here.

Run by tests/layers/test_dispatch.py in a process of its own, with the GPU compiler on its path:
imported beside the other tests, the plugin would look for a driver. Prints how many
ragged-all-to-alls the compiled program has.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jax_plugins.xla_cuda13 as plugin
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mimo_jax.layers import dispatch, moe
from mimo_jax.sharding import TRAIN

B, T, D, E, F, TOP_K = 8, 4, 12, 16, 24, 3


def h200() -> str:
    """The compiler's own description of the device, which its library carries as text."""
    library = Path(next(iter(plugin.__path__))) / "xla_cuda_plugin.so"
    pattern = rb"# proto-message: stream_executor.GpuTargetConfigProto\n(.*?)\x00"
    texts = re.findall(pattern, library.read_bytes(), re.DOTALL)
    return next(text.decode() for text in texts if b'"NVIDIA H200' in text)


def main() -> int:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=h200(), topology="1x1x8"
    )
    grid = np.array(topology.devices).reshape(2, 2, 2, 1)
    mesh = Mesh(grid, TRAIN.mesh_axes, axis_types=(AxisType.Auto,) * 4)
    layer = functools.partial(
        dispatch.route_and_run_on_mesh,
        functools.partial(moe.route, top_k=TOP_K, routed_scale=1.0),
        mesh=mesh,
        capacity_factor=1.0,
        dispatch=dispatch.RAGGED,
    )

    def loss(x, w_router, bias, experts):
        return layer(x, w_router, bias, experts)[0].sum()

    whole = NamedSharding(mesh, PartitionSpec())
    shapes = ((B, T, D), (D, E), (E,), (D, E, F), (D, E, F), (E, F, D))
    x, w_router, bias, *experts = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes
    )
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 3)))
    compiled = program.lower(x, w_router, bias, moe.Experts(*experts)).compile()
    return len(re.findall(r"ragged-all-to-all(?:-start)?\(", compiled.as_text()))


if __name__ == "__main__":
    print(main())
