"""The controller and the step whose block length it picks.

Run: .venv/bin/python -m pytest tests/decode/test_adaptive.py

Seen red: features of a plain step kept one slot late, a flush that starts at the anchor, a probe
that changes the lasting rung, a finished row that votes.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.config import SCENES, ConfigError
from mimo_jax.decode import controller, costs
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.prefix import PromptReader, shared_borders
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import SAMPLED
from mimo_jax.models.params import split
from mimo_jax.testing.drafters import ScriptedDrafter
from tests.golden.files import DATA

LENGTHS = (1, 4, 8)
PROMPT = list(range(9, 25))


@pytest.fixture(scope="module")
def mimo():
    return (
        Model(*load_target(DATA / "mimo-tiny")),
        Model(*load_drafter(DATA / "mimo-tiny-dflash")),
    )


def test_ladders():
    assert controller.ladder(8) == (1, 4, 8)
    assert controller.ladder(5) == (1, 2, 5)
    assert controller.ladder(3) == (1, 3)
    assert controller.ladder(2) == (1, 2)
    assert set(controller.PROFILES) == set(SCENES)


def test_expected_tokens_of_the_rungs():
    alpha = jnp.asarray([[0.5, 0.4, 0.5]])
    got = controller.expected_tokens(alpha, (1, 2, 4))
    np.testing.assert_allclose(got, [[1.0, 1.5, 1.8]], atol=1e-6)


def _control(b, alpha, costs, **fields):
    control = controller.initial(b, LENGTHS)
    return control._replace(
        alpha=jnp.broadcast_to(jnp.asarray(alpha, jnp.float32), (b, 7)),
        costs=jnp.broadcast_to(jnp.asarray(costs, jnp.float32), (b, 3)),
        **{name: jnp.asarray(value) for name, value in fields.items()},
    )


def _running(*flags):
    return jnp.asarray(flags)


def test_costs_take_the_most_tokens_per_second_but_not_for_little():
    """7 of 8 accepted or none: 8 slots give .9 * 7 + 1 = 7.3 tokens, 4 slots 3.7."""
    choose = lambda control: controller.choose(control, _running(True), LENGTHS, "costs")[1].item()
    alpha = [0.9, 1, 1, 1, 1, 1, 1]
    assert choose(_control(1, alpha, (1, 2, 3), rung=[0])) == 2  # 7.3 / 3 against 1
    assert choose(_control(1, alpha, (1, 3.6, 7.1), rung=[0])) == 0  # 1.028: not 5% better
    assert choose(_control(1, alpha, (1, 3.6, 7.1), rung=[2])) == 2
    assert choose(_control(1, alpha, (1, 3.8, 8.0), rung=[2])) == 0  # 1 against .91


def test_rows_vote_and_finished_rows_do_not():
    good, bad = [0.9, 1, 1, 1, 1, 1, 1], [0.0] * 7
    control = _control(2, good, (1, 2, 3), rung=[0, 0])
    control = control._replace(alpha=jnp.asarray([good, bad], jnp.float32))
    choose = lambda *flags: controller.choose(control, _running(*flags), LENGTHS, "costs")[1]
    assert choose(True, True).tolist() == [2, 2]  # 8.3 / 3 tokens a second against 2 / 1
    assert choose(False, True).tolist() == [0, 0]


def test_profile_rows_stand_alone_and_do_not_flutter():
    """Running lengths 4.5 and 6.3 against bars of 3 and 6; up only past the bar by 0.3."""
    choose = lambda control: controller.choose(
        control, _running(True, True), LENGTHS, "profile"
    )[1].tolist()
    control = _control(2, [0.0] * 7, (1, 2, 3), rung=[2, 2], thresholds=[[3.0, 6.0]] * 2)
    first = lambda total: [total / 7, 1, 1, 1, 1, 1, 1]
    control = control._replace(alpha=jnp.asarray([first(3.5), first(5.1)], jnp.float32))
    assert choose(control) == [1, 2]
    low = control._replace(rung=jnp.asarray([0, 1], jnp.int32))
    assert choose(low) == [1, 1]  # 4.5 is past 3.3; 6.1 is not past 6.3


def test_a_probe_is_a_burst_of_four_and_changes_nothing_lasting():
    """Plain at cost 1, full at 3 with 1 token: (3 - 1) * 4 / .01 = 800 steps between probes."""
    control = _control(1, [0.0] * 7, (1, 2, 3), rung=[0])
    rungs = []
    for _ in range(1610):
        control, rung = controller.choose(control, _running(True), LENGTHS, "costs")
        rungs.append(int(rung[0]))
        assert int(control.rung[0]) == 0
        offered = jnp.asarray([7 if rungs[-1] else 0], jnp.int32)
        zero = jnp.zeros((1,), jnp.int32)
        control = controller.observe(control, rung, zero, offered, _running(True), 2)
    bursts = np.flatnonzero(rungs)
    assert bursts.tolist() == [800, 801, 802, 803, 1604, 1605, 1606, 1607]


def test_the_estimate_follows_the_text():
    control = _control(1, [0.5] * 7, (1, 2, 3))
    three, seven = jnp.asarray([3], jnp.int32), jnp.asarray([7], jnp.int32)
    for _ in range(200):
        control = controller.observe(control, seven * 0 + 2, three, seven, _running(True), 2)
    # The fourth draft was always tried and never accepted; those behind it were never tried.
    np.testing.assert_allclose(control.alpha[0], [1, 1, 1, 0, 0.5, 0.5, 0.5], atol=1e-3)
    half = controller.observe(control, three * 0 + 1, three * 0, three, _running(True), 2)
    assert float(half.alpha[0, 0]) < 0.95
    assert (np.asarray(half.alpha[0, 1:]) == np.asarray(control.alpha[0, 1:])).all()
    still = controller.observe(control, seven, three, seven, _running(False), 2)
    assert (np.asarray(still.alpha) == np.asarray(control.alpha)).all()


@pytest.mark.parametrize(("policy", "batch_size"), [("costs", 1), ("profile", 3)])
def test_text_is_that_of_plain_decoding(mimo, policy, batch_size):
    target, drafter = mimo
    requests = [
        Request(PROMPT, 90, scene="chat"),
        Request(list(range(40, 60)), 80, temperature=0.7, seed=4, scene="chat"),
        Request(list(range(3, 60)), 70, scene="math"),
        Request([5], 60),
    ]
    plain = generate_all(Engine(target, max_len=160, mode=SAMPLED), requests)
    engine = Engine(
        target, drafter, max_len=160, mode=SAMPLED, policy=policy, batch_size=batch_size
    )
    got = generate_all(engine, requests, steps_per_group=9)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain]
    prompts = [r.prompt_ids for r in requests * 2]
    reader = PromptReader(engine, prompts, shared_borders(prompts))
    got = generate_all(engine, requests * 2, reader=reader, steps_per_group=9)
    assert [c.token_ids for c in got] == [c.token_ids for c in plain * 2]
    assert reader.num_read < sum(map(len, prompts)) * 0.7


@pytest.mark.parametrize(("is_right", "rung"), [(True, 2), (False, 0)])
def test_it_drafts_where_that_pays(mimo, is_right, rung):
    """Costs 1, 2, 3: a drafter that is always right keeps full blocks, a wrong one gives up."""
    target, trained = mimo
    (free,) = generate_all(Engine(target, max_len=160), [Request(PROMPT, 120)])
    script = np.asarray([*PROMPT, *free.token_ids, *[0] * 16])
    drafter = ScriptedDrafter(trained.config, script, is_right=is_right)
    model = Model(trained.config, *split(drafter))
    engine = Engine(target, model, max_len=160, policy="costs")
    engine.costs = [1.0, 2.0, 3.0]
    first, second = generate_all(engine, [Request(PROMPT, 120, scene="math")] * 2)
    assert first.token_ids == second.token_ids == free.token_ids
    offered = np.asarray(second.num_offered_per_step)
    if is_right:
        assert (offered[:-1] == 7).all()
    else:
        assert np.asarray(first.num_offered_per_step).max() > 0
        assert (offered > 0).mean() < 0.05  # one probe: what the first answer taught is carried on
    assert engine.lengths[rung] == (8 if is_right else 1)


@pytest.mark.parametrize("num_plain", [1, 5, 32, 33, 70, 127, 128, 129, 200])
def test_features_kept_aside_reach_the_drafter(mimo, num_plain):
    """A block after some plain steps accepts what it accepts right after a prompt of that text."""
    target, drafter = mimo
    engine = Engine(target, drafter, max_len=300, policy="costs")
    engine.costs = [1.0, 1.0, 1.0]
    state = engine.prefill(Request(PROMPT, 280))
    for rung, count in ((0, num_plain), (2, 4)):
        state = engine.run(state, count, held=rung)
    accepted = np.asarray(state.accepted_per_step)[0, num_plain : num_plain + 4].tolist()
    ids = np.asarray(state.tokens)[0, : len(PROMPT) + num_plain].tolist()
    fixed = Engine(target, drafter, max_len=300)
    (want,) = generate_all(fixed, [Request(ids, 40)])
    assert accepted == want.num_accepted_per_step[:4]


def test_an_unknown_policy_is_one_line(mimo):
    with pytest.raises(ConfigError, match="policy 'best' is unknown; allowed: costs, profile"):
        Engine(*mimo, max_len=64, policy="best")


def test_a_trial_moves_the_others_cost():
    assert costs.followed([1.0, 2.0, 5.0], 0, 1, 4.0) == pytest.approx([1.0, 2.0 * 2**0.3, 5.0])
    assert costs.followed([2.0, 3.0], 1, 0, 0.5) == pytest.approx([2.0 * 0.75**0.3, 3.0])
    assert costs.followed([1.0, 1.0], 0, 1, 90.0) == pytest.approx([1.0, 2**0.3])  # an outlier


def test_costs_follow_while_a_job_runs(mimo, monkeypatch):
    """Blocks are said to be dear; trials find them cheap, and text stays as it was."""
    target, drafter = mimo
    requests = [Request(PROMPT, 250, scene="math")] * 3
    (want,) = generate_all(Engine(target, max_len=300), requests[:1])
    engine = Engine(target, drafter, max_len=300, policy="costs")
    engine.costs = [1.0, 9.0, 12.0]
    seconds = {0: 1.0, 1: 3.0, 2: 6.0}
    timed = costs._timed

    def with_known_clock(engine, state, num_steps, rung):
        return timed(engine, state, num_steps, rung)[0], seconds[rung]

    monkeypatch.setattr(costs, "_timed", with_known_clock)
    monkeypatch.setattr(costs, "_TRIAL_SHARE", 1e9)  # after every group
    got = generate_all(engine, requests, steps_per_group=16)
    assert [c.token_ids for c in got] == [want.token_ids] * 3
    assert engine.costs[1] / engine.costs[0] == pytest.approx(3.0, rel=0.3)
    assert engine.costs[2] / engine.costs[0] == pytest.approx(6.0, rel=0.3)
