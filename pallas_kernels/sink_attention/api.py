"""Attention of one block of tokens: shapes, errors, and which implementation runs.

The block comes as the projection left it. Norms, rotation, value scale, cleaning of values, the
masks of memory and block, sinks, softmax and the writing of the block into memory all happen
inside, so that the attention half of a layer is: norm, projection, this, projection.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.sink_attention import block, reference

IMPLEMENTATIONS = ("xla", "mosaic_gpu", "interpret")


def sink_attention(
    qkv: Float[Array, "b t w"],
    keys: Float[Array, "b k s h"],
    values: Float[Array, "b k s hv"],
    *,
    start: Int[Array, "b"],
    depths: Int[Array, "b t"],
    sees: Int[Array, "b t words"],
    slot_positions: Int[Array, "b s"] | None,
    cos: Float[Array, "b t r"],
    sin: Float[Array, "b t r"],
    sink: Float[Array, "n"] | None = None,
    q_norm: Float[Array, "h"] | None = None,
    k_norm: Float[Array, "h"] | None = None,
    norm_eps: float = 0.0,
    value_scale: float = 1.0,
    window: int | None = None,
    write: bool,
    first_slot: Int[Array, "b"],
    implementation: str,
) -> tuple[Float[Array, "b t nv"], Float[Array, "b k s2 h"], Float[Array, "b k s2 hv"]]:
    """Attention of a block over its memory and itself.

    Args:
      qkv: The raw projection, n heads of queries, then k of keys, then k of values;
        w = n * h + k * h + k * hv. 1 to 64 tokens.
      keys: Memory, normed and rotated.
      values: Memory, scaled and finite.
      start: Slots count only where 0 <= position < start.
      depths: Token i stands at start + depths[i]. A chain: 0 .. t-1.
      sees: int32 words, low bits first: bit j of token i says that it sees token j of the block.
        A chain: j <= i.
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
      implementation: "xla", "mosaic_gpu" (Hopper; memory in bfloat16) or "interpret" (the same
        kernel, simulated).

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
    if not 1 <= t <= block.MAX_TOKENS:
        raise ValueError(f"qkv: {t} tokens per row, allowed are 1 to {block.MAX_TOKENS}")
    if sees.shape[2] != -(-t // 32):
        raise ValueError(f"sees: {sees.shape[2]} words for {t} tokens, one per 32 is needed")
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation: {implementation!r}, allowed are {allowed}")
    if implementation == "xla":
        return reference.sink_attention(
            qkv, keys, values, start=start, depths=depths, sees=sees,
            slot_positions=slot_positions, cos=cos, sin=sin, sink=sink, q_norm=q_norm,
            k_norm=k_norm, norm_eps=norm_eps, value_scale=value_scale, window=window,
            write=write, first_slot=first_slot,
        )  # fmt: skip
    from pallas_kernels.sink_attention import pallas_mosaic_gpu as kernel

    tables = block.make_tables(start, depths, sees, cos, sin, window)
    assert slot_positions is not None and write and q_norm is None and k_norm is None
    out, keys, values = kernel.attend_ring(
        qkv.astype(jnp.bfloat16), keys, values, rows=tables.rows, cos=tables.cos, sin=tables.sin,
        positions=block.readable_positions(slot_positions, start), first_slot=first_slot,
        sink=sink, value_scale=value_scale, write=write,
        interpret=implementation == "interpret",
    )  # fmt: skip
    return out.astype(qkv.dtype), keys, values
