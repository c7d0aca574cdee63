"""A plan as tables for a terminal or a notebook."""

from collections.abc import Iterator

from rich.table import Table

from mimo_jax.plan.account import (
    DFLASH,
    LAUNCHES,
    MEMORY,
    PLAIN,
    ROOFLINE,
    SHARDING,
    Plan,
    Program,
)
from mimo_jax.plan.devices import SOURCES
from mimo_jax.plan.roofline import SCENE_ACCEPT_LENGTHS, drafter_choice
from mimo_jax.plan.thunks import COLLECTIVE_KERNEL
from mimo_jax.plan.weights import DRAFTER

GB = 1e9


def _table(title: str, *columns: str, numbers_from: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        justify = "right" if i >= numbers_from else "left"
        table.add_column(column, justify=justify, overflow="fold")
    return table


def _gb(num_bytes: int | float) -> str:
    return f"{num_bytes / GB:,.3f}" if num_bytes < GB else f"{num_bytes / GB:,.2f}"


def weights_table(plan: Plan) -> Table:
    """Weights by class, then caches by kind, in GB."""
    n = plan.request.num_devices
    table = _table(
        f"{plan.request.model.name}: weights and caches, GB", "class", "parameters, 1e9",
        "published files", "our program", f"on each of {n} devices",
    )  # fmt: skip
    for row in plan.weights.values():
        held = _gb(row.program_bytes) if row.program_bytes else "not loaded"
        here = _gb(row.device_bytes) if row.program_bytes else "-"
        table.add_row(row.kind, f"{row.num_weights / 1e9:,.3f}", _gb(row.file_bytes), held, here)
    rows = plan.weights.values()
    table.add_row(
        "all weights", f"{sum(r.num_weights for r in rows) / 1e9:,.3f}",
        _gb(sum(r.file_bytes for r in rows)), _gb(sum(r.program_bytes for r in rows)),
        _gb(sum(r.device_bytes for r in rows)), style="bold", end_section=True,
    )  # fmt: skip
    for cache in plan.caches:
        table.add_row(
            f"cache, {cache.kind}", "-", "-", _gb(cache.num_bytes), _gb(cache.device_bytes)
        )
    return table


def programs_table(plan: Plan) -> Table:
    """Memory of every compiled program, in GB."""
    table = _table(
        f"Programs, GB per device; compiled for {plan.compiled_for}", "program", "arguments",
        "of them written in place", "scratch", "peak", "lower s", "compile s", "compiler GB",
    )  # fmt: skip
    for program in plan.programs.values():
        facts = program.facts
        if facts is None:
            table.add_row(program.name, "not available")
            continue
        table.add_row(
            program.name, _gb(facts.argument_bytes), _gb(facts.alias_bytes), _gb(facts.temp_bytes),
            _gb(facts.peak_bytes), f"{facts.lower_s:.1f}", f"{facts.compile_s:.1f}",
            _gb(facts.host_peak_bytes),
        )  # fmt: skip
    return table


# Kinds of launches that have a column of their own; all others are copies and the like.
_XLA_KERNEL, _OUR_KERNEL = "kCustomKernel", "kCustomCall"


def _launch_cells(plan: Plan, program: Program) -> dict[str, str]:
    """One column of the launches table."""
    facts = program.facts
    names = ("launches", "per layer", "of XLA", "of our kernels", "all-reduces", "other",
             "CUDA graphs", "collectives", "MB in them", "copies over 8 MB", "GB moved",
             "scratch MB", "compile s")  # fmt: skip
    if facts is None:
        return dict.fromkeys(names, "not available")
    counts = ["-"] * 7
    if facts.launches is not None and facts.num_launches is not None:
        of = facts.launches.get
        kinds = [of(kind, 0) for kind in (_XLA_KERNEL, _OUR_KERNEL, COLLECTIVE_KERNEL)]
        layers = _layers_of(plan, program.name)
        counts = [
            f"{facts.num_launches:,}" + ("+" if facts.num_inner_loops else ""),
            "-" if layers is None else f"{facts.num_launches / layers:.2f}",
            *(f"{n:,}" for n in (*kinds, facts.num_launches - sum(kinds))),
            f"{facts.num_command_buffers}" + (", all" if facts.is_one_graph else ""),
        ]
    collectives = [f"{n:,} {kind}" for kind, (n, _) in facts.collectives.items()]
    moved = sum(num_bytes for _, num_bytes in facts.collectives.values())
    values = [
        *counts, ", ".join(collectives) or "none", f"{moved / 1e6:,.2f}",
        str(len(facts.large_copies)), f"{facts.moved_bytes / GB:,.2f}",
        f"{facts.temp_bytes / 1e6:,.1f}", f"{facts.compile_s:.1f}",
    ]  # fmt: skip
    return dict(zip(names, values, strict=True))


def _layers_of(plan: Plan, name: str) -> int | None:
    """Layers that a step runs; None for a program that is no loop over steps."""
    model = plan.request.model
    if name.startswith(PLAIN):
        return model.target.num_layers
    if name.startswith(DFLASH) and model.drafter is not None:
        return model.target.num_layers + model.drafter.num_layers
    return None


def launches_table(plan: Plan) -> Table:
    """Launches, graphs, collectives and copies; one column per compiled program."""
    programs = [program for program in plan.programs.values() if program.facts is not None]
    table = _table(
        "Per step (per run, where there is no loop over steps)", "",
        *(program.name for program in plan.programs.values()),
    )  # fmt: skip
    rows: dict[str, list[str]] = {}
    for program in plan.programs.values():
        for name, cell in _launch_cells(plan, program).items():
            rows.setdefault(name, []).append(cell)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    table.caption = (
        "-: not compiled that far; +: and loops inside, counted once; all: the loop is one graph; "
        "GB moved: without the experts that kernels pick, see the roofline"
    )
    reasons = {p.facts.why_no_kernels for p in programs if p.facts is not None}
    for reason in sorted(reason for reason in reasons if reason is not None):
        table.caption += f"; no kernels: {reason}"
    return table


def moves_table(plan: Plan) -> Table | None:
    """Which operations of the DFlash (or plain) step read and write most; None if not compiled."""
    loop = plan.programs.get(DFLASH) or plan.programs.get(PLAIN)
    if loop is None or loop.facts is None:
        return None
    table = _table(
        f"Memory traffic of the {loop.name}, MB per device", "operations", "result", "number",
        "MB", numbers_from=2,
    )  # fmt: skip
    for move in loop.facts.moves:
        table.add_row(move.name, move.shape[:40], str(move.count), f"{move.num_bytes / 1e6:,.2f}")
    table.add_row("everything", "", "", f"{loop.facts.moved_bytes / 1e6:,.2f}", style="bold")
    return table


def roofline_table(plan: Plan) -> Table:
    """Milliseconds of a step by cause and tokens/s by scene; one column per account."""
    request = plan.request
    table = _table(
        f"One step on {request.num_devices} x {request.device.name}, batch {request.batch_size}, "
        f"{request.context:,} positions: ms and share",
        "", *(speed.name for speed in plan.speeds),
    )  # fmt: skip
    causes = dict.fromkeys(cause for speed in plan.speeds for cause in speed.time.terms_s)
    for cause in causes:
        table.add_row(cause, *(
            f"{speed.time.terms_s[cause] * 1e3:.3f} ({speed.time.shares[cause]:.0%})"
            if cause in speed.time.terms_s else "-" for speed in plan.speeds
        ))  # fmt: skip
    table.add_section()
    table.add_row("sum", *(f"{s.time.sum_s * 1e3:.3f} ms" for s in plan.speeds), style="bold")
    table.add_row("all overlapped", *(f"{s.time.overlap_s * 1e3:.3f} ms" for s in plan.speeds))
    table.add_section()
    for scene, tau in {"any": 1.0, **request.accept_lengths}.items():
        if any(scene in speed.tokens_per_s for speed in plan.speeds):
            table.add_row(
                f"tok/s, {scene}, accept length {tau:g}",
                *(
                    f"{s.tokens_per_s[scene]:,.0f} ({s.overlapped_tokens_per_s[scene]:,.0f})"
                    if scene in s.tokens_per_s else "-" for s in plan.speeds
                ),
            )  # fmt: skip
    table.caption = (
        "tok/s: nothing overlapped (everything overlapped); configuration: bytes that must be "
        "read; compiled: bytes that the operations move; launches and all-reduces are counted in "
        "the compiled program wherever there is one"
    )
    return table


def constants_table(plan: Plan) -> Table:
    """Every constant of the roofline with its source."""
    table = _table("Constants", "constant", "value", "source", numbers_from=9)
    for name, source in SOURCES.items():
        table.add_row(name, f"{getattr(plan.request.device, name):.4g}", source)
    table.add_row(
        "launches_per_layer", f"{plan.request.launches_per_layer:g}",
        "as compiled programs have; used where none is compiled",
    )  # fmt: skip
    own = plan.request.accept_lengths == SCENE_ACCEPT_LENGTHS
    table.add_row(
        "accept_lengths", ", ".join(f"{tau:g}" for tau in plan.request.accept_lengths.values()),
        "the vendor's announcement of the Pro drafter, block of 8" if own else "command line",
    )  # fmt: skip
    return table


def sharding_table(plan: Plan) -> Table:
    """Weight -> axes -> cut -> MB per device."""
    table = _table(
        f"Where {plan.request.model.name} lies on {plan.request.num_devices} devices",
        "weight", "number", "shape of each", "axes", "cut", "MB per device", numbers_from=5,
    )  # fmt: skip
    for row in plan.placements:
        table.add_row(
            row.name, str(row.count), " x ".join(map(str, row.shape)), ", ".join(row.axes),
            row.cut, f"{row.device_bytes / 1e6:,.3f}",
        )  # fmt: skip
    return table


def checks_table(plan: Plan) -> Table:
    """Published sizes and promises, each with what was found."""
    table = _table("Checks", "check", "promised", "found", "holds", numbers_from=9)
    for check in plan.checks:
        table.add_row(*check[:3], "yes" if check.holds else "NO")
    return table


def bound_lines(plan: Plan) -> list[str]:
    """What the reading of the published weights alone would allow, per scene."""
    where = f"{plan.request.num_devices} x {plan.request.device.name}"
    return [
        f"{scene}: bound of the published weights {bound:,.0f} tok/s on {where} at accept length "
        f"{plan.request.accept_lengths[scene]:g}; 1000 tok/s is {1000 / bound:.1%} of the bound"
        for scene, bound in plan.bound_tokens_per_s.items()
    ]


def drafter_lines(plan: Plan) -> list[str]:
    """Whether the drafter should be cut over the devices or kept whole on each."""
    request = plan.request
    if not request.is_drafting or request.num_devices == 1 or DRAFTER not in plan.weights:
        return []
    choice = drafter_choice(
        request.model,
        plan.weights,
        request.device,
        num_tokens=request.draft_block_len * request.batch_size,
        num_devices=request.num_devices,
    )
    better = "cut" if choice.cut_s <= choice.whole_s else "whole"
    return [
        f"drafter: {choice.cut_s * 1e3:.2f} ms a step cut over {request.num_devices} devices, "
        f"{choice.whole_s * 1e3:.2f} whole on each: {better} is faster"
    ]


def failures(plan: Plan) -> list[str]:
    """One line for each program that could not be compiled."""
    return [
        f"{program.name}: not available because {program.error}"
        for program in plan.programs.values()
        if program.facts is None
    ]


def sections(plan: Plan, parts: tuple[str, ...]) -> Iterator[Table | str]:
    """Tables and lines of the asked parts, in reading order."""
    if MEMORY in parts:
        yield weights_table(plan)
        if plan.programs:
            yield programs_table(plan)
        counted = "" if plan.programs else " (weights and caches alone, nothing compiled)"
        yield f"{plan.request.device.name}: {plan.verdict}{counted}"
    elif plan.programs:
        yield f"compiled for {plan.compiled_for}"
    yield from failures(plan)
    if LAUNCHES in parts and plan.programs:
        yield launches_table(plan)
        moved = moves_table(plan)
        if moved is not None:
            yield moved
    if ROOFLINE in parts:
        yield roofline_table(plan)
        yield from bound_lines(plan)
        yield from drafter_lines(plan)
        yield constants_table(plan)
    if SHARDING in parts:
        yield sharding_table(plan)
    if plan.checks:
        yield checks_table(plan)
