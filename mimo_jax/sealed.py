"""Quantised memory of a global layer: old groups in codes, the newest tokens in float.

A tail holds the newest complete group, the group being filled, and room for one block; everything
older is in codes only. Three rules make a roll-back harmless and drafting exact:

  * a group is sealed when its last token is *committed*, never for a token that may be rejected;
  * its floats stay in the tail for one more group of tokens, so that both forms exist;
  * which form a query sees depends on its own position alone: codes below
    (position // group_len - 1) * group_len, floats from there. A block that crosses a border has
    queries on either side of it, and each sees what it would see in plain decoding.

A tail's slot i holds position (num_sealed - 1) * group_len + i, negative = nothing; when a group is
sealed the tail moves down by one group. So nothing wraps, and a chain or a tree is written as in a
linear memory. Sealing is a loop of at most one round on most steps: a branch would copy the codes.

So drafts change nothing, up to one thing: a key that was computed in a block differs from one
computed alone by 1e-7, and where it stands on the edge between two codes it may take the other.

A prompt chunk sees itself in float, and what lies before it by the same rule. It starts at a
multiple of the group length.

Rejected: a ring as tail (its slots repeat a position after a roll-back, and codes and floats would
need a table each); sealing on the way out of the tail (the first queries past a border would see
floats where plain decoding sees codes).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.layers.attention import Stretch
from mimo_jax.layers.pieces import Pieces
from mimo_jax.quant.kv import KVFormat, Sealed, rotate, seal, unseal

# Unrolled row writes up to this batch; a scatter beyond (the program would grow with the batch).
_MAX_UNROLLED_ROWS = 8


def write_rows(memory, block, slots):
    """memory [b, k, s, ...] with block [b, k, t, ...] at slots[b] of each row."""
    zeros = (0,) * (memory.ndim - 3)
    if memory.shape[0] > _MAX_UNROLLED_ROWS:
        one_row = lambda m, x, s: jax.lax.dynamic_update_slice(m, x, (0, s, *zeros))
        return jax.vmap(one_row)(memory, block, slots)
    for row in range(memory.shape[0]):
        start = (row, 0, slots[row], *zeros)
        memory = jax.lax.dynamic_update_slice(memory, block[row : row + 1], start)
    return memory


class SealedLayer(NamedTuple):
    """Memory of one layer.

    Attributes:
      tail_keys: [b, k, w, h], w = 2 groups and the longest block.
      tail_values: [b, k, w, hv].
      keys: Codes and scales [b, k, q, ...] of q groups, meaningless at or past num_sealed.
      values: As keys.
    """

    tail_keys: Float[Array, "b k w h"]
    tail_values: Float[Array, "b k w hv"]
    keys: Sealed
    values: Sealed


def make_layer(
    batch_size: int,
    max_len: int,
    geometry: tuple[int, int, int],
    form: KVFormat,
    *,
    slack: int,
    piece_len: int,
    dtype,
) -> SealedLayer:
    """Empty memory of (num_kv_heads, head_dim, v_head_dim); at least one piece of groups."""
    k, h, hv = geometry
    num_groups = -(-max(max_len, piece_len) // form.group_len)
    tail = lambda width: jnp.zeros((batch_size, k, 2 * form.group_len + slack, width), dtype)

    def groups(width: int, is_by_token: bool) -> Sealed:
        one = jax.ShapeDtypeStruct((form.group_len, width), jnp.float32)
        shapes = jax.eval_shape(lambda x: seal(x, form, is_by_token=is_by_token), one)
        empty = lambda s: jnp.zeros((batch_size, k, num_groups, *s.shape), s.dtype)
        return jax.tree.map(empty, shapes)

    return SealedLayer(tail(h), tail(hv), groups(h, False), groups(hv, True))


def turn(x: Float[Array, "*b h"], form: KVFormat) -> Float[Array, "*b h"]:
    """Queries, keys, values and outputs between the model's channels and the memory's."""
    return rotate(x) if form.is_evened else x


def num_in_codes(positions: Int[Array, "b t"], group_len: int) -> Int[Array, "b t"]:
    """How many positions, from the first, a query at each position sees in codes.

    Example: group_len 8, positions 15, 16, 23, 24 -> 0, 8, 8, 16.
    """
    return jnp.maximum((positions // group_len - 1) * group_len, 0)


def tail_start(num_sealed: Int[Array, "b"], group_len: int) -> Int[Array, "b"]:
    """Position of the tail's first slot; negative while nothing is sealed."""
    return (num_sealed - 1) * group_len


def tail_stretch(
    layer: SealedLayer,
    num_sealed: Int[Array, "b"],
    start: Int[Array, "b"],
    positions: Int[Array, "b t"],
    group_len: int,
) -> Stretch:
    """What queries at `positions` see in float of the positions before `start`."""
    index = jnp.arange(layer.tail_keys.shape[2], dtype=jnp.int32)[None, :]
    key_pos = tail_start(num_sealed, group_len)[:, None] + index
    is_there: Bool[Array, "b w"] = (key_pos >= 0) & (key_pos < start[:, None])
    first = num_in_codes(positions, group_len)[:, :, None]
    mask = is_there[:, None, :] & (key_pos[:, None, :] >= first)
    return Stretch(layer.tail_keys, layer.tail_values, mask)


def pieces(
    layer: SealedLayer, positions: Int[Array, "b t"], form: KVFormat, piece_len: int
) -> Pieces:
    """What queries at `positions` see in codes; decoded piece by piece."""
    group_len, dtype = form.group_len, layer.tail_keys.dtype
    num_slots = layer.keys.codes.shape[2] * group_len

    def read(row: int, num_rows: int, slot: Int[Array, ""], num: int):
        def decoded(sealed: Sealed):
            def groups(x):
                start = (row, 0, slot // group_len, *(0,) * (x.ndim - 3))
                sizes = (num_rows, x.shape[1], num // group_len, *x.shape[3:])
                return jax.lax.dynamic_slice(x, start, sizes)

            x = unseal(jax.tree.map(groups, sealed), form, dtype)
            return x.reshape(*x.shape[:2], num, x.shape[-1])

        # Held: a product that decodes its operand on the way does so once per query.
        return jax.lax.optimization_barrier((decoded(layer.keys), decoded(layer.values)))

    return Pieces(read, num_slots, piece_len, num_in_codes(positions, group_len))


def seal_full_groups(
    layers: tuple[SealedLayer, ...],
    num_sealed: Int[Array, "b"],
    start: Int[Array, "b"],
    form: KVFormat,
) -> tuple[tuple[SealedLayer, ...], Int[Array, "b"]]:
    """(layers, num_sealed) with every group sealed that ends at or before `start`.

    Args:
      layers: Quantised layers.
      num_sealed: Groups in codes.
      start: Positions below are committed and in memory.
      form: The format.
    """
    g = form.group_len

    def one_group(carry):
        layers, num_sealed = carry
        is_due = (num_sealed + 1) * g <= start
        wide = is_due[:, None, None, None]

        def advance(layer: SealedLayer) -> SealedLayer:
            # Rows that are not due write past their last group, where nobody looks.
            put = lambda sealed, x, by_token: jax.tree.map(
                lambda whole, one: write_rows(whole, one[:, :, None], num_sealed),
                sealed,
                seal(x[:, :, g : 2 * g], form, is_by_token=by_token),
            )
            down = lambda x: jnp.where(wide, jnp.roll(x, -g, axis=2), x)
            return SealedLayer(
                down(layer.tail_keys),
                down(layer.tail_values),
                put(layer.keys, layer.tail_keys, False),
                put(layer.values, layer.tail_values, True),
            )

        return tuple(advance(layer) for layer in layers), num_sealed + is_due.astype(jnp.int32)

    is_any_due = lambda carry: ((carry[1] + 1) * g <= start).any()
    return jax.lax.while_loop(is_any_due, one_group, (layers, num_sealed))


def write_block(
    layer: SealedLayer, keys, values, num_sealed: Int[Array, "b"], start: Int[Array, "b"], g: int
) -> SealedLayer:
    """A layer with keys/values [b, k, t, *] at positions start ..; t up to the slack."""
    slots = start - tail_start(num_sealed, g)
    return layer._replace(
        tail_keys=write_rows(layer.tail_keys, keys, slots),
        tail_values=write_rows(layer.tail_values, values, slots),
    )


def write_chunk(
    layer: SealedLayer,
    keys: Float[Array, "b k t h"],
    values: Float[Array, "b k t hv"],
    start: Int[Array, "b"],
    num_valid: Int[Array, "b"],
    form: KVFormat,
) -> SealedLayer:
    """A layer with a prompt chunk written; `start` is a multiple of the group length.

    All its groups are sealed, also one that padding has spoilt: it lies past num_sealed, and is
    sealed again from the tail.
    """
    g, width = form.group_len, layer.tail_keys.shape[2]
    t = keys.shape[2]
    padded = -(-t // g) * g

    def groups(x, is_by_token):
        x = jnp.pad(x, ((0, 0), (0, 0), (0, padded - t), (0, 0)))
        x = x.reshape(*x.shape[:2], padded // g, g, x.shape[-1])
        return seal(x, form, is_by_token=is_by_token)

    put = lambda sealed, new: jax.tree.map(
        lambda whole, part: write_rows(whole, part, start // g), sealed, new
    )
    # The old tail begins one group before `start` and is full up to there.
    offset = ((start + num_valid) // g - start // g) * g

    def tail(old, new):
        both = jnp.concatenate([old[:, :, :g], new], axis=2)
        both = jnp.pad(both, ((0, 0), (0, 0), (0, width), (0, 0)))
        one_row = lambda x, at: jax.lax.dynamic_slice_in_dim(x, at, width, axis=1)
        return jax.vmap(one_row)(both, offset)

    return SealedLayer(
        tail(layer.tail_keys, keys),
        tail(layer.tail_values, values),
        put(layer.keys, groups(keys, False)),
        put(layer.values, groups(values, True)),
    )
