"""MiMo-V2.5-Pro with its published DFlash drafter: 5 sliding layers, block of 8.

    python -m mimo_jax.plan configs/drafter_mimo_v25_pro.py --device h200 --context 262144

Source: dflash/config.json of MiMo-V2.5-Pro-FP4-DFlash.
"""

import dataclasses

from configs import target_mimo_v25_pro
from mimo_jax.config import AttentionConfig, DrafterConfig
from mimo_jax.plan.published import PublishedModel

NUM_LAYERS = 5


def get_config() -> PublishedModel:
    drafter = DrafterConfig(
        hidden_size=6144,
        num_layers=NUM_LAYERS,
        attention=AttentionConfig(
            num_heads=128,
            num_kv_heads=8,
            head_dim=128,
            v_head_dim=128,
            rope_theta=1e4,
            rope_dim=64,
            has_sink=True,
        ),
        dense_hidden_size=16384,
        target_layer_ids=(0, 15, 31, 47, 69),
        num_target_layers=70,
        draft_block_len=8,
        mask_token_id=151669,
        vocab_size=152064,
        windows=(1024,) * NUM_LAYERS,
        value_scale=0.612,
        norm_eps=1e-5,
        max_position=262144,
    )
    model = target_mimo_v25_pro.get_config()
    return dataclasses.replace(model, name="MiMo-V2.5-Pro + DFlash", drafter=drafter)
