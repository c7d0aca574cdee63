"""MiMo-V2-Flash's shape with its experts in MXFP4, as V2.6-Flash ships them: 4 x H200 hold it.

    python -m mimo_jax.plan configs/target_mimo_v26_flash.py --device h200 --devices 4

Source: the published config.json; FP8 projections and bfloat16 router as in the other FP4 files.
"""

import dataclasses

from configs import target_mimo_v25
from mimo_jax.plan.published import PublishedModel, StorageFormats


def get_config() -> PublishedModel:
    model = target_mimo_v25.get_config()
    moe = model.target.moe
    assert moe is not None
    packed = dataclasses.replace(moe, is_mxfp4=True)
    target = dataclasses.replace(model.target, moe=packed, is_fp8=True)
    storage = StorageFormats(experts="mxfp4", projections="fp8", router="bf16")
    return dataclasses.replace(model, name="MiMo-V2.6-Flash", target=target, storage=storage)
