"""Reading a long memory: what lies before a block in pieces, the block itself beside it.

A block (or prompt chunk) is written first and the memory read afterwards, but only below its start:
the block's own keys come as they are, under a mask of their own. So one function serves verify,
plain steps, prefill and drafts, whatever the mask of the block (causal, a tree, all ways); and
since the reading depends on the writing, XLA keeps the memory in place instead of copying it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mimo_jax import sealed
from mimo_jax.cache import KVCache, LayerCache
from mimo_jax.layers.attention import Stretch, attend
from mimo_jax.layers.pieces import Pieces, sum_pieces
from mimo_jax.sealed import SealedLayer

type Write = Callable[[KVCache, Array, Array], LayerCache | SealedLayer]


def float_pieces(layer: LayerCache, limit: Int[Array, "b t"], piece_len: int) -> Pieces:
    """A linear layer's slots 0 .. limit - 1."""

    def read(row: int, num_rows: int, slot: Int[Array, ""], num: int):
        def part(x):
            sizes = (num_rows, x.shape[1], num, x.shape[3])
            return jax.lax.dynamic_slice(x, (row, 0, slot, 0), sizes)

        return part(layer.keys), part(layer.values)

    return Pieces(read, layer.keys.shape[2], piece_len, limit, (layer.keys, layer.values))


def attend_long(
    queries: Float[Array, "b t n h"],
    own: Stretch,
    cache: KVCache,
    layer_idx: int,
    start: Int[Array, "b"],
    positions: Int[Array, "b t"],
    *,
    sink: Float[Array, "n"] | None = None,
    write: Write | None = None,
) -> tuple[Float[Array, "b t n hv"], LayerCache | SealedLayer]:
    """Attention over the positions before `start` in a long layer, and over `own`.

    Args:
      queries: Rotated by RoPE.
      own: Keys and values of the block, and which of them each query sees.
      cache: Memory; `cache.is_long(layer_idx)`.
      layer_idx: Which layer.
      start: Positions below are read.
      positions: Of the queries, at or past start.
      sink: As in `attend`.
      write: (cache, keys, values) -> the layer with the block written; None = it is not.

    Returns:
      (output, the layer).
    """
    old, form, num_sealed = cache.layers[layer_idx], cache.form, cache.num_sealed
    if form is None or num_sealed is None:
        layer = old if write is None else write(cache, own.keys, own.values)
        assert isinstance(layer, LayerCache), "without a format nothing is quantised"
        limit = jnp.broadcast_to(start[:, None], positions.shape)
        pieces = float_pieces(layer, limit, cache.piece_len)
        earlier = sum_pieces(queries, pieces, own.keys.shape[1])
        return attend(queries, [own], sink=sink, earlier=earlier), layer
    queries = sealed.turn(queries, form)
    own = Stretch(sealed.turn(own.keys, form), sealed.turn(own.values, form), own.mask)
    layer = old if write is None else write(cache, own.keys, own.values)
    assert isinstance(old, SealedLayer), "with a format every long layer is quantised"
    assert isinstance(layer, SealedLayer)
    # The tail as it was: a chunk's writing moves it on. Codes below `start` are the same in both.
    tail = sealed.tail_stretch(old, num_sealed, start, positions, form.group_len)
    pieces = sealed.pieces(layer, positions, form, cache.piece_len)
    earlier = sum_pieces(queries, pieces, own.keys.shape[1])
    out = attend(queries, [own, tail], sink=sink, earlier=earlier)
    return sealed.turn(out, form), layer
