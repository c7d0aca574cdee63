"""The embedded default with experts in MXFP4: some more steps in which the forward sees them so.

    python train.py --config configs/qat_nano.py

Makes assets/mimo-nano. Starts from what configs/nano.py left in runs/nano, target and drafter
(`make train-demo`); the target's text is then written anew and the drafter goes on learning on it.
The control, same steps and no quantization, is configs/qat_nano_control.py;
`python -m mimo_jax.bench qat` compares the two.

Expected (2026-11-30): held-out loss of the packed target, nats per token over all scenes, 1.135;
the float weights have 1.141, rounded without training 1.149, after the control's steps 1.131.
Time: 40 minutes on 2 cores with neighbours (AMD Zen 4): target 13, regeneration 9, drafter 18.
"""

import dataclasses

from configs import nano
from mimo_jax.train.config import ExperimentConfig, QatConfig, RegenerateConfig

NUM_STEPS = 300


def get_config() -> ExperimentConfig:
    full = nano.get_config()
    return dataclasses.replace(
        full,
        name="qat-nano",
        seed=7,  # other batches than those the weights saw first
        checkpoint="runs/nano/export",
        target_train=dataclasses.replace(
            full.target_train,
            num_steps=NUM_STEPS,
            muon_lr=1.5e-3,
            adamw_lr=5e-4,
            warmup_steps=20,
            decay_fraction=0.9,
            balance_rate=5e-4,
            eval_every=NUM_STEPS // 2,
            save_every=NUM_STEPS // 2,
            qat=QatConfig(),
        ),
        regenerate=RegenerateConfig(num_tokens=250_000),
        drafter_train=dataclasses.replace(
            full.drafter_train,
            num_steps=3000,
            muon_lr=4e-3,
            adamw_lr=1e-3,
            decay_fraction=0.9,
            eval_every=1500,
            save_every=500,
        ),
    )
