"""Small programs and configs for the worker: what a decode loop is made of, in a second.

Called by name in another process (plan/aot.py), so they take plain values only.
"""

import dataclasses
import os

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import drafter_mimo_v25_pro
from mimo_jax.config import ConfigError
from mimo_jax.plan.published import PublishedModel

WIDTH, HIDDEN, SLOTS = 256, 640, 20_000


def lower_loop(mesh: Mesh, *, copies_cache: bool = False, gathers: bool = False):
    """A loop until the state says stop: a cut product with its all-reduce, a write in place.

    Args:
      mesh: Of ("data", "model").
      copies_cache: Also carry a rolled cache, which has to be copied.
      gathers: Also gather what is cut.
    """

    def program(x, cache, w_up, w_down):
        def body(carry):
            x, cache, position = carry
            hidden = jnp.exp(-(x @ w_up))
            x = jax.lax.psum(hidden @ w_down, "model")
            if gathers:
                x = x + jax.lax.all_gather(hidden, "model", axis=1, tiled=True)[:, :WIDTH]
            cache = jax.lax.dynamic_update_slice(cache, x[:1], (position, 0))
            if copies_cache:
                cache = jnp.roll(cache, 1, axis=0)
            step = (x[0, 0] > 0).astype(jnp.int32) + 1
            return x, cache, position + step

        is_open = lambda carry: carry[2] < SLOTS - 8
        return jax.lax.while_loop(is_open, body, (x, cache, jnp.zeros((), jnp.int32)))[:2]

    whole, cut = PartitionSpec(), PartitionSpec(None, "model")
    specs = (whole, whole, cut, PartitionSpec("model", None))
    shapes = ((8, WIDTH), (SLOTS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=specs, out_specs=(whole, whole), check_vma=False
    )
    return jax.jit(mapped, donate_argnums=(0, 1)).lower(*arguments)


def die(mesh: Mesh):
    """Ends the process as a failing C++ check does."""
    os.write(2, b"F1130 12:00:00 1 ptxas.cc:7] Check failed: ptxas is not there\n*** stack ***\n")
    os.abort()


def fail(mesh: Mesh):
    """What XLA raises where it finds neither ptxas nor a library that does its work."""
    raise RuntimeError("UNAVAILABLE: No PTX compilation provider is available.\nmore lines")


def refuse(mesh: Mesh):
    """A configuration that cannot be."""
    raise ConfigError("heads 6 cannot be cut into 4 parts")


def get_config() -> PublishedModel:
    """MiMo-V2.5-Pro of six layers: every kind of them, at full width."""
    model = drafter_mimo_v25_pro.get_config()
    assert model.drafter is not None
    target = dataclasses.replace(
        model.target,
        layer_kinds=model.target.layer_kinds[4:10],
        is_moe_layer=(False, True, True, True, True, True),
    )
    drafter = dataclasses.replace(
        model.drafter,
        num_layers=1,
        windows=(1024,),
        is_causal=(False,),
        num_target_layers=6,
        target_layer_ids=(0, 1, 2, 3, 4),
    )
    return dataclasses.replace(model, name="short Pro", target=target, drafter=drafter)
