"""Two pictures of a plan: where a step's time goes, and what a longer block would bring."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mimo_jax.plan import roofline
from mimo_jax.plan.account import Plan, Request, Speed
from mimo_jax.plan.weights import ClassBytes

# One colour per cause, the same in every picture (Okabe and Ito: told apart by everyone).
COLOURS = {
    "experts": "#0072B2",
    "dense weights": "#56B4E9",
    "head": "#009E73",
    "caches": "#F0E442",
    "drafter and its head": "#CC79A7",
    roofline.READ: "#0072B2",
    roofline.ALL_REDUCES: "#E69F00",
    roofline.LAUNCHES: "#D55E00",
}


def draw_steps(ax: Axes, speeds: Sequence[Speed], title: str = "") -> None:
    """One bar per account, its causes stacked in milliseconds; tokens/s at its end.

    Args:
      ax: Where.
      speeds: Accounts, top to bottom.
      title: Above the axes.
    """
    labels = [speed.name.replace(", ", "\n", 1) for speed in speeds]
    drawn = set()
    longest = max(sum(speed.time.terms_s.values()) for speed in speeds) * 1e3
    for row, speed in enumerate(speeds):
        left = 0.0
        for cause, seconds in speed.time.terms_s.items():
            ms = seconds * 1e3
            label = None if cause in drawn else cause
            drawn.add(cause)
            hatch = "//" if cause == roofline.READ else None
            ax.barh(
                row, ms, left=left, color=COLOURS[cause], label=label, hatch=hatch,
                edgecolor="white", height=0.6,
            )  # fmt: skip
            left += ms
        scene, rate = next(iter(speed.tokens_per_s.items()))
        where = "" if scene == "any" else f" {scene}"
        ax.text(left + longest * 0.01, row, f"{rate:,.0f} tok/s{where}", va="center", fontsize=9)
    ax.set_yticks(range(len(speeds)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, longest * 1.25)
    ax.set_xlabel("milliseconds of one step, nothing overlapped")
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    ax.spines[["top", "right"]].set_visible(False)


def step_at_block(
    request: Request, rows: dict[str, ClassBytes], block: int, launches_per_layer: float
) -> roofline.StepTime:
    """Time of a DFlash step with another block length, from the configuration."""
    reads = roofline.of_program(
        request.model,
        rows,
        num_tokens=block,
        batch_size=request.batch_size,
        context=request.context,
        num_devices=request.num_devices,
        is_drafting=request.is_drafting,
    )
    tokens = block * request.batch_size
    traffic = roofline.expected_traffic(
        request.model,
        tokens,
        is_drafting=request.is_drafting,
        launches_per_layer=launches_per_layer,
    )
    flops = roofline.step_flops(request.model, rows, tokens)
    return roofline.step_time(reads, traffic, flops, request.device, request.num_devices)


def draw_sensitivity(
    ax: Axes,
    request: Request,
    rows: dict[str, ClassBytes],
    blocks: Sequence[int] = (2, 4, 6, 8, 12, 16),
    title: str = "",
) -> None:
    """Tokens/s against accept length, one line per block length; scenes marked.

    Args:
      ax: Where.
      request: Of the plan.
      rows: Weights by class.
      blocks: Draft block lengths.
      title: Above the axes.
    """
    for i, block in enumerate(blocks):
        time = step_at_block(request, rows, block, request.launches_per_layer)
        shade = 0.25 + 0.75 * i / max(1, len(blocks) - 1)
        colour = (0.0, 0.45 * shade, 0.7, shade)
        ends = (1.0, float(block))
        rates = [time.tokens_per_s(tau) for tau in ends]
        width = 2.5 if block == request.draft_block_len else 1.5
        ax.plot(ends, rates, color=colour, linewidth=width)
        ax.annotate(
            f"block {block}", (ends[1], rates[1]), fontsize=8, xytext=(0, 4), ha="center",
            textcoords="offset points",
        )  # fmt: skip
    top = ax.get_ylim()[1]
    for scene, tau in request.accept_lengths.items():
        ax.axvline(tau, color="#888888", linestyle=":", linewidth=1)
        ax.text(tau, top, scene, rotation=90, fontsize=8, va="top", ha="right", color="#555555")
    ax.axhline(1000, color="#D55E00", linestyle="--", linewidth=1)
    ax.text(max(blocks), 1000, "1,000 tok/s", fontsize=8, color="#D55E00", ha="right", va="bottom")
    ax.set_xlim(1, max(blocks) * 1.12)
    ax.set_ylim(0, top)
    ax.set_xlabel("accept length, tokens committed per step")
    ax.set_ylabel("tokens/s of one row")
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)


def save_plots(plan: Plan, directory: Path) -> list[Path]:
    """Writes NAME-step.png and, for a model with a drafter, NAME-sensitivity.png."""
    directory.mkdir(parents=True, exist_ok=True)
    request = plan.request
    stem = Path(request.config).stem
    where = f"{request.num_devices} x {request.device.name}"
    stem = f"{stem}-{request.num_devices}x{request.device.name}"
    title = (
        f"{request.model.name} on {where}, batch {request.batch_size}, "
        f"{request.context:,} positions"
    )
    figure = Figure(figsize=(9, 1.6 + 0.8 * len(plan.speeds)), layout="constrained", dpi=120)
    draw_steps(figure.subplots(), plan.speeds, title)
    paths = [directory / f"{stem}-step.png"]
    figure.savefig(paths[0])
    if request.is_drafting:
        figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
        text = f"{title}\nour XLA program, nothing overlapped, from the configuration"
        draw_sensitivity(figure.subplots(), request, plan.weights, title=text)
        paths.append(directory / f"{stem}-sensitivity.png")
        figure.savefig(paths[-1])
    return paths
