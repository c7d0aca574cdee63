"""MiMo-V2.5 with its published DFlash drafter, 2,936,114,304 bytes of bfloat16.

    python -m mimo_jax.plan configs/drafter_mimo_v25.py --device h200 --devices 8

Source: the published config.json of the drafter.
"""

import dataclasses

from configs import drafter_mimo_v25_pro, target_mimo_v25
from mimo_jax.plan.published import PublishedModel


def get_config() -> PublishedModel:
    model = target_mimo_v25.get_config()
    pro = drafter_mimo_v25_pro.get_config().drafter
    assert pro is not None
    drafter = dataclasses.replace(
        pro,
        hidden_size=4096,
        target_hidden_size=4096,
        attention=dataclasses.replace(pro.attention, num_heads=64),
        target_layer_ids=(0, 11, 23, 35, 47),
        num_target_layers=48,
        mask_token_id=151675,
        vocab_size=152576,
        norm_eps=1e-6,
    )
    return dataclasses.replace(model, name="MiMo-V2.5 + DFlash", drafter=drafter)
