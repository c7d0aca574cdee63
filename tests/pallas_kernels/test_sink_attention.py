"""Attention of one block: the reference against the model's own layers, the kernel against it.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_sink_attention.py

The kernel is simulated. Whatever nobody may see holds NaN in every test: keys of slots that are
empty, at or past `start`, or left of the window.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax import cache as kv
from mimo_jax.layers import masks
from mimo_jax.layers.attention import Stretch, attend
from mimo_jax.layers.norm import rms_norm
from mimo_jax.layers.rope import apply_rope
from pallas_kernels.sink_attention import api, block, pallas_mosaic_gpu

# bfloat16 keeps 8 bits, and the outputs are below 2.
TOLERANCE = 2**-6
CHAIN = "chain"


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call; `start` gives the rows, `ring` 0 = linear."""

    start: tuple[int, ...]
    t: int
    window: int | None
    ring: int = 0
    slots: int = 0
    n: int = 4
    k: int = 1
    h: int = 32
    hv: int = 16
    half: int = 8
    has_sink: bool = True
    has_norms: bool = False
    write: bool = True
    graph: str = CHAIN


def seen_by(graph: str, b: int, t: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """(depths [b, t], sees [b, t, t]) of a chain, a draft block of t - 1 slots or a random tree."""
    depths = np.tile(np.arange(t, dtype=np.int32), (b, 1))
    if graph == CHAIN:
        return depths, np.tile(np.tril(np.ones((t, t), bool)), (b, 1, 1))
    if graph == "draft":
        active = np.arange(t)[None, :] < t - 1
        return depths, np.tile(active | np.eye(t, dtype=bool), (b, 1, 1))
    sees = np.tile(np.eye(t, dtype=bool), (b, 1, 1))
    for row in range(b):
        depths[row, 0] = 0
        for node in range(1, t):
            parent = rng.integers(0, node)
            depths[row, node] = depths[row, parent] + 1
            sees[row, node] |= sees[row, parent]
    return depths, sees


def make(case: Case, dtype: Any = jnp.bfloat16) -> tuple[tuple, dict[str, Any]]:
    """Arguments of `api.sink_attention`, but for the implementation."""
    rng = np.random.default_rng(len(case.start) * 1000 + case.t)
    b, slots = len(case.start), case.slots
    start = np.array(case.start, np.int32)
    positions = np.tile(np.arange(slots, dtype=np.int32), (b, 1))
    if case.ring:
        positions = np.full((b, slots), -1, np.int32)
        for row in range(b):
            for position in range(case.start[row]):
                positions[row, position % case.ring] = position
    dead = (positions < 0) | (positions >= start[:, None])
    if case.window is not None:
        dead |= start[:, None] - positions >= case.window

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    keys = np.where(dead[:, None, :, None], np.nan, draw(b, case.k, slots, case.h))
    qkv = draw(b, case.t, case.n * case.h + case.k * (case.h + case.hv))
    depths, sees = seen_by(case.graph, b, case.t, rng)
    angles = rng.uniform(-3, 3, (b, case.t, case.half)).astype(np.float32)
    arrays = [jnp.asarray(x, dtype) for x in (qkv, keys, draw(b, case.k, slots, case.hv))]
    norms = [jnp.asarray(1 + draw(case.h) / 4, dtype) if case.has_norms else None for _ in "qk"]
    return tuple(arrays), {
        "start": jnp.asarray(start),
        "depths": jnp.asarray(depths),
        "sees": block.pack_bits(jnp.asarray(sees)),
        "slot_positions": jnp.asarray(positions) if case.ring else None,
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "sink": jnp.asarray(draw(case.n), dtype) if case.has_sink else None,
        "q_norm": norms[0],
        "k_norm": norms[1],
        "norm_eps": 1e-5,
        "value_scale": 0.6,
        "window": case.window,
        "write": case.write,
        "first_slot": jnp.asarray(start % case.ring if case.ring else start),
    }


def run(arrays: tuple, given: dict[str, Any], implementation: str):
    """Compiled whole: operation by operation took three times as long."""
    call = functools.partial(api.sink_attention, **given, implementation=implementation)
    return jax.jit(call)(*arrays)


def as_the_model_does(arrays, given, case: Case):
    """The same call in terms of mimo_jax's layers, [b, t, n * hv]; and the block's keys, values."""
    qkv, keys, values = arrays
    b, t, _ = qkv.shape
    n, k, h, hv = case.n, case.k, case.h, case.hv
    queries, own_keys, own_values = jnp.split(qkv, [n * h, (n + k) * h], axis=-1)
    queries, own_keys = queries.reshape(b, t, n, h), own_keys.reshape(b, t, k, h)
    if case.has_norms:
        queries = rms_norm(queries, given["q_norm"], eps=1e-5)
        own_keys = rms_norm(own_keys, given["k_norm"], eps=1e-5)
    queries = apply_rope(queries, given["cos"], given["sin"])
    own_keys = apply_rope(own_keys, given["cos"], given["sin"]).transpose(0, 2, 1, 3)
    own_values = kv.without_nan(own_values.reshape(b, t, k, hv) * 0.6).transpose(0, 2, 1, 3)
    start, depths = given["start"], given["depths"]
    positions = given["slot_positions"]
    if positions is None:
        positions = jnp.tile(jnp.arange(keys.shape[2], dtype=jnp.int32), (b, 1))
    positions = jnp.where(positions < start[:, None], positions, -1)
    of_memory = masks.causal_mask(start[:, None] + depths, positions, case.window)
    of_block = masks.tree_mask(depths, block.unpack_bits(given["sees"]), case.window)
    stretches = [Stretch(keys, values, of_memory), Stretch(own_keys, own_values, of_block)]
    out = attend(queries, stretches, sink=given["sink"])
    return out.reshape(b, t, n * hv), own_keys, own_values


RING = Case(start=(37, 5), t=3, window=12, ring=16, slots=24, n=6, k=2)
REFERENCE_CASES = {
    "ring": RING,
    "start 0": dataclasses.replace(RING, start=(0, 1), has_sink=False),
    "linear": Case(start=(11,), t=5, window=None, slots=20, has_norms=True),
    "tree": Case(start=(30, 4), t=33, window=6, slots=40, graph="tree", write=False),
    "draft": Case(start=(9,), t=4, window=7, slots=12, graph="draft", write=False),
}


@pytest.mark.parametrize("case", REFERENCE_CASES.values(), ids=REFERENCE_CASES)
def test_reference_is_what_the_model_does(case):
    arrays, given = make(case, jnp.float32)
    out, keys, values = run(arrays, given, "xla")
    model = jax.jit(functools.partial(as_the_model_does, given=given, case=case))
    want, own_keys, own_values = model(arrays)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=2e-6)
    if case.write:
        first = given["first_slot"]
        own_keys = kv.write_rows(arrays[1], own_keys, first)
        own_values = kv.write_rows(arrays[2], own_values, first)
    np.testing.assert_allclose(keys, own_keys, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(values, own_values, rtol=1e-6, atol=1e-6)


KERNEL_CASES = {
    "ring, 1 token, one row empty": Case(start=(0, 50), t=1, window=70, ring=72, slots=80),
    "ring, 8 tokens, 2 KV heads": Case(start=(37, 5), t=8, window=12, ring=24, slots=32, n=6, k=2),
    "ring, 16 tokens, no sink": Case((90,), 16, 40, ring=56, slots=72, n=8, has_sink=False),
    "ring, 40 tokens": Case(start=(7,), t=40, window=16, ring=56, slots=96, n=2),
    "ring, window in the block": Case(start=(30,), t=8, window=3, ring=16, slots=24),
    "linear, 3 splits": Case(start=(600,), t=8, window=None, slots=640, n=16, has_sink=False),
    "linear, last tile full": Case(start=(128, 64), t=5, window=None, slots=136, has_norms=True),
    "linear, start 0": Case(start=(0,), t=3, window=None, slots=300, has_sink=False, hv=32),
    "linear, window": Case(start=(290,), t=8, window=30, slots=300),
    "tree in a ring": Case((33, 4), 33, 5, ring=16, slots=48, n=2, graph="tree", write=False),
    "tree, linear": Case((70,), 24, None, slots=96, n=4, graph="tree", write=False),
    "draft block": Case((40,), 5, 20, ring=24, slots=32, half=16, graph="draft", write=False),
}


@pytest.mark.parametrize("case", KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_kernel_equals_reference(case):
    arrays, given = make(case)
    got = run(arrays, given, "interpret")
    want = run(arrays, given, "xla")
    for name, one, other in zip(("out", "keys", "values"), got, want, strict=True):
        one, other = (np.asarray(x.astype(jnp.float32)) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
    assert np.isfinite(np.asarray(got[0].astype(jnp.float32))).all()


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_half_of_the_weight_goes_to_a_sink_of_zero(implementation):
    """Scores 0, one own value of 8 that a scale of a half makes 4; NaN and infinity beside it."""
    qkv = jnp.zeros((1, 1, 48), jnp.float32).at[0, 0, 32:35].set([8, jnp.nan, -jnp.inf])
    keys, values = jnp.zeros((1, 1, 8, 16), jnp.bfloat16), jnp.zeros((1, 1, 8, 16), jnp.bfloat16)
    zero, flat = jnp.zeros((1,), jnp.int32), jnp.zeros((1, 1, 8), jnp.float32)
    out, keys, values = api.sink_attention(
        qkv, keys, values, start=zero, depths=zero[None], sees=jnp.ones((1, 1, 1), jnp.int32),
        slot_positions=jnp.full((1, 8), -1, jnp.int32), cos=flat, sin=flat,
        sink=jnp.zeros((1,), jnp.float32), value_scale=0.5, write=True, first_slot=zero + 3,
        implementation=implementation,
    )  # fmt: skip
    largest = float(jnp.finfo(jnp.bfloat16).max)
    np.testing.assert_array_equal(out[0, 0, :4], [2.0, 0.0, -largest / 2, 0.0])
    assert out.dtype == jnp.float32
    held = np.asarray(values[0, 0].astype(jnp.float32))
    np.testing.assert_array_equal(held[3, :4], [4.0, 0.0, -largest, 0.0])
    assert not np.delete(held, 3, axis=0).any()


@pytest.mark.parametrize("norm", [True, False])
def test_context_is_written_and_nothing_else(norm):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    b, t, k, h, hv, half, s = 2, 5, 2, 32, 48, 16, 40
    memory = draw(b, k, s, h), draw(b, k, s, hv)
    angles = rng.uniform(-3, 3, (b, t, half)).astype(np.float32)
    arguments = {
        "first_slot": jnp.asarray([3, 30], jnp.int32),
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "k_norm": 1 + draw(h) if norm else None,
        "norm_eps": 1e-6,
        "value_scale": 0.7,
    }
    kv_part = draw(b, t, k * (h + hv))
    got = api.write_context(kv_part, *memory, **arguments, implementation="interpret")
    want = api.write_context(kv_part, *memory, **arguments, implementation="xla")
    for one, other, old in zip(got, want, memory, strict=True):
        one, other, old = (np.asarray(x.astype(jnp.float32)) for x in (one, other, old))
        np.testing.assert_allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_array_equal(one[0, :, :3], old[0, :, :3])
        np.testing.assert_array_equal(one[1, :, 35:], old[1, :, 35:])
        assert (one[1, :, 30:35] != old[1, :, 30:35]).any(axis=-1).all()


def test_bits_of_a_block():
    sees = np.zeros((1, 34, 34), bool)
    sees[0, 0, [0, 2]] = True
    sees[0, 1, 31] = True
    sees[0, 2, [1, 32]] = True
    words = block.pack_bits(jnp.asarray(sees))
    np.testing.assert_array_equal(words[0, :3], [[5, 0], [-(2**31), 0], [2, 1]])
    np.testing.assert_array_equal(block.unpack_bits(words), sees)


def test_rows_of_a_tile():
    """Two tokens at 10 and 11, window 3: rows 0 and 8 of a tile are token 0 of two heads."""
    depths = jnp.asarray([[0, 1]], jnp.int32)
    sees = jnp.asarray([[[1], [3]]], jnp.int32)
    flat = jnp.asarray([[[0.5], [0.25]]], jnp.float32)
    tables = block.make_tables(jnp.asarray([10], jnp.int32), depths, sees, flat, flat, 3)
    np.testing.assert_array_equal(tables.rows[0, block.LOWEST, :10], [8, 9, *[0] * 6, 8, 9])
    np.testing.assert_array_equal(tables.rows[0, block.LOW_BITS, 8:11], [1, 3, 0])
    assert not tables.rows[0, block.HIGH_BITS].any()
    np.testing.assert_array_equal(tables.cos[0, 56:59, 0], [0.5, 0.25, 0])


@pytest.mark.parametrize(
    ("start", "num_splits", "want"),
    [(0, 64, (4, 0)), (1, 64, (4, 1)), (64_000, 64, (16, 63)), (262_144, 128, (32, 128))],
)
def test_splits_of_a_memory(start, num_splits, want):
    per_split, num_used = jax.jit(pallas_mosaic_gpu.cut, static_argnums=1)(start, num_splits)
    assert (int(per_split), int(num_used)) == want


BAD = {
    "heads": ({"n": 3, "k": 2}, "qkv: 192 columns are not whole heads of 32 with 2 of 32 + 16"),
    "tokens": ({"t": 65, "slots": 80, "ring": 0}, "block: 65 tokens per row, allowed are 1 to 64"),
    "widths": ({"h": 24}, "heads: widths 24 and 16, rotated 16; 16 must divide all"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_one_line_for_what_does_not_fit(changed, message):
    arrays, given = make(dataclasses.replace(RING, **changed))
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        api.sink_attention(*arrays, **given, implementation="interpret")


def test_one_line_for_other_dtypes_and_names():
    arrays, given = make(RING, jnp.float32)
    with pytest.raises(ValueError, match="memory: float32 and float32, the kernel takes bfloat16"):
        api.sink_attention(*arrays, **given, implementation="interpret")
    message = "implementation: 'cuda', allowed are xla, mosaic_gpu, interpret"
    with pytest.raises(ValueError, match=message):
        api.sink_attention(*arrays, **given, implementation="cuda")
    given["sees"] = jnp.zeros((2, 3, 2), jnp.int32)
    with pytest.raises(ValueError, match="sees: 2 words for 3 tokens, one per 32 is needed"):
        api.sink_attention(*arrays, **given, implementation="xla")
