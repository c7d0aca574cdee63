"""The drafter against other implementations: fusion, draft blocks with and without memory, leaks.

Run: .venv/bin/python -m pytest tests/models/test_drafter.py
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import DrafterConfig
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import transpose_weights
from tests.golden.files import ATOL, DATA, arrays

SLACK, MAX_LEN, M1 = 8, 48, 8


class Programs(NamedTuple):
    """A drafter's jitted functions, params first."""

    inject_prompt: Callable
    inject_context: Callable
    draft_hidden: Callable
    project_context: Callable
    train_hidden: Callable
    fuse: Callable


def programs(config: DrafterConfig) -> Programs:
    graph, _ = nnx.split(nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0))))

    def method(name):
        no_target = (None,) if name.startswith("inject_") else ()
        run = lambda params, *args: getattr(nnx.merge(graph, params), name)(*no_target, *args)
        return jax.jit(run)

    def fuse(params, features):
        drafter = nnx.merge(graph, params)
        return features @ drafter.w_fuse[...], drafter.fuse_context(features)

    names = Programs._fields[:-1]
    return Programs(*[method(name) for name in names], jax.jit(fuse))


class Case(NamedTuple):
    """A golden pair."""

    config: DrafterConfig
    params: nnx.State
    golden: dict[str, np.ndarray]
    run: Programs
    target: nnx.Module

    def embed(self, token_ids: np.ndarray) -> jax.Array:
        return self.target.embed(jnp.asarray(token_ids))

    def cache(self, batch_size=2):
        graph, _ = nnx.split(nnx.eval_shape(lambda: Drafter(self.config, rngs=nnx.Rngs(0))))
        return nnx.merge(graph, self.params).make_cache(batch_size, MAX_LEN, SLACK)

    def with_prompt(self, features: np.ndarray, length: int):
        """Memory after a prompt whose chunk is longer than its valid part."""
        b = features.shape[0]
        zero, num_valid = np.zeros(b, np.int32), np.full(b, length, np.int32)
        ids = np.zeros(features.shape[:2], np.int32)
        return self.run.inject_prompt(self.params, self.cache(b), features, ids, zero, num_valid)

    def draft(self, embeddings, cache, anchor: int, active: int = M1):
        b = embeddings.shape[0]
        args = (embeddings, cache, np.full(b, anchor, np.int32), np.full(b, active, np.int32))
        return np.asarray(self.run.draft_hidden(self.params, *args))


@pytest.fixture(scope="module", params=["mimo", "qwen3"])
def case(request) -> Case:
    config, _, params = load_drafter(DATA / f"{request.param}-tiny-dflash")
    _, graph, target_params = load_target(DATA / f"{request.param}-tiny")
    golden = arrays(f"{request.param}_tiny_dflash")
    return Case(config, params, golden, programs(config), nnx.merge(graph, target_params))


def check(actual, expected):
    np.testing.assert_allclose(np.asarray(actual), expected, atol=ATOL, rtol=0)


def moved(actual, expected) -> float:
    return np.abs(np.asarray(actual) - expected).max()


def test_config_is_the_one_that_made_the_data(case):
    assert case.config.target_layer_ids == tuple(case.golden["target_layer_ids"])
    assert case.config.draft_block_len == case.golden["block_size"]
    assert case.config.mask_token_id == case.golden["mask_token_id"]
    case.config.check_fits(case.target.config)


def test_context_features_and_their_fusion(case):
    ids = case.golden["input_ids"]
    taps = case.config.target_layer_ids
    graph, target_params = nnx.split(case.target)
    tap = jax.jit(lambda p, x: nnx.merge(graph, p)(x, tap_layer_ids=taps).context_features)
    features = tap(target_params, ids)
    check(features, case.golden["context_features"])
    fused, normed = case.run.fuse(case.params, case.golden["context_features"])
    check(fused, case.golden["fc_out"])
    check(normed, case.golden["ctx_normed"])


def test_blocks_equal_the_golden_ones(case):
    g = case.golden
    cache = case.with_prompt(g["context_features"], 24)
    block1 = case.embed(g["block1_ids"])
    check(block1, g["block1_noise_emb"])
    hidden = case.draft(block1, cache, 24)
    check(hidden, g["block1_hidden"])
    check(case.target.unembed(jnp.asarray(hidden)), g["block1_logits"])
    # The verify pass of block 1 gives eight features; three were accepted, five are stale.
    stale = g["context_features"][:, 24:32].copy()
    stale[:, 3:] = 100.0
    ids = np.zeros(stale.shape[:2], np.int32)
    cache = case.run.inject_context(case.params, cache, stale, ids, np.full(2, 24, np.int32))
    hidden = case.draft(case.embed(g["block2_ids"]), cache, 27)
    check(hidden, g["block2_hidden"])
    check(case.target.unembed(jnp.asarray(hidden)), g["block2_logits"])


def test_proposals_are_the_lowest_argmax_of_the_mask_slots(case):
    g = case.golden
    cache = case.with_prompt(g["context_features"], 24)
    graph, target_params = nnx.split(case.target)

    @functools.partial(jax.jit, static_argnums=6)
    def propose(params, target_params, *args):
        drafter_graph, _ = nnx.split(nnx.eval_shape(lambda: Drafter(case.config, rngs=nnx.Rngs(0))))
        drafter = nnx.merge(drafter_graph, params)
        return argmax_lowest(drafter.draft_logits(nnx.merge(graph, target_params), *args))

    anchor_pos, active = np.full(2, 24, np.int32), np.full(2, M1, np.int32)
    args = (g["block1_ids"][:, 0], cache, anchor_pos, active, M1)
    tokens = propose(case.params, target_params, *args)
    np.testing.assert_array_equal(tokens, g["block1_logits"][:, 1:].argmax(-1))


def test_transposed_matrices_give_the_same_block(case):
    g = case.golden
    cache = case.with_prompt(g["context_features"], 24)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Drafter(case.config, rngs=nnx.Rngs(0))))
    graph, params = transpose_weights(graph, case.params)

    @jax.jit
    def draft(params, *args):
        return nnx.merge(graph, params).draft_hidden(*args)

    anchor_pos, active = np.full(2, 24, np.int32), np.full(2, M1, np.int32)
    check(draft(params, case.embed(g["block1_ids"]), cache, anchor_pos, active), g["block1_hidden"])


def test_rows_may_stand_at_different_places(case):
    g = case.golden
    cache = case.with_prompt(g["context_features"], 27)
    first, second = case.embed(g["block1_ids"]), case.embed(g["block2_ids"])
    embeddings = jnp.stack([first[0], second[1]])
    anchors, active = np.array([24, 27], np.int32), np.full(2, M1, np.int32)
    hidden = case.run.draft_hidden(case.params, embeddings, cache, anchors, active)
    check(hidden[0], g["block1_hidden"][0])
    check(hidden[1], g["block2_hidden"][1])


def test_nothing_at_or_after_the_anchor_is_seen(case):
    g = case.golden
    features = g["context_features"].copy()
    features[:, 24:] = 100 * np.random.default_rng(3).standard_normal(features[:, 24:].shape)
    block = case.embed(g["block1_ids"])
    check(case.draft(block, case.with_prompt(features, 40), 24), g["block1_hidden"])
    features[:, 23] += 1.0
    assert moved(case.draft(block, case.with_prompt(features, 40), 24), g["block1_hidden"]) > 0.01


def test_inactive_slots_do_not_matter(case):
    g = case.golden
    cache = case.with_prompt(g["context_features"], 24)
    block = np.asarray(case.embed(g["block1_ids"]))
    garbage = block.copy()
    garbage[:, 5:] = 50.0
    padded = case.draft(garbage, cache, 24, active=5)
    check(padded[:, :5], case.draft(block[:, :5], cache, 24, active=5))
    assert moved(padded[:, :5], g["block1_hidden"][:, :5]) > 0.01
    assert np.isfinite(padded).all()


def variant(case: Case, **changes) -> Case:
    config = dataclasses.replace(case.config, **changes)
    return case._replace(config=config, run=programs(config))


@pytest.mark.parametrize(
    ("windows", "is_causal"), [((None, None), (False, False)), ((11, None), (True, False))]
)
def test_trainer_and_decoder_run_the_same_block(case, windows, is_causal):
    case = variant(case, windows=windows, is_causal=is_causal)
    g = case.golden
    features = g["context_features"]
    block = case.embed(g["block1_ids"])
    cached = case.draft(block, case.with_prompt(features, 24), 24)
    # Gathered in any order, with holes: only context_pos says what stands where.
    order = np.random.default_rng(4).permutation(40)
    keep_pos = np.where(order < 24, order, -1).astype(np.int32)
    positions = np.broadcast_to(order.astype(np.int32), (2, 40))
    context = case.run.project_context(case.params, features[:, order], positions)
    anchors = np.full(2, 24, np.int32)
    args = (block, *context, np.broadcast_to(keep_pos, (2, 40)), anchors)
    check(case.run.train_hidden(case.params, *args), cached)
    # All positions present: the mask alone keeps the future out.
    args = (block, *context, positions, anchors)
    check(case.run.train_hidden(case.params, *args), cached)
    if windows == (None, None):
        check(cached, g["block1_hidden"])
    else:
        assert moved(cached, g["block1_hidden"]) > 0.01


def test_mimo_drafter_with_sinks_windows_partial_rotary_and_value_scale():
    config, _, params = load_drafter(DATA / "pro-tiny-dflash", jnp.float32)
    golden = arrays("pro_tiny_dflash")
    case = Case(config, params, golden, programs(config), nnx.Module())
    features = golden["context_features"][None]
    _, normed = case.run.fuse(params, features)
    check(normed[0], golden["ctx_normed"])
    for number in (1, 2, 3):
        anchor = int(golden[f"block{number}_start"])
        cache = case.with_prompt(features, anchor)
        hidden = case.draft(golden[f"block{number}_noise_emb"][None], cache, anchor)
        check(hidden[0], golden[f"block{number}_hidden"])
    # Block by block instead of one prompt: the ring of 24 slots goes around.
    cache = case.with_prompt(features[:, :12], 12)
    for first in (12, 20):
        part = np.resize(features[:, first : first + 8], (1, 8, config.context_width))
        cache = case.run.inject_context(
            params, cache, part, np.zeros((1, 8), np.int32), np.array([first], np.int32)
        )
    hidden = case.draft(golden["block3_noise_emb"][None], cache, 27)
    check(hidden[0], golden["block3_hidden"])
