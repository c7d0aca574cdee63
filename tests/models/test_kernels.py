"""A model on the kernels, in the GPU interpreter, against the same weights in plain XLA.

Run: .venv/bin/python -m pytest tests/models/test_kernels.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax import cache as kv
from mimo_jax.config import (
    GLOBAL,
    SLIDING,
    AttentionConfig,
    ConfigError,
    DrafterConfig,
    MoeConfig,
    TargetConfig,
)
from mimo_jax.decode.engine import switch_to_kernels
from mimo_jax.decode.placement import Model
from mimo_jax.models import kernels
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import flatten, split
from mimo_jax.models.target import Target
from mimo_jax.quant.kv import FORMATS
from pallas_kernels.dispatch import INTERPRET, MOSAIC_GPU, XLA

T, START = 3, 21
ATTENTION = {"num_heads": 4, "head_dim": 32, "v_head_dim": 16, "rope_dim": 16}


def target_config(**changes) -> TargetConfig:
    fields = {
        "vocab_size": 96,
        "hidden_size": 128,
        "layer_kinds": (GLOBAL, SLIDING),
        "attention": {
            GLOBAL: AttentionConfig(**ATTENTION, num_kv_heads=1, rope_theta=1e4),
            SLIDING: AttentionConfig(
                **ATTENTION, num_kv_heads=2, rope_theta=1e2, window=16, has_sink=True
            ),
        },
        "dense_hidden_size": 160,
        "moe": MoeConfig(num_experts=5, top_k=2, hidden_size=128, is_mxfp4=True),
        "is_moe_layer": (False, True),
        "value_scale": 0.6,
        "max_position": 128,
    }
    return TargetConfig(**(fields | changes))


def drafter_config() -> DrafterConfig:
    return DrafterConfig(
        hidden_size=128,
        num_layers=1,
        attention=AttentionConfig(**ATTENTION, num_kv_heads=2, rope_theta=1e3, has_sink=True),
        dense_hidden_size=96,
        target_layer_ids=(0, 1),
        num_target_layers=2,
        draft_block_len=4,
        mask_token_id=95,
        vocab_size=96,
        windows=(16,),
        value_scale=0.6,
    )


def _random_codes(module, rng):
    """Packed experts are zero until loaded."""
    for layer in module.layers:
        for name, leaf in list(vars(layer).items()):
            if name.startswith("experts_"):
                low, high = (118, 124) if name.endswith("scale") else (0, 256)
                codes = rng.integers(low, high, leaf.shape).astype(np.uint8)
                leaf.set_value(jnp.asarray(codes))
            elif name in ("sink", "selection_bias"):
                leaf.set_value(jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype))
    return module


@functools.cache
def models(implementation: str) -> tuple[Target, Drafter]:
    rng = np.random.default_rng(0)
    target = Target(target_config(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    drafter = Drafter(drafter_config(), rngs=nnx.Rngs(1), dtype=jnp.bfloat16)
    pair = []
    for module in (target, drafter):
        graph, params = kernels.use_kernels(*split(_random_codes(module, rng)), implementation)
        pair.append(nnx.merge(graph, params))
    return pair[0], pair[1]


def _filled(cache: kv.KVCache, rng) -> kv.KVCache:
    """Memory of START positions; the slots behind hold keys that nobody may use."""
    start = jnp.array([START], jnp.int32)
    layers = []
    for layer_idx, layer in enumerate(cache.layers):
        shape, width = layer.keys.shape[:2], layer.keys.shape[3]
        keys = jnp.asarray(rng.standard_normal((*shape, START, width)), jnp.bfloat16)
        values = jnp.asarray(
            rng.standard_normal((*shape, START, layer.values.shape[3])), jnp.bfloat16
        )
        poisoned = cache.layers[layer_idx]._replace(keys=jnp.full_like(layer.keys, jnp.nan))
        held = kv.KVCache(
            (*cache.layers[:layer_idx], poisoned, *cache.layers[layer_idx + 1 :]),
            cache.ring_positions,
            cache.windows,
            cache.slack,
        )
        zero = jnp.zeros((1,), jnp.int32)
        layers.append(kv.write_chunk(held, layer_idx, keys, values, zero, start))
    filled = kv.KVCache(tuple(layers), cache.ring_positions, cache.windows, cache.slack)
    return kv.finish_chunk(filled, jnp.zeros((1,), jnp.int32), start)


def _close(found, wanted, tolerance=0.03):
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())


def _both(run):
    return run(*models(INTERPRET)), run(*models(XLA))


def test_step_agrees_and_writes_the_same_memory():
    ids = jnp.array([[5, 90, 17]], jnp.int32)

    def run(target, drafter):
        cache = _filled(target.make_cache(1, 64, 8), np.random.default_rng(1))
        start = jnp.array([START], jnp.int32)
        return target.step(ids, cache, start, tap_layer_ids=(0, 1))

    found, wanted = _both(run)
    _close(found.logits, wanted.logits)
    _close(found.context_features, wanted.context_features)
    for layer_idx, slot in ((0, START), (1, START % kv.ring_len(16, 8))):
        new = slice(slot, slot + T)
        for ours, theirs in zip(
            found.cache.layers[layer_idx], wanted.cache.layers[layer_idx], strict=True
        ):
            _close(ours[:, :, new], theirs[:, :, new])
    np.testing.assert_array_equal(found.cache.ring_positions, wanted.cache.ring_positions)


@pytest.mark.slow
def test_tree_agrees_and_writes_nothing():
    depths = jnp.array([[0, 1, 1, 2]], jnp.int32)
    sees = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    ids = jnp.array([[5, 90, 17, 44]], jnp.int32)

    def run(target, drafter):
        cache = _filled(target.make_cache(1, 64, 8), np.random.default_rng(1))
        out, nodes = target.look(ids, cache, jnp.array([START], jnp.int32), depths, sees)
        return out.logits, nodes

    (found, found_nodes), (wanted, wanted_nodes) = _both(run)
    _close(found, wanted)
    assert len(found_nodes) == len(wanted_nodes) == 2
    leaves = (jax.tree.leaves(nodes) for nodes in (found_nodes, wanted_nodes))
    for ours, theirs in zip(*leaves, strict=True):
        _close(ours, theirs)


def test_draft_and_injection_agree():
    anchor_pos, active = jnp.array([START], jnp.int32), jnp.array([3], jnp.int32)
    features = jnp.asarray(np.random.default_rng(2).standard_normal((1, T, 256)), jnp.bfloat16)

    def run(target, drafter):
        cache = _filled(drafter.make_cache(1, 64, 8), np.random.default_rng(1))
        anchors = jnp.array([7], jnp.int32)
        logits = drafter.draft_logits(target, anchors, cache, anchor_pos, active, 4)
        ids = jnp.zeros((1, T), jnp.int32)
        return logits, drafter.inject_context(target, cache, features, ids, anchor_pos)

    (found, found_cache), (wanted, wanted_cache) = _both(run)
    _close(found[:, :2], wanted[:, :2])  # the third slot is not active
    slot = START % kv.ring_len(16, 8)
    for ours, theirs in zip(found_cache.layers[0], wanted_cache.layers[0], strict=True):
        _close(ours[:, :, slot : slot + T], theirs[:, :, slot : slot + T])
    np.testing.assert_array_equal(found_cache.ring_positions, wanted_cache.ring_positions)


@pytest.mark.slow
def test_prompt_chunk_reads_tiles_back():
    """More tokens than the kernel takes go through the packed experts."""
    ids = jnp.asarray(np.random.default_rng(3).integers(0, 96, (1, 72)), jnp.int32)

    def run(target, drafter):
        cache, zero = target.make_cache(1, 100, 4), jnp.zeros((1,), jnp.int32)
        valid = jnp.array([70], jnp.int32)
        return target.prefill(ids, cache, zero, valid, is_first=True).logits

    found, wanted = _both(run)
    np.testing.assert_array_equal(found, wanted)


def test_quantised_memory_stays_with_xla():
    target, _ = models(INTERPRET)
    assert target.has_block_kernel(target.make_cache(1, 64, 4))
    form = FORMATS["int8"]
    assert not target.has_block_kernel(target.make_cache(1, 64, 4, form=form))


def test_weights_are_tiled_in_place_of_the_packed_ones():
    target, drafter = models(INTERPRET)
    layer = target.layers[1]
    assert layer.experts_gate_tiles.shape == (1, 5, 2, 1, 64, 16)
    assert layer.experts_down_scales.shape == (1, 5, 2, 4, 64)
    assert not hasattr(layer, "experts_gate")
    # Queries 4 x 32, keys 2 x 32, values 2 x 16.
    assert drafter.layers[0].w_qkv.shape == (128, 128 + 64 + 32)
    assert not hasattr(drafter.layers[0], "w_q")


def test_kernels_are_refused_where_they_cannot_run():
    graph, params = split(Target(target_config(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    model = Model(target_config(), graph, params)
    with pytest.raises(ConfigError, match="mosaic_gpu: cpu is not a GPU; allowed here: xla"):
        switch_to_kernels(model, MOSAIC_GPU)
    assert switch_to_kernels(model, None).graph == graph


def test_packed_experts_are_let_go_where_that_is_asked():
    graph, params = split(Target(target_config(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    packed = flatten(params)["layers.1.experts_gate"]
    kernels.use_kernels(graph, params, INTERPRET)
    assert not packed.is_deleted()
    kernels.use_kernels(graph, params, INTERPRET, consumes=True)
    assert packed.is_deleted()


def test_cpu_keeps_xla():
    assert kernels.why_not(target_config(), jnp.bfloat16, None) == "cpu is not a GPU"


@pytest.mark.parametrize(
    ("config", "parts", "reason"),
    [
        (target_config(), 1, None),
        (target_config(), 2, "64 inputs do not divide into blocks of 128 inputs"),
        (target_config(hidden_size=192), 1, "192 inputs do not divide into blocks of 128 inputs"),
        (
            target_config(
                attention={
                    kind: AttentionConfig(
                        **(ATTENTION | {"v_head_dim": 24}),
                        num_kv_heads=2,
                        rope_theta=1e4,
                        window=None if kind == GLOBAL else 16,
                    )
                    for kind in (GLOBAL, SLIDING)
                }
            ),
            1,
            "heads of 32 and 24 are not multiples of 16",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_named(config, parts, reason):
    assert kernels._why_not_shapes(config, parts) == reason
