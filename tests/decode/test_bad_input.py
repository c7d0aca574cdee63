"""Requests at the edge of what is allowed, and beyond: exact answers, or one clear line.

Run: .venv/bin/python -m pytest tests/decode/test_bad_input.py
"""

import dataclasses
import json

import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.jobs import Job, run_jobs
from mimo_jax.decode.params import SamplingParams
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.serving.requests import LineError, parse_line
from mimo_jax.testing.drafters import ScriptedDrafter
from mimo_jax.text.tokenizer import Tokenizer
from tests.decode import smallest
from tests.serving.checkpoints import byte_tokenizer

PROMPT = [4, 9, 12]
NAN, HUGE = float("nan"), 2**70
# (field, value, what the line says); through every way in
OUT_OF_RANGE = [
    ("temperature", NAN, "temperature nan is out of range; allowed: >= 0 (0 = greedy), else 1e-5"),
    ("temperature", 1e-30, "temperature 1e-30 is out of range"),
    ("temperature", 1e300, "temperature 1e+300 is out of range"),
    ("temperature", -0.5, "temperature -0.5 is out of range"),
    ("top_p", NAN, "top_p nan is out of range; allowed: above 0 (1e-6), up to 1"),
    ("top_p", 1e-45, "top_p 1e-45 is out of range"),
    ("top_p", 1.5, "top_p 1.5 is out of range"),
    ("top_k", -1, "top_k -1 is out of range; allowed: >= 0"),
    ("top_k", HUGE, f"top_k {HUGE} is out of range"),
    ("min_p", NAN, "min_p nan is out of range"),
    ("min_p", 1.0, "min_p 1.0 is out of range"),
    ("repetition_penalty", 1e-40, "repetition_penalty 1e-40 is out of range; allowed: 1e-3..1e3"),
    ("repetition_penalty", NAN, "repetition_penalty nan is out of range"),
    ("presence_penalty", NAN, "presence_penalty nan is out of range; allowed: -2..2"),
    ("frequency_penalty", 2.5, "frequency_penalty 2.5 is out of range"),
    ("seed", 2**31, "seed 2147483648 is out of range; allowed: 0..2147483647"),
    ("seed", -1, "seed -1 is out of range"),
    ("seed", HUGE, f"seed {HUGE} is out of range"),
    ("max_tokens", 0, "max_tokens 0"),
    ("logit_bias", ((5, NAN),), "logit_bias of id 5 nan is out of range; allowed: -100..100"),
    ("logit_bias", ((5, 1e9),), "logit_bias of id 5 1000000000.0 is out of range"),
]


@pytest.fixture(scope="module")
def plain():
    """An engine without a drafter that serves every request."""
    target = smallest.pair()[0]
    return Engine(
        target, max_len=smallest.MAX_LEN, batch_size=3, mode=ADJUSTED, max_bias_ids=2
    )


@pytest.fixture(scope="module")
def chain():
    return Engine(
        *smallest.pair(), max_len=smallest.MAX_LEN, batch_size=3, mode=ADJUSTED, max_bias_ids=2
    )


def _refusal(error, action, *args, **kwargs) -> str:
    with pytest.raises(error) as caught:
        action(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("field", "value", "message"), OUT_OF_RANGE)
def test_one_line_in_every_way_in(plain, field, value, message):
    fields = {field: value}
    assert message in _refusal(ConfigError, SamplingParams, **fields)
    request = Request(PROMPT, **{"max_tokens": 4} | fields)
    assert message in _refusal(ConfigError, plain.prefill, request)
    if field == "logit_bias":
        value = {str(token_id): bias for token_id, bias in value}
    line = json.dumps({"prompt_token_ids": PROMPT, field: value}).encode()
    refusal = _refusal(LineError, parse_line, line, 3, SamplingParams())
    assert refusal.startswith("line 3: ")
    assert message in refusal


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request([23], 4), "prompt token id 23 is not in the vocabulary 0..22"),
        (Request([HUGE], 4), f"prompt token id {HUGE} is not in the vocabulary"),
        (Request([-1], 4), "prompt token id -1 is not in the vocabulary"),
        (Request(PROMPT, 4, (HUGE,)), f"stop token id {HUGE} is not in the vocabulary"),
        (Request(PROMPT, 4, (-1,)), "stop token id -1 is not in the vocabulary"),
        (Request(PROMPT, HUGE), f"max_tokens {HUGE} exceed the context of 120 tokens"),
        (Request(PROMPT, 4, logit_bias=((23, 1.0),)), "logit_bias id 23 is not in the vocabulary"),
    ],
)
def test_ids_and_lengths_past_the_model(plain, request_, message):
    assert message in _refusal(ConfigError, plain.prefill, request_)


def test_the_smallest_and_largest_values_work(plain, chain):
    requests = [
        Request(PROMPT, 9, temperature=1e-5, seed=2**31 - 1),
        Request(PROMPT, 9, temperature=1e5, top_k=2**31 - 1),
        Request(PROMPT, 9, temperature=1.0, top_p=1e-6),
        Request(PROMPT, 9, temperature=1.0, min_p=0.999999),
        Request(PROMPT, 9, repetition_penalty=1e3, presence_penalty=2.0, frequency_penalty=-2.0),
        Request(PROMPT, 9, repetition_penalty=1e-3, logit_bias=((0, 100.0), (1, -100.0))),
        Request(PROMPT, 117),
        Request([5] * 119, 1),
    ]
    want, got = (generate_all(engine, requests) for engine in (plain, chain))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert {c.finish_reason for c in got} == {"length"}
    greedy = generate_all(plain, [Request(PROMPT, 9)])[0].token_ids
    assert [c.token_ids for c in want[2:4]] == [greedy, greedy]  # one token is left to choose from


def test_the_mask_id_is_a_token_like_any_other(plain):
    """Asked for, said in the middle of a text, and as a stop id, beside the drafter's masks."""
    target, _ = smallest.pair()
    config = smallest.pair()[1].config
    mask = config.mask_token_id
    drafter = Model(config, *split(Drafter(config, rngs=nnx.Rngs(2))))
    engine = Engine(
        target, drafter, max_len=smallest.MAX_LEN, batch_size=3, mode=ADJUSTED, max_bias_ids=2
    )
    bias = ((mask, 2.5),)
    requests = [
        Request([mask, 9, mask], 40, logit_bias=bias, temperature=0.9, seed=seed, stop_ids=stops)
        for stops in ((), (mask,))
        for seed in range(4)
    ]
    want, got = (generate_all(e, requests) for e in (plain, engine))
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    for free, stopped in zip(got[:4], got[4:], strict=True):
        assert mask in free.token_ids[1:-1]
        assert stopped.token_ids == free.token_ids[: free.token_ids.index(mask) + 1]
        assert stopped.finish_reason == "stop"


@pytest.fixture(scope="module")
def right():
    """(engine whose drafts are always right, greedy text of PROMPT)."""
    target, trained = smallest.pair()
    (free,) = generate_all(Engine(target, max_len=smallest.MAX_LEN), [Request(PROMPT, 60)])
    script = np.asarray([*PROMPT, *free.token_ids, *[0] * 16])
    config = dataclasses.replace(trained.config)
    model = Model(config, *split(ScriptedDrafter(config, script)))
    return Engine(target, model, max_len=smallest.MAX_LEN), free.token_ids


@pytest.mark.parametrize("max_tokens", range(2, 14))
def test_a_stop_id_and_the_length_limit_in_one_accepted_run(right, max_tokens):
    """Every place of a stop id before, at and behind the limit; at the limit the stop id wins."""
    engine, text = right
    for stop_id in dict.fromkeys(text[:14]):
        place = text.index(stop_id) + 1
        (got,) = generate_all(engine, [Request(PROMPT, max_tokens, (stop_id,))])
        assert got.token_ids == text[: min(place, max_tokens)]
        assert got.finish_reason == ("stop" if place <= max_tokens else "length")
        assert sum(got.num_committed_per_step) == len(got.token_ids) - 1


@pytest.mark.parametrize("steps_per_group", [1, 3])
def test_stop_strings_across_tokens_blocks_and_groups(right, steps_per_group):
    """One character per token, five per block: every substring of three as a stop string."""
    engine, ids = right
    tokenizer = Tokenizer(byte_tokenizer())
    text = tokenizer.decode(ids)
    assert len(text) == len(ids)
    stops = list(dict.fromkeys(text[i : i + 3] for i in range(20)))
    jobs = [Job(Request(PROMPT, 60), (stop, "never")) for stop in stops]
    done = dict(run_jobs(engine, jobs, tokenizer, steps_per_group=steps_per_group))
    for index, stop in enumerate(stops):
        end = text.find(stop)
        assert done[index].text == text[:end]
        assert done[index].token_ids == ids[: end + 3]
        assert done[index].finish_reason == "stop"


KINDS = ((5, None), (4, "profile"))  # block length, policy


def _fields():
    """Of a Request, which the test makes: jaxtyping draws random numbers, strategies may not."""
    number = lambda least, most: st.floats(least, most, width=32, allow_nan=False)
    ids = st.integers(0, smallest.V - 1)
    pairs = lambda values: tuple(values.items())
    return st.fixed_dictionaries(
        {
            "prompt_ids": st.lists(ids, min_size=1, max_size=30),
            "max_tokens": st.integers(1, 40),
            "stop_ids": st.lists(ids, max_size=3).map(tuple),
            "temperature": st.sampled_from([0.0, 0.0625, 0.75, 1.0, 1.5]),
            "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.015625]),
            "top_k": st.sampled_from([0, 1, 5, 23, 400]),
            "min_p": st.sampled_from([0.0, 0.125, 0.5]),
            "repetition_penalty": number(0.5, 2.0),
            "presence_penalty": number(-2.0, 2.0),
            "frequency_penalty": number(-1.0, 1.0),
            "logit_bias": st.dictionaries(ids, number(-4, 4), max_size=2).map(pairs),
            "seed": st.integers(0, 2**31 - 1),
            "scene": st.sampled_from([None, "math", "chat"]),
        }
    )


@pytest.fixture(scope="module")
def drafting():
    """Engines by (block length, policy)."""
    return {
        (length, policy): smallest.CheckedEngine(
            *smallest.pair(),
            max_len=smallest.MAX_LEN,
            batch_size=3,
            mode=ADJUSTED,
            max_bias_ids=2,
            draft_block_len=length,
            policy=policy,
        )
        for length, policy in KINDS
    }


@settings(max_examples=20)
@given(
    fields=st.lists(_fields(), min_size=1, max_size=5),
    kind=st.sampled_from(KINDS),
    steps_per_group=st.integers(1, 9),
)
def test_random_requests_are_answered_as_plainly(plain, drafting, fields, kind, steps_per_group):
    engine, requests = drafting[kind], [Request(**values) for values in fields]
    want = generate_all(plain, requests)
    got = generate_all(engine, requests, steps_per_group=steps_per_group)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]
    assert [c.finish_reason for c in got] == [c.finish_reason for c in want]

