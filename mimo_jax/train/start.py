"""What a training starts from: the devices of its mesh, and a target read from disk."""

import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.checkpoint.hf_target import load_target, open_target
from mimo_jax.config import require
from mimo_jax.decode.placement import Model
from mimo_jax.distributed import ProcessGroup
from mimo_jax.layers.dispatch import PADDED, RAGGED
from mimo_jax.models.packing import unpack_experts
from mimo_jax.models.params import abstract, flatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, full_sizes, make_mesh
from mimo_jax.train.config import DistillConfig, ExperimentConfig
from mimo_jax.train.placement import param_shardings


def on_all_devices[C: (ExperimentConfig, DistillConfig)](config: C, group: ProcessGroup) -> C:
    """The config with a mesh for all processes: its own, or rows over all devices if it has none.

    Raises:
      ConfigError: If its mesh leaves out devices of some process, or rows do not divide.
    """
    num_devices = jax.device_count()
    if group.count > 1 and math.prod(config.mesh) == 1:
        config = dataclasses.replace(config, mesh=full_sizes(TRAIN, (num_devices, 1, 1)))
    require(
        group.count == 1 or math.prod(config.mesh) == num_devices,
        f"mesh {'x'.join(map(str, config.mesh))} has {math.prod(config.mesh)} devices, and "
        f"{group.count} processes bring {num_devices}: allowed is a mesh of all of them",
    )
    return config


def run_mesh(config: ExperimentConfig | DistillConfig) -> Mesh | None:
    """The devices of a run: None for a mesh of one.

    Raises:
      ConfigError: If there are fewer devices, or they cannot dispatch experts as the config asks.
    """
    if math.prod(config.mesh) == 1:
        return None
    mesh = make_mesh(TRAIN, config.mesh)
    require(
        config.dispatch != RAGGED or mesh.devices.flat[0].platform == "gpu",
        f"dispatch {RAGGED} needs GPUs (XLA has no ragged all-to-all elsewhere); use {PADDED}",
    )
    return mesh


def load_float_target(directory: Path) -> Model:
    """A target in float32 throughout, packed experts decoded (which changes no value)."""
    model = Model(*load_target(directory, dtype=jnp.float32))
    is_packed = model.config.moe is not None and model.config.moe.is_mxfp4
    return Model(*unpack_experts(model.config, model.params)) if is_packed else model


def load_frozen_target(directory: Path, mesh: Mesh | None = None) -> Model:
    """A target as it is published (rounded), computing in float32: what a drafter learns from.

    On a mesh every device reads its own part, and packed experts stay packed; on one device they
    are decoded, for a step reads them at every turn.
    """
    if mesh is None:
        return load_float_target(directory)
    target_config, _ = open_target(directory)
    _, like = abstract(lambda: Target(target_config, rngs=nnx.Rngs(0)))
    shardings = flatten(param_shardings(like, mesh))
    return Model(*load_target(directory, dtype=jnp.float32, sharding_of=shardings.__getitem__))
