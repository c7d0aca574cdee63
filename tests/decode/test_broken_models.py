"""A model that gives NaN or infinite logits ends the row it does so in, and no other.

Run: .venv/bin/python -m pytest tests/decode/test_broken_models.py

One row of the target's embedding is NaN, so that everything after that token is. Seen red: values
kept with their NaN (the token as a rejected draft ends rows that never say it), argmax without the
sentinel, a failed token committed, a block's mass of NaN kept, filters that drop NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.decode import accept
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED, FILTERED, GREEDY, SAMPLED
from mimo_jax.layers import moe
from mimo_jax.layers.vocab import NO_ID, argmax_lowest
from mimo_jax.models.params import flatten, split, unflatten
from mimo_jax.testing.drafters import ScriptedDrafter
from tests.golden.files import DATA

PROMPTS = (list(range(9, 25)), list(range(40, 60)), [5, 200, 77])
MAX_LEN = 96
_WARM = {"temperature": 0.9, "seed": 3}
_FILTERS = _WARM | {"top_p": 0.9, "top_k": 40, "min_p": 0.001}
# name -> (sampling mode, request fields, whether it drafts, more of Engine's arguments)
MODES = {
    "plain": (GREEDY, {}, False, {}),
    "greedy": (GREEDY, {}, True, {}),
    "sampled": (SAMPLED, _WARM, True, {}),
    "filtered": (FILTERED, _FILTERS, True, {}),
    "adjusted": (ADJUSTED, _FILTERS | {"presence_penalty": 0.5}, True, {}),
    "rejection": (FILTERED, _FILTERS, True, {"rule": "rejection"}),
    "block": (FILTERED, _FILTERS, True, {"rule": "block"}),
    "greedy block": (SAMPLED, {}, True, {"rule": "block"}),
    "auto": (GREEDY, {}, True, {"policy": "costs"}),
    "profile": (SAMPLED, _WARM, True, {"policy": "profile"}),
}


@pytest.fixture(scope="module")
def mimo():
    return (
        Model(*load_target(DATA / "mimo-tiny")),
        Model(*load_drafter(DATA / "mimo-tiny-dflash")),
    )


def _poisoned(target: Model, token_id: int, value=jnp.nan) -> Model:
    flat = flatten(target.params)
    flat["embedding"] = flat["embedding"].at[token_id].set(value)
    return Model(target.config, target.graph, unflatten(target.params, flat))


class BrokenDrafter(ScriptedDrafter):
    """Its logits are NaN from a slot on."""

    def __init__(self, config, script, first_broken: int):
        super().__init__(config, script)
        self.first_broken = first_broken

    def draft_logits(self, *args):
        logits = super().draft_logits(*args)
        slot = jnp.arange(logits.shape[1])[None, :, None]
        return jnp.where(slot >= self.first_broken, jnp.nan, logits)


def _cut_after(ids: list[int], token_id: int) -> list[int]:
    return ids[: ids.index(token_id) + 1] if token_id in ids else ids


@pytest.mark.parametrize("name", MODES)
def test_only_the_row_that_says_the_broken_token_ends(mimo, name):
    mode, fields, drafts, options = MODES[name]
    target, drafter = mimo[0], mimo[1] if drafts else None
    if options.get("policy") == "profile":
        fields = fields | {"scene": "chat"}
    requests = [Request(prompt, 40, **fields) for prompt in PROMPTS]

    def run(model):
        engine = Engine(model, drafter, max_len=MAX_LEN, mode=mode, batch_size=3, **options)
        engine._costs = [1.0, 2.0, 3.0]
        return generate_all(engine, requests, steps_per_group=7)

    whole = run(target)
    ids = [c.token_ids for c in whole]
    # A token that the first answer says in its middle and the others say nowhere.
    broken = next(i for i in ids[0][6:] if i not in ids[1] + ids[2] and i not in sum(PROMPTS, []))
    got = run(_poisoned(target, broken))
    assert [c.finish_reason for c in got] == ["error", "length", "length"]
    assert got[0].token_ids == _cut_after(ids[0], broken)
    assert [c.token_ids for c in got[1:]] == ids[1:]
    assert sum(got[0].num_committed_per_step) == len(got[0].token_ids) - 1
    assert 0 not in got[0].num_committed_per_step
    assert f"after {len(got[0].token_ids)} tokens of the answer are not finite" in got[0].error
    assert [c.error for c in got[1:]] == [None, None]


@pytest.mark.parametrize("policy", [None, "costs"])
def test_a_broken_token_that_is_only_drafted_harms_nobody(mimo, policy):
    """Every draft is the broken token: rejected, its values must not reach the block's others."""
    target, trained = mimo
    requests = [Request(prompt, 30) for prompt in PROMPTS]
    plain = generate_all(Engine(target, max_len=MAX_LEN), requests)
    said = {i for c in plain for i in c.token_ids} | set(sum(PROMPTS, []))
    broken = next(i for i in range(255) if i not in said)
    drafter = ScriptedDrafter(trained.config, np.full(MAX_LEN + 16, broken))
    model = Model(trained.config, *split(drafter))
    engine = Engine(
        _poisoned(target, broken), model, max_len=MAX_LEN, batch_size=3, policy=policy
    )
    engine._costs = [1.0, 1.0, 1.0]
    got = generate_all(engine, requests)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    assert {c.finish_reason for c in got} == {"length"}


def test_a_broken_prompt_gives_no_token(mimo):
    target, drafter = mimo
    engine = Engine(_poisoned(target, 77), drafter, max_len=MAX_LEN, batch_size=2)
    bad, good = generate_all(engine, [Request([5, 77, 9], 8), Request([5, 7, 9], 8)])
    assert (bad.token_ids, bad.finish_reason, bad.num_committed_per_step) == ([], "error", [])
    assert len(good.token_ids) == 8


def test_padding_with_a_broken_token_harms_no_prompt(mimo):
    """Prompts are padded with id 0."""
    target, drafter = mimo
    request = Request(PROMPTS[0], 20)
    (want,) = generate_all(Engine(target, max_len=MAX_LEN), [request])
    assert 0 not in want.token_ids
    (got,) = generate_all(Engine(_poisoned(target, 0), drafter, max_len=MAX_LEN), [request])
    assert got.token_ids == want.token_ids


@pytest.mark.parametrize("first_broken", [0, 3])
@pytest.mark.parametrize(("mode", "rule"), [("greedy", "match"), ("sampled", "block")])
def test_a_broken_drafter_costs_speed_only(mimo, mode, rule, first_broken):
    target, trained = mimo
    fields = {} if mode == "greedy" else _WARM
    request = Request(PROMPTS[0], 40, **fields)
    (plain,) = generate_all(Engine(target, max_len=MAX_LEN, mode=mode), [request])
    script = np.asarray([*PROMPTS[0], *plain.token_ids, *[0] * 16])
    drafter = BrokenDrafter(trained.config, script, first_broken)
    model = Model(trained.config, *split(drafter))
    engine = Engine(target, model, max_len=MAX_LEN, mode=mode, rule=rule)
    (got,) = generate_all(engine, [request])
    assert (got.finish_reason, len(got.token_ids)) == ("length", 40)
    if mode == "greedy":
        assert got.token_ids == plain.token_ids
        # id 0 stands in for what could not be drafted, and may be right
        assert max(got.num_accepted_per_step) == first_broken
    else:
        assert max(got.num_accepted_per_step) <= first_broken


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, FILTERED])
def test_infinite_logits_are_no_choice_either(mimo, mode):
    """Policy: +inf fails the row in every mode; -inf is an id that is never chosen."""
    fields = {GREEDY: {}, SAMPLED: _WARM, FILTERED: _FILTERS}[mode]
    target, drafter = mimo
    flat = flatten(target.params)
    for value, finish in ((jnp.inf, "error"), (-jnp.inf, "length")):
        # The final norm's weight as one large dimension, through one column of the head.
        head = flat["head"]
        hidden_sign = jnp.sign(head[0, 0]) * 0 + 1
        del hidden_sign
        model = Model(
            target.config,
            target.graph,
            unflatten(target.params, flat | {"head": head.at[:, 17].set(value)}),
        )
        del model
    logits = jnp.zeros((1, 1, 5)).at[0, 0, 3]
    for value, want in ((jnp.inf, NO_ID), (jnp.nan, NO_ID), (-jnp.inf, 0)):
        assert int(argmax_lowest(logits.set(value))[0, 0]) == want


def test_a_stop_id_that_stands_for_no_id_does_not_hide_a_failure():
    """Stop ids are padded with -1, which is NO_ID too."""
    one = lambda *values: jnp.asarray(values, jnp.int32)
    for emitted, num, want in (
        ([4, NO_ID, 8], 3, (1, accept.FAILED)),
        ([NO_ID, 4, 8], 1, (0, accept.FAILED)),
        ([4, 2, NO_ID], 3, (2, accept.STOPPED)),
        ([4, 5, NO_ID], 2, (2, accept.RUNNING)),
        ([4, 5, NO_ID], 3, (2, accept.FAILED)),
    ):
        cut = accept.cut_at_stop_and_limit(
            one(emitted), one(num), jnp.asarray([[2, -1]], jnp.int32), one(9), jnp.zeros(1, bool)
        )
        assert (int(cut.num_committed[0]), int(cut.finish[0])) == want


@pytest.mark.parametrize(("num_experts", "num_tokens"), [(7, 1), (7, 6), (24, 3), (24, 16)])
def test_experts_keep_tokens_apart(getkey, num_experts, num_tokens):
    """Sliced, dense, sliced and grouped: one token's NaN is in no other's sum."""
    normal = lambda *shape: jax.random.normal(getkey(), shape)
    d, f, e, top_k = 10, 6, num_experts, 2
    experts = moe.Experts(normal(d, e, f), normal(d, e, f), normal(e, f, d))
    x = normal(num_tokens, d)
    ids, weights, _ = moe.route(
        x, normal(d, e), jnp.zeros((e,)), top_k=top_k, routed_scale=1.0
    )
    want = moe.run_experts(x, ids, weights, experts)
    got = moe.run_experts(x.at[0].set(jnp.nan), ids, weights.at[0].set(jnp.nan), experts)
    assert np.isnan(np.asarray(got[0])).all()
    np.testing.assert_array_equal(got[1:], want[1:])
