"""What a run of the check is told, and which parts it has; imports nothing that needs a GPU."""

import dataclasses
from pathlib import Path
from typing import Literal, NamedTuple

Size = Literal["pro", "toy"]


@dataclasses.dataclass(frozen=True)
class GpuCheck:
    """Numerics and speed on one GPU, and the time of one device's share of the Pro on eight.

    Takes at most 8 minutes on an H200; --size toy runs all of it small, on a CPU too. Needs jax,
    flax, numpy and jaxtyping only when called as python -m mimo_jax.bench.gpu_check.
    """

    size: Size = "pro"
    """The Pro's shapes, or small ones that show that the check itself works."""
    out: Path = Path("out/bench/gpu_check")
    """Directory of report.json and report.md, both rewritten after every part."""
    seconds: float = 480.0
    """Of the whole run; parts that no longer fit are left out."""
    only: tuple[str, ...] = ()
    """Parts to run; default all."""


class Part(NamedTuple):
    """One child process of the check.

    Attributes:
      name: In the report.
      function: "package.module:function", called as function(size, note); note(figures) keeps what
        is known so far.
      argument: Passed to the function as third argument where it is not None.
      seconds: After which it is ended.
    """

    name: str
    function: str
    argument: str | None
    seconds: float


_HERE = "mimo_jax.bench.gpu_check"
XLA, KERNELS = "xla", "kernels"
# The order of worth: what is left out when time is over comes last.
PARTS = (
    Part("rates", f"{_HERE}.rates:measure_rates", None, 40.0),
    Part("kernels", f"{_HERE}.kernels:check_kernels", None, 120.0),
    Part("layers, xla", f"{_HERE}.shard:time_layers", XLA, 75.0),
    Part("layers, kernels", f"{_HERE}.shard:time_layers", KERNELS, 75.0),
    Part("steps, kernels", f"{_HERE}.shard:time_steps", KERNELS, 130.0),
    Part("steps, xla", f"{_HERE}.shard:time_steps", XLA, 130.0),
)
