"""XLA flags of our programs on GPUs, to be set before JAX starts.

`+WHILE` puts the decode loop itself into the CUDA graph (the list that is often copied would drop
the collective kernels from it), split-k would add a launch per product, and two combined
all-reduces go to NCCL, which cuts the graph in two. Counted in programs compiled ahead of time for
8 x H200 with jax 0.12.0.1 (`python -m mimo_jax.plan`).

Trap: XLA ends the process over a flag that it does not know, so they are set for the versions that
were looked at, and only where a GPU plugin is installed.
"""

import importlib.util
from collections.abc import MutableMapping
from importlib.metadata import version

GPU_XLA_FLAGS = (
    "--xla_gpu_enable_command_buffer=+WHILE",
    "--xla_gpu_experimental_force_split_k=1",
    "--xla_gpu_all_reduce_combine_threshold_bytes=0",
)


def has_gpu_plugin() -> bool:
    """Whether JAX would find a CUDA plugin of a version whose flags are known; imports no JAX."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    found = (importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") for n in (12, 13))
    is_known = tuple(map(int, version("jax").split(".")[:2])) >= (0, 12)
    return is_known and any(spec is not None for spec in found)


def set_gpu_flags(environ: MutableMapping[str, str]) -> None:
    """Adds the flags to XLA_FLAGS, except those that the user has set.

    Example: XLA_FLAGS "--xla_gpu_enable_command_buffer=" stays, the other two are added.
    """
    given = environ.get("XLA_FLAGS", "").split()
    names = {flag.split("=")[0] for flag in given}
    added = [flag for flag in GPU_XLA_FLAGS if flag.split("=")[0] not in names]
    environ["XLA_FLAGS"] = " ".join([*given, *added])
