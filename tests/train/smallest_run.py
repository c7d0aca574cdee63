"""The whole recipe at the smallest size, for tests: `python train.py --config` with this file.

Time: 15 s on one CPU core, most of it importing and compiling.
"""

from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    DrafterConfig,
    MoeConfig,
    TargetConfig,
)
from mimo_jax.train.config import (
    CorpusConfig,
    DrafterTrainConfig,
    ExperimentConfig,
    RegenerateConfig,
    TargetTrainConfig,
)

SCENES = ("code-gen", "math")
CHARS = {"code-stdlib": 20_000, "code-gen": 30_000, "math": 30_000, "agent": 20_000, "chat": 8_000}
SHAPE = {"num_heads": 4, "head_dim": 12, "v_head_dim": 8, "rope_dim": 4}


def get_config() -> ExperimentConfig:
    mix = dict.fromkeys(SCENES, 0.5)
    return ExperimentConfig(
        name="smallest",
        seed=3,
        corpus=CorpusConfig(
            target_chars=CHARS, num_heldout=4, tokenizer_docs=20, vocab_size=320, row_len=512
        ),
        target=TargetConfig(
            vocab_size=320,
            hidden_size=28,
            layer_kinds=(GLOBAL, SLIDING),
            attention={
                GLOBAL: AttentionConfig(num_kv_heads=1, rope_theta=1e5, **SHAPE),
                SLIDING: AttentionConfig(
                    num_kv_heads=2, rope_theta=1e4, window=10, has_sink=True, **SHAPE
                ),
            },
            dense_hidden_size=40,
            moe=MoeConfig(num_experts=6, top_k=2, hidden_size=20),
            is_moe_layer=(False, True),
            value_scale=0.707,
            max_position=512,
        ),
        target_train=TargetTrainConfig(
            num_steps=6, batch_rows=4, mix=mix, warmup_steps=2, eval_every=6, save_every=3
        ),
        regenerate=RegenerateConfig(num_tokens=900, max_tokens=16, batch_size=8, num_heldout=2),
        drafter=DrafterConfig(
            hidden_size=28,
            num_layers=1,
            attention=AttentionConfig(
                num_heads=4,
                num_kv_heads=2,
                head_dim=14,
                v_head_dim=14,
                rope_theta=1e4,
                rope_dim=14,
            ),
            dense_hidden_size=32,
            target_layer_ids=(0, 1),
            num_target_layers=2,
            draft_block_len=5,
            mask_token_id=4,
            vocab_size=320,
            windows=(11,),
            max_position=512,
        ),
        drafter_train=DrafterTrainConfig(
            num_steps=4,
            batch_rows=4,
            row_len=512,
            num_anchors=4,
            mix=mix,
            warmup_steps=2,
            eval_every=4,
            save_every=2,
        ),
    )
