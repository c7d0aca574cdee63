"""Which implementation of an op runs, and why not another.

An implementation is a word that the caller passes and that jit sees as static:

    xla         the plain `jax.numpy` reference; every platform
    mosaic_gpu  the Pallas kernel, compiled; Hopper only (its matrix instructions are `wgmma`)
    interpret   the same kernel in Pallas' GPU interpreter, on the CPU: for tests

Rejected: finding out at trace time what the default device is. A program is also compiled for
devices that are not here, and then the answer would be wrong.
"""

from typing import Any

XLA, MOSAIC_GPU, INTERPRET = "xla", "mosaic_gpu", "interpret"
IMPLEMENTATIONS = (XLA, MOSAIC_GPU, INTERPRET)


def check(implementation: str) -> None:
    """Raises ValueError for a word that is none of IMPLEMENTATIONS."""
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation {implementation!r} is unknown; allowed: {allowed}")


def interpret_params(implementation: str) -> Any:
    """What `plgpu.kernel(interpret=)` wants: None for a compiled kernel."""
    if implementation != INTERPRET:
        return None
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def why_not_mosaic(device: Any) -> str | None:
    """None if the Mosaic kernels run on a `jax.Device`, real or ahead of time; else the reason.

    Example: a Blackwell device -> "... compute capability 10.0, the kernels are for 9.0".
    """
    if device.platform not in ("gpu", "cuda"):
        return f"{device.platform} is not a GPU"
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        # sm_100 has no wgmma; its block-scaled product takes E2M1 and E8M0 as they are, in another
        # layout. The XLA path serves there until such a kernel exists.
        return f"{device.device_kind} has compute capability {capability}, the kernels are for 9.0"
    return None
