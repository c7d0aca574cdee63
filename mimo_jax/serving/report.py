"""Figures of a batch job: one set of numbers, shown as a table and written as JSON.

Medians for durations (one long pause would move a mean). Tokens per second are output tokens over
wall time without compiling; a scene's share of the wall time is its share of the time that its
requests spent in rows, so with one row the scenes add up to the whole.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mimo_jax.decode.jobs import Output
from mimo_jax.decode.stats import AcceptStats, tpot_s

_BAR_LEN = 24


@dataclasses.dataclass
class Tally:
    """Running sums over some requests."""

    num_requests: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    accept: AcceptStats = AcceptStats()
    ttft_s: list[float] = dataclasses.field(default_factory=list)
    tpot_s: list[float] = dataclasses.field(default_factory=list)
    busy_s: float = 0.0

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Tally":
        """The inverse of `dataclasses.asdict`, also by way of JSON."""
        counts: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields["accept"].items()
        }
        sums: dict[str, Any] = fields | {"accept": AcceptStats(**counts)}
        return cls(**sums)

    def __iadd__(self, other: "Tally") -> "Tally":
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def add(self, candidates: Sequence[Output]) -> None:
        """Counts a line: all candidates decoded for it, in their order; none where it has an error.

        Its time to the first token is the first candidate's, for which the prompt was read.
        """
        self.num_requests += 1
        if not candidates:
            self.num_errors += 1
            return
        self.prompt_tokens += len(candidates[0].prompt_ids)
        self.ttft_s.append(candidates[0].completion.ttft_s)
        for output in candidates:
            completion = output.completion
            self.output_tokens += len(output.token_ids)
            self.accept += output.stats
            tpot = tpot_s(completion)
            if tpot is not None:
                self.tpot_s.append(tpot)
            self.busy_s += completion.ttft_s + completion.decode_s

    def figures(self, run_s: float) -> dict:
        """Under the names of the JSON file; run_s is wall time without compiling."""
        median = lambda values: round(statistics.median(values), 6) if values else None
        rate = self.output_tokens / run_s if run_s > 0 else 0.0
        return {
            "num_requests": self.num_requests,
            "num_errors": self.num_errors,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": round(rate, 2),
            **self.accept.to_json(),
            "ttft_s": median(self.ttft_s),
            "tpot_s": median(self.tpot_s),
        }


class JobReport:
    """Tallies of a whole job and of each scene in it."""

    def __init__(self):
        self.total = Tally()
        self.scenes: dict[str, Tally] = {}

    def add(self, scene: str | None, candidates: Sequence[Output]) -> None:
        """Counts one line, as `Tally.add`."""
        self.total.add(candidates)
        if scene is not None:
            self.scenes.setdefault(scene, Tally()).add(candidates)

    def to_json(self) -> dict:
        """Everything, for `joined` in another process."""
        return {
            "total": dataclasses.asdict(self.total),
            "scenes": {name: dataclasses.asdict(tally) for name, tally in self.scenes.items()},
        }

    @classmethod
    def joined(cls, reports: Sequence[dict]) -> "JobReport":
        """The sum of what several processes counted, each as `to_json` gives it."""
        report = cls()
        for fields in reports:
            report.total += Tally.from_json(fields["total"])
            for name, tally in fields["scenes"].items():
                report.scenes[name] = report.scenes.get(name, Tally())
                report.scenes[name] += Tally.from_json(tally)
        return report

    def metrics(self, wall_s: float, compile_s: float, num_skipped: int, run: dict) -> dict:
        """Everything that the JSON file holds.

        Args:
          wall_s: Of decoding, compiling included.
          compile_s: Part of it that went into compiling.
          num_skipped: Lines that an earlier run had answered; they are in no other figure.
          run: How the job was run, e.g. checkpoint, batch size and device.
        """
        run_s = max(wall_s - compile_s, 0.0)
        busy_s = self.total.busy_s or 1.0
        return {
            **self.total.figures(run_s),
            "compile_s": round(compile_s, 3),
            "wall_s": round(wall_s, 3),
            "num_skipped": num_skipped,
            "scenes": {
                name: tally.figures(run_s * tally.busy_s / busy_s)
                for name, tally in sorted(self.scenes.items())
            },
            "run": run,
        }


def render(metrics: dict) -> RenderableType:
    """The table at the end of a job, from `JobReport.metrics`."""
    parts: list[RenderableType] = [_table_of_scenes(metrics)]
    if len(metrics["accept_length_histogram"]) > 1:
        parts.append(_table_of_positions(metrics))
    skipped = f"; {metrics['num_skipped']} lines were answered before" * (
        metrics["num_skipped"] > 0
    )
    parts.append(Text(f"compiled for {metrics['compile_s']:.1f} s, not counted above{skipped}"))
    return Group(*parts)


def _cell(value: float | None, digits: int, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _table_of_scenes(metrics: dict) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("scene")
    for name in ("requests", "errors", "prompt", "output", "TTFT ms", "TPOT ms", "tokens/s", "τ"):
        table.add_column(name, justify="right")
    rows = [*metrics["scenes"].items(), ("all", metrics)]
    for name, figures in rows:
        ms = {key: None if figures[key] is None else figures[key] * 1e3 for key in _DURATIONS}
        table.add_row(
            name,
            str(figures["num_requests"]),
            str(figures["num_errors"]),
            str(figures["prompt_tokens"]),
            str(figures["output_tokens"]),
            _cell(ms["ttft_s"], 1),
            _cell(ms["tpot_s"], 2),
            _cell(figures["output_tokens_per_s"], 1),
            _cell(figures["tau"], 2),
            style="bold" if name == "all" and len(rows) > 1 else None,
        )
    return table


_DURATIONS = ("ttft_s", "tpot_s")


def _table_of_positions(metrics: dict) -> Table:
    histogram: Sequence[int] = metrics["accept_length_histogram"]
    acceptance: Sequence[float | None] = [*metrics["per_position_acceptance"], None]
    total = max(sum(histogram), 1)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("position", justify="right")
    table.add_column("accepted", justify="right")
    table.add_column("committed", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("")
    for i, (count, alpha) in enumerate(zip(histogram, acceptance, strict=True), start=1):
        is_draft = i < len(histogram)
        share = count / total
        table.add_row(
            str(i) if is_draft else "",
            _cell(None if alpha is None else 100 * alpha, 1, " %") if is_draft else "",
            str(i),
            str(count),
            f"{'█' * round(_BAR_LEN * share)} {share:.1%}",
        )
    return table
