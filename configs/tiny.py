"""A 4-layer target with every feature on, and a drafter: random weights, seconds on a CPU.

Used by tests. Dimensions are pairwise distinct, so that a swapped axis cannot pass.
"""

import dataclasses

from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    DrafterConfig,
    MoeConfig,
    TargetConfig,
)
from mimo_jax.models.eagle import EagleConfig


def tiny_target(*, window: int = 10, vocab_size: int = 61) -> TargetConfig:
    """Global and sliding layers of different geometry, sinks, a dense layer and experts."""
    return TargetConfig(
        vocab_size=vocab_size,
        hidden_size=28,
        layer_kinds=(GLOBAL, SLIDING, SLIDING, GLOBAL),
        attention={
            GLOBAL: AttentionConfig(
                num_heads=6, num_kv_heads=2, head_dim=12, v_head_dim=8, rope_theta=1e5, rope_dim=4
            ),
            SLIDING: AttentionConfig(
                num_heads=6,
                num_kv_heads=3,
                head_dim=12,
                v_head_dim=8,
                rope_theta=1e4,
                rope_dim=4,
                window=window,
                has_sink=True,
            ),
        },
        dense_hidden_size=40,
        moe=MoeConfig(num_experts=7, top_k=2, hidden_size=20),
        is_moe_layer=(False, True, True, True),
        value_scale=0.707,
        max_position=512,
    )


def tiny_drafter(*, window: int | None = 11, vocab_size: int = 61) -> DrafterConfig:
    """One sliding and, with window=None, all-global layers; block of 5."""
    return DrafterConfig(
        hidden_size=28,
        num_layers=2,
        attention=AttentionConfig(
            num_heads=4, num_kv_heads=2, head_dim=14, v_head_dim=9, rope_theta=1e4, rope_dim=6
        ),
        dense_hidden_size=33,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        draft_block_len=5,
        mask_token_id=3,
        vocab_size=vocab_size,
        windows=(window, window),
        max_position=512,
    )


def tiny_eagle() -> EagleConfig:
    """An EAGLE-3 drafter that fits `tiny_target`; four drafts."""
    attention = dataclasses.replace(tiny_drafter().attention, window=11)
    return EagleConfig(
        hidden_size=28,
        attention=attention,
        dense_hidden_size=33,
        target_layer_ids=(0, 2, 3),
        num_target_layers=4,
        draft_block_len=5,
    )


def mesh_target(*, is_mxfp4: bool = False) -> TargetConfig:
    """As `tiny_target`, with axes that eight devices can share; fewer global KV heads than that.

    Packed experts are wider: each device holds whole groups of 32.
    """
    return TargetConfig(
        vocab_size=88,
        hidden_size=64 if is_mxfp4 else 40,
        layer_kinds=(GLOBAL, SLIDING, SLIDING, GLOBAL),
        attention={
            GLOBAL: AttentionConfig(
                num_heads=16, num_kv_heads=4, head_dim=12, v_head_dim=10, rope_theta=1e5, rope_dim=4
            ),
            SLIDING: AttentionConfig(
                num_heads=16,
                num_kv_heads=8,
                head_dim=12,
                v_head_dim=10,
                rope_theta=1e4,
                rope_dim=4,
                window=9,
                has_sink=True,
            ),
        },
        dense_hidden_size=48,
        moe=MoeConfig(
            num_experts=7, top_k=2, hidden_size=256 if is_mxfp4 else 24, is_mxfp4=is_mxfp4
        ),
        is_moe_layer=(False, True, True, True),
        value_scale=0.707,
        max_position=512,
    )


def mesh_drafter(target: TargetConfig) -> DrafterConfig:
    """A drafter for `mesh_target`, with fewer KV heads than devices and a smaller vocabulary."""
    return DrafterConfig(
        hidden_size=target.hidden_size,
        num_layers=2,
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=2, head_dim=14, v_head_dim=11, rope_theta=1e4, rope_dim=6
        ),
        dense_hidden_size=56,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        draft_block_len=5,
        mask_token_id=3,
        vocab_size=target.vocab_size - 5,
        windows=(11, 11),
        max_position=512,
    )


def train_mesh_target() -> TargetConfig:
    """Two layers whose every axis that training cuts divides by 8, experts included."""
    common = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 4, "v_head_dim": 6, "rope_dim": 2}
    return TargetConfig(
        vocab_size=72,
        hidden_size=48,
        layer_kinds=(GLOBAL, SLIDING),
        attention={
            GLOBAL: AttentionConfig(**common, rope_theta=1e5),
            SLIDING: AttentionConfig(**common, rope_theta=1e4, window=5, has_sink=True),
        },
        dense_hidden_size=40,
        moe=MoeConfig(num_experts=24, top_k=2, hidden_size=32),
        is_moe_layer=(False, True),
        value_scale=0.707,
        max_position=128,
    )


def train_mesh_drafter() -> DrafterConfig:
    """One layer that fits `train_mesh_target`; fewer KV heads than devices."""
    return DrafterConfig(
        hidden_size=48,
        num_layers=1,
        attention=AttentionConfig(
            num_heads=8, num_kv_heads=4, head_dim=6, v_head_dim=10, rope_theta=1e4, rope_dim=4
        ),
        dense_hidden_size=56,
        target_layer_ids=(0, 1),
        num_target_layers=2,
        draft_block_len=3,
        mask_token_id=3,
        vocab_size=72,
        windows=(7,),
        max_position=128,
    )


def smallest_target() -> TargetConfig:
    """Two layers, one of each kind, one sparse: for tests that compile many programs."""
    common = {"head_dim": 6, "v_head_dim": 5, "rope_dim": 4}
    return TargetConfig(
        vocab_size=23,
        hidden_size=20,
        layer_kinds=(GLOBAL, SLIDING),
        attention={
            GLOBAL: AttentionConfig(num_heads=4, num_kv_heads=2, rope_theta=1e5, **common),
            SLIDING: AttentionConfig(
                num_heads=6, num_kv_heads=3, rope_theta=1e4, window=7, has_sink=True, **common
            ),
        },
        dense_hidden_size=24,
        moe=MoeConfig(num_experts=5, top_k=2, hidden_size=12),
        is_moe_layer=(False, True),
        value_scale=0.707,
        max_position=256,
    )


def smallest_drafter() -> DrafterConfig:
    """One sliding layer and blocks of five, for `smallest_target`."""
    return DrafterConfig(
        hidden_size=20,
        num_layers=1,
        attention=AttentionConfig(
            num_heads=3, num_kv_heads=1, head_dim=8, v_head_dim=7, rope_theta=1e4, rope_dim=6
        ),
        dense_hidden_size=28,
        target_layer_ids=(0, 1),
        num_target_layers=2,
        draft_block_len=5,
        mask_token_id=3,
        vocab_size=23,
        windows=(9,),
        max_position=256,
    )
