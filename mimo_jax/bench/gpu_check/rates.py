"""What the machine is, and how fast its memory can be read and copied: the measure of the rest."""

import importlib.metadata
import platform

import jax
import jax.numpy as jnp

from mimo_jax.bench.gpu_check.parts import Note
from mimo_jax.bench.gpu_check.settings import Size
from mimo_jax.timing import measure

NUM_BYTES = {"pro": 4 << 30, "toy": 8 << 20}


def describe() -> dict[str, str]:
    """Device and versions."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"device": device.device_kind, "python": platform.python_version(), **versions}


def measure_rates(size: Size, note: Note) -> None:
    """GB/s of a copy (bytes read plus bytes written) and of a sum (bytes read)."""
    note({"machine": describe()})
    num_bytes = NUM_BYTES[size]
    fill = jax.jit(lambda key: jax.random.bits(key, (num_bytes // 4,), jnp.uint32))
    x = fill(jax.random.key(0))
    copy = measure(jax.jit(lambda x: x ^ jnp.uint32(1)), x, num_runs=7)
    note({"copy_gb_per_s": 2 * num_bytes / copy.median_s / 1e9})
    total = measure(jax.jit(lambda x: x.sum()), x, num_runs=7)
    note({"read_gb_per_s": num_bytes / total.median_s / 1e9})
