"""The picture of `context_bench`: milliseconds of a step by context."""

from pathlib import Path

from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by everyone.
_COLOURS = ("#009E73", "#56B4E9", "#0072B2", "#CC79A7", "#D55E00", "#E69F00", "#000000")


def draw_context(steps: dict[str, dict[int, dict]], gb_per_s: float, path: Path) -> None:
    """One line per variant, and how long reading float32's bytes takes at the machine's rate.

    Args:
      steps: As `context_bench.step_times`, by variant.
      gb_per_s: Rate of summing memory, by processor time.
      path: A PNG file.
    """
    figure = Figure(figsize=(8, 5), layout="constrained")
    ax = figure.subplots()
    for colour, (name, rows) in zip(_COLOURS, steps.items(), strict=False):
        contexts = sorted(rows)
        times = [rows[n]["processor_ms"] for n in contexts]
        style = "--" if "block" in name else "-"
        ax.plot(contexts, times, style, color=colour, marker="o", markersize=4, label=name)
    rows = steps.get("global")
    if rows:
        contexts = sorted(rows)
        bound = [rows[n]["read_mb"] / gb_per_s for n in contexts]
        ax.plot(contexts, bound, ":", color="grey", label=f"float32 bytes at {gb_per_s:.0f} GB/s")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("context in tokens, of a memory for 262,144")
    ax.set_ylabel("processor milliseconds of a step")
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
