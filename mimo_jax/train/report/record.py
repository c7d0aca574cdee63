"""What a run directory says about its trainings: metrics, config, and how far they came."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from mimo_jax.config import ConfigError, require
from mimo_jax.train.metrics import ACCEPT_LENGTHS, read_metrics, scalars

# Records of one kind each: training steps have a loss, evaluations have figures by scene.
_ACCEPTANCES = ("real_acceptance", "heldout_acceptance")


@dataclasses.dataclass(frozen=True)
class Stage:
    """One training of a run.

    Attributes:
      name: Of its directory.
      records: Lines of its metrics, in order; not empty.
      num_steps: That its config asks for; None if the run's config does not say.
      has_bad_batch: Whether the loop stopped it and kept a batch.
    """

    name: str
    records: list[dict[str, Any]]
    num_steps: int | None
    has_bad_batch: bool

    @property
    def last_step(self) -> int:
        """Newest step in the metrics."""
        return self.records[-1]["step"]

    @property
    def is_finished(self) -> bool:
        """Whether it came to its end."""
        return self.num_steps is not None and self.last_step >= self.num_steps

    @property
    def progress(self) -> str:
        """How far it is, in words. Example: "finished, 2,800 steps"."""
        if self.is_finished:
            return f"finished, {self.last_step:,} steps"
        of = "" if self.num_steps is None else f" of {self.num_steps:,}"
        bad = ", ended by bad steps (bad_batch.npz)" if self.has_bad_batch else ""
        return f"at step {self.last_step:,}{of}{bad or ', running or stopped'}"

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric that is a number; null is left out."""
        found = [(r["step"], r[name]) for r in self.records if r.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]

    def by_scene(self, name: str) -> dict[str, tuple[list[int], list[float]]]:
        """The same for each scene of a metric by scene."""
        scenes: dict[str, tuple[list[int], list[float]]] = {}
        for record in self.records:
            for scene, value in (record.get(name) or {}).items():
                if isinstance(value, int | float):
                    steps, values = scenes.setdefault(scene, ([], []))
                    steps.append(record["step"])
                    values.append(value)
        return scenes

    def newest(self, name: str) -> Any:
        """A metric's newest value, whatever it is; None if there is none."""
        return next((r[name] for r in reversed(self.records) if r.get(name) is not None), None)

    @property
    def rates(self) -> list[str]:
        """Names of learning rates among the metrics."""
        names = {name for record in self.records for name in record}
        return sorted(n for n in names if n.startswith("lr_") or n.endswith("_lr") or n == "lr")

    def final_figures(self) -> dict[str, float]:
        """Newest number of every metric under its slashed name, the clock left out."""
        names = {name for record in self.records for name in record} - {"step", "time"}
        return dict(sorted(scalars({name: self.newest(name) for name in names})))

    def accept_table(self) -> dict[str, dict[str, Any]]:
        """Scene -> newest accept lengths and per-position acceptance, as far as measured."""
        table: dict[str, dict[str, Any]] = {}
        for name in (*ACCEPT_LENGTHS, *_ACCEPTANCES):
            for scene, value in (self.newest(name) or {}).items():
                table.setdefault(scene, {})[name] = value
        return dict(sorted(table.items()))

    @property
    def seconds_per_step(self) -> float | None:
        """Median of wall time per step between two logged steps, evaluations included."""
        logged = [(r["step"], r["time"]) for r in self.records if "loss" in r]
        pairs = zip(logged, logged[1:], strict=False)
        gaps = sorted((t1 - t0) / (s1 - s0) for (s0, t0), (s1, t1) in pairs if s1 > s0)
        return gaps[len(gaps) // 2] if gaps else None


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """A run directory as read.

    Attributes:
      run_dir: The directory.
      stages: Its trainings in the order they began.
      provenance: What `provenance.record` wrote before the work; {} if it is missing.
    """

    run_dir: Path
    stages: list[Stage]
    provenance: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """What report.json holds."""
        return {
            "run_dir": str(self.run_dir),
            "stages": {
                stage.name: {
                    "progress": stage.progress,
                    "last_step": stage.last_step,
                    "num_steps": stage.num_steps,
                    "figures": stage.final_figures(),
                }
                for stage in self.stages
            },
            "provenance": self.provenance,
        }


def read_run(run_dir: Path) -> RunRecord:
    """Reads what there is.

    Raises:
      ConfigError: If there is no such directory, or no training in it has written metrics yet.
    """
    require(run_dir.is_dir(), f"run directory {run_dir} does not exist")
    path = run_dir / "config.json"
    provenance = {}
    if path.exists():
        try:
            provenance = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path} is no JSON: {error}") from error
    stages = []
    found = [*run_dir.glob("*/metrics.jsonl"), *run_dir.glob("*/*/metrics.jsonl")]
    for metrics_path in sorted(found):
        stage_dir, records = metrics_path.parent, read_metrics(metrics_path)
        if not records:
            continue
        name = str(stage_dir.relative_to(run_dir))
        settings = provenance.get("config", {}).get(f"{stage_dir.name}_train") or {}
        has_bad_batch = (stage_dir / "bad_batch.npz").exists()
        stages.append(Stage(name, records, settings.get("num_steps"), has_bad_batch))
    require(
        bool(stages),
        f"{run_dir} has no metrics yet: a training writes the first line of STAGE/metrics.jsonl "
        "after ten steps",
    )
    stages.sort(key=lambda stage: stage.records[0].get("time", 0.0))
    return RunRecord(run_dir, stages, provenance)
