"""Key/value memory by kind, at a context length: what a batch holds beside the weights.

Read off the caches that the models make, as shapes. Global layers grow with the context, rings do
not; on a mesh the KV heads are cut, and repeated where there are fewer heads than devices.
"""

from typing import NamedTuple

import jax
from flax import nnx

from mimo_jax.cache import KVCache, LayerCache
from mimo_jax.config import AttentionConfig
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.weights import abstract_drafter, abstract_target
from mimo_jax.quant.kv import KVFormat
from mimo_jax.sealed import SealedLayer

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
        num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
        kept = max(1, a.num_kv_heads // num_devices) / a.num_kv_heads
        whole += num_bytes
        here += round(num_bytes * kept)
        if not is_ring:
            growth += _growth(layer, cache.form) * kept
    return whole, here, growth


def _growth(layer: LayerCache | SealedLayer, form: KVFormat | None) -> float:
    """Bytes per token of a linear layer; of a quantised one without its tail."""
    if isinstance(layer, LayerCache):
        return sum(x.size * x.dtype.itemsize / x.shape[2] for x in layer)
    assert form is not None, "a quantised layer has a format"
    codes = jax.tree.leaves((layer.keys, layer.values))
    return sum(x.size * x.dtype.itemsize / (x.shape[2] * form.group_len) for x in codes)


def cache_bytes(
    model: PublishedModel,
    *,
    batch_size: int,
    context: int,
    draft_block_len: int,
    num_devices: int,
    kv_format: KVFormat | None = None,
) -> list[CacheBytes]:
    """Memory by kind; kinds that a model lacks are left out.

    Args:
      model: Architecture and formats.
      batch_size: Rows.
      context: Positions per row.
      draft_block_len: Longest block of a step.
      num_devices: That heads are cut over.
      kv_format: How global layers are quantised, or None.

    Example: MiMo-V2.5-Pro, 1 row, 262,144 positions, block of 8, 8 devices -> global layers
      13.42 GB in all and 1.68 GB on each device.
    """

    def shapes(graph, params, **options):
        make = lambda p: nnx.merge(graph, p).make_cache(
            batch_size, context, draft_block_len, **options
        )
        return jax.eval_shape(make, params)

    cache = shapes(*abstract_target(model.target), form=kv_format)
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
