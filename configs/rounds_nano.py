"""Another drafter for the embedded target, experts in MXFP4, in two rounds of its own answers.

    python train.py --config configs/nano.py        # once: its runs/nano/corpus holds the prompts
    python train.py --config configs/rounds_nano.py --dry-run
    python train.py --config configs/rounds_nano.py

The second round answers with the drafter of the first and goes on from its weights. The example to
copy for a target of your own: change checkpoint, prompts and the drafter's shape. Prompts may be
any file of `messages`, `prompt` or ids (`mimo_jax/train/sources.py`); here they are those of packed
rows. Not run to its end yet, so there is no expected result.
"""

from configs.common import DRAFTER_MIX, nano_drafter
from mimo_jax.train.config import AnswerConfig, DistillConfig, DrafterTrainConfig


def get_config() -> DistillConfig:
    source = lambda part: {
        scene: f"runs/nano/corpus/{part}/{scene}.npz" for scene in DRAFTER_MIX
    }
    return DistillConfig(
        name="rounds-nano",
        seed=0,
        checkpoint="assets/mimo-nano",
        prompts=source("train"),
        heldout=source("heldout"),
        answers=AnswerConfig(max_tokens=200, batch_size=64, num_prompts=1600, num_heldout=16),
        drafter=nano_drafter(),
        drafter_train=DrafterTrainConfig(
            num_steps=3000, mix=DRAFTER_MIX, keeps_features=True, eval_every=1000
        ),
        rounds=2,
    )
