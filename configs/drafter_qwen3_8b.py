"""Qwen3-8B with its published DFlash drafter: 5 layers without a window, block of 16.

    python -m mimo_jax.plan configs/drafter_qwen3_8b.py --device h200 --devices 1 --context 32768

Source: the published config.json of both; 1,048,626,432 parameters in the drafter.
"""

from mimo_jax.config import GLOBAL, AttentionConfig, DrafterConfig, TargetConfig
from mimo_jax.plan.published import PublishedModel

NUM_LAYERS = 36


def get_config() -> PublishedModel:
    geometry = AttentionConfig(
        num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, rope_theta=1e6, rope_dim=128
    )
    target = TargetConfig(
        vocab_size=151936,
        hidden_size=4096,
        layer_kinds=(GLOBAL,) * NUM_LAYERS,
        attention={GLOBAL: geometry},
        dense_hidden_size=12288,
        use_qk_norm=True,
        norm_eps=1e-6,
        max_position=40960,
    )
    drafter = DrafterConfig(
        hidden_size=4096,
        num_layers=5,
        attention=geometry,
        dense_hidden_size=12288,
        target_layer_ids=(1, 9, 17, 25, 33),
        num_target_layers=NUM_LAYERS,
        draft_block_len=16,
        mask_token_id=151669,
        vocab_size=151936,
        max_position=40960,
    )
    return PublishedModel("Qwen3-8B + DFlash", target, drafter)
