"""The embedded default (assets/mimo-nano): a 3.9M target and its DFlash drafter, from text.

    python train.py --config configs/nano.py
"""

from configs.common import DRAFTER_MIX, TARGET_MIX, nano_drafter, nano_target
from mimo_jax.config import (
    CorpusConfig,
    DrafterTrainConfig,
    ExperimentConfig,
    RegenerateConfig,
    TargetTrainConfig,
)


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        name="nano",
        seed=0,
        corpus=CorpusConfig(),
        target=nano_target(),
        target_train=TargetTrainConfig(num_steps=2400, mix=TARGET_MIX),
        regenerate=RegenerateConfig(num_tokens=600_000),
        drafter=nano_drafter(),
        drafter_train=DrafterTrainConfig(
            num_steps=13_000, mix=DRAFTER_MIX, eval_every=3250, save_every=650
        ),
    )
