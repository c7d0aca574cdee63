"""One thread block per token: a row is read once, and lies in registers until its norm is known."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import interpret_params


@functools.partial(jax.jit, static_argnames=("eps", "implementation"))
def add_norm(x, addend, weight, *, eps: float, implementation: str):
    """As `api.add_norm`."""
    t, d = x.shape
    shape = jax.ShapeDtypeStruct((t, d), x.dtype)

    def body(x, addend, weight, total, normed):
        row = jax.lax.axis_index("row")
        per_thread = d // 128
        layout = plgpu.Layout.WG_STRIDED((d,), vec_size=min(per_thread & -per_thread, 8))
        load = lambda ref: plgpu.load(ref, layout=layout)
        value = (load(x.at[row]) + load(addend.at[row])).astype(x.dtype)
        total[row] = value
        wide = value.astype(jnp.float32)
        mean_square = jnp.sum(wide * wide) / d
        scaled = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
        normed[row] = scaled * load(weight).astype(x.dtype)

    return plgpu.kernel(
        body,
        out_type=(shape, shape),
        grid=(t,),
        grid_names=("row",),
        interpret=interpret_params(implementation),
    )(x, addend, weight)
