"""A published model as the plan sees it: configs, MTP heads, and the formats of its files.

Configs of models (configs/target_*.py, configs/drafter_*.py) return this. It holds no sizes: those
follow from the modules' declared shapes (plan/weights.py), so that a plan cannot disagree with the
program. Training configs return an ExperimentConfig instead; `read_config` accepts both.
"""

import dataclasses
import importlib.util
import os
from pathlib import Path

from mimo_jax.checkpoint.safetensors_reader import nearest
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig, require
from mimo_jax.train.config import ExperimentConfig

FORMATS = ("mxfp4", "fp8", "bf16", "f32")


@dataclasses.dataclass(frozen=True)
class StorageFormats:
    """How the files hold what is not plain bfloat16; each one of FORMATS.

    Attributes:
      experts: Routed experts.
      projections: q, k, v and the dense SwiGLU matrices (the output projection is bfloat16).
      router: Router matrix.
    """

    experts: str = "bf16"
    projections: str = "bf16"
    router: str = "f32"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            require(
                name in FORMATS,
                f"storage of {field.name} {name!r} is unknown; allowed: {', '.join(FORMATS)}",
            )


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A target, what ships with it, and how its files store it.

    Attributes:
      name: For titles.
      target: Architecture of the target; `moe.is_mxfp4` and `is_fp8` say what our program
        holds.
      drafter: Architecture of its drafter, or None.
      num_mtp_heads: MTP heads in the files; our decoding does not load them.
      storage: Formats of the files.
      experiment: The training run, for training configs; adds the train steps to the plan.
    """

    name: str
    target: TargetConfig
    drafter: DrafterConfig | None = None
    num_mtp_heads: int = 0
    storage: StorageFormats = StorageFormats()
    experiment: ExperimentConfig | None = None

    def __post_init__(self):
        if self.drafter is not None:
            self.drafter.check_fits(self.target)


def of_experiment(experiment: ExperimentConfig) -> PublishedModel:
    """The models of a training run, stored as they are held: float32 counts as bf16 at decoding."""
    return PublishedModel(
        experiment.name, experiment.target, experiment.drafter, experiment=experiment
    )


def read_config(path: str | os.PathLike) -> PublishedModel:
    """The model that a config file's `get_config()` describes.

    Raises:
      ConfigError: If the file is missing, has no get_config, or returns something else.
    """
    path = Path(path)
    if not path.is_file():
        others = sorted(str(p) for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ConfigError(f"config {path} is missing{nearest(str(path), others)}")
    spec = importlib.util.spec_from_file_location(f"planned_{path.stem}", path)
    assert spec is not None  # a .py file always has a spec and a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise ConfigError(f"config {path} cannot be read: {error}") from error
    if not hasattr(module, "get_config"):
        raise ConfigError(f"config {path} has no get_config()")
    config = module.get_config()
    if isinstance(config, ExperimentConfig):
        return of_experiment(config)
    if not isinstance(config, PublishedModel):
        raise ConfigError(
            f"config {path} returns {type(config).__name__}; allowed: PublishedModel, "
            "ExperimentConfig"
        )
    return config
