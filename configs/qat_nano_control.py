"""What configs/qat_nano.py is measured against: the same start and steps, nothing quantized.

    python train.py --config configs/qat_nano_control.py
"""

import dataclasses

from configs import qat_nano
from mimo_jax.train.config import ExperimentConfig


def get_config() -> ExperimentConfig:
    config = qat_nano.get_config()
    train = dataclasses.replace(config.target_train, qat=None)
    return dataclasses.replace(config, name="qat-nano-control", target_train=train)
