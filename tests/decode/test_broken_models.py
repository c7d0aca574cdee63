"""A model that gives NaN or infinite logits ends the row it does so in, and no other.

Run: .venv/bin/python -m pytest tests/decode/test_broken_models.py

One row of the target's embedding is NaN, so that everything after that token is. Policy: NaN and
+inf among a row's logits, or only -inf, end it as an error; single -inf are ids never chosen.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from mimo_jax import ConfigError
from mimo_jax.decode import accept
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.jobs import Job, stream_job
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request, row_sampling
from mimo_jax.decode.sampling import GREEDY, MODES, SAMPLED, sample
from mimo_jax.layers import moe
from mimo_jax.layers.vocab import NO_ID, argmax_lowest
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.sharding import DECODE, make_mesh
from mimo_jax.testing.drafters import TableDrafter
from mimo_jax.text.tokenizer import Tokenizer
from tests.decode import smallest
from tests.serving.checkpoints import byte_tokenizer

BROKEN = 7
QUICK = ("off", "block", "costs")
NAMES = [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in smallest.MODES]


def _with(model: Model, name: str, array) -> Model:
    params = unflatten(model.params, flatten(model.params) | {name: array})
    return Model(model.config, model.graph, params)


def _poisoned(target: Model, token_id: int = BROKEN) -> Model:
    embedding = flatten(target.params)["embedding"]
    return _with(target, "embedding", embedding.at[token_id].set(jnp.nan))


@functools.cache
def _compiled(name: str) -> Engine:
    target, drafter = smallest.pair()
    engine = Engine(
        target,
        None if name == "off" else drafter,
        max_len=smallest.MAX_LEN,
        batch_size=3,
        **smallest.MODES[name][1],
    )
    engine.costs = smallest.COSTS
    return engine


def _engine(name: str, drafter: Model | None) -> Engine:
    """One engine per mode: weights are arguments of its programs and may be changed."""
    engine = _compiled(name)
    engine.target, engine.drafter = smallest.pair()[0], drafter
    return engine


def _requests(name: str) -> list[Request]:
    """Prompts without the broken token."""
    fields = smallest.MODES[name][0]
    return [Request([i, 9, 12, i + 1], 24, seed=i, **fields) for i in (0, 3, 8, 11, 16, 19)]


@functools.cache
def _with_drafts_of(token_id: int | None, first_broken: int = 9) -> Model:
    """A drafter that proposes one id throughout (None: any), NaN from a slot on."""
    table = np.zeros((smallest.V, 4, smallest.V), np.float32)
    if token_id is not None:
        table[:, :, token_id] = 9
    table[:, first_broken:] = np.nan
    config = smallest.pair()[1].config
    return Model(config, *split(TableDrafter(config, table, rngs=nnx.Rngs(6))))


@pytest.mark.parametrize("name", NAMES)
def test_only_rows_that_say_the_broken_token_end(name):
    engine = _engine(name, None if name == "off" else smallest.pair()[1])
    whole = [c.token_ids for c in generate_all(engine, _requests(name))]
    # An id that some answers say before their end and others do not.
    prompts = {i for request in _requests(name) for i in request.prompt_ids}
    counts = {i: sum(i in ids[:-1] for ids in whole) for i in range(smallest.V)}
    broken = next(i for i, n in counts.items() if 0 < n < len(whole) and i not in prompts)
    engine.target = _poisoned(engine.target, broken)
    got = generate_all(engine, _requests(name), steps_per_group=7)
    errors = [c for c in got if c.finish_reason == "error"]
    assert 0 < len(errors) < len(got)
    for completion, clean in zip(got, whole, strict=True):
        ids = completion.token_ids
        if name == "block":  # a block that ends early is judged otherwise: another answer
            clean = ids
        end = clean.index(broken) + 1 if broken in clean else 24
        assert ids == clean[:end]
        assert completion.finish_reason == ("error" if len(ids) < 24 else "length")
        assert sum(completion.num_committed_per_step) == len(ids) - 1
        assert 0 not in completion.num_committed_per_step
    for completion in errors:
        assert completion.token_ids[-1] == broken
        place = f"after {len(completion.token_ids)} tokens of the answer are not finite"
        assert place in completion.error
    assert {c.error for c in got if c.finish_reason == "length"} == {None}


@pytest.mark.parametrize("name", ["greedy", "costs"])
def test_a_broken_token_that_is_only_drafted_harms_nobody(name):
    """Every draft is the broken token: rejected, its values must not reach anybody else's."""
    requests = [Request([i, 9, 12], 40, logit_bias=()) for i in (1, 10, 13)]
    engine = _engine(name, _with_drafts_of(BROKEN))
    plain = [c.token_ids for c in generate_all(_engine("off", None), requests)]
    assert not any(BROKEN in ids for ids in plain)
    engine.target = _poisoned(engine.target)
    got = generate_all(engine, requests)
    assert [c.token_ids for c in got] == plain
    assert {c.finish_reason for c in got} == {"length"}


def test_a_broken_prompt_gives_no_token_and_padding_with_one_harms_no_prompt():
    engine = _engine("greedy", smallest.pair()[1])
    (want,) = generate_all(engine, [Request([5, 8, 9], 8)])
    assert not {0, BROKEN} & set(want.token_ids)
    clean, engine.target = engine.target, _poisoned(engine.target)
    bad, good = generate_all(engine, [Request([5, BROKEN, 9], 8), Request([5, 8, 9], 8)])
    assert (bad.token_ids, bad.finish_reason, bad.num_committed_per_step) == ([], "error", [])
    assert good.token_ids == want.token_ids
    engine.target = _poisoned(clean, 0)  # what prompts are padded with
    assert generate_all(engine, [Request([5, 8, 9], 8)])[0].token_ids == want.token_ids


@pytest.mark.parametrize("first_broken", [0, 2])
@pytest.mark.parametrize(
    "name", ["greedy", pytest.param("rejection", marks=pytest.mark.slow), "block"]
)
def test_a_broken_drafter_costs_speed_only(name, first_broken):
    fields = smallest.MODES[name][0]
    requests = [Request([i, 9, 12], 24, seed=i, **fields) for i in (1, 10, 13)]
    got = generate_all(_engine(name, _with_drafts_of(11, first_broken)), requests)
    assert {(c.finish_reason, len(c.token_ids)) for c in got} == {("length", 24)}
    most = max(max(c.num_accepted_per_step) for c in got)
    if name == "greedy":
        plain = generate_all(_engine("off", None), requests)
        assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    else:
        assert most <= first_broken


def test_a_broken_drafter_beside_greedy_rows_that_are_judged():
    """What stands in for a missing draft is id 0, and may be what the target says."""
    requests = [Request([i, 9], 24) for i in (4, 11, 16)]
    plain, engine = _engine("off", None), _engine("block", _with_drafts_of(None, first_broken=0))
    often = collections.Counter(generate_all(plain, requests)[0].token_ids).most_common(1)[0][0]
    head = flatten(plain.target.params)["head"]
    pair, exchanged = jnp.asarray([0, often]), jnp.asarray([often, 0])
    head = head.at[:, pair].set(head[:, exchanged])
    plain.target = engine.target = _with(plain.target, "head", head)
    want, got = (generate_all(e, requests) for e in (plain, engine))
    assert 0 in want[0].token_ids[1:]
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert max(max(c.num_accepted_per_step) for c in got) > 0


@pytest.mark.parametrize("rule", [accept.accept_by_rejection, accept.accept_by_block])
def test_a_block_ends_where_probabilities_are_missing(rule):
    """p of the first draft equals q: kept for certain, whatever stands behind it."""
    half, none = [0.5, 0.5], [np.nan, np.nan]
    f32 = lambda x: jnp.asarray([x], jnp.float32)
    active = jnp.asarray([3], jnp.int32)
    for q, p, is_broken in (
        ([half, half], [half, none, half], True),
        ([half, none], [half, [0.2, 0.8], half], False),
    ):
        verdict = rule(jnp.asarray([[0, 1]], jnp.int32), f32(q), f32(p), f32([0.9, 0.0]), active)
        assert verdict.num_accepted.tolist() == [1]
        weights = np.asarray(verdict.bonus_weights)[0]
        assert np.isnan(weights).all() == is_broken
        if not is_broken:
            np.testing.assert_allclose(weights, [0.2, 0.8], atol=1e-6)


def test_a_stream_ends_with_the_error():
    engine = Engine(_poisoned(smallest.pair()[0]), max_len=smallest.MAX_LEN)
    job = Job(Request([5, BROKEN, 9], 8))
    with pytest.raises(ConfigError, match="logits after 0 tokens of the answer are not finite"):
        list(stream_job(engine, job, Tokenizer(byte_tokenizer())))


@pytest.mark.parametrize("mode", MODES)
def test_what_logits_allow_no_choice(mode):
    fields = {GREEDY: {}, SAMPLED: smallest.WARM}.get(mode, smallest.FILTERS)
    one = row_sampling(Request((1,), 1, **fields), 0)
    params = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), 4, axis=0), one)
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (4, 9))
    draw = jax.jit(lambda x: sample(x, params, positions, mode))
    clean = np.random.default_rng(0).normal(size=(4, 9, 2048)).astype(np.float32)
    want = np.asarray(draw(clean))
    for value, at, is_choice in (
        (np.nan, 0, False),  # XLA:CPU's maximum does not see this one, nor the next
        (np.nan, 1024, False),
        (-np.nan, 300, False),
        (np.nan, slice(None), False),
        (np.inf, 300, False),
        (-np.inf, slice(None), False),
        (-np.inf, int(want[1, 2]), True),
    ):
        logits = clean.copy()
        logits[1, 2, at] = value
        got = np.array(draw(logits))
        assert (got[1, 2] == NO_ID) != is_choice, (value, at)
        assert got[1, 2] != want[1, 2]
        got[1, 2] = want[1, 2]
        assert (got == want).all()


@pytest.mark.multi_device
def test_a_vocabulary_over_eight_devices():
    mesh = make_mesh(DECODE, (1, 8))
    best = jax.jit(
        jax.shard_map(
            lambda x: argmax_lowest(x, "model"),
            mesh=mesh,
            in_specs=(P(None, None, "model"),),
            out_specs=P(),
            check_vma=False,
        )
    )
    logits = np.random.default_rng(1).normal(size=(5, 9, 8 * 2048)).astype(np.float32)
    want = logits.argmax(axis=-1)
    logits[0, 3, 3 * 2048 + 1024], logits[1, 3, 0], logits[2, 3, want[2, 3]] = np.nan, np.inf, 9
    logits[3, 3], logits[4, 3, 5 * 2048] = -np.inf, np.nan
    want[[0, 1, 3, 4], 3] = NO_ID
    assert (np.asarray(best(logits)) == want).all()


def test_padding_of_stop_ids_hides_no_failure():
    """Stop ids are padded with -1, which is NO_ID too."""
    for emitted, num, want in (
        ([4, NO_ID, 8], 3, (1, accept.FAILED)),
        ([NO_ID, 4, 8], 1, (0, accept.FAILED)),
        ([4, 2, NO_ID], 3, (2, accept.STOPPED)),
        ([4, 5, NO_ID], 2, (2, accept.RUNNING)),
        ([4, 5, NO_ID], 3, (2, accept.FAILED)),
    ):
        cut = accept.cut_at_stop_and_limit(
            jnp.asarray([emitted], jnp.int32),
            jnp.asarray([num], jnp.int32),
            jnp.asarray([[2, -1]], jnp.int32),
            jnp.asarray([9], jnp.int32),
            jnp.zeros((1,), bool),
        )
        assert (int(cut.num_committed[0]), int(cut.finish[0])) == want


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(7, 1), (7, 6), (24, 3), (24, 16)])
def test_experts_keep_tokens_apart(getkey, num_experts, num_tokens):
    """Sliced, dense, sliced and grouped: one token's NaN is in no other's sum."""
    normal = lambda *shape: jax.random.normal(getkey(), shape)
    d, f, e, top_k = 10, 6, num_experts, 2
    experts = moe.Experts(normal(d, e, f), normal(d, e, f), normal(e, f, d))
    x = normal(num_tokens, d)
    ids, weights, _ = moe.route(x, normal(d, e), jnp.zeros((e,)), top_k=top_k, routed_scale=1.0)
    want = moe.run_experts(x, ids, weights, experts)
    got = moe.run_experts(x.at[0].set(jnp.nan), ids, weights.at[0].set(jnp.nan), experts)
    assert np.isnan(np.asarray(got[0])).all()
    np.testing.assert_array_equal(got[1:], want[1:])
