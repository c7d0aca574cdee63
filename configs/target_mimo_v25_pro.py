"""MiMo-V2.5-Pro as UltraSpeed runs it: 1.02T parameters, 42B active, experts in MXFP4.

    python -m mimo_jax.plan configs/target_mimo_v25_pro.py --device h200 --context 262144

Source: the published config.json of MiMo-V2.5-Pro-FP4-DFlash.
"""

from mimo_jax.config import GLOBAL, SLIDING, AttentionConfig, MoeConfig, TargetConfig
from mimo_jax.plan.published import PublishedModel, StorageFormats

NUM_LAYERS = 70
GLOBAL_LAYERS = (0, 7, 15, 23, 31, 39, 47, 55, 62, 69)


def get_config() -> PublishedModel:
    def geometry(**of_kind) -> AttentionConfig:
        return AttentionConfig(
            num_heads=128, num_kv_heads=8, head_dim=192, v_head_dim=128, rope_dim=64, **of_kind
        )

    target = TargetConfig(
        vocab_size=152576,
        hidden_size=6144,
        layer_kinds=tuple(GLOBAL if i in GLOBAL_LAYERS else SLIDING for i in range(NUM_LAYERS)),
        attention={
            GLOBAL: geometry(rope_theta=1e7),
            SLIDING: geometry(rope_theta=1e4, window=128, has_sink=True),
        },
        dense_hidden_size=16384,
        moe=MoeConfig(num_experts=384, top_k=8, hidden_size=2048, is_mxfp4=True),
        is_moe_layer=tuple(i > 0 for i in range(NUM_LAYERS)),
        value_scale=0.612,
        norm_eps=1e-5,
        max_position=1048576,
        is_fp8=True,
    )
    storage = StorageFormats(experts="mxfp4", projections="fp8", router="bf16")
    return PublishedModel("MiMo-V2.5-Pro", target, num_mtp_heads=3, storage=storage)
