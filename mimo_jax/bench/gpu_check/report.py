"""The report as markdown, and what the figures would mean on eight GPUs.

Tokens per second are extrapolated, never measured: the measured step of one device's share, plus an
estimate for the all-reduces that one GPU cannot run (`plan/devices.py`), times published accept
lengths. Whoever quotes them quotes that sentence too.
"""

from typing import Any

from mimo_jax.bench.gpu_check.parts import OK, Figures
from mimo_jax.plan.devices import Device
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.roofline import SCENE_ACCEPT_LENGTHS, expected_traffic

LOOPS = ("plain", "dflash")


def all_reduces_s(model: PublishedModel, device: Device, num_devices: int, loop: str) -> float:
    """Estimated seconds of a step's all-reduces: number times latency, and the bytes on the wire.

    Example: the Pro on 8 H200, a DFlash step: 155 of 5 us and 0.23 ms of wire -> 0.0010 s.
    """
    is_drafting = loop != "plain"
    num_tokens = model.drafter.draft_block_len if is_drafting and model.drafter else 1
    traffic = expected_traffic(model, num_tokens, is_drafting=is_drafting)
    wire_s = traffic.all_reduce_bytes * (num_devices - 1) / device.link_bytes_per_s
    return traffic.num_all_reduces * device.all_reduce_s + wire_s


def extrapolate(
    steps: Figures, model: PublishedModel, device: Device, num_devices: int
) -> dict[str, Figures]:
    """Tokens per second on num_devices by loop and scene, from measured steps of one share."""
    found: dict[str, Figures] = {}
    for loop, times in steps.items():
        reduces_s = all_reduces_s(model, device, num_devices, loop)
        step_s = times["step_ms"] / 1e3 + reduces_s
        scenes = {"any text": 1.0} if loop == "plain" else SCENE_ACCEPT_LENGTHS
        found[loop] = {
            "step_with_all_reduces_ms": step_s * 1e3,
            "all_reduces_ms_estimated": reduces_s * 1e3,
            "tokens_per_s": {scene: length / step_s for scene, length in scenes.items()},
        }
    return found


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    cells = lambda row: "| " + " | ".join(str(cell) for cell in row) + " |"
    return [cells(header), cells(("---",) * len(header)), *map(cells, rows), ""]


def _number(row: Figures, name: str, form: str) -> str:
    return format(row[name], form) if name in row else "-"


def _kernel_rows(kernels: Figures, read_gb_per_s: float | None) -> list[tuple[str, ...]]:
    rows = []
    for name, row in kernels.items():
        verdict = row.get("error") or ("yes" if row.get("is_right") else "**NO**")
        figures = ("relative_error", ".1e"), ("kernel_us", ".1f"), ("kernel_gb_per_s", ",.0f")
        rival = ("xla_us", ".1f"), ("xla_gb_per_s", ",.0f")
        share = "-"
        if read_gb_per_s and "kernel_gb_per_s" in row:
            share = f"{row['kernel_gb_per_s'] / read_gb_per_s:.0%}"
        kernel, xla = ([_number(row, *one) for one in group] for group in (figures, rival))
        rows.append((name, verdict, *kernel, share, *xla))
    return rows


def to_markdown(report: Figures) -> str:
    """The whole report; parts that gave nothing say why."""
    parts, lines = report["parts"], ["# One GPU", ""]
    lines += [f"`{report['command']}`, {report['date']}, revision {report['revision']}.", ""]
    rates = parts.get("rates", {}).get("figures", {})
    machine = rates.get("machine", {})
    lines += [", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    names = ("copy_gb_per_s", "read_gb_per_s")
    copy, read = (_number(rates, name, ",.0f") for name in names)
    lines += [f"Memory: copy {copy} GB/s (read plus written), sum {read} GB/s (read).", ""]

    rows = [
        (name, part["status"], f"{part['seconds']:.0f}", part.get("error", ""))
        for name, part in parts.items()
    ]
    lines += ["## Parts", "", *_table(("part", "status", "s", "error"), rows)]

    kernels = parts.get("kernels", {}).get("figures", {}).get("kernels")
    if kernels:
        header = ("kernel", "right", "error", "us", "GB/s", "of the read rate")
        rows = _kernel_rows(kernels, rates.get("read_gb_per_s"))
        lines += ["## Kernels", "", *_table((*header, "XLA us", "XLA GB/s"), rows)]

    rows = []
    for name, part in parts.items():
        figures = part["figures"]
        for kind in ("sliding", "global"):
            if added := figures.get(f"{kind}_layer_ms"):
                rows.append((name, f"one more {kind} layer", *(f"{added[x]:.3f}" for x in LOOPS)))
        if steps := figures.get("steps"):
            times = (_number(steps.get(loop, {}), "step_ms", ".3f") for loop in LOOPS)
            rows.append((name, "a whole step", *times))
    if rows:
        lines += ["## One device's share of eight, all-reduces left out", ""]
        lines += _table(("part", "what", "plain ms", "DFlash block of 8 ms"), rows)

    rows = []
    for name, loops in report.get("extrapolated", {}).items():
        for loop, row in loops.items():
            step, reduces = row["step_with_all_reduces_ms"], row["all_reduces_ms_estimated"]
            for scene, speed in row["tokens_per_s"].items():
                rows.append((name, loop, scene, f"{step:.3f}", f"{reduces:.3f}", f"{speed:,.0f}"))
    if rows:
        lines += ["## Extrapolated to eight GPUs: not measured", ""]
        lines += [report["extrapolation"], ""]
        header = ("part", "loop", "scene", "step ms", "of it all-reduces", "tokens/s, one row")
        lines += _table(header, rows)
    failed = [name for name, part in parts.items() if part["status"] != OK]
    lines += [f"Not all parts are done: {', '.join(failed)}." if failed else "All parts are done."]
    return "\n".join(lines) + "\n"
