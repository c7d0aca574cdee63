"""The target against other implementations: whole rows, prefill, steps, roll-backs, dead memory.

Run: .venv/bin/python -m pytest tests/models/test_target.py

Logits and hidden states of every path are compared with the same golden arrays, so no path serves
as the reference of another.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import SLIDING, TargetConfig
from mimo_jax.models.params import flatten, transpose_weights
from mimo_jax.models.target import Target
from tests.golden.files import ATOL, DATA, arrays

SLACK, MAX_LEN = 5, 48
# Its global layers are all that Qwen3 has; running both where rings matter would double the time.
only_mimo = pytest.mark.parametrize("case", ["mimo"], indirect=True)


class Case(NamedTuple):
    """One golden target with its jitted ways forward."""

    config: TargetConfig
    params: nnx.State
    golden: dict[str, np.ndarray]
    full: Callable
    prefill: Callable
    step: Callable
    make_cache: Callable


@pytest.fixture(scope="module", params=["mimo", "qwen3"])
def case(request) -> Case:
    config, graph, params = load_target(DATA / f"{request.param}-tiny")
    all_layers = tuple(range(config.num_layers))

    @jax.jit
    def full(params, token_ids):
        return nnx.merge(graph, params)(token_ids, tap_layer_ids=all_layers)

    def prefill(params, token_ids, cache, start, num_valid, is_first):
        return nnx.merge(graph, params).prefill(
            token_ids, cache, start, num_valid, is_first=is_first, tap_layer_ids=(1, 4)
        )

    @jax.jit
    def step(params, token_ids, cache, start):
        return nnx.merge(graph, params).step(token_ids, cache, start, tap_layer_ids=(1, 4))

    def make_cache():
        return nnx.merge(graph, params).make_cache(2, MAX_LEN, SLACK)

    return Case(
        config,
        params,
        arrays(f"{request.param}_tiny"),
        full,
        jax.jit(prefill, static_argnums=5),
        step,
        make_cache,
    )


def take_rows(array: np.ndarray, start: np.ndarray, t: int) -> np.ndarray:
    """array[row, start[row] : start[row] + t] of each row."""
    return np.stack([array[row, first : first + t] for row, first in enumerate(start)])


def check(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("t", [40, 39])  # 40 = five windows: the chunked way; 39: the whole mask
def test_logits_and_every_layer_equal_the_golden_ones(case, t):
    out = case.full(case.params, case.golden["input_ids"][:, :t])
    check(out.logits, case.golden["logits"][:, :t])
    layers = np.split(np.asarray(out.context_features), case.config.num_layers, axis=-1)
    check(np.stack(layers), case.golden["layer_out"][:, :, :t])


@only_mimo
def test_transposed_matrices_give_the_same_logits(case):
    graph, _ = nnx.split(nnx.eval_shape(lambda: Target(case.config, rngs=nnx.Rngs(0))))
    graph, params = transpose_weights(graph, case.params)
    assert flatten(params)["layers.0.w_qkv"].shape == (272, 64)
    out = jax.jit(lambda p, x: nnx.merge(graph, p)(x))(params, case.golden["input_ids"][:, :17])
    check(out.logits, case.golden["logits"][:, :17])
    assert transpose_weights(graph, params)[0] == graph


def with_window(config: TargetConfig, window: int) -> TargetConfig:
    sliding = dataclasses.replace(config.attention[SLIDING], window=window)
    return dataclasses.replace(config, attention=config.attention | {SLIDING: sliding})


def test_a_window_of_nine_keys_gives_the_other_golden_logits():
    config, _, params = load_target(DATA / "mimo-tiny")
    golden = arrays("mimo_tiny")
    nine = with_window(config, 9)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Target(nine, rngs=nnx.Rngs(0))))
    out = jax.jit(lambda p, x: nnx.merge(graph, p)(x))(params, golden["input_ids"])
    check(out.logits, golden["logits_window9"])
    assert np.abs(golden["logits_window9"] - golden["logits"]).max() > 0.1


@only_mimo
def test_packed_documents_do_not_see_each_other(case):
    ids, logits = case.golden["input_ids"], case.golden["logits"]
    packed = np.concatenate([ids[0, :15], ids[1, :24], [0]])[None]
    segments = np.repeat([1, 2, 0], [15, 24, 1])[None].astype(np.int32)
    positions = np.concatenate([np.arange(15), np.arange(25)])[None].astype(np.int32)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Target(case.config, rngs=nnx.Rngs(0))))

    @jax.jit
    def packed_logits(params, packed, segments, positions):
        target = nnx.merge(graph, params)
        return target(packed, segment_ids=segments, positions=positions).logits

    out = np.asarray(packed_logits(case.params, packed, segments, positions))
    check(out[0, :15], logits[0, :15])
    check(out[0, 15:39], logits[1, :24])
    assert np.isfinite(out).all()


def prefilled(case: Case, num_valid: np.ndarray):
    """Output of one padded chunk of 16 tokens; padding holds an id that must not matter."""
    ids = np.where(np.arange(16) < num_valid[:, None], case.golden["input_ids"][:, :16], 7)
    start = np.zeros(2, np.int32)
    return case.prefill(
        case.params, ids.astype(np.int32), case.make_cache(), start, num_valid, True
    )


@pytest.mark.parametrize(("case", "t"), [("mimo", 1), ("mimo", 5), ("qwen3", 5)], indirect=["case"])
def test_steps_continue_a_prefill_beyond_window_and_ring(case, t):
    # Rows of different lengths; the ring has 16 slots, so positions 16 and 32 go around it.
    start = np.array([3, 13], np.int32)
    out = prefilled(case, start)
    check(out.logits[:, 0], case.golden["logits"][[0, 1], start - 1])
    features = np.concatenate([case.golden["layer_out"][i] for i in (1, 4)], axis=-1)
    check(out.context_features[0, :3], features[0, :3])
    check(out.context_features[1, :13], features[1, :13])
    cache = out.cache
    while (start + t <= 40).all():
        tokens = take_rows(case.golden["input_ids"], start, t)
        out = case.step(case.params, tokens, cache, start)
        check(out.logits, take_rows(case.golden["logits"], start, t))
        check(out.context_features, take_rows(features, start, t))
        cache, start = out.cache, start + t


@only_mimo
def test_rejected_tokens_leave_no_trace(case):
    rng = np.random.default_rng(5)
    start, cache = np.array([3, 13], np.int32), prefilled(case, np.array([3, 13], np.int32)).cache
    while (start + 5 <= 40).all():
        num_right = rng.integers(1, 6, size=2).astype(np.int32)
        tokens = take_rows(case.golden["input_ids"], start, 5)
        tokens = np.where(np.arange(5) < num_right[:, None], tokens, (tokens + 1) % 255)
        out = case.step(case.params, tokens.astype(np.int32), cache, start)
        wanted = take_rows(case.golden["logits"], start, 5)
        for row in range(2):
            check(out.logits[row, : num_right[row]], wanted[row, : num_right[row]])
        cache, start = out.cache, start + num_right


def poison(cache, length: np.ndarray, rng):
    """Noise of size 1e4 wherever a query at or past `length` must not look."""
    layers = []
    for layer_idx, layer in enumerate(cache.layers):
        position = np.asarray(cache.key_positions(layer_idx))
        is_dead = (position < 0) | (position >= length[:, None])
        window = cache.windows[layer_idx]
        if window is not None:
            is_dead |= position <= length[:, None] - window
        assert is_dead.any()
        dead = is_dead[:, None, :, None]
        noisy = [
            np.where(dead, 1e4 * rng.standard_normal(x.shape), np.asarray(x)).astype(np.float32)
            for x in layer
        ]
        layers.append(type(layer)(*map(jnp.asarray, noisy)))
    return dataclasses.replace(cache, layers=tuple(layers))


@only_mimo
def test_memory_beyond_length_and_window_is_never_read(case):
    rng = np.random.default_rng(6)
    start = np.array([6, 14], np.int32)
    out = prefilled(case, start)
    for _ in range(2):
        cache = poison(out.cache, start, rng)
        out = case.step(case.params, take_rows(case.golden["input_ids"], start, 5), cache, start)
        check(out.logits, take_rows(case.golden["logits"], start, 5))
        start = start + 5


@only_mimo
def test_chunked_prefill_equals_one_shot(case):
    num_valid = np.array([30, 35], np.int32)
    ids = case.golden["input_ids"]
    last = case.golden["logits"][[0, 1], num_valid - 1]
    zero = np.zeros(2, np.int32)
    out = case.prefill(case.params, ids, case.make_cache(), zero, num_valid, True)
    check(out.logits[:, 0], last)
    one_shot = out.cache
    chunked = case.make_cache()
    for first, valid in ((0, (16, 16)), (16, (11, 16)), (np.array([27, 32]), (3, 3))):
        start, valid = np.broadcast_to(first, 2).astype(np.int32), np.array(valid, np.int32)
        tokens = take_rows(np.pad(ids, ((0, 0), (0, 16))), start, 16)
        tokens = np.where(np.arange(16) < valid[:, None], tokens, 7).astype(np.int32)
        is_first = start.max() == 0
        out = case.prefill(case.params, tokens, chunked, start, valid, bool(is_first))
        chunked = out.cache
    check(out.logits[:, 0], last)
    for cache in (one_shot, chunked):
        step = case.step(case.params, take_rows(ids, num_valid, 5), cache, num_valid)
        check(step.logits, take_rows(case.golden["logits"], num_valid, 5))
