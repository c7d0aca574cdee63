"""Helpers shared by configs: the nano architecture. Not defaults: those live on the dataclasses."""

from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    DrafterConfig,
    MoeConfig,
    TargetConfig,
)

# Share of training rows per scene.
TARGET_MIX = {"code-stdlib": 0.20, "code-gen": 0.28, "math": 0.22, "agent": 0.20, "chat": 0.10}
DRAFTER_MIX = {"code-stdlib": 0.18, "code-gen": 0.28, "math": 0.24, "agent": 0.20, "chat": 0.10}


def tapped_layers(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers that published drafters read: evenly from the second to the third from the end.

    Example: 36 layers, 5 taps -> 1, 9, 17, 25, 33.
    """
    first, last = 1, num_layers - 3
    return tuple(round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps))


def nano_target() -> TargetConfig:
    """2.8M parameters in the MiMo shape that transformers' MiMoV2FlashForCausalLM can load.

    Four experts, not eight: a draft block of 8 touches all of them anyway, so verifying pays for
    each, and after 3,600 steps eight did not predict held-out text better (LOG.md).
    """
    return TargetConfig(
        vocab_size=2048,
        hidden_size=192,
        layer_kinds=(GLOBAL, SLIDING, SLIDING, SLIDING, SLIDING, GLOBAL),
        attention={
            GLOBAL: AttentionConfig(
                num_heads=6, num_kv_heads=1, head_dim=48, v_head_dim=32, rope_theta=1e5, rope_dim=16
            ),
            SLIDING: AttentionConfig(
                num_heads=6,
                num_kv_heads=2,
                head_dim=48,
                v_head_dim=32,
                rope_theta=1e4,
                rope_dim=16,
                window=64,
                has_sink=True,
            ),
        },
        dense_hidden_size=384,
        moe=MoeConfig(num_experts=4, top_k=2, hidden_size=96),
        is_moe_layer=(False, True, True, True, True, True),
        value_scale=0.707,
        max_position=512,
    )


def nano_drafter(num_layers: int = 2, window: int = 128) -> DrafterConfig:
    """0.79M parameters in the published DFlash shape: 2 sliding layers, block of 8.

    Taps leave the first layer (dense, little context) and the last out: the last one's residual
    stream is four times larger than the first's and, without a norm per tap (published drafters
    have none), drowns the others.
    """
    return DrafterConfig(
        hidden_size=192,
        num_layers=num_layers,
        attention=AttentionConfig(
            num_heads=6, num_kv_heads=2, head_dim=32, v_head_dim=32, rope_theta=1e4, rope_dim=32
        ),
        dense_hidden_size=384,
        target_layer_ids=(1, 2, 3, 4),
        num_target_layers=6,
        draft_block_len=8,
        mask_token_id=9,
        vocab_size=2048,
        windows=(window,) * num_layers,
        max_position=512,
    )
