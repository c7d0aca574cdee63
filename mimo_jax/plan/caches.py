"""Key/value memory by kind, at a context length: what a batch holds beside the weights.

Read off the caches that the models make, as shapes. Global layers grow with the context, rings do
not; on a mesh the KV heads are cut, and repeated where there are fewer heads than devices.
"""

from typing import NamedTuple

import jax
from flax import nnx

from mimo_jax.cache import KVCache
from mimo_jax.config import AttentionConfig
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.weights import abstract_drafter, abstract_target

GLOBAL_LAYERS, RINGS, DRAFTER_CACHE = "global layers", "sliding layers", "drafter context"


class CacheBytes(NamedTuple):
    """Memory of one kind.

    Attributes:
      kind: GLOBAL_LAYERS, RINGS or DRAFTER_CACHE.
      num_bytes: Of all rows, one copy.
      device_bytes: On each device of the mesh.
      bytes_per_token: Growth of device_bytes per token of context; 0 for rings.
    """

    kind: str
    num_bytes: int
    device_bytes: int
    bytes_per_token: float


def _sum(
    cache: KVCache, geometry: list[AttentionConfig], is_ring: bool, num_devices: int
) -> tuple[int, int, float]:
    whole, here, growth = 0, 0, 0.0
    for layer, window, a in zip(cache.layers, cache.windows, geometry, strict=True):
        if (window is not None) != is_ring:
            continue
        num_bytes = sum(x.size * x.dtype.itemsize for x in layer)
        kept = max(1, a.num_kv_heads // num_devices) / a.num_kv_heads
        whole += num_bytes
        here += round(num_bytes * kept)
        if not is_ring:
            growth += num_bytes * kept / layer.keys.shape[2]
    return whole, here, growth


def cache_bytes(
    model: PublishedModel, *, batch_size: int, context: int, draft_block_len: int, num_devices: int
) -> list[CacheBytes]:
    """Memory by kind; kinds that a model lacks are left out.

    Example: MiMo-V2.5-Pro, 1 row, 262,144 positions, block of 8, 8 devices -> global layers
      13.42 GB in all and 1.68 GB on each device.
    """

    def shapes(graph, params):
        make = lambda p: nnx.merge(graph, p).make_cache(batch_size, context, draft_block_len)
        return jax.eval_shape(make, params)

    cache = shapes(*abstract_target(model.target))
    geometry = [model.target.layer_attention(i) for i in range(model.target.num_layers)]
    rows = [
        CacheBytes(GLOBAL_LAYERS, *_sum(cache, geometry, False, num_devices)),
        CacheBytes(RINGS, *_sum(cache, geometry, True, num_devices)),
    ]
    if model.drafter is not None:
        cache = shapes(*abstract_drafter(model.drafter))
        geometry = [model.drafter.attention] * model.drafter.num_layers
        linear = _sum(cache, geometry, False, num_devices)
        ring = _sum(cache, geometry, True, num_devices)
        both = (linear[0] + ring[0], linear[1] + ring[1], linear[2])
        rows.append(CacheBytes(DRAFTER_CACHE, *both))
    return [row for row in rows if row.num_bytes]
