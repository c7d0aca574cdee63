"""Several answers to one prompt. Run: pytest tests/decode/test_best_of_n.py

Seen red: candidate 0 with a seed of its own, lowest mean first, sum in place of mean, votes for
"no answer", ties to the lower mean, alternatives with log probabilities nobody asked for.
"""

from decimal import Decimal

import pytest

from mimo_jax import LLM, ConfigError, SamplingParams
from mimo_jax.decode import best_of_n
from mimo_jax.decode.best_of_n import candidate_seed, candidates_of, choose, last_number, scores
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion
from mimo_jax.decode.jobs import Job, Output
from mimo_jax.decode.params import MAX_SEED
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from tests.serving.checkpoints import make_text_checkpoint

PROMPT = [40, 41, 42, 43, 44, 45, 46]
SAMPLED = {"temperature": 1.2, "seed": 5, "max_tokens": 12}


def test_seeds_of_candidates():
    assert [candidate_seed(7, i) for i in range(3)] == [7, 506952128, 1013904249]
    assert candidate_seed(MAX_SEED, 1) == 506952120
    seeds = {candidate_seed(s, i) for s in range(100) for i in range(128)}
    assert len(seeds) == 100 * 128
    job = Job(Request([1], 4, seed=7), ("x",))
    assert candidates_of(job, 1) == [job]
    first, second = candidates_of(job, 2)
    assert (first.request.seed, second.request.seed) == (7, 506952128)
    assert (second.stops, second.logprobs) == (("x",), 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 30 = 42.0 apples", "42"),
        ("It costs $1,250.", "1250"),
        ("5-3 is 2, not -2", "-2"),
        ("5-3", "3"),
        ("(4)-1", "1"),
        ("x=-3.50", "-3.5"),
        ("1, 2, 3", "3"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, answer):
    assert last_number(text) == (None if answer is None else Decimal(answer))


def _output(text, *logprobs):
    n = len(logprobs)
    said = (list(logprobs), [[]] * n)
    completion = Completion([9] * n, "length", [n - 1], [0], [0], 0.1, 0.1, *said)
    return Output([1], [9] * n, text, "length", completion, AcceptStats())


FOUR = [
    _output("= 42", -1.0, -1.0),
    _output("41", -0.5),
    _output("42.", -0.1, -0.2, -0.3),
    _output("?", -0.1, -0.1),
]


def test_ranks():
    assert scores(FOUR, "logprob", None) == pytest.approx([-1.0, -0.5, -0.2, -0.1])
    assert scores(FOUR, "majority", None) == [0.5, 0.25, 0.5, 0.0]
    assert scores(FOUR, "majority", lambda text: text[0]) == [0.25, 0.5, 0.5, 0.25]
    assert scores(FOUR, lambda output: -len(output.token_ids), None) == [-2, -1, -3, -2]
    for bad in (None, float("nan"), "good"):
        with pytest.raises(ConfigError, match="for candidate 0; allowed: numbers"):
            scores(FOUR, lambda output, bad=bad: bad, None)


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        ("logprob", [3, 2, 1, 0]),
        ("majority", [2, 0, 1, 3]),
        (lambda output: len(output.token_ids) == 2, [3, 0, 2, 1]),  # ties: the higher mean first
    ],
)
def test_best_first(rank, order):
    best = choose(FOUR, 4, rank, keeps_logprobs=True)
    assert [o.text for o in (best, *best.alternatives)] == [FOUR[i].text for i in order]
    assert best.logprobs == FOUR[order[0]].logprobs
    two = choose(FOUR, 2, rank, keeps_logprobs=False)
    (second,) = two.alternatives
    assert (two.text, second.text) == (best.text, FOUR[order[1]].text)
    assert two.logprobs is second.logprobs is second.top_logprobs is None
    assert two.score >= second.score
    assert second.alternatives == ()


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM.load(make_text_checkpoint(tmp_path_factory.mktemp("best") / "model"))


def test_candidates_are_what_their_seeds_give_and_the_prompt_is_read_once(llm, monkeypatch):
    seeds = [candidate_seed(5, i) for i in range(4)]
    options = SAMPLED | {"seed": seeds, "logprobs": 0, "batch_size": 4}  # the engine of n=4
    single = llm.generate([PROMPT] * 4, **options)
    assert {o.score for o in single} == {None}
    reads, widths = [], []
    read, run = Engine.read, Engine.run

    def noted_read(self, ids, after=None):
        reads.append(len(ids))
        return read(self, ids, after)

    def noted_run(self, state, num_steps):
        widths.append(state.length.shape[0])
        return run(self, state, num_steps)

    monkeypatch.setattr(Engine, "read", noted_read)
    monkeypatch.setattr(Engine, "run", noted_run)
    (best,) = llm.generate(PROMPT, n=3, best_of=4, **SAMPLED)
    assert reads == [7]
    assert set(widths) == {4}  # side by side
    ranked = sorted(single, key=lambda o: -best_of_n.mean_logprob(o))
    answers = [best, *best.alternatives]
    assert [o.token_ids for o in answers] == [o.token_ids for o in ranked[:3]]
    assert [o.score for o in answers] == pytest.approx(
        [best_of_n.mean_logprob(o) for o in ranked[:3]], abs=1e-5
    )
    assert best.logprobs is None


def test_ranks_of_the_caller(llm):
    options = SAMPLED | {"n": 4}
    first = llm.generate([PROMPT, PROMPT[:4]], rank=lambda o: o.token_ids[0], **options)
    for best in first:
        firsts = [o.token_ids[0] for o in (best, *best.alternatives)]
        assert firsts == sorted(firsts, reverse=True)
        assert best.score == firsts[0]
    voted = llm.generate(PROMPT, rank="majority", extract=lambda text: len(text) > 0, **options)[0]
    assert {o.score for o in (voted, *voted.alternatives)} == {1.0}
    chat = llm.chat([{"role": "user", "content": "hi"}], **options)
    assert len(chat.alternatives) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, r"n 0 is out of range; allowed: 1\.\.128"),
        ({"n": 129}, r"n 129 is out of range"),
        ({"n": 3, "best_of": 2}, r"best_of 2 is out of range; allowed: n\.\.128, and n is 3"),
        ({"best_of": 0}, "best_of 0 is out of range"),
        ({"n": 2, "temperature": 0.0}, "n 2 has no meaning at temperature 0, .* allowed: n 1, "),
        ({"best_of": 3, "temperature": 0.0}, "best_of 3 has no meaning at temperature 0"),
        ({"n": 2, "rank": "best"}, "rank 'best' is unknown; allowed: logprob, majority, or a func"),
        ({"n": 2, "extract": len}, "extract has no meaning without rank majority"),
        ({"rank": "majority"}, "rank majority has no meaning for one candidate; give n or best_of"),
        ({"rank": len}, "a rank has no meaning for one candidate; give n or best_of above 1"),
    ],
)
def test_refusals(llm, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        llm.generate(PROMPT, **SAMPLED | options)
    assert "\n" not in str(error.value)


def test_what_needs_text_says_so(llm):
    with pytest.raises(ConfigError, match=r"majority reads answers, and .* no tokenizer\.json"):
        LLM(llm.target).generate(PROMPT, n=2, rank="majority", **SAMPLED)


@pytest.mark.parametrize("value", [None, "3", 2.5, True])
def test_wrong_types_are_one_line(value, unchecked_annotations):
    with pytest.raises(ConfigError, match=f"n is {value!r}, expected an integer"):
        SamplingParams(n=value)
    with pytest.raises(ConfigError, match="temperature is None, expected a number"):
        SamplingParams(temperature=None)
