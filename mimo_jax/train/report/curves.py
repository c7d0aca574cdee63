"""The pictures of one training: loss, accept length, acceptance by position, and how it ran.

A panel whose figures are missing is left out. One colour per scene, the same in every picture.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mimo_jax.train.report.record import Stage

# Okabe and Ito: told apart by everyone. The last is for what belongs to no scene.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8A7A00")
GREY = "#777777"
_SMOOTHED_POINTS = 120


def scene_colours(stage: Stage) -> dict[str, str]:
    """Scene -> colour, by alphabet over all scenes that the stage knows."""
    names = {
        scene
        for record in stage.records
        for value in record.values()
        if isinstance(value, dict)
        for scene in value
    }
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(sorted(names))}


def smoothed(values: list[float]) -> np.ndarray:
    """Centred running mean over about a 120th of the values, shorter at both ends.

    Example: 3 values -> themselves.
    """
    half = max(len(values) // _SMOOTHED_POINTS, 0)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    i = np.arange(len(values))
    first, last = np.maximum(i - half, 0), np.minimum(i + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw_noisy(ax: Axes, stage: Stage, name: str, label: str, colour: str = GREY) -> bool:
    steps, values = stage.series(name)
    if steps:
        ax.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
        ax.plot(steps, smoothed(values), color=colour, linewidth=1.6, label=label)
    return bool(steps)


def _draw_scenes(ax: Axes, stage: Stage, name: str, style: str, suffix: str = "") -> bool:
    colours, scenes = scene_colours(stage), stage.by_scene(name)
    for scene, (steps, values) in sorted(scenes.items()):
        ax.plot(
            steps, values, style, color=colours[scene], linewidth=1.6, markersize=3.5,
            label=scene + suffix,
        )  # fmt: skip
    return bool(scenes)


def _loss(ax: Axes, stage: Stage) -> bool:
    found = _draw_noisy(ax, stage, "loss", "training")
    found |= _draw_scenes(ax, stage, "heldout_loss", "o-", ", held out")
    _, values = stage.series("loss")
    if len(values) > 20:  # the first steps would squeeze the rest into a line
        heldout = [max(losses) for _, losses in stage.by_scene("heldout_loss").values()]
        top = max(float(np.quantile(values, 0.98)), *heldout, 0.0)
        ax.set_ylim(top=top + 0.1 * (top - min(values)))
    ax.set_ylabel("loss, nats")
    return found


def _accept_length(ax: Axes, stage: Stage) -> bool:
    found = _draw_noisy(ax, stage, "expected_accept_length", "on training blocks")
    found |= _draw_scenes(ax, stage, "heldout_accept_length", "o-")
    found |= _draw_scenes(ax, stage, "real_accept_length", "^--", ", decoded")
    ax.set_ylabel("accept length τ, tokens per step")
    return found


def _acceptance(ax: Axes, stage: Stage) -> bool:
    colours, table = scene_colours(stage), stage.accept_table()
    found = False
    for scene, row in table.items():
        for name, style, suffix in (
            ("heldout_acceptance", "o-", ""),
            ("real_acceptance", "^--", ", decoded"),
        ):
            alphas = row.get(name) or []
            points = [(i, a) for i, a in enumerate(alphas, start=1) if a is not None]
            if points:
                found = True
                ax.plot(
                    *zip(*points, strict=True), style, color=colours[scene], linewidth=1.6,
                    markersize=4, label=scene + suffix,
                )  # fmt: skip
                ax.set_xticks(range(1, len(alphas) + 1))
    ax.set_ylim(0, 1.03)
    ax.set_xlabel("draft position i")
    ax.set_ylabel("acceptance α_i, given all before")
    return found


def _rates(ax: Axes, stage: Stage) -> bool:
    for i, name in enumerate(stage.rates):
        steps, values = stage.series(name)
        ax.plot(steps, values, color=COLOURS[i % len(COLOURS)], linewidth=1.6, label=name)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("learning rate")
    return bool(stage.rates)


def _grad_norm(ax: Axes, stage: Stage) -> bool:
    found = _draw_noisy(ax, stage, "grad_norm", "gradient norm", COLOURS[0])
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_ylabel("gradient norm before clipping")
    return found


def _speed(ax: Axes, stage: Stage) -> bool:
    found = _draw_noisy(ax, stage, "tokens_per_s", "tokens/s", COLOURS[2])
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    ax.set_ylabel("tokens/s")
    return found


# name -> (title, draws and says whether there was anything)
PANELS: dict[str, tuple[str, Callable[[Axes, Stage], bool]]] = {
    "loss": ("Loss", _loss),
    "accept_length": ("Accept length, held out", _accept_length),
    "acceptance": ("Acceptance by position, newest evaluation", _acceptance),
    "learning_rates": ("Learning rates", _rates),
    "grad_norm": ("Gradient norm", _grad_norm),
    "tokens_per_s": ("Speed", _speed),
}


def save_curves(stage: Stage, directory: Path) -> dict[str, Path]:
    """Writes STAGE-PANEL.png for every panel that has figures; returns them by panel."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, (title, draw) in PANELS.items():
        figure = Figure(figsize=(7.2, 3.9), layout="constrained", dpi=110)
        ax = figure.subplots()
        ax.set_xlabel("step")
        ax.grid(color="#e6e6e6", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        if not draw(ax, stage):
            continue
        ax.set_title(f"{stage.name}: {title}", fontsize=11, loc="left")
        if len(ax.get_legend_handles_labels()[1]) > 1:
            ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        paths[name] = directory / f"{stage.name.replace('/', '-')}-{name}.png"
        figure.savefig(paths[name])
    return paths
