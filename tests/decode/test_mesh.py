"""Decoding on a mesh of eight virtual devices gives what one device gives.

Run: .venv/bin/python -m pytest tests/decode/test_mesh.py

A new mode of the engine joins by a line in MODES.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from configs.tiny import mesh_drafter, mesh_target
from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.filters import filter_logits
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model, place_on_mesh, shapes_on_mesh
from mimo_jax.decode.prefix import PromptReader, shared_borders
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED, FILTERED, GREEDY, SAMPLED
from mimo_jax.layers.vocab import argmax_lowest, embed_rows
from mimo_jax.models.cut import attention_part, device_order, target_part
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.models.target import Target
from mimo_jax.sharding import DECODE, make_mesh

pytestmark = pytest.mark.multi_device

SHAPES = ((1, 8), (2, 4), (4, 2), (8, 1))
_FILTERS = {"temperature": 1.1, "seed": 6, "top_p": 0.8, "top_k": 9, "min_p": 0.02}
_PENALTIES = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": ((5, 2.0), (80, -1.5)),
}
# name -> (sampling mode, request fields, whether it drafts, more of Engine's arguments)
MODES = {
    "plain greedy": (GREEDY, {}, False, {}),
    "greedy": (GREEDY, {}, True, {"num_logprobs": 3}),
    "plain sampled": (SAMPLED, {"temperature": 0.9, "seed": 5}, False, {}),
    "sampled": (SAMPLED, {"temperature": 0.9, "seed": 5}, True, {}),
    "filtered": (FILTERED, _FILTERS, True, {}),
    "adjusted": (ADJUSTED, _FILTERS | _PENALTIES, True, {"max_bias_ids": 8}),
    "rejection": (FILTERED, _FILTERS, True, {"rule": "rejection"}),
    "block": (FILTERED, _FILTERS, True, {"rule": "block"}),
    "profile": (GREEDY, {}, True, {"policy": "profile"}),
    "costs": (GREEDY, {}, True, {"policy": "costs"}),
    "tree": (
        ADJUSTED,
        _FILTERS | _PENALTIES,
        True,
        {"max_bias_ids": 8, "max_verify_nodes": 12, "num_logprobs": 2},
    ),
    "costs with a tree": (SAMPLED, {}, True, {"policy": "costs", "max_verify_nodes": 9}),
}
PROMPTS = ([1, 2, 3, 4, 5, 6], [7, 8, 9], [11] * 30)  # one prefill program


def _model(module) -> Model:
    """Random weights; sinks and norms too, so that a part in the wrong place shows."""
    graph, params = split(module)
    flat = flatten(params)
    key = jax.random.key(3)
    for i, (name, value) in enumerate(flat.items()):
        if value.ndim == 1:
            noise = jax.random.normal(jax.random.fold_in(key, i), value.shape, value.dtype)
            flat[name] = value + 0.3 * noise
        elif value.dtype == jnp.uint8:
            low, high = (118, 125) if name.endswith("_scale") else (0, 256)
            flat[name] = jax.random.randint(
                jax.random.fold_in(key, i), value.shape, low, high, jnp.int32
            ).astype(jnp.uint8)
    return Model(module.config, graph, unflatten(params, flat))


@pytest.fixture(scope="module")
def models():
    config = mesh_target()
    target = _model(Target(config, rngs=nnx.Rngs(1)))
    return target, _model(Drafter(mesh_drafter(config), rngs=nnx.Rngs(2)))


def _texts(target, drafter, mode, fields, batch_size, **options):
    """Ids, steps and the likeliest ids of every prompt."""
    engine = Engine(target, drafter, max_len=128, mode=mode, batch_size=batch_size, **options)
    requests = [Request(prompt, 24, **fields) for prompt in PROMPTS]
    likeliest = lambda c: [[i for i, _ in top] for top in c.top_logprobs or ()]
    # What a controller has learnt depends on which prompts came before: steps may differ.
    steps = lambda c: () if "policy" in options else c.num_committed_per_step
    return [(c.token_ids, steps(c), likeliest(c)) for c in generate_all(engine, requests)]


@pytest.fixture(scope="module")
def one_device(models):
    """Text of each mode on one device."""
    texts = {}

    def get(name):
        if name not in texts:
            mode, fields, drafts, options = MODES[name]
            drafter = models[1] if drafts else None
            texts[name] = _texts(models[0], drafter, mode, fields, 1, **options)
        return texts[name]

    return get


def _cases():
    """Every mode on every mesh; by default those that differ most, and every mesh."""
    quick = {((2, 4), "profile"), ((4, 2), "filtered"), ((8, 1), "sampled")}
    quick |= {((1, 8), name) for name in ("tree", "block")}
    for shape in SHAPES:
        for name in MODES:
            is_slow = (shape, name) not in quick
            marks = [pytest.mark.slow] if is_slow else []
            yield pytest.param(shape, name, marks=marks, id=f"{shape[0]}x{shape[1]} {name}")


@pytest.mark.parametrize(("shape", "name"), list(_cases()))
def test_text_is_that_of_one_device(models, one_device, shape, name):
    """Token by token and step by step, rows cut over data, all else over model."""
    mode, fields, drafts, options = MODES[name]
    mesh = make_mesh(DECODE, shape)
    target = place_on_mesh(models[0], mesh)
    drafter = place_on_mesh(models[1], mesh) if drafts else None
    batch_size = max(2, shape[0])
    assert _texts(target, drafter, mode, fields, batch_size, **options) == one_device(name)


def test_a_shared_beginning_on_a_mesh(models):
    """Read once on eight devices, copied, and continued, with the drafter's half, as on one."""
    shared = list(range(40)) + list(range(20, 48))
    prompts = [shared + [n, 5] for n in range(5)] + [shared + [1, 5]]
    requests = [Request(p, 12, temperature=0.9, seed=n) for n, p in enumerate(prompts)]
    plain = Engine(*models, max_len=128, mode=SAMPLED)
    want = generate_all(plain, requests)
    mesh = make_mesh(DECODE, (2, 4))
    placed = [place_on_mesh(model, mesh) for model in models]
    engine = Engine(*placed, max_len=128, mode=SAMPLED, batch_size=2)
    reader = PromptReader(engine, prompts, shared_borders(prompts))
    got = generate_all(engine, requests, reader=reader)
    assert reader.num_read == 64 + 5 * 6
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert [c.num_committed_per_step for c in got] == [c.num_committed_per_step for c in want]


def test_a_whole_drafter_on_every_device_gives_the_same(models, one_device):
    mesh = make_mesh(DECODE, (1, 8))
    target = place_on_mesh(models[0], mesh)
    drafter = place_on_mesh(models[1], mesh, is_replicated=True)
    assert _texts(target, drafter, GREEDY, {}, 2, num_logprobs=3) == one_device("greedy")


def test_packed_experts_keep_their_groups_whole():
    config = mesh_target(is_mxfp4=True)
    target = _model(Target(config, rngs=nnx.Rngs(4)))
    want = _texts(target, None, GREEDY, {}, 1)
    placed = place_on_mesh(target, make_mesh(DECODE, (1, 8)))
    down = flatten(placed.params)["layers.1.experts_down_scale"]
    assert {shard.data.shape for shard in down.addressable_shards} == {(7, 64, 1)}
    assert _texts(placed, None, GREEDY, {}, 1) == want


def test_logits_are_those_of_one_device(models):
    target = models[0]
    mesh = make_mesh(DECODE, (1, 8))
    placed = place_on_mesh(target, mesh)
    ids = jnp.asarray([[5, 80, 33, 2, 17, 64, 9]], jnp.int32)
    start = jnp.zeros((1,), jnp.int32)

    def logits(graph, params, token_ids):
        model = nnx.merge(graph, params)
        return model.step(token_ids, model.make_cache(1, 16, 7), start).logits

    want = jax.jit(lambda p, x: logits(target.graph, p, x))(target.params, ids)
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, placed.params)
    got = jax.jit(
        jax.shard_map(
            lambda p, x: logits(placed.graph, p, x),
            mesh=mesh,
            in_specs=(specs, P()),
            out_specs=P(None, None, "model"),
            check_vma=False,
        )
    )(placed.params, ids)
    np.testing.assert_allclose(got, want, atol=2e-5)


def _collectives(text: str) -> dict[str, int]:
    """Arrays that cross devices, by kind; XLA may put two into one operation."""
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    operands = lambda kind: re.findall(rf" {kind}(?:-start)?\(([^)]*)\), channel", text)
    return {kind: sum(ops.count("%") for ops in operands(kind)) for kind in kinds}


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_issues_the_collectives_of_the_rule(drafts):
    """Two per layer; embedding and argmax; for a drafter those and its context fusion."""
    config = mesh_target()
    mesh = make_mesh(DECODE, (1, 8))
    target = shapes_on_mesh(config, mesh, jnp.float32)
    drafter = shapes_on_mesh(mesh_drafter(config), mesh, jnp.float32) if drafts else None
    engine = Engine(target, drafter, max_len=128)
    state = engine.state_shapes()
    text = engine.group_program(state).as_text()
    expected = 2 * 4 + 2 + (2 * 2 + 3 if drafts else 0)
    assert _collectives(text) == {
        "all-reduce": expected,
        "all-gather": 0,
        "all-to-all": 0,
        "collective-permute": 0,
        "reduce-scatter": 0,
    }


def test_device_order_puts_heads_beside_their_keys_and_values():
    assert device_order([(4, 1), (1, 1)], 2).tolist() == [0, 1, 4, 2, 3, 4]
    # 2 query heads of 2 columns, 2 KV heads of 2 and 1: [q0 q1 | k0 k1 | v0 v1]
    assert device_order([(2, 2), (2, 2), (2, 1)], 2).tolist() == [0, 1, 4, 5, 8, 2, 3, 6, 7, 9]


def test_few_kv_heads_are_repeated_and_other_counts_refused():
    a = mesh_target().attention["global"]
    assert attention_part(a, 8, "global").num_kv_heads == 1
    assert attention_part(a, 2, "global").num_kv_heads == 2
    with pytest.raises(ConfigError, match="global num_heads 16 cannot be cut into 3 parts"):
        attention_part(a, 3, "global")
    with pytest.raises(ConfigError, match="it can be cut into 1, 2, 4, 8, 16$"):
        attention_part(a, 32, "global")
    few = dataclasses.replace(a, num_heads=48, num_kv_heads=6)
    with pytest.raises(ConfigError, match="num_kv_heads 6 cannot be repeated to 16"):
        attention_part(few, 16, "global")


def test_what_does_not_divide_is_one_line():
    with pytest.raises(ConfigError, match="moe hidden_size 24 cannot be cut into 16 parts"):
        target_part(mesh_target(), 16)


def test_rows_must_divide_over_data(models):
    mesh = make_mesh(DECODE, (4, 2))
    with pytest.raises(ConfigError, match=r"batch_size 3 cannot be cut into 4 parts \(mesh data"):
        Engine(place_on_mesh(models[0], mesh), max_len=64, batch_size=3)
    with pytest.raises(ConfigError, match="placed on the same mesh"):
        Engine(place_on_mesh(models[0], mesh), models[1], max_len=64, batch_size=4)


def _over_vocab(fn, *args):
    """fn on arrays whose last axis is cut over eight devices."""
    mesh = make_mesh(DECODE, (1, 8))
    specs = tuple(P(*(None,) * (a.ndim - 1), "model") if a.ndim == 3 else P() for a in args)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )(*args)


def test_argmax_over_a_cut_vocabulary_lets_the_lowest_id_win(getkey):
    logits = jnp.round(jax.random.normal(getkey(), (3, 5, 48)) * 2)  # many ties
    want = argmax_lowest(logits)
    got = _over_vocab(lambda x: argmax_lowest(x, "model"), logits)
    assert (np.asarray(got) == np.asarray(want)).all()
    assert (np.asarray(want) == np.argmax(np.asarray(logits), axis=-1)).all()


def test_embedding_over_a_cut_vocabulary_is_exact(getkey):
    table = jax.random.normal(getkey(), (24, 5))
    ids = jnp.asarray([[0, 23, 7], [8, 3, 15]], jnp.int32)
    mesh = make_mesh(DECODE, (1, 8))
    got = jax.jit(
        jax.shard_map(
            lambda t, i: embed_rows(t, i, "model"),
            mesh=mesh,
            in_specs=(P("model"), P()),
            out_specs=P(),
            check_vma=False,
        )
    )(table, ids)
    assert (np.asarray(got) == np.asarray(table)[np.asarray(ids)]).all()


def test_filters_over_a_cut_vocabulary_keep_the_same(getkey):
    """With ties across devices: they are cut by id, wherever they live."""
    logits = jnp.round(jax.random.normal(getkey(), (4, 3, 40)) * 3) / 2
    top_k = jnp.asarray([0, 7, 13, 1], jnp.int32)
    top_p = jnp.asarray([0.6, 1.0, 0.75, 1.0], jnp.float32)
    min_p = jnp.asarray([0.0, 0.0, 0.2, 0.0], jnp.float32)
    want = np.isfinite(np.asarray(filter_logits(logits, top_k, top_p, min_p)))
    mesh = make_mesh(DECODE, (1, 8))
    got = jax.jit(
        jax.shard_map(
            lambda x, k, p, least: filter_logits(x, k, p, least, "model"),
            mesh=mesh,
            in_specs=(P(None, None, "model"), P(), P(), P()),
            out_specs=P(None, None, "model"),
            check_vma=False,
        )
    )(logits, top_k, top_p, min_p)
    assert (np.isfinite(np.asarray(got)) == want).all()
    assert want[1].sum(axis=-1).tolist() == [7, 7, 7]
    assert want[3].sum(axis=-1).tolist() == [1, 1, 1]
