"""The whole recipe of configs/nano.py at a size that shows the path, not the result.

    python train.py --config configs/nano_smoke.py

Expected: every stage runs and runs/nano-smoke/export decodes; accept lengths near 1.
Time: under 5 minutes on 2 CPU cores.
"""

import dataclasses

from configs import nano
from mimo_jax.train.config import ExperimentConfig, RegenerateConfig

SMALL = {"code-stdlib": 400_000, "code-gen": 300_000, "math": 300_000, "agent": 300_000,
         "chat": 200_000}


def get_config() -> ExperimentConfig:
    full = nano.get_config()
    return dataclasses.replace(
        full,
        name="nano-smoke",
        corpus=dataclasses.replace(
            full.corpus, target_chars=SMALL, num_heldout=24, tokenizer_docs=300
        ),
        target_train=dataclasses.replace(
            full.target_train, num_steps=60, warmup_steps=10, eval_every=60, save_every=30
        ),
        regenerate=RegenerateConfig(
            num_tokens=20_000, max_tokens=100, batch_size=32, num_heldout=8
        ),
        drafter_train=dataclasses.replace(
            full.drafter_train, num_steps=150, eval_every=150, save_every=75
        ),
    )
