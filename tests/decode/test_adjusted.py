"""Penalties, biases and log probabilities: at every drafted position, and to the bonus alike.

Run: .venv/bin/python -m pytest tests/decode/test_adjusted.py

Seen red: counts without the block's earlier drafts, counts taken before the cut at a stop, prompt
ids counted as output, log probabilities of adjusted instead of raw logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.filters import filter_logits
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request, row_sampling
from mimo_jax.decode.sampling import ADJUSTED, GREEDY, adjust_logits
from tests.golden.files import DATA

PENALTIES = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((17, 3.0), (40, -50.0)),
}
PROMPT = list(range(9, 25))


@pytest.fixture(scope="module")
def mimo():
    return (
        Model(*load_target(DATA / "mimo-tiny")),
        Model(*load_drafter(DATA / "mimo-tiny-dflash")),
    )


def test_literal_adjustments():
    """Logits 2 and -2: said twice; in the prompt; neither; biased."""
    params = row_sampling(
        Request((1,), 1, repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.1,
                logit_bias=((5, 7.0),)), 2
    )
    params = jax.tree.map(jnp.asarray, params)
    logits = jnp.asarray([[[2.0, -2.0, 2.0, -2.0, 2.0, 2.0]]])
    emitted = jnp.asarray([[[2, 1, 0, 0, 0, 0]]], jnp.int32)
    in_prompt = jnp.asarray([[False, False, True, True, False, False]])
    got = adjust_logits(logits, params, emitted, in_prompt)
    expected = [2 / 1.25 - 0.5 - 0.2, -2.5 - 0.5 - 0.1, 1.6, -2.5, 2.0, 9.0]
    np.testing.assert_allclose(np.asarray(got)[0, 0], expected, atol=1e-6)


def test_min_p_is_a_share_of_the_largest():
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05]]]))
    one = lambda value, dtype: jnp.asarray([value], dtype)
    got = filter_logits(
        logits, one(0, jnp.int32), one(1.0, jnp.float32), one(0.29, jnp.float32)
    )
    assert np.isfinite(np.asarray(got))[0, 0].tolist() == [True, True, True, False]


def _replay(target: Model, request: Request, num_tokens: int) -> list[int]:
    """Greedy decoding with penalties, by whole forwards and NumPy loops."""
    forward = jax.jit(lambda p, x: nnx.merge(target.graph, p)(x).logits)
    ids, output = list(request.prompt_ids), []
    for _ in range(num_tokens):
        padded = np.zeros((1, len(request.prompt_ids) + num_tokens), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.array(forward(target.params, padded))[0, len(ids) - 1].astype(np.float64)
        for i in range(len(logits)):
            said = output.count(i)
            if said or i in request.prompt_ids:
                factor = request.repetition_penalty
                logits[i] = logits[i] / factor if logits[i] > 0 else logits[i] * factor
            if said:
                logits[i] -= request.presence_penalty + request.frequency_penalty * said
        for i, value in request.logit_bias:
            logits[i] += value
        output.append(int(logits.argmax()))
        ids.append(output[-1])
    return output


def test_greedy_with_penalties_is_the_replay_plain_and_drafted(mimo):
    target, drafter = mimo
    request = Request(PROMPT, 24, **PENALTIES)
    want = _replay(target, request, 24)
    (free,) = generate_all(Engine(target, max_len=64), [Request(PROMPT, 24)])
    assert want != free.token_ids
    for model in (None, drafter):
        engine = Engine(target, model, max_len=64, mode=ADJUSTED, max_bias_ids=2)
        (got,) = generate_all(engine, [request])
        assert got.token_ids == want


def test_sampled_with_penalties_drafted_equals_plain_in_any_batch(mimo):
    target, drafter = mimo
    requests = [
        Request(PROMPT[i:], 30, temperature=0.8, seed=s, min_p=0.01, **PENALTIES)
        for s, i in enumerate((0, 3, 5, 1, 2))
    ]
    options = {"max_len": 64, "mode": ADJUSTED, "max_bias_ids": 2}
    plain = generate_all(Engine(target, **options), requests)
    drafted = generate_all(Engine(target, drafter, batch_size=3, **options), requests)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]


@pytest.mark.parametrize("drafts", [False, True])
def test_logprobs_are_those_of_the_raw_logits(mimo, drafts):
    target, drafter = mimo
    request = Request(PROMPT, 20, **PENALTIES)
    engine = Engine(
        target, drafter if drafts else None, max_len=64, mode=ADJUSTED, max_bias_ids=2,
        num_logprobs=3,
    )
    (got,) = generate_all(engine, [request])
    ids = jnp.asarray([[*PROMPT, *got.token_ids]], jnp.int32)
    logits = jax.jit(lambda p: nnx.merge(target.graph, p)(ids).logits)(target.params)
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))[0, len(PROMPT) - 1 : -1]
    own = logprobs[np.arange(20), got.token_ids]
    np.testing.assert_allclose(got.logprobs, own, atol=2e-5)
    for position, top in enumerate(got.top_logprobs):
        best = np.argsort(-logprobs[position], kind="stable")[:3]
        assert [i for i, _ in top] == best.tolist()
        np.testing.assert_allclose([x for _, x in top], logprobs[position, best], atol=2e-5)


def test_what_an_engine_was_not_built_for_is_one_line(mimo):
    target, _ = mimo
    with pytest.raises(ConfigError, match="needs an engine of mode adjusted, not greedy"):
        Engine(target, max_len=64, mode=GREEDY).prefill(Request(PROMPT, 2, presence_penalty=1.0))
    engine = Engine(target, max_len=64, mode=ADJUSTED, max_bias_ids=1)
    with pytest.raises(ConfigError, match="2 logit biases; at most 1 are allowed"):
        engine.prefill(Request(PROMPT, 2, logit_bias=((1, 1.0), (2, 1.0))))
    with pytest.raises(ConfigError, match="logit_bias id 300 is not in the vocabulary 0..255"):
        engine.prefill(Request(PROMPT, 2, logit_bias=((300, 1.0),)))
    with pytest.raises(ConfigError, match="rule 'best' is unknown; allowed: match, rejection"):
        Engine(target, max_len=64, rule="best")
