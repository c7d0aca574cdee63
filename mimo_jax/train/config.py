"""Frozen dataclasses that describe a training run; the one home of their defaults."""

import dataclasses

from mimo_jax.config import DrafterConfig, TargetConfig, require
from mimo_jax.layers.dispatch import DISPATCHES, PADDED
from mimo_jax.quant.mxfp4 import EVEN, check_groups, check_rule
from mimo_jax.sharding import TENSOR, TRAIN, full_sizes
from mimo_jax.train.objectives import ObjectiveConfig
from mimo_jax.train.placement import check_mesh


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
class QatConfig:
    """Training a target for experts in MXFP4: the forward sees them so; see `quant/qat.py`.

    Attributes:
      rule: How a group gets its scale, one of `quant.mxfp4.RULES`. On the experts of the embedded
        default `even` errs least (mean square 0.0125 of the weights', floor 0.0129, rceil 0.0138).
      distill_weight: Share of the loss that is the divergence from the same weights unquantised, in
        [0, 1]; the rest is cross-entropy. Above 0 a step costs one more forward.
    """

    rule: str = EVEN
    distill_weight: float = 0.0

    def __post_init__(self):
        check_rule(self.rule)
        require(
            0 <= self.distill_weight <= 1,
            f"qat.distill_weight {self.distill_weight} is out of range; allowed: 0 to 1",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What every training has: its length, its batches, its optimizers.

    Attributes:
      num_steps: Optimizer steps.
      batch_rows: Packed rows per step.
      mix: Share of rows per scene.
      muon_lr: Peak rate of matrices (updates are RMS-matched to AdamW's).
      adamw_lr: Peak rate of everything else: embeddings, head, router, norms, sinks.
      weight_decay: Decoupled, on matrices.
      warmup_steps: Linear warm-up.
      decay_fraction: Last part of the run, in which rates fall linearly to zero.
      clip_norm: Global gradient norm.
      eval_every: Steps between held-out evaluations.
      save_every: Steps between checkpoints.
    """

    num_steps: int
    batch_rows: int
    mix: dict[str, float] = dataclasses.field(default_factory=dict)
    muon_lr: float = 8e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    decay_fraction: float = 0.6
    clip_norm: float = 1.0
    eval_every: int = 500
    save_every: int = 250


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
    """

    num_steps: int = 10_000
    batch_rows: int = 4
    row_len: int = 256
    num_anchors: int = 32
    objective: ObjectiveConfig = ObjectiveConfig()
    block_chunk: int | None = 32
    adamw_lr: float = 2e-3
    eval_every: int = 1000
    save_every: int = 500

    def __post_init__(self):
        require(self.num_anchors >= 1, f"num_anchors {self.num_anchors} must be at least 1")
        require(
            self.block_chunk is None or self.block_chunk >= 1,
            f"block_chunk {self.block_chunk} must be at least 1, or None for all blocks at once",
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
