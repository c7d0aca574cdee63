"""The baseline drafters in the decode loop: exact, rolled back right, the same as in training.

Run: .venv/bin/python -m pytest tests/decode/test_baselines.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.tiny import tiny_drafter, tiny_eagle, tiny_target
from mimo_jax import cache as kv
from mimo_jax.checkpoint.hf_target import load_mtp_drafter, load_mtp_heads
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model, place_on_mesh
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import SAMPLED
from mimo_jax.models.denoising import most_confident, with_passes
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.eagle import EagleDrafter
from mimo_jax.models.lookahead import HeadMemory
from mimo_jax.models.mtp import MtpConfig, MtpDrafter, chain_first_head
from mimo_jax.models.params import flatten, split
from mimo_jax.models.target import Target
from mimo_jax.sharding import DECODE, make_mesh
from mimo_jax.train.block_rows import DraftBlocks
from mimo_jax.train.block_step import block_logits
from mimo_jax.train.data import pack_documents
from mimo_jax.train.eagle_step import eagle_forward
from mimo_jax.train.mtp_step import mtp_forward
from mimo_jax.train.step import Batch
from tests.golden.files import DATA
from tests.oracles.eagle import eagle_logits

HEADS = ("eagle", "apart", "chain")
MAX_LEN = 96


def model(config, module) -> Model:
    return Model(config, *split(module))


@pytest.fixture(scope="module")
def target() -> Model:
    module = Target(tiny_target(), rngs=nnx.Rngs(0))
    module.embedding[...] = module.embedding[...] * 6  # less repetitive greedy text
    return model(module.config, module)


@pytest.fixture(scope="module")
def drafters(target) -> dict[str, Model]:
    plain = Drafter(tiny_drafter(), rngs=nnx.Rngs(1))
    plain = model(plain.config, plain)
    eagle, apart = tiny_eagle(), MtpConfig(target.config)
    heads = model(apart, MtpDrafter(apart, rngs=nnx.Rngs(3)))
    return {
        "plain": plain,
        "one pass": Model(*with_passes(plain.config, plain.graph, plain.params, 1)),
        "passes": Model(*with_passes(plain.config, plain.graph, plain.params, 3)),
        "eagle": model(eagle, EagleDrafter(eagle, rngs=nnx.Rngs(2))),
        "apart": heads,
        "chain": Model(*chain_first_head(apart, heads.params, 5)),
    }


def requests() -> list[Request]:
    rng = np.random.default_rng(5)
    return [Request(rng.integers(0, 61, n).tolist(), m) for n, m in ((1, 30), (33, 25), (2, 9))]


@pytest.fixture(scope="module")
def plain_ids(target) -> list[list[int]]:
    return [c.token_ids for c in generate_all(Engine(target, max_len=MAX_LEN), requests())]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("kind", ["passes", *HEADS])
def test_greedy_output_is_that_of_plain_decoding(target, drafters, plain_ids, kind, batch_size):
    """Prompts of 1 and 2 tokens: the first keys of a head belong to positions before the row's."""
    engine = Engine(target, drafters[kind], max_len=MAX_LEN, batch_size=batch_size)
    got = generate_all(engine, requests(), steps_per_group=4)
    assert [c.token_ids for c in got] == plain_ids


@functools.cache
def _jitted(target_graph, drafter_graph, taps, m1):
    """Draft logits of a state's memory, and of one made anew from the committed ids."""

    def from_memory(target_params, params, ids, memory, anchor_pos):
        t, d = nnx.merge(target_graph, target_params), nnx.merge(drafter_graph, params)
        anchors = jnp.take_along_axis(ids, anchor_pos[:, None], axis=1)[:, 0]
        full = jnp.full(anchor_pos.shape, m1, jnp.int32)
        return d.draft_logits(t, anchors, memory, anchor_pos, full, m1)

    def anew(target_params, params, ids, anchor_pos):
        t, d = nnx.merge(target_graph, target_params), nnx.merge(drafter_graph, params)
        features = t(ids, tap_layer_ids=taps).context_features
        memory = d.make_cache(ids.shape[0], ids.shape[1], m1)
        zero = jnp.zeros_like(anchor_pos)
        memory = d.inject_prompt(t, memory, features, ids, zero, anchor_pos)
        return from_memory(target_params, params, ids, memory, anchor_pos), features

    return jax.jit(from_memory), jax.jit(anew)


def _programs(target: Model, drafter: Model):
    config = drafter.config
    return _jitted(target.graph, drafter.graph, config.target_layer_ids, config.draft_block_len)


def poisoned(memory: HeadMemory, anchor_pos) -> HeadMemory:
    """Large numbers wherever no committed id has a key, and in the tail from the anchor on."""
    caches = []
    for k, cache in enumerate(memory.caches):
        position = cache.ring_positions
        dead = (position < 0) | (position >= anchor_pos[:, None] - 1 - k)
        dead = dead[:, None, :, None]
        layer = kv.LayerCache(*(jnp.where(dead, 1e3, x) for x in cache.layers[0]))
        caches.append(kv.KVCache((layer,), position, cache.windows, cache.slack))
    offset = jnp.arange(memory.tail.shape[1], dtype=jnp.int32)[None, :]
    dead = (memory.tail_start[:, None] + offset >= anchor_pos[:, None])[:, :, None]
    return HeadMemory(tuple(caches), jnp.where(dead, 1e3, memory.tail), memory.tail_start)


@pytest.mark.parametrize("kind", HEADS)
def test_memory_after_rollbacks_is_that_of_the_committed_text(target, drafters, kind):
    """After 11 steps in which most drafts are rejected: as if the text had been one prompt."""
    drafter = drafters[kind]
    engine = Engine(target, drafter, max_len=MAX_LEN)
    state = engine.run(engine.prefill(Request(list(range(7, 12)), 60)), 11)
    ids, anchor_pos = np.asarray(state.tokens)[:, :64], np.asarray(state.length) - 1
    assert 5 + 11 <= anchor_pos[0] < 60
    from_memory, anew = _programs(target, drafter)
    args = (target.params, drafter.params, ids)
    want = np.asarray(anew(*args, anchor_pos)[0])
    dirty = poisoned(state.drafter_cache, jnp.asarray(anchor_pos))
    for memory in (state.drafter_cache, dirty):
        got = np.asarray(from_memory(*args, memory, anchor_pos))
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("kind", ["eagle", "apart"])
def test_training_sees_what_decoding_sees(target, drafters, kind):
    """Drafts written into a row: its logits at the anchor are those that drafted them.

    For EAGLE-3 this holds the unroll of training and the recurrence of decoding together.
    """
    drafter = drafters[kind]
    m = drafter.config.draft_block_len - 1
    rng = np.random.default_rng(3)
    documents = [rng.integers(4, 61, n).tolist() for n in (9, 24)]
    _, anew = _programs(target, drafter)
    anchors, drafted, logits = [6, 18], [], []
    for ids, anchor in zip(documents, anchors, strict=True):
        padded = np.asarray([ids + [0] * (64 - len(ids))], np.int32)
        out = anew(target.params, drafter.params, padded, np.asarray([anchor], np.int32))[0]
        logits.append(np.asarray(out[0]))
        drafted.append(np.argmax(logits[-1], axis=-1).tolist())
    answered = [
        (ids[:2], ids[2 : anchor + 1] + drafts)
        for ids, anchor, drafts in zip(documents, anchors, drafted, strict=True)
    ]
    rows = pack_documents(answered, 48, pad_id=0, seed=0)
    assert len(rows.token_ids) == 1
    batch = Batch(*(jnp.asarray(x) for x in rows))
    order = [anchors.index(n - m - 1) for n in np.bincount(rows.segment_ids[0])[1:]]
    starts = [np.flatnonzero(rows.segment_ids[0] == s)[0] for s in (1, 2)]
    anchor_pos = jnp.asarray([[s + anchors[i] for s, i in zip(starts, order, strict=True)]])
    labels = jnp.asarray([drafted[i] for i in order], jnp.int32)
    blocks = DraftBlocks(anchor_pos.astype(jnp.int32), labels, labels >= 0)
    is_eagle = kind == "eagle"
    forward = (
        eagle_forward(drafter.graph, drafter.config) if is_eagle else mtp_forward(drafter.graph)
    )

    @jax.jit
    def in_training(target_params, params):
        t = nnx.merge(target.graph, target_params)
        features = t(
            batch.token_ids,
            segment_ids=batch.segment_ids,
            positions=batch.positions,
            tap_layer_ids=drafter.config.target_layer_ids,
        ).context_features
        return block_logits(forward, t, {"drafter": params}, batch, features, blocks)

    got = np.asarray(in_training(target.params, drafter.params))
    np.testing.assert_allclose(got, [logits[i] for i in order], atol=2e-5)


def test_eagle_logits_are_those_of_the_loops(target, drafters):
    drafter = drafters["eagle"]
    ids = np.random.default_rng(8).integers(0, 61, (1, 64)).astype(np.int32)
    _, anew = _programs(target, drafter)
    got, features = anew(target.params, drafter.params, ids, np.asarray([19], np.int32))
    weights = {
        name.removeprefix("heads.0."): np.asarray(leaf, np.float64)
        for name, leaf in flatten(drafter.params).items()
    }
    theirs = flatten(target.params)
    weights["embedding"] = np.asarray(theirs["embedding"], np.float64)
    weights["head"] = np.asarray(theirs["head"], np.float64)
    want = eagle_logits(weights, np.asarray(features[0], np.float64), ids[0], 19, num_drafts=4)
    np.testing.assert_allclose(np.asarray(got[0]), want, atol=2e-5)


def test_heads_apart_are_whole_row_heads(target, drafters):
    """Head k on (h_p, id at p + 1 + k), by the forward that goldens hold (`MtpHead.__call__`)."""
    drafter = drafters["apart"]
    ids = np.random.default_rng(9).integers(0, 61, (1, 64)).astype(np.int32)
    anchor = 21
    _, anew = _programs(target, drafter)
    got, features = anew(target.params, drafter.params, ids, np.asarray([anchor], np.int32))

    @jax.jit
    def whole_rows(target_params, params, ids):
        t, d = nnx.merge(target.graph, target_params), nnx.merge(drafter.graph, params)
        outs = [
            head(t, ids[:, 1 + k : anchor + 1 + k], features[:, :anchor])
            for k, head in enumerate(d.heads)
        ]
        return jnp.stack([out.logits[:, -1] for out in outs], axis=1)

    ids[0, anchor + 1 : anchor + 4] = np.argmax(np.asarray(got[0]), axis=-1)
    want = whole_rows(target.params, drafter.params, ids)
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-5)


def test_one_pass_is_the_drafter_itself(target, drafters):
    request = Request(list(range(30, 46)), 40)
    states = []
    for kind in ("plain", "one pass"):
        engine = Engine(target, drafters[kind], max_len=MAX_LEN)
        states.append(generate_all(engine, [request])[0])
    assert states[0].token_ids == states[1].token_ids
    assert states[0].num_accepted_per_step == states[1].num_accepted_per_step


def test_the_most_confident_slots_are_filled_first():
    probs = jnp.asarray([[[0.5, 0.5], [0.1, 0.9], [0.7, 0.3], [0.01, 0.99]]])
    usable = jnp.asarray([[True, True, True, False]])
    none = jnp.zeros((1, 4), bool)
    filled = lambda before, n: most_confident(jnp.log(probs), before, usable, n)[0].tolist()
    assert filled(none, 2) == [False, True, True, False]
    assert filled(jnp.asarray([[True, False, False, False]]), 2) == [True, True, False, False]
    assert filled(none, 4) == [True] * 4


def test_filled_slots_keep_the_logits_that_filled_them(target, drafters):
    """Of 4 slots two are filled after the first of two passes; the others see them."""
    plain = drafters["plain"]
    ids = np.random.default_rng(4).integers(0, 61, (1, 64)).astype(np.int32)
    anchor_pos = np.asarray([20], np.int32)
    logits = []
    for num_passes in (1, 2):
        drafter = Model(*with_passes(plain.config, plain.graph, plain.params, num_passes))
        _, anew = _programs(target, drafter)
        logits.append(np.asarray(anew(target.params, drafter.params, ids, anchor_pos)[0][0]))
    first, second = logits
    confidence = first.max(axis=-1) - np.log(np.exp(first).sum(axis=-1))
    filled = np.argsort(-confidence)[:2]
    others = np.setdiff1d(np.arange(4), filled)
    np.testing.assert_allclose(second[filled], first[filled], atol=1e-6)
    assert (np.abs(second[others] - first[others]).max(axis=-1) > 1e-3).all()


def test_the_mask_id_may_be_said_and_drafted(target, plain_ids):
    """The commonest id of the answers is the mask id: a slot is filled by being marked so."""
    said = [i for ids in plain_ids for i in ids]
    config = dataclasses.replace(tiny_drafter(), mask_token_id=max(set(said), key=said.count))
    drafter = Drafter(config, rngs=nnx.Rngs(1))
    passes = Model(*with_passes(config, *split(drafter), 3))
    got = generate_all(Engine(target, passes, max_len=MAX_LEN), requests())
    assert [c.token_ids for c in got] == plain_ids


def test_features_kept_aside_reach_the_heads(target, drafters):
    """60 plain steps, flushed in two pieces of 32, then two blocks; the window is 10.

    Sampled, since a text that repeats itself hides ids of the wrong positions.
    """
    drafter = drafters["apart"]
    engine = Engine(target, drafter, max_len=MAX_LEN, policy="costs", mode=SAMPLED)
    engine.costs = [1.0, 1.0, 1.0]
    state = engine.prefill(Request(list(range(7, 12)), 90, temperature=1.0, seed=3))
    for rung, count in ((0, 60), (2, 2)):
        state = engine.run(state, count, held=rung)
    ids, anchor_pos = np.asarray(state.tokens)[:, :96], np.asarray(state.length) - 1
    from_memory, anew = _programs(target, drafter)
    args = (target.params, drafter.params, ids)
    got = np.asarray(from_memory(*args, state.drafter_cache, anchor_pos))
    np.testing.assert_allclose(got, np.asarray(anew(*args, anchor_pos)[0]), atol=2e-5)


def test_heads_of_a_checkpoint_as_a_drafter():
    """The golden checkpoint has two heads: blocks of 3 apart, of any length chained."""
    config, _, params = load_mtp_drafter(DATA / "pro-tiny", jnp.float32)
    assert (config.draft_block_len, config.target_layer_ids) == (3, (5,))
    _, second = load_mtp_heads(DATA / "pro-tiny", jnp.float32)[1]
    theirs, ours = flatten(second)["w_combine"], flatten(params)["heads.1.w_combine"]
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    chain = load_mtp_drafter(DATA / "pro-tiny", jnp.float32, draft_block_len=8, is_chained=True)
    again = chain_first_head(config, params, 8)
    for ours in (flatten(chain[2]), flatten(again[2])):
        first = {n: leaf for n, leaf in flatten(params).items() if "heads.0" in n}
        assert sorted(ours) == sorted(first)
        for name, leaf in first.items():
            np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(leaf))
    with pytest.raises(ConfigError, match="needs 3 MTP heads, there are 2"):
        load_mtp_drafter(DATA / "pro-tiny", jnp.float32, draft_block_len=4)
    with pytest.raises(CheckpointError, match="holds no MTP heads"):
        load_mtp_drafter(DATA / "mimo-tiny")


@pytest.mark.parametrize(
    ("kind", "message"),
    [("eagle", "EagleConfig decodes on one device only"), ("apart", "MtpConfig decodes on one")],
)
def test_baselines_on_a_mesh_are_refused_in_one_line(drafters, kind, message):
    with pytest.raises(ConfigError, match=message) as error:
        place_on_mesh(drafters[kind], make_mesh(DECODE, (1, 2)))
    assert "\n" not in str(error.value)


def test_a_drafter_of_another_target_is_refused(target, drafters):
    other = Target(tiny_target(vocab_size=67), rngs=nnx.Rngs(0))
    other = model(other.config, other)
    with pytest.raises(ConfigError, match="vocab_size is 61, expected 67"):
        Engine(other, drafters["apart"], max_len=64)
    with pytest.raises(ConfigError, match=r"allowed: 2\.\.4"):
        Engine(target, drafters["apart"], max_len=64, draft_block_len=5)
