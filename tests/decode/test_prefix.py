"""What prompts begin with in common is read once, and nobody can tell from the answers.

Run: .venv/bin/python -m pytest tests/decode/test_prefix.py

Seen red: the drafter's half left out of a copy, a kept memory handed out twice without a copy, the
last user's memory not given up, a border where nobody parts.
"""

import dataclasses

import numpy as np
import pytest

from mimo_jax.checkpoint.hf_drafter import load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.prefix import MIN_SAVED_TOKENS, PIECE_LEN, Border, PromptReader, shared_borders
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import ADJUSTED
from tests.golden.files import DATA, arrays

GOLDEN_TEXTS = [arrays("mimo_tiny_dflash")[f"spec{b}_output_ids"].tolist() for b in (0, 1)]
RNG = np.random.default_rng(3)
SYSTEM, OTHER = RNG.integers(0, 255, 70).tolist(), RNG.integers(0, 255, 101).tolist()
TAILS = [RNG.integers(0, 255, n).tolist() for n in (3, 1, 5, 2, 4, 6)]


def borders_of(prompts):
    return [tuple(b.num_tokens for b in borders) for borders in shared_borders(prompts)]


def test_borders_are_whole_pieces_of_what_is_shared():
    assert (PIECE_LEN, MIN_SAVED_TOKENS) == (32, 256)
    assert borders_of([SYSTEM + tail for tail in TAILS]) == [(64,)] * 6  # 5 * 64 saved
    assert borders_of([SYSTEM + tail for tail in TAILS[:4]]) == [()] * 4  # 3 * 64 < 256
    assert borders_of([list(range(95)) + [n] for n in range(5)]) == [(64,)] * 5
    assert borders_of([list(range(96)) + [n] for n in range(5)]) == [(96,)] * 5
    assert borders_of([[]]) == [()]
    assert shared_borders([SYSTEM + tail for tail in TAILS])[5] == (Border(64, 2),)


def test_groups_within_groups_and_loners():
    """70 shared by eight, of whom five go on alike to 134; one prompt shares nothing."""
    more = list(range(64))
    prompts = [SYSTEM + more + tail for tail in TAILS[:5]] + [SYSTEM + tail for tail in TAILS[:3]]
    got = borders_of([*prompts, OTHER])
    assert got == [(64, 128)] * 5 + [(64,)] * 3 + [()]  # 7 * 64 and 4 * 64 saved
    ids = {b for borders in shared_borders(prompts) for b in borders}
    assert len(ids) == 2
    few = [OTHER[:96] + tail for tail in TAILS[:4]] + [OTHER[:64] + tail for tail in TAILS[:4]]
    assert borders_of(few) == [(64,)] * 8  # four of them would save 3 * 32 more


def test_prompts_asked_twice_are_kept_whole():
    assert borders_of([[5, 8], [5, 8], [5, 8, 3], [5]]) == [(2,), (2,), (), ()]
    assert borders_of([OTHER] * 2 + [OTHER[:96]]) == [(101,), (101,), ()]
    assert borders_of([OTHER[:64]] * 6) == [(64,)] * 6
    assert borders_of([OTHER] * 8) == [(101,)] * 8  # in one piece: nobody parts before the end
    assert borders_of([OTHER] * 8 + [OTHER[:99]]) == [(96, 101)] * 8 + [(96,)]


class FakeEngine:
    """Remembers what was read; a memory is its ids in a list, emptied when it is consumed."""

    def __init__(self, batch_size):
        self.batch_size, self.reads, self.copies = batch_size, [], 0

    def read(self, prompt, after=None):
        before = 0
        if after is not None:
            before = after.num_tokens
            assert after.ids == list(prompt[:before]), "of another prompt, or consumed"
            after.ids = None
        self.reads.append((before, len(prompt)))
        return FakeMemory(list(prompt))

    def copy(self, memory):
        self.copies += 1
        return FakeMemory(list(memory.ids))


@dataclasses.dataclass
class FakeMemory:
    ids: list | None

    @property
    def num_tokens(self):
        return len(self.ids)


@pytest.fixture
def fake(unchecked_annotations):
    return FakeEngine(batch_size=1)


def read_all(engine, prompts):
    reader = PromptReader(engine, prompts, shared_borders(prompts))
    for index, prompt in enumerate(prompts):
        memory = reader.read(index)
        assert memory.ids == list(prompt)
        memory.ids = None  # consumed by the row
        assert len(reader._kept) <= max(2, engine.batch_size)
    assert not reader._kept
    assert reader.num_read == sum(end - begin for begin, end in engine.reads)
    return engine.reads


def test_a_shared_beginning_is_read_once(fake):
    reads = read_all(fake, [SYSTEM + tail for tail in TAILS])
    assert reads == [(0, 64), (64, 73), (64, 71), (64, 75), (64, 72), (64, 74), (64, 76)]
    assert fake.copies == 5  # the last one takes the memory itself


def test_equal_prompts_are_read_once(fake):
    assert read_all(fake, [OTHER, SYSTEM, OTHER, OTHER]) == [(0, 101), (0, 70)]
    assert fake.copies == 2


def test_more_prefixes_than_are_kept_are_read_again(fake):
    """Three beginnings in turn and room for two: every one is evicted before it is wanted.

    But for the last round, in which nothing new is kept and two of the three are still there.
    """
    groups = [RNG.integers(0, 255, 64).tolist() for _ in range(3)]
    prompts = [group + [n] for n in range(5) for group in groups]
    assert len(read_all(fake, prompts)) == 2 * len(prompts) - 2
    fake.reads.clear()
    fake.batch_size = 3
    assert len(read_all(fake, prompts)) == len(prompts) + 3


@pytest.fixture(scope="module")
def engine():
    target = Model(*load_target(DATA / "mimo-tiny"))
    drafter = Model(*load_drafter(DATA / "mimo-tiny-dflash"))
    return Engine(target, drafter, max_len=128, batch_size=2, mode=ADJUSTED, num_logprobs=1)


def _requests():
    """Two golden texts cut at nine places each, in turn: penalties, seeds, one prompt thrice.

    What follows is text that this drafter was made to foresee.
    """
    fields = [
        {},
        {"temperature": 0.9, "seed": 4},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
    ]
    prompts = [text[:n] for n in range(33, 42) for text in GOLDEN_TEXTS]
    requests = [Request(p, 14, **fields[i // 2 % 3]) for i, p in enumerate(prompts)]
    return [Request(prompts[0], 14, temperature=0.8, seed=s) for s in (1, 2)] + requests


def test_answers_and_steps_are_those_without_reuse(engine):
    """The target's rings of 8 and the drafter's memory go on at the border, 32."""
    requests = _requests()
    alone = generate_all(engine, requests, steps_per_group=4)
    prompts = [r.prompt_ids for r in requests]
    borders = shared_borders(prompts)
    lengths = [tuple(b.num_tokens for b in bs) for bs in borders]
    assert lengths == [(32, 33)] * 3 + [(32,)] * 17
    reader = PromptReader(engine, prompts, borders)
    together = generate_all(engine, requests, reader=reader, steps_per_group=4)
    assert reader.num_read == 2 * sum(range(1, 10)) + 2 * 32
    for got, want in zip(together, alone, strict=True):
        assert got.token_ids == want.token_ids
        assert got.num_committed_per_step == want.num_committed_per_step
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=2e-5)
    assert max(max(c.num_committed_per_step) for c in alone) > 2


def test_a_lost_drafter_half_would_show_in_the_steps_alone(engine):
    """The failure that this design forbids: the target's half restored, the drafter's not."""
    prompt = GOLDEN_TEXTS[0][:33]
    request = Request(prompt, 30)
    (want,) = generate_all(engine, [request])

    class Forgetful(PromptReader):
        def read(self, index):
            memory, blank = engine.read(prompt[:32]), engine.read([0])
            lost = memory._replace(caches=(memory.caches[0], blank.caches[1]))
            return engine.read(prompt, after=lost)

    (got,) = generate_all(engine, [request], reader=Forgetful(engine, [prompt], [()]))
    assert got.token_ids == want.token_ids
    assert got.num_committed_per_step != want.num_committed_per_step
