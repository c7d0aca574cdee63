"""The text backbone of MiMo-V2.5, 310B parameters: V2-Flash's shape with another RoPE base.

    python -m mimo_jax.plan configs/target_mimo_v25.py --device h200 --devices 8

Source: the published config.json; towers for pictures and sound are not loaded and not counted.
"""

import dataclasses

from configs import target_mimo_v2_flash
from mimo_jax.config import GLOBAL
from mimo_jax.plan.published import PublishedModel


def get_config() -> PublishedModel:
    flash = target_mimo_v2_flash.get_config()
    geometry = dict(flash.target.attention)
    geometry[GLOBAL] = dataclasses.replace(geometry[GLOBAL], rope_theta=1e7)
    target = dataclasses.replace(
        flash.target, attention=geometry, norm_eps=1e-6, max_position=1048576
    )
    return dataclasses.replace(flash, name="MiMo-V2.5", target=target)
