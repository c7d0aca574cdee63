"""MiMo-V2-Flash, 309B parameters of which 15B are active: 48 layers, 256 experts, FP8 files.

    python -m mimo_jax.plan configs/target_mimo_v2_flash.py --device h200 --devices 8

Source: the published config.json (its layer lists are irregular and are written out, not derived).
"""

from mimo_jax.config import GLOBAL, SLIDING, AttentionConfig, MoeConfig, TargetConfig
from mimo_jax.plan.published import PublishedModel, StorageFormats

NUM_LAYERS = 48
GLOBAL_LAYERS = (0, 5, 11, 17, 23, 29, 35, 41, 47)


def get_config() -> PublishedModel:
    target = TargetConfig(
        vocab_size=152576,
        hidden_size=4096,
        layer_kinds=tuple(GLOBAL if i in GLOBAL_LAYERS else SLIDING for i in range(NUM_LAYERS)),
        attention={
            GLOBAL: AttentionConfig(
                num_heads=64,
                num_kv_heads=4,
                head_dim=192,
                v_head_dim=128,
                rope_theta=5e6,
                rope_dim=64,
            ),
            SLIDING: AttentionConfig(
                num_heads=64,
                num_kv_heads=8,
                head_dim=192,
                v_head_dim=128,
                rope_theta=1e4,
                rope_dim=64,
                window=128,
                has_sink=True,
            ),
        },
        dense_hidden_size=16384,
        moe=MoeConfig(num_experts=256, top_k=8, hidden_size=2048),
        is_moe_layer=tuple(i > 0 for i in range(NUM_LAYERS)),
        value_scale=0.707,
        norm_eps=1e-5,
        max_position=262144,
    )
    storage = StorageFormats(experts="fp8", projections="fp8", router="f32")
    return PublishedModel("MiMo-V2-Flash", target, num_mtp_heads=3, storage=storage)
