"""Frozen dataclasses that describe a training run; the one home of their defaults."""

import dataclasses
import math
from collections.abc import Callable

from mimo_jax.config import DrafterConfig, TargetConfig, require
from mimo_jax.layers.dispatch import DISPATCHES, PADDED
from mimo_jax.quant.mxfp4 import EVEN, check_groups, check_rule
from mimo_jax.sharding import TENSOR, TRAIN, full_sizes
from mimo_jax.train.data import LONG_DOCUMENTS, SPLIT
from mimo_jax.train.muon import ADAMW, MUON
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.placement import check_mesh
from mimo_jax.train.schedule import SCHEDULES, WSD
from mimo_jax.train.thinking import DEFAULT, thinking_kwargs


@dataclasses.dataclass(frozen=True)
class CorpusConfig:
    """Text of a run.

    Attributes:
      seed: Of every generator.
      target_chars: Training characters per scene; a missing scene has the corpus's default.
      num_heldout: Held-out documents per scene.
      tokenizer_docs: Documents per scene that the tokenizer is trained on.
      vocab_size: Of the tokenizer that is trained on it.
      row_len: Tokens per packed training row.
    """

    seed: int = 0
    target_chars: dict[str, int] = dataclasses.field(default_factory=dict)
    num_heldout: int = 200
    tokenizer_docs: int = 3000
    vocab_size: int = 2048
    row_len: int = 512


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text from files as packed rows; see `train/dataset.py`.

    Attributes:
      sources: Name of each source -> file, directory or pattern, see `sources.find_files`.
      row_len: Tokens per row.
      long_documents: What becomes of longer documents, of `data.LONG_DOCUMENTS`.
      thinking: Of `thinking.THINKING`: a drafter is for one of them.
      seed: Of the order in which documents are packed.
    """

    sources: dict[str, str]
    row_len: int
    long_documents: str = SPLIT
    thinking: str = DEFAULT
    seed: int = 0

    def __post_init__(self):
        require(len(self.sources) > 0, "data.sources is empty; allowed: at least one")
        require(self.row_len >= 2, f"data.row_len {self.row_len} is out of range; allowed: >= 2")
        require(
            self.long_documents in LONG_DOCUMENTS,
            f"data.long_documents {self.long_documents!r} is unknown; allowed: "
            f"{', '.join(LONG_DOCUMENTS)}",
        )
        thinking_kwargs(self.thinking)


@dataclasses.dataclass(frozen=True)
class QatConfig:
    """Training a target for experts in MXFP4: the forward sees them so; see `quant/qat.py`.

    Attributes:
      rule: How a group gets its scale, one of `quant.mxfp4.RULES`. On the experts of the embedded
        default `even` errs least (mean square 0.0125 of the weights', floor 0.0129, rceil 0.0138).
      distill_weight: Share of the loss that is the divergence from the same weights unquantised, in
        [0, 1]; the rest is cross-entropy. Above 0 a step costs one more forward.
      from_step: First step whose forward sees packed experts; those before train in float.
    """

    rule: str = EVEN
    distill_weight: float = 0.0
    from_step: int = 0

    def __post_init__(self):
        check_rule(self.rule)
        require(
            0 <= self.distill_weight <= 1,
            f"qat.distill_weight {self.distill_weight} is out of range; allowed: 0 to 1",
        )


def _check(name: str, value, is_allowed: Callable[[float], bool], allowed: str) -> None:
    require(is_allowed(value), f"{name} {value} is out of range; allowed: {allowed}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every training has: its length, its batches, its optimizers.

    Attributes:
      num_steps: Optimizer steps.
      batch_rows: Packed rows per step.
      mix: Share of rows per scene.
      matrix_optimizer: "muon", or "adamw" to have AdamW everywhere, for comparison.
      muon_lr: Peak rate of matrices (updates are RMS-matched to AdamW's).
      muon_momentum: Decay of Muon's gradient accumulator.
      newton_schulz_steps: Iterations of Muon.
      newton_schulz_dtype: Of the factors in Muon's products, "float32" or "bfloat16".
      adamw_lr: Peak rate of everything else: embeddings, head, router, norms, sinks.
      adam_b1: AdamW's decay of the first moment.
      adam_b2: AdamW's decay of the second moment.
      weight_decay: Decoupled, on matrices.
      schedule: Of both rates, one of `schedule.SCHEDULES`.
      warmup_steps: Linear warm-up.
      decay_fraction: Last part of the run, in which the rates of "wsd" fall linearly to zero.
      clip_norm: Global gradient norm.
      ema_decay: Of the average of weights that is evaluated and exported; 0: there is none.
      max_bad_steps: Steps in a row whose loss or gradient is not finite; then the run stops.
      eval_every: Steps between held-out evaluations.
      save_every: Steps between checkpoints.
    """

    num_steps: int
    batch_rows: int
    mix: dict[str, float] = dataclasses.field(default_factory=dict)
    matrix_optimizer: str = MUON
    muon_lr: float = 8e-3
    muon_momentum: float = 0.95
    newton_schulz_steps: int = 5
    newton_schulz_dtype: str = "float32"
    adamw_lr: float = 3e-3
    adam_b1: float = 0.9
    adam_b2: float = 0.95
    weight_decay: float = 0.01
    schedule: str = WSD
    warmup_steps: int = 50
    decay_fraction: float = 0.6
    clip_norm: float = 1.0
    ema_decay: float = 0.0
    max_bad_steps: int = 10
    eval_every: int = 500
    save_every: int = 250

    def __post_init__(self):
        for name, allowed in (
            ("matrix_optimizer", (MUON, ADAMW)),
            ("newton_schulz_dtype", ("float32", "bfloat16")),
            ("schedule", SCHEDULES),
        ):
            value = getattr(self, name)
            require(
                value in allowed, f"{name} {value!r} is unknown; allowed: {', '.join(allowed)}"
            )
        counts = ("num_steps", "batch_rows", "newton_schulz_steps", "max_bad_steps")
        for name in (*counts, "eval_every", "save_every"):
            _check(name, getattr(self, name), lambda x: x >= 1, "1 and more")
        for name in ("muon_lr", "adamw_lr", "weight_decay", "warmup_steps"):
            _check(name, getattr(self, name), lambda x: 0 <= x < math.inf, "0 and more")
        for name in ("muon_momentum", "adam_b1", "adam_b2", "ema_decay"):
            _check(name, getattr(self, name), lambda x: 0 <= x < 1, "0 to below 1")
        _check("decay_fraction", self.decay_fraction, lambda x: 0 < x <= 1, "above 0 to 1")
        _check("clip_norm", self.clip_norm, lambda x: x > 0, "above 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetTrainConfig(TrainConfig):
    """Pre-training of a small target.

    Attributes:
      capacity_factor: Rows an expert may take, in multiples of the mean.
      balance_rate: Step of the selection bias.
      qat: Quantization-aware training; the target is then written with packed experts. None: it
        is trained and written in float.
    """

    num_steps: int = 4000
    batch_rows: int = 8
    capacity_factor: float = 1.25
    balance_rate: float = 3e-3
    qat: QatConfig | None = None

    def __post_init__(self):
        super().__post_init__()
        _check("capacity_factor", self.capacity_factor, lambda x: x > 0, "above 0")
        _check("balance_rate", self.balance_rate, lambda x: 0 <= x < math.inf, "0 and more")
        if self.qat is not None:
            last = self.num_steps - 1
            _check("qat.from_step", self.qat.from_step, lambda x: 0 <= x <= last, f"0 to {last}")


@dataclasses.dataclass(frozen=True)
class RegenerateConfig:
    """The target answers prompts: the drafter learns the target's own text.

    Attributes:
      num_tokens: Generated tokens in all.
      greedy_share: Share of prompts answered greedily; the rest at `temperature`.
      temperature: Of the sampled share.
      max_tokens: Longest answer.
      batch_size: Rows decoded at once.
      num_heldout: Held-out prompts per scene for the simulated accept length.
    """

    num_tokens: int = 800_000
    greedy_share: float = 0.67
    temperature: float = 0.8
    max_tokens: int = 200
    batch_size: int = 128
    num_heldout: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterTrainConfig(TrainConfig):
    """Distillation of a DFlash drafter on the target's own text.

    Attributes:
      row_len: Tokens per row.
      num_anchors: Draft blocks per row and step, at random positions.
      objective: What the slots of a block are taught, and what each counts.
      block_chunk: Draft blocks that a device works on at a time, which bounds the memory of a step
        whatever num_anchors is; None: all at once. 32 of the nano's (256 slots) stay in the cache:
        a step's 128 take 20% less processor time than all at once, 512 of a longer row 28%. In
        rows of 32,768 tokens take 256: a chunk costs one addition over the row's context.
      keeps_features: The target reads all rows once, before the first step, and what a step needs
        of it stays in host memory in bfloat16 (see `train/features.py`). One device only: on a
        mesh each step computes it anew.
    """

    num_steps: int = 10_000
    batch_rows: int = 4
    row_len: int = 256
    num_anchors: int = 32
    objective: ObjectiveConfig = ObjectiveConfig()
    block_chunk: int | None = 32
    keeps_features: bool = False
    adamw_lr: float = 2e-3
    eval_every: int = 1000
    save_every: int = 500

    def __post_init__(self):
        super().__post_init__()
        require(self.num_anchors >= 1, f"num_anchors {self.num_anchors} must be at least 1")
        require(
            self.block_chunk is None or self.block_chunk >= 1,
            f"block_chunk {self.block_chunk} must be at least 1, or None for all blocks at once",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerConfig:
    """How a target answers files of prompts; the fields are those of `train.py regenerate`.

    Attributes:
      temperature: 0 is greedy.
      top_p: Sample from the fewest tokens that have this probability together; 1 is off.
      max_tokens: Most tokens per answer.
      thinking: Of `thinking.THINKING`: a drafter is for one of them.
      batch_size: Answers decoded at once.
      num_prompts: Prompts per scene that are answered in all rounds, from the beginning of the
        data; None: all of them.
      num_heldout: Held-out prompts per scene that are answered, greedily, to measure on.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    thinking: str = DEFAULT
    batch_size: int = 16
    num_prompts: int | None = None
    num_heldout: int = 32

    def __post_init__(self):
        thinking_kwargs(self.thinking)
        for name in ("max_tokens", "batch_size", "num_prompts", "num_heldout"):
            value = getattr(self, name)
            if value is not None:
                _check(f"answers.{name}", value, lambda x: x >= 1, "1 and more")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """One run that makes a drafter for a target that exists; see `train/distill.py`.

    Attributes:
      name: Of the run; the default run directory is runs/NAME.
      seed: Of initial weights, batches, anchors and answers.
      checkpoint: Directory of the target, with tokenizer and, for conversations, chat template.
      prompts: Scene -> file, directory or pattern of prompts to answer and learn, see
        `sources.find_files`.
      heldout: Scene -> prompts to measure on; the same scenes. They are never trained on.
      answers: How the target answers.
      drafter: Architecture of the drafter.
      drafter_train: Of each round.
      rounds: How often to answer and train. Each takes its own share of the prompts, decodes with
        the drafter of the round before and goes on from its weights.
      start: Directory of a drafter of this architecture to go on from; None: from nothing.
      mesh: Devices along the axes of sharding.TRAIN.
      dispatch: How tokens travel to experts on other devices.
    """

    name: str
    seed: int
    checkpoint: str
    prompts: dict[str, str]
    heldout: dict[str, str]
    answers: AnswerConfig
    drafter: DrafterConfig
    drafter_train: DrafterTrainConfig
    rounds: int = 1
    start: str | None = None
    mesh: tuple[int, ...] = (1, 1, 1)
    dispatch: str = PADDED

    def __post_init__(self):
        scenes = sorted(self.prompts)
        require(len(scenes) > 0, "prompts names no scene; allowed: at least one")
        for name, found in (
            ("heldout", sorted(self.heldout)),
            ("drafter_train.mix", sorted(self.drafter_train.mix)),
        ):
            require(found == scenes, f"{name} has the scenes {found}, prompts has {scenes}")
        _check("rounds", self.rounds, lambda x: x >= 1, "1 and more")
        require(
            self.dispatch in DISPATCHES,
            f"dispatch {self.dispatch!r} is unknown; allowed: {', '.join(DISPATCHES)}",
        )


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One run from text to an exported target + drafter; see `train/recipe.py` for the stages.

    Attributes:
      name: Of the run; the default run directory is runs/NAME.
      seed: Of initial weights, batches and anchors.
      corpus: Text and tokenizer.
      target: Architecture of the target.
      target_train: Its pre-training.
      regenerate: How the target answers the training prompts.
      drafter: Architecture of the drafter.
      drafter_train: Its distillation.
      mesh: Devices along the axes of sharding.TRAIN: data, expert, tensor and, for long rows,
        sequence. Both training stages run on it; a run may go on on another one.
      dispatch: How tokens travel to experts on other devices: see layers/dispatch.py.
      checkpoint: Directory of a target with tokenizer and drafter of these architectures, from
        whose weights both trainings start; None: from nothing.
    """

    name: str
    seed: int
    corpus: CorpusConfig
    target: TargetConfig
    target_train: TargetTrainConfig
    regenerate: RegenerateConfig
    drafter: DrafterConfig
    drafter_train: DrafterTrainConfig
    mesh: tuple[int, ...] = (1, 1, 1)
    dispatch: str = PADDED
    checkpoint: str | None = None

    def __post_init__(self):
        self.drafter.check_fits(self.target)
        require(
            self.target.vocab_size == self.corpus.vocab_size,
            f"target.vocab_size {self.target.vocab_size} differs from corpus.vocab_size "
            f"{self.corpus.vocab_size}",
        )
        require(
            self.target.moe is None or not self.target.moe.is_mxfp4,
            "target.moe.is_mxfp4: packed experts have no gradient and cannot be trained; "
            "target_train.qat trains float ones for it",
        )
        if self.target_train.qat is not None:
            self._check_groups()
        require(
            not self.target.is_fp8, "target.is_fp8: codes have no gradient and cannot be trained"
        )
        require(
            self.dispatch in DISPATCHES,
            f"dispatch {self.dispatch!r} is unknown; allowed: {', '.join(DISPATCHES)}",
        )
        check_mesh(
            self.mesh,
            self.target,
            self.drafter,
            {
                "target_train.batch_rows": self.target_train.batch_rows,
                "drafter_train.batch_rows": self.drafter_train.batch_rows,
            },
            self.drafter_train.row_len,
        )

    def _check_groups(self) -> None:
        """Every device must hold whole groups of what is quantized."""
        moe = self.target.moe
        require(moe is not None, "target_train.qat: the target has no experts to quantize")
        assert moe is not None
        sizes = dict(zip(TRAIN.mesh_axes, full_sizes(TRAIN, self.mesh), strict=True))
        # Cut over "data" as well (FSDP), but made whole before it is quantized.
        check_groups("target.layers.experts_gate", "embed", self.target.hidden_size)
        check_groups(
            "target.layers.experts_down", "expert_hidden", moe.hidden_size, sizes[TENSOR]
        )
