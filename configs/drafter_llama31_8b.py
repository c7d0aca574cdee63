"""Llama-3.1-8B with a DFlash drafter of the published kind: 5 layers, block of 10.

    python -m mimo_jax.plan configs/drafter_llama31_8b.py --device h200 --devices 1 --context 32768

Source: the published config.json of the target; of the drafter the published layers, block length
and mask id. Its widths are the target's and its taps the published rule, which nobody has printed.
"""

from mimo_jax.config import (
    GLOBAL,
    AttentionConfig,
    DrafterConfig,
    RopeScaling,
    TargetConfig,
    default_target_layer_ids,
)
from mimo_jax.plan.published import PublishedModel

NUM_LAYERS = 32


def get_config() -> PublishedModel:
    geometry = AttentionConfig(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        v_head_dim=128,
        rope_theta=5e5,
        rope_dim=128,
        rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    )
    target = TargetConfig(
        vocab_size=128256,
        hidden_size=4096,
        layer_kinds=(GLOBAL,) * NUM_LAYERS,
        attention={GLOBAL: geometry},
        dense_hidden_size=14336,
        norm_eps=1e-5,
        max_position=131072,
    )
    drafter = DrafterConfig(
        hidden_size=4096,
        num_layers=5,
        attention=geometry,
        dense_hidden_size=14336,
        target_layer_ids=default_target_layer_ids(NUM_LAYERS, 5),
        num_target_layers=NUM_LAYERS,
        draft_block_len=10,
        mask_token_id=128002,
        vocab_size=128256,
        max_position=131072,
    )
    return PublishedModel("Llama-3.1-8B + DFlash", target, drafter)
