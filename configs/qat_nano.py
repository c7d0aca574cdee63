"""The embedded default: configs/nano.py, the last steps of whose target see experts in MXFP4.

    python train.py --config configs/qat_nano.py     (make train-demo)

Makes assets/mimo-nano. What the rounding costs: `python -m mimo_jax.bench qat` compares its target
with that of configs/nano.py, the same steps without quantization.

Expected (2026-11-30): held-out loss of the target in nats per token, code-stdlib 3.21, code-gen
0.284, math 0.320, agent 0.340, chat 0.548; accept length on held-out prompts, greedy, math 6.5,
agent 6.1, code-gen 5.7, code-stdlib 3.8, chat 3.4.
Time: 89 minutes on 2 cores (AMD Zen 4): target 47, regeneration 3, drafter 37, the rest 2.
"""

import dataclasses

from configs import nano
from mimo_jax.train.config import ExperimentConfig, QatConfig

FROM_STEP = 2000  # of 2,800; the rates have fallen to half of their peak


def get_config() -> ExperimentConfig:
    full = nano.get_config()
    train = dataclasses.replace(full.target_train, qat=QatConfig(from_step=FROM_STEP))
    return dataclasses.replace(full, name="qat-nano", target_train=train)
