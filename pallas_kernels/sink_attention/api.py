"""Attention of one block of tokens: shapes, errors, and which implementation runs.

The block comes as the projection left it. Norms, rotation, value scale, cleaning of values, the
masks of memory and block, sinks, softmax and the writing of the block into memory all happen
inside, so that the attention half of a layer is: norm, projection, this, projection.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import IMPLEMENTATIONS
from pallas_kernels.sink_attention import block, reference


def _check(t: int, implementation: str) -> None:
    if not 1 <= t <= block.MAX_TOKENS:
        raise ValueError(f"block: {t} tokens per row, allowed are 1 to {block.MAX_TOKENS}")
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: {implementation!r}, allowed are {allowed}")


def sink_attention(
    qkv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    start: jax.Array,
    depths: jax.Array,
    sees: jax.Array,
    slot_positions: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    sink: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    value_scale: float = 1.0,
    window: int | None = None,
    write: bool,
    first_slot: jax.Array,
    implementation: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of a block over its memory and itself.

    Args:
      qkv: The raw projection, n heads of queries, then k of keys, then k of values;
        w = n * h + k * h + k * hv. 1 to 64 tokens.
      keys: Memory, normed and rotated.
      values: Memory, scaled and finite.
      start: Slots count only where 0 <= position < start.
      depths: Token i stands at start + depths[i]. A chain: 0 .. t-1.
      sees: int32 words, low bits first: bit j of token i says that it sees token j of the block.
        A chain: j <= i. See `block.pack_bits`.
      slot_positions: Position of every slot of a ring, -1 = nothing; None = slot i holds
        position i.
      cos: Rotation of the first 2r dims of queries and keys, dim i against dim i + r.
      sin: As cos.
      sink: One more logit per head, without a value.
      q_norm: Weight of an RMS norm of each query head before the rotation.
      k_norm: Of each key head.
      norm_eps: Of these norms.
      value_scale: The block's values are multiplied by it; NaN then counts as 0 and infinities as
        the largest finite number.
      window: A token sees positions less than `window` before its own, in memory and block.
      write: Whether the block's keys and values go into the memory, which is then updated in
        place where the caller donates it.
      first_slot: The block's slots are first_slot .. first_slot + t - 1.
      implementation: "xla", "mosaic_gpu" (Hopper; memory in bfloat16, its slots a multiple of 8)
        or "interpret" (the same kernel, simulated).

    Returns:
      (output [b, t, n * hv] in qkv's dtype, and with `write` the memory, else the block's own keys
      [b, k, t, h] and values [b, k, t, hv] as memory would hold them).

    Raises:
      ValueError: For shapes that do not fit, or an implementation that does not exist.

    Example: one head of h = hv = 1, an empty memory and a sink of 0; q = 0, v = 8 -> out 4.
    """
    b, t, width = qkv.shape
    _, k, _, h = keys.shape
    hv = values.shape[3]
    n = (width - k * (h + hv)) // h
    if n < 1 or n % k or n * h + k * (h + hv) != width:
        raise ValueError(f"qkv: {width} columns are not whole heads of {h} with {k} of {h} + {hv}")
    if sees.shape[2] != -(-t // 32):
        raise ValueError(f"sees: {sees.shape[2]} words for {t} tokens, one per 32 is needed")
    _check(t, implementation)
    if implementation == "xla":
        return reference.sink_attention(
            qkv, keys, values, start=start, depths=depths, sees=sees,
            slot_positions=slot_positions, cos=cos, sin=sin, sink=sink, q_norm=q_norm,
            k_norm=k_norm, norm_eps=norm_eps, value_scale=value_scale, window=window,
            write=write, first_slot=first_slot,
        )  # fmt: skip
    kernel, call = _kernel_call(qkv, keys, values, n, cos, norm_eps, value_scale, implementation)
    tables = block.make_tables(start, depths, sees, cos, sin, window)
    whole = block.whole_tiles(qkv.astype(jnp.bfloat16))
    inputs = kernel.Inputs(whole, tables, start, first_slot, sink, q_norm, k_norm)
    if slot_positions is None:
        out, keys, values = kernel.attend_linear(call, inputs, (keys, values), write=write)
    else:
        positions = block.readable_positions(slot_positions, start)
        out, keys, values = kernel.attend_ring(call, inputs, (keys, values), positions, write=write)
    return out[:, :t].astype(qkv.dtype), keys, values


def _kernel_call(qkv, keys, values, n: int, cos, norm_eps, value_scale, implementation: str):
    """The kernels' module, imported where it is wanted, and what they must know at compile time."""
    from pallas_kernels.sink_attention import pallas_mosaic_gpu as kernel

    b, t, _ = qkv.shape
    _, k, _, h = keys.shape
    hv, half = values.shape[3], cos.shape[2]
    if keys.dtype != jnp.bfloat16 or values.dtype != jnp.bfloat16:
        raise ValueError(f"memory: {keys.dtype} and {values.dtype}, the kernel takes bfloat16")
    if keys.shape[2] % 8:
        raise ValueError(f"memory: {keys.shape[2]} slots, the kernel takes multiples of 8")
    if h % 16 or hv % 16 or half % 8:
        raise ValueError(f"heads: widths {h} and {hv}, rotated {2 * half}; 16 must divide all")
    is_simulated = implementation == "interpret"
    return kernel, kernel.Call(b, t, n, k, h, hv, half, hv, 1, norm_eps, value_scale, is_simulated)


def write_context(
    kv: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    first_slot: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    k_norm: jax.Array | None = None,
    norm_eps: float = 0.0,
    value_scale: float = 1.0,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """Writes keys and values that belong to no queries: a drafter's context.

    Args:
      kv: The raw projection, k heads of keys, then of values; w = k * h + k * hv.
      keys: Memory.
      values: Memory.
      first_slot: Token i goes to slot first_slot + i.
      cos: As in `sink_attention`, as all that follows.
      sin: As cos.
      k_norm: Weight of the norm before the rotation, or None.
      norm_eps: Of the norm.
      value_scale: Of the values.
      implementation: As in `sink_attention`.

    Returns:
      The memory.

    Raises:
      ValueError: For shapes that do not fit, or an implementation that does not exist.

    Example: a value of 8 under value_scale 0.5 at first_slot 2 -> slot 2 holds 4.
    """
    _, t, width = kv.shape
    _, k, _, h = keys.shape
    if width != k * (h + values.shape[3]):
        raise ValueError(f"kv: {width} columns, {k} heads of {h} + {values.shape[3]} are needed")
    _check(t, implementation)
    if implementation == "xla":
        return reference.write_context(
            kv, keys, values, first_slot=first_slot, cos=cos, sin=sin, k_norm=k_norm,
            norm_eps=norm_eps, value_scale=value_scale,
        )  # fmt: skip
    kernel, call = _kernel_call(kv, keys, values, 0, cos, norm_eps, value_scale, implementation)
    cos, sin = (block.spread(x) for x in (cos, sin))
    kv = block.whole_tiles(kv.astype(jnp.bfloat16))
    return kernel.write_context(call, kv, (keys, values), cos, sin, first_slot, k_norm)
