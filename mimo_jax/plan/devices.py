"""Devices a plan can be made for: capacity, rates and costs, each with where it comes from.

The compiler's own description of a device (clock, caches, shared memory) is not here: it stands as
text inside the plugin (plan/targets.py) under `target`. What is here is what a roofline needs, and
every rate can be overridden on the command line.

Rates are peaks of the data sheets. Costs of a launch and of an all-reduce are estimates for one
node; they decide the sum at small batches and are the first to be measured when a machine is there.
"""

import dataclasses

from mimo_jax.checkpoint.safetensors_reader import nearest
from mimo_jax.config import ConfigError, require


@dataclasses.dataclass(frozen=True)
class Device:
    """One accelerator.

    Attributes:
      name: Short name, as on the command line.
      target: Name of its description inside the compiler plugin.
      memory_bytes: Memory that the data sheet promises, decimal.
      hbm_bytes_per_s: Peak rate of that memory.
      bf16_flops_per_s: Peak dense bfloat16 rate.
      link_bytes_per_s: Rate of one device to the others of its node, one direction.
      launch_s: One kernel inside a CUDA graph, start to start when it has nothing to do.
      all_reduce_s: One all-reduce of a few hundred kilobytes at most over 8 devices, by latency.
    """

    name: str
    target: str
    memory_bytes: float
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    link_bytes_per_s: float
    launch_s: float = 1.3e-6
    all_reduce_s: float = 5e-6

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                isinstance(value, str) or value > 0, f"{field.name} {value} must be > 0"
            )


# Name, description in the plugin, memory, HBM, bf16 dense, NVLink one way.
DEVICES = {
    device.name: device
    for device in (
        Device("a100", "NVIDIA A100-SXM4-80GB", 80e9, 2.039e12, 312e12, 300e9),
        Device("h100", "NVIDIA H100 80GB HBM3", 80e9, 3.35e12, 989e12, 450e9),
        Device("h200", "NVIDIA H200 141GB HBM3e", 141e9, 4.8e12, 989e12, 450e9),
        Device("b200", "NVIDIA B200", 180e9, 8.0e12, 2250e12, 900e9),
        Device("b300", "NVIDIA B300", 270e9, 8.0e12, 2250e12, 900e9),
        Device("gb200", "NVIDIA GB200", 186e9, 8.0e12, 2500e12, 900e9),
        Device("gb300", "NVIDIA GB300", 279e9, 8.0e12, 2500e12, 900e9),
        # No NVLink: PCIe 5.0 x16.
        Device("rtx-pro-6000", "NVIDIA RTX PRO 6000 Blackwell", 96e9, 1.792e12, 504e12, 64e9),
    )
}

# What each constant rests on, printed under every roofline.
SOURCES = {
    "memory_bytes": "data sheet, decimal GB usable",
    "hbm_bytes_per_s": "data sheet, peak",
    "bf16_flops_per_s": "data sheet, dense, peak",
    "link_bytes_per_s": "data sheet, NVLink, one direction",
    "launch_s": "1.3 us per kernel even inside a graph (HazyResearch, Megakernels, 2025)",
    "all_reduce_s": "estimate: 5 us for a one-shot all-reduce over 8 devices; not measured",
}


def find_device(name: str) -> Device:
    """The device of that name, upper or lower case.

    Raises:
      ConfigError: If it is unknown; names the nearest and all allowed.
    """
    device = DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(
            f"device {name!r} is unknown{nearest(name.lower(), DEVICES)}; allowed: "
            f"{', '.join(DEVICES)}"
        )
    return device
