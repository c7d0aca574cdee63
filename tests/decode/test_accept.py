"""python -m pytest tests/decode/test_accept.py"""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.decode import accept
from tests.oracles.accept import accept_and_cut

FINISH = {accept.RUNNING: "running", accept.STOPPED: "stop", accept.LENGTH: "length"}


def _i32(values):
    return jnp.asarray(values, jnp.int32)


def test_match_counts_the_equal_prefix():
    drafts, target = _i32([[5, 6, 7], [1, 6, 7]]), _i32([[5, 6, 9, 1], [5, 6, 7, 8]])
    assert accept.accept_by_match(drafts, target, _i32([4, 4])).tolist() == [2, 0]


def test_match_ignores_slots_past_active_len():
    drafts, target = _i32([[5, 6, 7]]), _i32([[5, 6, 7, 8]])
    assert accept.accept_by_match(drafts, target, _i32([3])).tolist() == [2]
    assert accept.accept_by_match(drafts, target, _i32([1])).tolist() == [0]


def test_match_needs_one_more_target_position():
    with pytest.raises(ValueError, match="expected 4"):
        accept.accept_by_match(_i32([[1, 2, 3]]), _i32([[1, 2, 3]]), _i32([3]))


def test_stop_id_behind_the_emitted_tokens_is_not_output():
    cut = accept.cut_at_stop_and_limit(
        _i32([[4, 9, 2, 2]]), _i32([2]), _i32([[2, -1]]), _i32([9]), jnp.zeros((1,), bool)
    )
    assert (cut.num_committed.tolist(), cut.finish.tolist()) == ([2], [accept.RUNNING])


def test_finished_rows_commit_nothing():
    cut = accept.cut_at_stop_and_limit(
        _i32([[4, 2]]), _i32([2]), _i32([[2]]), _i32([5]), jnp.ones((1,), bool)
    )
    assert cut.num_committed.tolist() == [0]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_equal_to_the_oracle(data):
    m = 4
    ids = st.integers(0, 3)
    drafts = data.draw(st.lists(ids, min_size=m, max_size=m))
    target = data.draw(st.lists(ids, min_size=m + 1, max_size=m + 1))
    active_len = data.draw(st.integers(1, m + 1))
    stop_ids = data.draw(st.lists(ids, max_size=2))
    # Room never exceeds what active_len allows for, and active_len never the room (decode/step.py).
    room = data.draw(st.integers(active_len, 9)) if active_len == m + 1 else active_len
    num_accepted, emitted, finish = accept_and_cut(drafts, target, active_len, stop_ids, room)
    got = accept.accept_by_match(_i32([drafts]), _i32([target]), _i32([active_len]))
    assert got.tolist() == [num_accepted]
    padded = _i32([stop_ids + [-1] * (2 - len(stop_ids))])
    cut = accept.cut_at_stop_and_limit(
        _i32([target]), got + 1, padded, _i32([room]), jnp.zeros((1,), bool)
    )
    n = int(cut.num_committed[0])
    assert np.asarray(target)[:n].tolist() == emitted
    assert FINISH[int(cut.finish[0])] == finish
