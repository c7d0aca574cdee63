"""`python -m mimo_jax.plan CONFIG --device h200`: what a model costs on devices nobody has here."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Memory, launches and speed of a model on devices that need not be there.

    Compiles the real programs ahead of time, each in a process of its own (about 1.3 GB of memory
    and a minute for a 1T model), and adds a roofline. Where the GPU compiler is not installed, the
    programs are compiled for virtual CPU devices instead, and the report says so.
    """

    config: tyro.conf.Positional[Path]
    """Config file of a model or of a training run, e.g. configs/drafter_mimo_v25_pro.py."""
    device: str = "h200"
    """a100, h100, h200, b200, b300, gb200, gb300 or rtx-pro-6000."""
    devices: int = 8
    """Devices of the node; heads and widths are cut over all of them."""
    context: int | None = None
    """Longest prompt and output together; default the model's, at most 262,144."""
    batch: int = 1
    """Rows decoded at once."""
    draft_block_len: int | None = None
    """Slots of a draft block; default what the drafter was trained for."""
    only: Annotated[
        tuple[Literal["memory", "launches", "roofline", "sharding"], ...],
        tyro.conf.UseAppendAction,
    ] = ()
    """Part to show, repeatable; default all but sharding."""
    json: bool = False
    """Print the plan as JSON instead of tables."""
    plot: bool = False
    """Write the step as stacked bars and tokens/s over accept length as PNG."""
    output: Path = Path("out/plan")
    """Directory of the pictures."""
    analytic: bool = False
    """Compile nothing: sizes and roofline from the configuration alone."""
    accept_lengths: tuple[float, float, float] | None = None
    """Committed tokens per step of code, math and agent; default 6.30 5.56 4.29."""
    launches_per_layer: float | None = None
    """Launches per layer where nothing is compiled for a GPU; default 29, XLA alone."""
    memory_bytes: float | None = None
    """Override: memory of a device."""
    hbm_bytes_per_s: float | None = None
    """Override: rate of its memory."""
    bf16_flops_per_s: float | None = None
    """Override: dense bfloat16 rate."""
    link_bytes_per_s: float | None = None
    """Override: rate of one device to the others, one direction."""
    launch_s: float | None = None
    """Override: seconds of one launch inside a CUDA graph."""
    all_reduce_s: float | None = None
    """Override: seconds of one small all-reduce."""


def main() -> int:
    arguments = tyro.cli(Arguments, prog="python -m mimo_jax.plan")
    from mimo_jax.config import ConfigError

    try:
        return run(arguments)
    except ConfigError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2


def run(arguments: Arguments) -> int:
    """Plans, prints, draws; 1 if a published size or a promise of the program does not hold."""
    from mimo_jax.plan import account, report
    from mimo_jax.plan.checks import failed
    from mimo_jax.plan.devices import SOURCES, find_device
    from mimo_jax.plan.plots import save_plots
    from mimo_jax.plan.published import read_config
    from mimo_jax.plan.roofline import SCENE_ACCEPT_LENGTHS, XLA_LAUNCHES_PER_LAYER

    own = {name: value for name in SOURCES if (value := getattr(arguments, name)) is not None}
    device = dataclasses.replace(find_device(arguments.device), **own)
    lengths = None
    if arguments.accept_lengths is not None:
        lengths = dict(zip(SCENE_ACCEPT_LENGTHS, arguments.accept_lengths, strict=True))
    request = account.make_request(
        str(arguments.config),
        read_config(arguments.config),
        device,
        num_devices=arguments.devices,
        context=arguments.context,
        batch_size=arguments.batch,
        draft_block_len=arguments.draft_block_len,
        accept_lengths=lengths,
        launches_per_layer=arguments.launches_per_layer or XLA_LAUNCHES_PER_LAYER,
    )
    parts = arguments.only or (account.MEMORY, account.LAUNCHES, account.ROOFLINE)
    target, note = None, "nothing (--analytic)"
    if parts != (account.SHARDING,) and not arguments.analytic:
        target, note = account.choose_target(device, arguments.devices)
    # Files and pipes have no width of their own; 80 columns would fold most tables.
    console = Console(stderr=arguments.json, width=None if sys.stdout.isatty() else 120)
    with console.status(f"compiling {request.model.name} for {note}"):
        plan = account.make_plan(request, parts, target, note, is_analytic=arguments.analytic)
    if arguments.json:
        print(json.dumps(account.as_json(plan), indent=1))
    else:
        for section in report.sections(plan, parts):
            console.print(section, soft_wrap=isinstance(section, str), markup=False)
    if arguments.plot:
        for path in save_plots(plan, arguments.output):
            console.print(f"written: {path}", markup=False)
    failure = failed(plan.checks)
    if failure is not None:
        print(f"plan: {failure}", file=sys.stderr)
    return 1 if failure is not None else 0


if __name__ == "__main__":
    sys.exit(main())
