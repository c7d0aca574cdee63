"""The embedded default in float: a 2.8M target and its DFlash drafter, from text.

    python train.py --config configs/nano.py

The corpora have changed since the embedded pair was made (LOG.md): conventions in place of free
names, tool results that come from outside. What the recipe gives on them is not measured yet. On
the text before (2026-11-30, seed 0): held-out loss of the target in nats per token, code-stdlib
3.1, code-gen 0.33, math 0.35, agent 0.36, chat 0.6; accept length on held-out prompts, greedy, math
5.6, agent 4.9, code-gen 4.5, code-stdlib 3.2, chat 2.9.
Time: 85 minutes on 2 cores (AMD Zen 4): target 52, regeneration 3, drafter 29.
Resumable: the same command goes on where it was stopped.
"""

from configs.common import DRAFTER_MIX, TARGET_MIX, nano_drafter, nano_target
from mimo_jax.train.config import (
    CorpusConfig,
    DrafterTrainConfig,
    ExperimentConfig,
    RegenerateConfig,
    TargetTrainConfig,
)
from mimo_jax.train.objectives import DPACE, ObjectiveConfig


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="nano",
        seed=0,
        corpus=CorpusConfig(),
        target=nano_target(),
        target_train=TargetTrainConfig(num_steps=2800, mix=TARGET_MIX),
        regenerate=RegenerateConfig(num_tokens=800_000),
        drafter=nano_drafter(),
        drafter_train=DrafterTrainConfig(
            num_steps=19_000,
            mix=DRAFTER_MIX,
            objective=ObjectiveConfig(weighting=DPACE),
            keeps_features=True,
            eval_every=4750,
            save_every=950,
        ),
    )
