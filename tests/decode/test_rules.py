"""Acceptance rules leave the target's distribution as it is: exact joint laws of toy vocabularies.

Run: .venv/bin/python -m pytest tests/decode/test_rules.py

A target over four ids whose distribution depends on the whole prefix, a drafter that is wrong in
both directions, blocks of two drafts. Every rule runs 200,000 rows with their own seeds; the
committed tokens, continued by the target where a block was cut short, must follow the joint law of
three tokens (64 cells, chi-square). Seen red: `max(q - p, 0)` as the residual, the coin read from
the proposal's stream of noise, c_i left uncapped.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from mimo_jax.decode import accept
from mimo_jax.decode.request import Request, row_sampling
from mimo_jax.decode.sampling import (
    FILTERED,
    SAMPLED,
    coins,
    probabilities,
    propose,
    sample,
    sample_by_weight,
    target_logits,
)

V, M, N = 4, 2, 200_000
FILTERS = {
    "no filter": {},
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.35},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}


def _tables():
    """Target logits after 0, 1 and 2 tokens, [1, v], [v, v], [v*v, v]; drafter's [m, v]."""
    rng = np.random.default_rng(7)
    target = [rng.normal(size=(V**i, V)).astype(np.float32) * 1.3 for i in range(M + 1)]
    drafter = rng.normal(size=(M, V)).astype(np.float32)
    drafter[0] = 0.6 * target[0][0] + 0.4 * drafter[0]  # related, as a drafter is
    return target, drafter


def _params(n, fields):
    one = row_sampling(Request((1,), 1, **{"temperature": 1.0} | fields), 0)
    params = jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), n, axis=0), one)
    return params.__class__(**vars(params) | {"seed": jnp.arange(n, dtype=jnp.int32)})


def _joint(fields):
    """The law of three tokens, [v, v, v], and the filtered tables it comes from."""
    target, _ = _tables()
    mode = FILTERED if fields else SAMPLED
    tables = []
    for table in target:
        logits = jnp.asarray(table)[:, None, :]
        params = _params(len(table), fields)
        probs = probabilities(target_logits(logits, params, mode), params)
        tables.append(np.asarray(probs, np.float64)[:, 0])
    joint = tables[0][0][:, None, None] * tables[1][:, :, None] * tables[2].reshape(V, V, V)
    return joint / joint.sum(), tables


def _run(rule, fields):
    """(emitted [n, m1], num_accepted [n]) of one speculative step of every row."""
    step = functools.partial(_step, rule, FILTERED if fields else SAMPLED)
    # Everything as an argument: XLA would fold 200,000 constant rows at compile time.
    return jax.jit(step)(*_tables(), _params(N, fields))


def _step(rule, mode, target, drafter, params):
    draft_logits = jnp.broadcast_to(jnp.asarray(drafter), (N, M, V))
    positions = jnp.broadcast_to(jnp.arange(5, 5 + M + 1, dtype=jnp.int32), (N, M + 1))
    active = jnp.full((N,), M + 1, jnp.int32)
    if rule == accept.MATCH:
        drafts = jnp.argmax(draft_logits, axis=-1).astype(jnp.int32)
    else:
        drafts, draft_probs = propose(draft_logits, params, positions[:, :M], mode)
    first, second = drafts[:, 0], drafts[:, 0] * V + drafts[:, 1]
    logits = jnp.stack(
        [
            jnp.broadcast_to(jnp.asarray(target[0]), (N, V)),
            jnp.asarray(target[1])[first],
            jnp.asarray(target[2])[second],
        ],
        axis=1,
    )
    if rule == accept.MATCH:
        emitted = sample(logits, params, positions, mode)
        return emitted, accept.accept_by_match(drafts, emitted, active)
    probs = probabilities(target_logits(logits, params, mode), params)
    judge = accept.accept_by_block if rule == accept.BLOCK else accept.accept_by_rejection
    uniform = coins(params, positions[:, :M])
    verdict = judge(drafts, draft_probs, probs, uniform, active)
    bonus = sample_by_weight(verdict.bonus_weights, params, 5 + verdict.num_accepted)
    slots = jnp.arange(M + 1)[None, :]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    emitted = jnp.where(slots == verdict.num_accepted[:, None], bonus[:, None], padded)
    return emitted, verdict.num_accepted


def _finished(emitted, num_accepted, tables):
    """Sequences of three tokens: what a step cut short is continued by the target."""
    rng = np.random.default_rng(1)
    ids, done = np.array(emitted), np.asarray(num_accepted) + 1
    for position in (1, 2):
        prefix = np.zeros(len(ids), int)
        for i in range(position):
            prefix = prefix * V + ids[:, i]
        cumulative = tables[position][prefix].cumsum(axis=1)
        fresh = (rng.random(len(ids))[:, None] > cumulative[:, :-1]).sum(axis=1)
        ids[:, position] = np.where(done > position, ids[:, position], fresh)
    return ids


def _p_value(ids, joint):
    cells = np.ravel_multi_index(tuple(ids.T), (V, V, V))
    counts, expected = np.bincount(cells, minlength=V**3), joint.ravel() * len(ids)
    possible = expected > 1e-6 * len(ids)
    if counts[~possible].any():
        return 0.0
    counts, expected = counts[possible], expected[possible]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(statistic, len(counts) - 1))


@pytest.mark.parametrize("fields", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("rule", accept.RULES)
def test_the_joint_law_of_three_tokens_is_the_targets(rule, fields):
    joint, tables = _joint(fields)
    emitted, num_accepted = _run(rule, fields)
    assert 0.2 < float(num_accepted.mean()) < 1.9  # both outcomes are common
    assert _p_value(_finished(emitted, num_accepted, tables), joint) > 1e-4


def test_the_test_would_notice_a_bias_of_two_percent():
    joint, tables = _joint({})
    ids = _finished(*_run(accept.BLOCK, {}), tables)
    ids[: N // 50, 0] = np.arange(N // 50) % V  # 2% of the rows begin with any id
    assert _p_value(ids, joint) < 1e-4


def test_block_verification_accepts_no_less_than_rejection():
    """Same proposals and coins; the mean over 200,000 rows is larger by more than its noise."""
    rejection, block = (np.asarray(_run(rule, {})[1]) for rule in ("rejection", "block"))
    gain = block - rejection.astype(float)
    assert gain.mean() > 4 * gain.std() / np.sqrt(N)


def _literal(rule, draft, q, p, uniform, active):
    f32 = lambda x: jnp.asarray(x, jnp.float32)[None]
    judge = accept.accept_by_block if rule == accept.BLOCK else accept.accept_by_rejection
    verdict = judge(
        jnp.asarray([draft], jnp.int32), f32(q), f32(p), f32(uniform), jnp.asarray([active])
    )
    return int(verdict.num_accepted[0]), np.asarray(verdict.bonus_weights)[0]


def test_literal_rejection():
    q, p = [[0.8, 0.2], [0.5, 0.5]], [[0.4, 0.6], [0.5, 0.5], [0.1, 0.9]]
    assert _literal("rejection", [0, 1], q, p, [0.49, 0.9], 3)[0] == 2
    accepted, bonus = _literal("rejection", [0, 1], q, p, [0.51, 0.0], 3)
    assert accepted == 0
    np.testing.assert_allclose(bonus, [0.0, 0.4], atol=1e-6)


def test_literal_block():
    """p/q = .5, then 4: token by token the first fails half the time, together never."""
    q, p = [[0.8, 0.2], [0.2, 0.8]], [[0.4, 0.6], [0.8, 0.2], [0.3, 0.7]]
    accepted, bonus = _literal("block", [0, 0], q, p, [0.99, 0.99], 3)
    assert accepted == 2
    np.testing.assert_allclose(bonus, [0.3, 0.7], atol=1e-6)
    # second draft 1: c_2 = .5 * .25 = .125; s_1 = max(.5 p_1 - q_2, 0) = .2, h_1 = .2 / .7
    accepted, bonus = _literal("block", [0, 1], q, p, [0.28, 0.13], 3)
    assert accepted == 1
    np.testing.assert_allclose(bonus, [0.2, 0.0], atol=1e-6)
    assert _literal("block", [0, 1], q, p, [0.29, 0.13], 3)[0] == 0
    assert _literal("block", [0, 1], q, p, [0.29, 0.12], 3)[0] == 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_slots_past_the_active_length_are_not_offered(rule):
    q, p = [[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.3, 0.7], [0.1, 0.9]]
    accepted, bonus = _literal(rule, [0, 1], q, p, [0.0, 0.0], 2)
    assert accepted == 1
    np.testing.assert_allclose(bonus, [0.3, 0.7], atol=1e-6)  # the target's own, nothing taken off
    assert _literal(rule, [0, 1], q, p, [0.0, 0.0], 1)[0] == 0
