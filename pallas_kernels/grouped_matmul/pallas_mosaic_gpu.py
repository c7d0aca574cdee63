"""Hopper kernels of the experts' products, with E2M1 decoded into the matrix unit's registers.

`up`: one thread block per (slot, 64 hidden values); blocks of slots that are not active end at
once. `down`: one per 64 outputs, over the active slots. Both stream tiles of 64 outputs by 256
inputs through a ring in shared memory; a warp group decodes a tile into registers, which are the
left operand of `wgmma`, the tokens being its N = 8, 16, ... 64 columns. E8M0 scales are applied to
the float32 sums of a group of 32 inputs, where there is one per output and group; on the weights
there would be 32 times as many products.

Decoded weights are bfloat16 values times 2**-126 (tiles.py); one packed product by 2**126 makes
them whole. All sixteen codes are exact (PTX: products of bfloat16 keep subnormal numbers).

The interpreter cannot take a left operand from registers, and XLA:CPU flushes subnormal numbers:
there, and only there, operands go through shared memory and are widened by way of float16.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import INTERPRET, interpret_params
from pallas_kernels.formats import MX_GROUP_LEN
from pallas_kernels.grouped_matmul.tiles import BLOCK_INPUTS, ROWS, WORD_INPUTS

MIN_TOKENS = 8  # columns of the smallest wgmma
MAX_STAGES = 6  # tiles in flight: 6 x 8 KB, twice in `up`; Little's law asks for 32 KB per SM
_STAGE_BYTES = 196_608  # of the 227 KB that a block may have
_WORDS = BLOCK_INPUTS // WORD_INPUTS
_GROUPS = BLOCK_INPUTS // MX_GROUP_LEN  # of a block, which is also the number of codes of a half
_LAYOUT = plgpu.Layout.WGMMA


def pad_tokens(x, choices, choice_weights):
    """Tokens up to a multiple of 8; those added want nothing."""
    added = -x.shape[0] % MIN_TOKENS
    if not added:
        return x, choices, choice_weights
    return (
        jnp.pad(x, ((0, added), (0, 0))),
        jnp.pad(choices, ((0, 0), (0, added)), constant_values=-1),
        jnp.pad(choice_weights, ((0, 0), (0, added))),
    )


def _signed(bits: int):
    return jnp.int32(bits - (1 << 32) if bits >> 31 else bits)


def _operands(words, code: int, keeps_subnormals: bool):
    """bfloat16 [64, 16] twice: the values of one code of both half words.

    Without keeps_subnormals, for the interpreter: XLA:CPU would read 0.5 * 2**-126 as 0.
    """
    right, left = jax.lax.shift_right_logical, jax.lax.shift_left
    mask = _signed(0x81C081C0)
    if code < 3:
        bits = words & mask if code == 0 else left(words, _signed(3 * code)) & mask
    else:
        bits = left(words, _signed(1)) & _signed(0x80008000)
        bits |= right(words, _signed(5)) & _signed(0x01000100)
        bits |= right(words, _signed(4)) & _signed(0x00C000C0)

    def values(half):
        half = half.astype(jnp.int16)
        if keeps_subnormals:
            return jax.lax.bitcast_convert_type(half, jnp.bfloat16) * jnp.bfloat16(2.0**126)
        as_half = (half & jnp.int16(-0x8000)) | left(half & jnp.int16(0x01C0), jnp.int16(3))
        small = jax.lax.bitcast_convert_type(as_half, jnp.float16)
        return small.astype(jnp.bfloat16) * jnp.bfloat16(2.0**14)

    return values(bits), values(right(bits, _signed(16)))


def _scale(byte):
    """float32 of E8M0 bytes; 255 is NaN, 0 counts as 0 (2**-127 times a weight is as good as)."""
    byte = byte.astype(jnp.int32)
    bits = jnp.where(byte == 255, _signed(0x7FC00000), byte << 23)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _product(tile, scales, x, through=None):
    """float32 [64, t]: one tile times the tokens' inputs, in shared memory.

    Args:
      tile: int32 [64, words].
      scales: uint8 [groups, 64].
      x: [t, inputs].
      through: Shared memory [.., 64, 16] for the left operands; None = registers.
    """
    t = x.shape[0]
    words = tile[...]
    total = None
    for block in range(words.shape[1] // _WORDS):
        of_block = words[:, block * _WORDS : (block + 1) * _WORDS]
        for group in range(_GROUPS):

            def multiply(acc, group=group, of_block=of_block, block=block):
                for half, operand in enumerate(_operands(of_block, group, through is None)):
                    if through is not None:
                        through[half] = operand
                        plgpu.commit_smem()
                        operand = through.at[half]
                    first = block * BLOCK_INPUTS + group * MX_GROUP_LEN + half * 16
                    plgpu.wgmma(acc, operand, x.at[:, pl.ds(first, 16)].transpose((1, 0)))
                    if through is not None:
                        plgpu.wgmma_wait(0)
                plgpu.wgmma_wait(0)
                return acc[...]

            part = pl.run_scoped(multiply, plgpu.ACC((ROWS, t), jnp.float32))
            row = plgpu.load(scales.at[block * _GROUPS + group], layout=_LAYOUT.reduce(1))
            part = part * jax.lax.broadcast_in_dim(_scale(row), (ROWS, t), (0,))
            total = part if total is None else total + part
    return total


def _num_stages(t: int, width: int, num_tiles: int) -> int:
    """Stages whose tiles, scales and tokens' inputs fit shared memory. (8, 256, 2) -> 6."""
    tile = ROWS * width // 2 + ROWS * width // MX_GROUP_LEN
    return min(MAX_STAGES, _STAGE_BYTES // (num_tiles * tile + 2 * t * width))


def _zeros(t: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, t), jnp.float32), _LAYOUT)


def _store(values, staging, destination):
    """A float32 [64, t] result into bfloat16 rows of `destination` [t, 64]."""
    staging.transpose((1, 0))[...] = values.astype(staging.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, destination)
    plgpu.wait_smem_to_gmem(0)


def _clipped(ref, index, size: int):
    return jnp.clip(ref[index], 0, size - 1)


def _scratch(t: int, implementation: str, **more):
    scratch = {"staging": plgpu.SMEM((t, ROWS), jnp.bfloat16), **more}
    if implementation == INTERPRET:
        scratch["through"] = plgpu.SMEM((2, ROWS, 16), jnp.bfloat16)
    return scratch


def _params(implementation: str):
    # Shared memory is written by copies and by the last store only; what the interpreter's detour
    # writes and reads needs the barriers.
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        unsafe_no_auto_barriers=implementation != INTERPRET,
    )


@functools.partial(jax.jit, static_argnames="implementation")
def up(x, gate, up, layer, expert_ids, num_active, *, implementation: str):
    """bfloat16 [slots, t, f], silu(gate x) * (up x); slots that are not active are not written."""
    num_layers, e, row_tiles, input_tiles, _, words = gate.tiles.shape
    t, width = x.shape[0], words * WORD_INPUTS
    slots = expert_ids.shape[0]
    x = x.astype(jnp.bfloat16)

    def body(x, gate, gate_scale, up, up_scale, layer, ids, num, out, scratch):
        slot, row = jax.lax.axis_index("slot"), jax.lax.axis_index("row")

        @pl.when(slot < num[0])
        def _():
            at = (_clipped(layer, 0, num_layers), _clipped(ids, slot, e), row)
            tile = plgpu.BlockSpec(
                (None, None, None, None, ROWS, words), lambda k: (*at, k, 0, 0)
            )
            groups = plgpu.BlockSpec(
                (None, None, None, width // MX_GROUP_LEN, ROWS), lambda k: (*at, k, 0)
            )
            inputs = plgpu.BlockSpec((t, width), lambda k: (0, k))

            def step(_, x, gate, gate_scale, up, up_scale, carry):
                product = functools.partial(_product, x=x, through=scratch.get("through"))
                gate_sum, up_sum = carry
                return gate_sum + product(gate, gate_scale), up_sum + product(up, up_scale)

            gate_sum, up_sum = plgpu.emit_pipeline(
                step,
                grid=(input_tiles,),
                in_specs=[inputs, tile, groups, tile, groups],
                max_concurrent_steps=_num_stages(t, width, 2),
                init_carry=(_zeros(t), _zeros(t)),
            )(x, gate, gate_scale, up, up_scale)
            hidden = gate_sum / (1.0 + jnp.exp(-gate_sum)) * up_sum
            _store(hidden, scratch["staging"], out.at[slot, :, pl.ds(row * ROWS, ROWS)])

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((slots, t, row_tiles * ROWS), jnp.bfloat16),
        grid=(slots, row_tiles),
        grid_names=("slot", "row"),
        scratch_types=[_scratch(t, implementation)],
        compiler_params=_params(implementation),
        interpret=interpret_params(implementation),
    )(x, *gate, *up, layer, expert_ids, num_active)


@functools.partial(jax.jit, static_argnames="implementation")
def down(
    hidden, down, layer, expert_ids, num_active, choices, choice_weights, *, implementation: str
):
    """bfloat16 [t, d], the sum over active slots of the router's weight times down(hidden)."""
    num_layers, e, row_tiles, input_tiles, _, words = down.tiles.shape
    t, width = hidden.shape[1], words * WORD_INPUTS
    top_k = choices.shape[0]

    def body(hidden, down, scale, layer, ids, num, choices, weights, out, scratch):
        row = jax.lax.axis_index("row")
        for ref, copy in ((choices, scratch["choices"]), (weights, scratch["weights"])):
            plgpu.copy_gmem_to_smem(ref, copy, scratch["barrier"])
        plgpu.barrier_wait(scratch["barrier"])
        of_layer = _clipped(layer, 0, num_layers)

        def at(slot):
            return of_layer, _clipped(ids, slot, e), row

        def step(index, hidden, tile, scale, carry):
            slot, _ = index
            expert = ids[slot]
            wanted = plgpu.layout_cast(jnp.zeros((t,), jnp.float32), _LAYOUT.reduce(0))
            for j in range(top_k):
                chosen = plgpu.load(scratch["choices"].at[j], layout=_LAYOUT.reduce(0))
                weight = plgpu.load(scratch["weights"].at[j], layout=_LAYOUT.reduce(0))
                wanted += jnp.where(chosen == expert, weight, jnp.zeros_like(weight))
            wanted = jax.lax.broadcast_in_dim(wanted, (ROWS, t), (1,))
            part = _product(tile, scale, hidden, scratch.get("through"))
            # Selected, not only multiplied: a broken expert is its own tokens' business.
            return carry + jnp.where(wanted != 0.0, part * wanted, jnp.zeros_like(part))

        total = plgpu.emit_pipeline(
            step,
            grid=(num[0], input_tiles),
            in_specs=[
                plgpu.BlockSpec((None, t, width), lambda slot, k: (slot, 0, k)),
                plgpu.BlockSpec(
                    (None, None, None, None, ROWS, words), lambda slot, k: (*at(slot), k, 0, 0)
                ),
                plgpu.BlockSpec(
                    (None, None, None, width // MX_GROUP_LEN, ROWS),
                    lambda slot, k: (*at(slot), k, 0),
                ),
            ],
            max_concurrent_steps=_num_stages(t, width, 1),
            init_carry=_zeros(t),
        )(hidden, down, scale)
        _store(total, scratch["staging"], out.at[:, pl.ds(row * ROWS, ROWS)])

    scratch = _scratch(
        t,
        implementation,
        choices=plgpu.SMEM((top_k, t), jnp.int32),
        weights=plgpu.SMEM((top_k, t), jnp.float32),
        barrier=plgpu.Barrier(num_arrivals=2),
    )
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((t, row_tiles * ROWS), jnp.bfloat16),
        grid=(row_tiles,),
        grid_names=("row",),
        scratch_types=[scratch],
        compiler_params=_params(implementation),
        interpret=interpret_params(implementation),
    )(hidden, *down, layer, expert_ids, num_active, choices, choice_weights)
