"""The embedded default: configs/nano.py, the last steps of whose target see experts in MXFP4.

    python train.py --config configs/qat_nano.py     (make train-demo)

Makes assets/mimo-nano. What the rounding costs: `python -m mimo_jax.bench qat` compares its target
with that of configs/nano.py, the same steps without quantization.
"""

import dataclasses

from configs import nano
from mimo_jax.train.config import ExperimentConfig, QatConfig

FROM_STEP = 2000  # of 2,800; the rates have fallen to half of their peak


def get_config() -> ExperimentConfig:
    full = nano.get_config()
    train = dataclasses.replace(full.target_train, qat=QatConfig(from_step=FROM_STEP))
    return dataclasses.replace(full, name="qat-nano", target_train=train)
