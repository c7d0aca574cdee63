"""Run: pytest tests/decode/test_stats.py"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.decode.generate import Completion
from mimo_jax.decode.stats import AcceptStats, is_looping, tpot_s


def completion(committed, accepted, offered, decode_s=0.0) -> Completion:
    return Completion(
        token_ids=[5] * (1 + sum(committed)),
        finish_reason="length",
        num_committed_per_step=committed,
        num_accepted_per_step=accepted,
        num_offered_per_step=offered,
        ttft_s=0.5,
        decode_s=decode_s,
    )


def test_worked_trace_of_the_glossary():
    stats = AcceptStats.of([completion([4, 2, 1, 2], [3, 1, 0, 3], [3] * 4)], draft_block_len=4)
    assert stats.tau == 2.25
    assert stats.histogram == (1, 2, 0, 1)
    # An accepted draft that a stop then cuts off was accepted all the same.
    assert stats.per_position_acceptance == (3 / 4, 2 / 3, 2 / 2)
    assert stats.reach_rates == (3 / 4, 2 / 4, 2 / 4)
    product = 1.0
    for alpha, reach in zip(stats.per_position_acceptance, stats.reach_rates, strict=True):
        product *= alpha
        assert product == pytest.approx(reach)


def test_what_was_not_offered_is_no_rejection():
    stats = AcceptStats.of([completion([3, 2, 1], [2, 2, 0], [3, 2, 0])], draft_block_len=4)
    assert stats.tried == (2, 2, 1)
    assert stats.per_position_acceptance == (1.0, 1.0, 0.0)


def test_plain_decoding_has_tau_one():
    stats = AcceptStats.of([completion([1, 1, 1], [0, 0, 0], [0, 0, 0])])
    assert (stats.tau, stats.histogram, stats.per_position_acceptance) == (1.0, (3,), ())


def test_no_steps():
    stats = AcceptStats.of([completion([], [], [])], draft_block_len=3)
    assert stats.tau is None
    assert stats.per_position_acceptance == (None, None)
    assert stats.reach_rates == (0.0, 0.0)
    assert stats.to_json()["tau"] is None


def test_a_sum_is_the_same_as_counting_together():
    one = completion([2, 1], [1, 0], [3, 3])
    two = completion([1], [0], [0])
    together = AcceptStats.of([one, two], draft_block_len=4)
    assert AcceptStats.of([one], 4) + AcceptStats.of([two]) == together
    assert sum([AcceptStats.of([one], 4), AcceptStats.of([two], 4)], AcceptStats()) == together


def test_tpot_leaves_the_first_token_out():
    assert tpot_s(completion([4, 4], [3, 3], [3, 3], decode_s=2.0)) == 0.25
    assert tpot_s(completion([], [], [])) is None


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 12, True),
        ([7] * 11, False),
        ([1, 2] + [7, 8, 9] * 4, True),
        ([7, 8, 9] * 4 + [1], False),
        ([9, 8, 7, *range(40), *range(40)], True),
        ([*range(41), *range(41)], False),
        ([*range(40), *range(39)], False),
        ([*range(20), *range(20), *range(5)], True),
        ([], False),
    ],
)
def test_loops(ids, expected):
    assert is_looping(ids) is expected


@given(st.lists(st.integers(0, 2), max_size=30))
def test_loops_by_definition(ids):
    def repeats(tail, period):
        return all(a == b for a, b in zip(tail, tail[period:], strict=False))

    tails = [(ids[-n:], p) for n in range(12, len(ids) + 1) for p in range(1, n // 2 + 1)]
    assert is_looping(ids) == any(repeats(tail, period) for tail, period in tails)
