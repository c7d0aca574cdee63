"""The device descriptions that XLA's GPU plugin carries, as text.

The plugin's library embeds one text message per device it was tested for (memory, cores, clocks,
version numbers). Given back to the compiler, such a text stands in for the device: nothing is read
from hardware. They are read from the library at hand, never copied here, so they fit its version.
"""

import mmap
import re
from pathlib import Path

from mimo_jax.checkpoint.safetensors_reader import nearest
from mimo_jax.config import ConfigError

_MESSAGE = re.compile(rb"# proto-message: stream_executor\.GpuTargetConfigProto\n(.*?)\x00", re.S)
_NAME = re.compile(r'^device_description_str: "(.*)"', re.M)


def read_targets(library: Path) -> dict[str, str]:
    """Device name -> target text, of every description inside the plugin's library.

    Example: 22 entries for the CUDA 13 plugin of jax 0.12, "NVIDIA H200 141GB HBM3e" among them.
    """
    with (
        library.open("rb") as handle,
        mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        texts = [found.group(1).decode() for found in _MESSAGE.finditer(data)]
    return {_NAME.findall(text)[0]: text for text in texts if _NAME.search(text)}


def target_text(library: Path, name: str) -> str:
    """The description of one device.

    Raises:
      ConfigError: If this plugin does not describe it; names the nearest.
    """
    targets = read_targets(library)
    if name not in targets:
        raise ConfigError(
            f"the compiler plugin describes no {name!r}{nearest(name, targets)}; it has "
            f"{len(targets)} others"
        )
    return targets[name]
