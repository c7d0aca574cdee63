"""Hopper kernel of the router's choice: one thread block, everything in registers.

Scores stand as [experts, tokens]: a token's best expert is then a maximum over rows, and ties fall
to the lowest row. After top_k rounds the choices lie in shared memory; the distinct ones are found
by comparing all with all, 64 by 64 at a time, which needs no sort and no prefix sum.

Numbers are compared as float32, exact up to 2**24 experts.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import interpret_params

_TILE = 64
_COPY = 256  # rows that one copy moves at most
_LAYOUT = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _LAYOUT.reduce(1), _LAYOUT.reduce(0)
_NEVER = -3e38


# Layouts are said at every turn: left to be inferred, they take the compiler minutes.
def _rows(vector, shape):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (0,)), _LAYOUT)


def _columns(vector, shape):
    return plgpu.layout_cast(jax.lax.broadcast_in_dim(vector, shape, (1,)), _LAYOUT)


def _over_rows(reduce, matrix):
    return plgpu.layout_cast(reduce(matrix, axis=0), _BY_COLUMN)


def _over_columns(reduce, matrix):
    return plgpu.layout_cast(reduce(matrix, axis=1), _BY_ROW)


def _is_zero(vector, layout):
    return plgpu.layout_cast(jnp.where(vector == 0.0, 1.0, 0.0), layout)


def _index(shape, axis: int):
    index = plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=_LAYOUT)
    return plgpu.layout_cast(index.astype(jnp.float32), _LAYOUT)


def _choose(logits, bias, top_k: int, routed_scale: float, scoring: str):
    """Per round the experts and weights of all tokens, float32 [t] each."""
    shape = logits.shape
    if scoring == "sigmoid":
        scores = 1.0 / (1.0 + jnp.exp(-logits))
    else:
        powers = jnp.exp(logits - _columns(_over_rows(jnp.max, logits), shape))
        scores = powers / _columns(_over_rows(jnp.sum, powers), shape)
    choice, row = scores + _rows(bias, shape), _index(shape, 0)
    experts, weights = [], []
    for _ in range(top_k):
        best = choice == _columns(_over_rows(jnp.max, choice), shape)
        expert = _over_rows(jnp.min, jnp.where(best, row, float(shape[0])))
        is_it = row == _columns(expert, shape)
        experts.append(expert)
        weights.append(_over_rows(jnp.sum, jnp.where(is_it, scores, 0.0)))
        choice = jnp.where(is_it, _NEVER, choice)
    total = functools.reduce(jnp.add, weights) + 1e-20
    return experts, [weight / total * routed_scale for weight in weights]


def _distinct(flat, copy, ids, num_active, n: int):
    """Writes the distinct numbers of `flat` [n] into `ids` [n], their count into num_active.

    `copy` holds the same: one array read in two layouts takes the compiler minutes.
    """
    shape, num_tiles = (_TILE, _TILE), n // _TILE
    part = lambda ref, tile: ref.at[pl.ds(tile * _TILE, _TILE)]
    by_row = [plgpu.load(part(flat, i), layout=_BY_ROW) for i in range(num_tiles)]
    by_column = [plgpu.load(part(copy, i), layout=_BY_COLUMN) for i in range(num_tiles)]
    row, column = _index(shape, 0), _index(shape, 1)

    def repeats(i, j, before):
        is_equal = _rows(by_row[i], shape) == _columns(by_column[j], shape)
        if i == j:
            is_equal = is_equal & before
        return plgpu.layout_cast(jnp.where(is_equal, 1.0, 0.0), _LAYOUT)

    # Number i is the first of its kind if it equals none before it; said once for numbers that
    # stand along rows and once along columns, since vectors do not change sides.
    first_by_row, first_by_column = [], []
    for i in range(num_tiles):
        seen_by_row = sum(_over_columns(jnp.sum, repeats(i, j, column < row)) for j in range(i + 1))
        seen_by_column = sum(_over_rows(jnp.sum, repeats(j, i, row < column)) for j in range(i + 1))
        first_by_row.append(_is_zero(seen_by_row, _BY_ROW))
        first_by_column.append(_is_zero(seen_by_column, _BY_COLUMN))
    slots = []
    for i in range(num_tiles):
        earlier = [_over_rows(jnp.sum, _rows(first_by_row[j], shape)) for j in range(i)]
        own = jnp.where(row < column, _rows(first_by_row[i], shape), 0.0)
        own = _over_rows(jnp.sum, plgpu.layout_cast(own, _LAYOUT))
        slots.append(functools.reduce(jnp.add, earlier, own))
    count = functools.reduce(
        jnp.add, [_over_rows(jnp.sum, _rows(first, shape)) for first in first_by_row]
    )
    num_active[...] = plgpu.layout_cast(count.astype(jnp.int32), _BY_COLUMN)
    for i in range(num_tiles):
        place = row + float(i * _TILE)
        parts = []
        for j in range(num_tiles):
            is_here = place == _columns(slots[j], shape)
            number = plgpu.layout_cast(by_column[j] * first_by_column[j], _BY_COLUMN)
            found = jnp.where(is_here, _columns(number, shape), 0.0)
            parts.append(_over_columns(jnp.sum, plgpu.layout_cast(found, _LAYOUT)))
        total = functools.reduce(jnp.add, parts)
        ids.at[pl.ds(i * _TILE, _TILE)][...] = plgpu.layout_cast(total.astype(jnp.int32), _BY_ROW)


@functools.partial(
    jax.jit, static_argnames=("top_k", "routed_scale", "scoring", "implementation")
)
def router_top_k(logits, bias, *, top_k: int, routed_scale: float, scoring: str, implementation):
    """As `api.router_top_k`: (expert_ids, num_active [64], choices, weights)."""
    e, t = logits.shape
    added_experts, added_tokens = -e % _TILE, -t % 8
    if added_experts or added_tokens:
        # Experts that are nobody's, and tokens that repeat the last one.
        logits = jnp.pad(logits, ((0, 0), (0, added_tokens)), mode="edge")
        logits = jnp.pad(logits, ((0, added_experts), (0, 0)), constant_values=-1e30)
        bias = jnp.pad(bias, (0, added_experts), constant_values=_NEVER)
    rows, columns = logits.shape
    n = -(-top_k * columns // _TILE) * _TILE

    def body(logits, bias, ids, num_active, choices, weights, scratch):
        barrier = scratch["barrier"]
        for first in range(0, rows, _COPY):
            part = pl.ds(first, min(_COPY, rows - first))
            plgpu.copy_gmem_to_smem(logits.at[part], scratch["logits"].at[part], barrier)
            plgpu.copy_gmem_to_smem(bias.at[part], scratch["bias"].at[part], barrier)
        plgpu.barrier_wait(barrier)
        experts, shares = _choose(
            plgpu.load(scratch["logits"], layout=_LAYOUT),
            plgpu.load(scratch["bias"], layout=_BY_ROW),
            top_k,
            routed_scale,
            scoring,
        )
        flat = scratch["flat"]
        for j in range(n // columns):
            for ref in (flat, scratch["copy"]):
                ref.at[pl.ds(j * columns, columns)][...] = experts[min(j, top_k - 1)]
        for j in range(top_k):
            scratch["choices"][j] = experts[j].astype(jnp.int32)
            scratch["weights"][j] = shares[j]
        plgpu.commit_smem()
        _distinct(flat, scratch["copy"], scratch["ids"], scratch["num_active"], n)
        plgpu.commit_smem()
        outputs = {"ids": ids, "num_active": num_active, "choices": choices, "weights": weights}
        for name, destination in outputs.items():
            plgpu.copy_smem_to_gmem(scratch[name], destination)
        plgpu.wait_smem_to_gmem(0)

    shapes = {
        "ids": ((n,), jnp.int32),
        "num_active": ((_TILE,), jnp.int32),
        "choices": ((top_k, columns), jnp.int32),
        "weights": ((top_k, columns), jnp.float32),
    }
    scratch = {name: plgpu.SMEM(*shape) for name, shape in shapes.items()}
    scratch |= {
        "logits": plgpu.SMEM((rows, columns), jnp.float32),
        "bias": plgpu.SMEM((rows,), jnp.float32),
        "flat": plgpu.SMEM((n,), jnp.float32),
        "copy": plgpu.SMEM((n,), jnp.float32),
        "barrier": plgpu.Barrier(num_arrivals=2 * -(-rows // _COPY)),
    }
    ids, num_active, choices, weights = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*shape) for shape in shapes.values()],
        grid=(1,),
        grid_names=("block",),
        scratch_types=[scratch],
        interpret=interpret_params(implementation),
    )(logits, bias)
    if added_tokens:
        choices, weights = choices[:, :t], weights[:, :t]
    return ids, num_active, choices, weights
