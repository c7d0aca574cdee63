"""The lossless bench on a tiny pair, and what it says of answers that differ.

Run: .venv/bin/python -m pytest tests/bench/test_lossless.py

Seen red: a near tie counted as identical, a difference at the end of an answer taken for a tie.
"""

import jax
import pytest

from mimo_jax.bench import lossless
from mimo_jax.decode.generate import Completion
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from tests.decode import smallest

REQUEST = Request([4, 9, 12], 4)


def _answer(ids: list[int], reason: str = "length") -> Completion:
    return Completion(ids, reason, [len(ids) - 1], [0], [0], 0.0, 0.0)


def _outcome(target: Model, drafted: Completion) -> lossless.Outcome:
    plain = [_answer([5, 8, 9, 4])]
    outcome = lossless.Outcome("chain", 1, "math")
    return lossless._compare(outcome, target, [REQUEST], plain, [drafted], 5)


def test_every_outcome():
    target = smallest.pair()[0]
    undecided = Model(target.config, target.graph, jax.tree.map(lambda x: x * 0, target.params))
    same = _outcome(target, _answer([5, 8, 9, 4]))
    assert (same.num_answers, same.num_tokens, same.num_identical, same.tau) == (1, 4, 1, 3.0)
    assert (same.near_ties, same.differences) == ([], [])
    tie = _outcome(undecided, _answer([5, 8, 3, 4]))
    assert tie.near_ties == [{"prompt": 0, "token": 2, "margin": 0.0}]
    assert (tie.num_identical, tie.differences) == (0, [])
    (found,) = _outcome(target, _answer([5, 8, 3, 4])).differences
    assert (found["prompt"], found["token"]) == (0, 2)
    assert found["margin"] > lossless.NEAR_TIE
    for drafted in (_answer([5, 8, 9]), _answer([5, 8, 9, 4], "stop")):
        (found,) = _outcome(undecided, drafted).differences
        assert found["margin"] is None


@pytest.mark.parametrize("number", [0, pytest.param(-2, marks=pytest.mark.slow)])
def test_modes_at_batch_sizes(number):
    mode = lossless.MODES[number]
    requests = {"math": [Request([i, 9, 12], 12) for i in (1, 10, 13)]}
    seen = []
    outcomes = list(
        lossless.run_lossless(
            *smallest.pair(),
            requests,
            max_len=smallest.MAX_LEN,
            modes=[mode],
            batch_sizes=(3,),
            on_answer=seen.append,
        )
    )
    assert [(o.mode, o.batch_size, o.num_identical) for o in outcomes] == [(mode.name, 3, 3)]
    assert seen == ["plain"] * 3 + [f"{mode.name}, batch 3"] * 3
