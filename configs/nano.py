"""The embedded default in float: a 2.8M target and its DFlash drafter, from text.

    python train.py --config configs/nano.py

What configs/qat_nano.py changes and is measured against. Resumable: the same command goes on where
it was stopped.
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
