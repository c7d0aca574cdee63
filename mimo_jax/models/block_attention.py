"""A layer's attention in one launch: `pallas_kernels.sink_attention` against a model's memory.

The kernel takes the raw projection and returns what the output projection reads; norms, rotation,
masks, softmax and the writing of the block happen inside. What all layers of a step share (where
the block stands, who sees whom, angles) is made once here, in `Block`.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax import cache as kv
from mimo_jax.config import AttentionConfig
from pallas_kernels.sink_attention import api
from pallas_kernels.sink_attention.block import pack_bits


class Block(NamedTuple):
    """Tokens of a step that are not in memory yet.

    Attributes:
      start: Memory counts below this position.
      depths: Position of each token after start.
      sees: int32 words, the block's own mask in bits.
    """

    start: Int[Array, "b"]
    depths: Int[Array, "b t"]
    sees: Int[Array, "b t words"]


def block_of(
    start: Int[Array, "b"], depths: Int[Array, "b t"], sees: Bool[Array, "b t t"]
) -> Block:
    """A block whose token i stands at start + depths[i] and sees token j where sees[i, j]."""
    return Block(start, depths, pack_bits(sees))


def attend_block(
    qkv: Float[Array, "b t w"],
    cache: kv.KVCache,
    layer_idx: int,
    layer,
    geometry: AttentionConfig,
    tables: tuple[Float[Array, "b t r"], Float[Array, "b t r"]],
    block: Block,
    *,
    value_scale: float,
    norm_eps: float,
    has_norms: bool,
    window: int | None,
    write: bool,
    implementation: str,
) -> tuple[Float[Array, "b t o"], kv.LayerCache]:
    """Attention of a block over a layer's memory and itself.

    Args:
      qkv: The raw projection.
      cache: Memory; the layer is not quantised.
      layer_idx: Which layer of it.
      layer: Module with q_norm, k_norm and sink where the model has them.
      geometry: Of the layer.
      tables: (cos, sin) of the block's positions.
      block: Where it stands and who sees whom.
      value_scale: Factor on the values.
      norm_eps: Of the query and key norms.
      has_norms: Whether queries and keys have norms.
      window: Keys that a query sees, or None.
      write: Whether the block goes into memory.
      implementation: Of pallas_kernels.dispatch.

    Returns:
      (output, the layer's memory; without `write` the block's own keys and values).
    """
    held = cache.layers[layer_idx]
    assert isinstance(held, kv.LayerCache), "the kernel reads no quantised memory"
    out, keys, values = api.sink_attention(
        qkv,
        held.keys,
        held.values,
        start=block.start,
        depths=block.depths,
        sees=block.sees,
        slot_positions=None if cache.windows[layer_idx] is None else cache.ring_positions,
        cos=tables[0],
        sin=tables[1],
        sink=layer.sink[...] if geometry.has_sink else None,
        q_norm=layer.q_norm[...] if has_norms else None,
        k_norm=layer.k_norm[...] if has_norms else None,
        norm_eps=norm_eps,
        value_scale=value_scale,
        window=window,
        write=write,
        first_slot=cache.first_slot(layer_idx, block.start),
        implementation=implementation,
    )
    return out, kv.LayerCache(keys, values)


def chain(start: Int[Array, "b"], t: int) -> Block:
    """A block of t tokens in a row, each seeing those before it and itself."""
    b = start.shape[0]
    depths = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    sees = jnp.tril(jnp.ones((t, t), bool))[None]
    return block_of(start, depths, jnp.broadcast_to(sees, (b, t, t)))
