"""Key/value memory: linear for global layers, rings for sliding layers and drafter context.

A chain rolls back by length: nothing is erased, positions at or past a row's length are masked
and later overwritten. A ring has `window + slack` slots and `slack` more behind them, so that a
block of up to `slack` tokens that starts at any slot is written as one contiguous piece. The same
absolute position may then stand twice (behind the end, and at its slot after a rollback), so a
ring keeps the absolute position of every slot and a write first forgets positions at or past its
start. All ring layers of a cache share one position table.

A linear layer of more than two pieces is read piece by piece up to a row's length (`recall.py`),
so that neither time nor scratch follows the capacity. Linear layers may hold their older tokens in
codes (`sealed.py`); rings never do: they are small, and their slots are overwritten.

Rejected: a ring of `window` slots (a speculative write would overwrite live history), and
modular scatter (on XLA:CPU a loop over rows; two contiguous updates are 10x cheaper).

Trap: a masked slot has weight 0, and 0 times NaN is NaN. Values are therefore stored without NaN
and infinities (`without_nan`); keys keep theirs, so that whoever really sees such a position has
NaN logits, and a draft that was rejected has harmed nobody.

Arrays are head-major, [b, k, s, h]. All functions are pure: a cache goes in and comes out.
"""

import dataclasses
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mimo_jax import sealed
from mimo_jax.quant.kv import KVFormat
from mimo_jax.sealed import SealedLayer, write_rows

PIECE_LEN = 1024  # slots read at once; 2,048 cost short rows 0.1 ms, 512 long ones a third more


class LayerCache(NamedTuple):
    """Keys [b, k, s, h] and values [b, k, s, hv] of one layer."""

    keys: Float[Array, "b k s h"]
    values: Float[Array, "b k s hv"]


@no_type_check  # a pytree also holds tracers, shapes and shardings
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Memory of one model for a batch of rows.

    Attributes:
      layers: One LayerCache per layer; SealedLayer where linear memory is quantised.
      ring_positions: Absolute position held by each slot of every ring layer, int32 [b, s_ring],
        -1 = nothing; None when no layer is a ring.
      windows: Per layer: None = linear (slot i holds position i), else a ring of that window.
      slack: Longest block that a step may write.
      piece_len: Slots of a long linear layer that are read at once.
      form: How linear layers are quantised; None = not at all.
      num_sealed: int32 [b], groups of each row in codes; None when no layer is quantised.
    """

    layers: tuple[LayerCache | SealedLayer, ...]
    ring_positions: Int[Array, "b s"] | None
    windows: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    slack: int = dataclasses.field(metadata={"static": True})
    piece_len: int = dataclasses.field(metadata={"static": True}, default=PIECE_LEN)
    form: KVFormat | None = dataclasses.field(metadata={"static": True}, default=None)
    num_sealed: Int[Array, "b"] | None = None

    @property
    def batch_size(self) -> int:
        return jax.tree.leaves(self.layers)[0].shape[0]

    def is_long(self, layer_idx: int) -> bool:
        """Whether a layer is read piece by piece: a linear one of more than two pieces."""
        layer = self.layers[layer_idx]
        if isinstance(layer, SealedLayer):
            return True
        is_linear = self.windows[layer_idx] is None
        return is_linear and layer.keys.shape[2] > 2 * self.piece_len

    def key_positions(self, layer_idx: int) -> Int[Array, "b s"]:
        """Absolute position of each slot of a layer; -1 where a ring slot holds nothing."""
        if self.windows[layer_idx] is not None:
            assert self.ring_positions is not None, "ring layers have a position table"
            return self.ring_positions
        layer = self.layers[layer_idx]
        assert isinstance(layer, LayerCache), "a quantised layer has no position per slot"
        s = layer.keys.shape[2]
        index = jnp.arange(s, dtype=jnp.int32)[None, :]
        return jnp.broadcast_to(index, (self.batch_size, s))

    def first_slot(self, layer_idx: int, start: Int[Array, "b"]) -> Int[Array, "b"]:
        """Slot of position `start`; a block that begins there is written as one stretch."""
        if self.windows[layer_idx] is None:
            return start
        assert self.ring_positions is not None, "ring layers have a position table"
        return start % (self.ring_positions.shape[1] - self.slack)


def whole_slots(num_slots: int) -> int:
    """Slots up to a multiple of 8, which the attention kernel wants. Example: 5 -> 8."""
    return -(-num_slots // 8) * 8


def ring_len(window: int, slack: int) -> int:
    """Slots addressed by position modulo length: window + slack, rounded up to 8.

    Example: window 128, slack 8 -> 136; the ring then has 8 more slots behind its end.
    """
    return whole_slots(window + slack)


def make_cache(
    batch_size: int,
    max_len: int,
    geometry: list[tuple[int, int, int]],
    windows: tuple[int | None, ...],
    *,
    slack: int,
    dtype,
    piece_len: int = PIECE_LEN,
    form: KVFormat | None = None,
) -> KVCache:
    """An empty cache.

    Args:
      batch_size: Rows.
      max_len: Longest sequence; linear layers get max_len + slack slots.
      geometry: Per layer (num_kv_heads, head_dim, v_head_dim).
      windows: Per layer a ring's window or None. All rings must have one window.
      slack: Longest block that a step may write, >= 1.
      dtype: Of keys and values.
      piece_len: Slots of a long linear layer that are read at once.
      form: How linear layers are quantised, or None.

    Raises:
      ValueError: If two ring layers have different windows, or groups do not fit blocks and pieces.
    """
    if form is not None and (piece_len % form.group_len or slack > form.group_len):
        raise ValueError(
            f"group_len {form.group_len} must divide a piece of {piece_len} and hold a block of "
            f"{slack}"
        )
    ring_windows = {w for w in windows if w is not None}
    if len(ring_windows) > 1:
        raise ValueError(f"ring layers share one window, got {sorted(ring_windows)}")
    layers = []
    for (k, h, hv), window in zip(geometry, windows, strict=True):
        if window is None and form is not None:
            sizes = {"slack": slack, "piece_len": piece_len, "dtype": dtype}
            layers.append(sealed.make_layer(batch_size, max_len, (k, h, hv), form, **sizes))
            continue
        s = max_len + slack if window is None else ring_len(window, slack) + slack
        layers.append(
            LayerCache(
                jnp.zeros((batch_size, k, s, h), dtype), jnp.zeros((batch_size, k, s, hv), dtype)
            )
        )
    ring_positions = None
    if ring_windows:
        s = ring_len(ring_windows.pop(), slack) + slack
        ring_positions = jnp.full((batch_size, s), -1, jnp.int32)
    has_sealed = any(isinstance(layer, SealedLayer) for layer in layers)
    num_sealed = jnp.zeros((batch_size,), jnp.int32) if has_sealed else None
    return KVCache(tuple(layers), ring_positions, windows, slack, piece_len, form, num_sealed)


def seal_full_groups(cache: KVCache, start: Int[Array, "b"]) -> KVCache:
    """With every group in codes that ends at or before `start`; once per step, before all writes.

    Args:
      cache: Memory; unchanged where no layer is quantised.
      start: Positions below are committed and in memory.
    """
    if cache.form is None or cache.num_sealed is None:
        return cache
    layers = list(cache.layers)
    indices = [i for i, layer in enumerate(layers) if isinstance(layer, SealedLayer)]
    held = tuple(layer for layer in layers if isinstance(layer, SealedLayer))
    held, num_sealed = sealed.seal_full_groups(held, cache.num_sealed, start, cache.form)
    for i, layer in zip(indices, held, strict=True):
        layers[i] = layer
    return dataclasses.replace(cache, layers=tuple(layers), num_sealed=num_sealed)


def advance_ring_positions(cache: KVCache, start: Int[Array, "b"], t: int) -> KVCache:
    """Notes that positions start .. start+t-1 are being written; t <= slack.

    Once per step, before the layers write.
    """
    if cache.ring_positions is None:
        return cache
    length = cache.ring_positions.shape[1] - cache.slack
    kept = jnp.where(cache.ring_positions >= start[:, None], -1, cache.ring_positions)
    first_slot = (start % length)[:, None]
    slots = jnp.arange(kept.shape[1], dtype=jnp.int32)[None, :]
    offset = slots - first_slot
    written = (offset >= 0) & (offset < t)
    positions = jnp.where(written, start[:, None] + offset, kept)
    return dataclasses.replace(cache, ring_positions=positions)


def without_nan(values: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Values as memory may hold them: NaN as 0, infinities as the largest finite number."""
    return jnp.nan_to_num(values)


def write_block(
    cache: KVCache, layer_idx: int, keys: Array, values: Array, start: Int[Array, "b"]
) -> LayerCache | SealedLayer:
    """A layer with keys/values [b, k, t, *] written at positions start .. start+t-1; t <= slack."""
    layer = cache.layers[layer_idx]
    values = without_nan(values)
    if isinstance(layer, SealedLayer):
        assert cache.num_sealed is not None
        assert cache.form is not None
        g = cache.form.group_len
        return sealed.write_block(layer, keys, values, cache.num_sealed, start, g)
    slots = cache.first_slot(layer_idx, start)
    written = LayerCache(
        write_rows(layer.keys, keys, slots), write_rows(layer.values, values, slots)
    )
    # Without it XLA:CPU writes a single position twice, once for the reader and once for the
    # carry, into copies of the whole memory: a cost that grows with the context.
    return LayerCache(*jax.lax.optimization_barrier(tuple(written)))


def write_path(
    cache: KVCache, nodes: tuple[LayerCache, ...], path: Int[Array, "b t"], start: Int[Array, "b"]
) -> KVCache:
    """Memory with some of a step's keys and values written at positions start .. start+t-1.

    Args:
      cache: Memory.
      nodes: Per layer keys and values [b, k, n, *] that are in no memory yet.
      path: Which of them, in order; t <= slack.
      start: Position of the first.
    """
    index = path[:, None, :, None]
    cache = advance_ring_positions(cache, start, path.shape[1])
    layers = []
    for layer_idx, of_layer in enumerate(nodes):
        keys, values = (jnp.take_along_axis(x, index, axis=2) for x in of_layer)
        layers.append(write_block(cache, layer_idx, keys, values, start))
    return dataclasses.replace(cache, layers=tuple(layers))


def _chunk_slot_positions(cache: KVCache, end: Int[Array, "b"]) -> Int[Array, "b s"]:
    """Newest position below `end` that belongs into each ring slot; -1 in the slack slots."""
    assert cache.ring_positions is not None, "ring layers have a position table"
    length = cache.ring_positions.shape[1] - cache.slack
    slots = jnp.arange(length, dtype=jnp.int32)[None, :]
    newest = end[:, None] - 1 - (end[:, None] - 1 - slots) % length
    newest = jnp.maximum(newest, -1)
    return jnp.pad(newest, ((0, 0), (0, cache.slack)), constant_values=-1)


def write_chunk(
    cache: KVCache,
    layer_idx: int,
    keys: Array,
    values: Array,
    start: Int[Array, "b"],
    num_valid: Int[Array, "b"],
) -> LayerCache | SealedLayer:
    """A layer with a prompt chunk of any length t written: positions start .. start+num_valid-1.

    Padding at the chunk's end is not kept in rings; in linear layers it lands past the row's
    length, where it is masked. Only prompts come this way: the slack slots must still be empty.
    In quantised layers `start` is a multiple of the group length.
    """
    layer, values = cache.layers[layer_idx], without_nan(values)
    if isinstance(layer, SealedLayer):
        assert cache.form is not None
        return sealed.write_chunk(layer, keys, values, start, num_valid, cache.form)
    if cache.windows[layer_idx] is None:
        t = keys.shape[2]
        room = layer.keys.shape[2]
        if t > room:
            keys, values = keys[:, :, :room], values[:, :, :room]
        return LayerCache(
            write_rows(layer.keys, keys, start), write_rows(layer.values, values, start)
        )
    wanted = _chunk_slot_positions(cache, start + num_valid)
    source = jnp.clip(wanted - start[:, None], 0, keys.shape[2] - 1)[:, None, :, None]
    is_new = (wanted >= start[:, None])[:, None, :, None]

    def merge(new, old):
        return jnp.where(is_new, jnp.take_along_axis(new, source, axis=2), old)

    return LayerCache(merge(keys, layer.keys), merge(values, layer.values))


def finish_chunk(cache: KVCache, start: Int[Array, "b"], num_valid: Int[Array, "b"]) -> KVCache:
    """Updates the position table and the count of groups after all layers wrote a chunk."""
    if cache.num_sealed is not None and cache.form is not None:
        num_sealed = (start + num_valid) // cache.form.group_len
        cache = dataclasses.replace(cache, num_sealed=num_sealed)
    if cache.ring_positions is None:
        return cache
    return dataclasses.replace(
        cache, ring_positions=_chunk_slot_positions(cache, start + num_valid)
    )


def insert_row[Tree](rows: Tree, one_row: Tree, row: Int[Array, ""]) -> Tree:
    """Replaces one row of every array of a cache, or of a state that holds caches.

    Args:
      rows: Arrays [b, ...].
      one_row: The same pytree with b = 1.
      row: Which row to replace.
    """
    return jax.tree.map(
        lambda whole, one: jax.lax.dynamic_update_index_in_dim(whole, one[0], row, 0),
        rows,
        one_row,
    )
