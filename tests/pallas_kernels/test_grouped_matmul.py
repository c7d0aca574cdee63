"""Experts over MXFP4 tiles: the kernels in the GPU interpreter against the plain reference.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_grouped_matmul.py

All cases share one set of shapes, so that the interpreter compiles once.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import INTERPRET, MOSAIC_GPU, XLA
from pallas_kernels.formats import E2M1_TABLE
from pallas_kernels.grouped_matmul import api, tiles
from pallas_kernels.grouped_matmul.tiles import TiledWeights, tile_weights, untile_weights
from pallas_kernels.router_top_k.api import Choice
from pallas_kernels.router_top_k.reference import distinct

LAYERS, EXPERTS, D, F, T, TOP_K = 2, 5, 384, 128, 3, 2
LAYER = jnp.array([1], jnp.int32)


def packed_stack(rng, n: int, k: int):
    codes = rng.integers(0, 256, (LAYERS, EXPERTS, n, k // 2), np.uint8)
    scale = rng.integers(119, 125, (LAYERS, EXPERTS, n, k // 32)).astype(np.uint8)
    return codes, scale


def poisoned(weights, *, but: set[int]):
    """NaN scales in every layer but LAYER and every expert but these."""
    codes, scale = (part.copy() for part in weights)
    scale[0] = 255
    for expert in set(range(EXPERTS)) - but:
        scale[1, expert] = 255
    return codes, scale


def stacks(but: set[int]) -> tuple[TiledWeights, ...]:
    rng = np.random.default_rng(0)
    whole = (packed_stack(rng, F, D), packed_stack(rng, F, D), packed_stack(rng, D, F))
    return tuple(tile_weights(*map(jnp.asarray, poisoned(w, but=but))) for w in whole)


def choice_of(choices, weights=None) -> Choice:
    choices = jnp.asarray(choices, jnp.int32)
    if weights is None:
        weights = jnp.arange(1, choices.size + 1, dtype=jnp.float32).reshape(choices.shape) / 8
    return Choice(*distinct(choices), choices, jnp.asarray(weights, jnp.float32))


def run(weights, choice: Choice, implementation: str, layer=LAYER):
    x = jnp.asarray(np.random.default_rng(1).standard_normal((T, D)), jnp.bfloat16)
    out = api.swiglu_experts(x, *weights, choice, layer, implementation=implementation)
    assert out.shape == (T, D)
    assert out.dtype == x.dtype
    return np.asarray(out, np.float32)


def agree(weights, choice: Choice, layer=LAYER) -> np.ndarray:
    found = run(weights, choice, INTERPRET, layer)
    wanted = run(weights, choice, XLA, layer)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    largest = np.nanmax(np.abs(wanted)) if not np.isnan(wanted).all() else 1.0
    np.testing.assert_allclose(found, wanted, atol=0.01 * max(largest, 1e-6))
    return found


def test_chosen_experts_alone_are_read():
    """All others hold NaN, in this layer and in the other one."""
    choice = choice_of([[4, 1, 4], [1, 2, 2]])
    assert choice.expert_ids[:3].tolist() == [4, 1, 2]
    assert int(choice.num_active[0]) == 3
    found = agree(stacks({1, 2, 4}), choice)
    assert np.isfinite(found).all()
    assert (np.abs(found).max(axis=1) > 0.1).all()


def test_a_broken_expert_breaks_its_own_tokens_alone():
    found = agree(stacks({1, 2}), choice_of([[1, 1, 3], [2, 2, 1]]))
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2]).any()


def test_all_tokens_on_one_expert():
    agree(stacks({2}), choice_of([[2, 2, 2], [-1, -1, -1]], [[0.5] * 3, [0.0] * 3]))


def test_no_token_for_any_expert():
    nobody = Choice(
        jnp.zeros((6,), jnp.int32), jnp.zeros((1,), jnp.int32),
        jnp.full((TOP_K, T), -1, jnp.int32), jnp.zeros((TOP_K, T), jnp.float32),
    )  # fmt: skip
    assert (agree(stacks(set()), nobody) == 0).all()


def test_indices_beyond_the_stack_mean_its_last_entry():
    choice = choice_of([[4, 4, 4], [1, 1, 1]])
    inside = agree(stacks({1, 4}), choice)
    np.testing.assert_array_equal(agree(stacks({1, 4}), choice, jnp.array([7], jnp.int32)), inside)
    beyond = choice_of([[9, 9, 9], [1, 1, 1]])
    np.testing.assert_array_equal(agree(stacks({1, 4}), beyond), inside)


def test_all_codes_come_out_exact():
    """One input of 1: the output is a column of weights, which bfloat16 holds exactly.

    Under a scale byte of 255 every one of them is NaN, not infinite.
    """
    from pallas_kernels.grouped_matmul import pallas_mosaic_gpu as kernel

    codes = np.arange(D * F, dtype=np.uint32).reshape(D, F) * 7 % 16  # every code in every row
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scale = (120 + np.arange(D)[:, None] % 9 + np.arange(F // 32)[None]).astype(np.uint8)
    scale[5, 3] = 255
    whole = [np.broadcast_to(x, (LAYERS, EXPERTS, *x.shape)) for x in (packed, scale)]
    down = tile_weights(*map(jnp.asarray, whole))
    choices = jnp.zeros((TOP_K, 8), jnp.int32).at[1].set(-1)
    weights = jnp.ones((TOP_K, 8), jnp.float32)
    ids, num = distinct(jnp.zeros((TOP_K, T), jnp.int32))
    for first in (0, 56, 120):
        hidden = jnp.zeros((TOP_K * T, 8, F), jnp.bfloat16)
        hidden = hidden.at[0, jnp.arange(8), first + jnp.arange(8)].set(1)
        out = kernel.down(
            hidden, down, LAYER, ids, num, choices, weights, implementation=INTERPRET
        )
        columns = slice(first, first + 8)
        values = E2M1_TABLE[codes[:, columns]]
        exponents = scale[:, first // 32].astype(np.int32)[:, None] - 127
        values = np.ldexp(values, np.where(exponents == 128, 0, exponents))
        values[5] = np.nan  # also where no input meets the broken group: 0 times NaN
        np.testing.assert_array_equal(np.asarray(out, np.float32), values.T)


def test_tiles_hold_the_bytes_of_the_file():
    rng = np.random.default_rng(2)
    for n, k in ((64, 128), (128, 384), (64, 512)):
        codes, scale = (jnp.asarray(x) for x in packed_stack(rng, n, k))
        tiled = tile_weights(codes, scale)
        shapes = tiles.tiled_shapes((LAYERS, EXPERTS, n, k))
        assert (tiled.tiles.shape, tiled.scales.shape) == shapes
        assert 4 * tiled.tiles.size + tiled.scales.size == codes.size + scale.size
        for found, wanted in zip(untile_weights(tiled), (codes, scale), strict=True):
            np.testing.assert_array_equal(found, wanted)
    cut = tile_weights(codes, scale, width=128)
    assert cut.tiles.shape == (LAYERS, EXPERTS, 1, 4, 64, 16)


def test_a_word_by_hand():
    """Input 32 q + 16 h + i of code 2 (1.0), all others 1 (0.5): one bit of the word moves."""
    codes = np.full((1, 1, 64, 128), 1, np.uint8)
    codes[..., 32 * 1 + 16 * 1 + 5] = 2
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    tiled = tile_weights(jnp.asarray(packed), jnp.full((1, 1, 64, 4), 127, jnp.uint8))
    words = np.asarray(tiled.tiles).view(np.uint32)[0, 0, 0, 0, 3]
    assert words[4] == 0x04490449
    # Code 1 of the upper half: magnitude bits 5..3 of it, 001 -> 010.
    assert words[5] == 0x04510449


def test_the_example_of_the_docstring():
    ones = lambda n, k: tile_weights(  # code 2 is 1.0
        jnp.full((1, 1, n, k // 2), 0x22, jnp.uint8), jnp.full((1, 1, n, k // 32), 127, jnp.uint8)
    )
    x = jnp.full((1, 128), 0.125, jnp.bfloat16)
    choice = choice_of([[0]], [[0.5]])
    zero = jnp.zeros((1,), jnp.int32)
    weights = (ones(128, 128), ones(128, 128), ones(128, 128))
    out = api.swiglu_experts(x, *weights, choice, zero, implementation=XLA)
    assert out.tolist() == [[16384.0] * 128]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 65}, r"x has 65 tokens; 1\.\.64 are allowed"),
        ({"tokens": 4}, "choices are for 3 tokens, x has 4"),
        ({"implementation": "triton"}, "allowed: xla, mosaic_gpu, interpret"),
        ({"swap": True}, r"down: tiles .* do not hold 5 matrices \[384, 128\]"),
    ],
)
def test_calls_that_cannot_be(change, message):
    weights = stacks(set(range(EXPERTS)))
    if change.get("swap"):
        weights = (weights[0], weights[1], weights[0])
    x = jnp.zeros((change.get("tokens", T), D), jnp.bfloat16)
    implementation = change.get("implementation", MOSAIC_GPU)
    with pytest.raises(ValueError, match=message):
        api.swiglu_experts(
            x, *weights, choice_of([[1, 1, 1]]), LAYER, implementation=implementation
        )


@pytest.mark.parametrize(
    ("codes", "scale", "message"),
    [
        ((1, 1, 64, 48), (1, 1, 64, 3), "96 inputs do not divide into blocks of 128 inputs"),
        ((1, 1, 96, 64), (1, 1, 96, 4), "96 outputs do not divide into tiles of 64"),
        ((1, 1, 64, 64), (1, 1, 64, 3), "one scale per 32 inputs is expected"),
    ],
)
def test_weights_that_cannot_be_tiled(codes, scale, message):
    with pytest.raises(ValueError, match=message):
        tile_weights(jnp.zeros(codes, jnp.uint8), jnp.zeros(scale, jnp.uint8))


def test_lowers_for_a_gpu_without_one():
    weights = stacks(set(range(EXPERTS)))
    x, choice = jnp.zeros((8, D), jnp.bfloat16), choice_of(np.zeros((TOP_K, 8)))
    call = jax.jit(
        lambda x, weights, choice: api.swiglu_experts(
            x, *weights, choice, LAYER, implementation=MOSAIC_GPU
        )
    )
    exported = jax.export.export(call, platforms=["cuda"])(x, weights, choice)
    assert exported.mlir_module().count("mosaic_gpu_v2") == 2
