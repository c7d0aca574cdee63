"""Text of an answer token by token, and stop strings. Run: pytest tests/decode/test_answer.py"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.decode.answer import AnswerText, cut_completion
from mimo_jax.decode.generate import Completion
from mimo_jax.text.bpe import train_bpe
from mimo_jax.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(train_bpe(["the end of the story. the end"] * 4, vocab_size=300))


def test_stop_inside_a_token_and_across_tokens():
    ids = TOKENIZER.encode("one. the end two")
    assert len(ids) < len("one. the end two"), "some tokens hold several characters"
    for stop, text in (("he e", "one. t"), ("end", "one. the "), ("e. ", "on")):
        answer = AnswerText(TOKENIZER, (stop,))
        answer.push(ids)
        assert (answer.text, answer.is_stopped) == (text, True)
        before = TOKENIZER.decode(ids[: answer.num_tokens - 1])
        assert stop not in before
        assert stop in TOKENIZER.decode(ids[: answer.num_tokens])


def test_the_earliest_of_several_stops_wins():
    answer = AnswerText(TOKENIZER, ("d", "end"))
    answer.push(TOKENIZER.encode("the end"))
    assert answer.text == "the "


def test_without_stop_the_text_is_whole():
    ids = TOKENIZER.encode("naïve …")
    answer = AnswerText(TOKENIZER, ("zzz",))
    answer.push(ids)
    answer.finish()
    assert (answer.text, answer.num_tokens, answer.is_stopped) == ("naïve …", len(ids), False)


def test_ids_beyond_the_tokenizer_have_no_text():
    answer = AnswerText(TOKENIZER)
    answer.push([*TOKENIZER.encode("a"), 4000])
    answer.finish()
    assert (answer.text, answer.num_tokens) == ("a", 2)


def test_half_a_character_waits_for_the_end():
    ids = TOKENIZER.encode("é")
    assert len(ids) == 2
    answer = AnswerText(TOKENIZER)
    answer.push(ids[:1])
    assert answer.take_new() == ""
    answer.finish()
    assert answer.take_new() == "\N{REPLACEMENT CHARACTER}"


@given(
    st.text("the end.é", max_size=30),
    st.lists(st.text("thend ", min_size=1, max_size=4), max_size=3),
)
def test_pieces_join_to_the_text_and_never_show_a_stop(text, stops):
    ids = TOKENIZER.encode(text)
    answer, pieces = AnswerText(TOKENIZER, stops), []
    for token_id in ids:
        answer.push([token_id])
        pieces.append(answer.take_new())
    answer.finish()
    pieces.append(answer.take_new())
    found = [text.find(stop) for stop in stops if stop in text]
    # Tokens are seen one after another: a stop that ends earlier may hide one that begins earlier.
    shown = "".join(pieces)
    assert shown == answer.text
    assert answer.is_stopped == bool(found)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert len(shown) == len(text) if not found else len(shown) >= min(found)


@pytest.mark.parametrize(
    ("num_tokens", "steps"), [(9, [4, 3, 1]), (8, [4, 3]), (6, [4, 1]), (5, [4]), (1, [])]
)
def test_counts_of_a_cut_answer_still_add_up(num_tokens, steps):
    whole = Completion([*range(9)], "length", [4, 3, 1], [3, 2, 0], [3, 3, 3], 0.1, 0.2)
    cut = cut_completion(whole, num_tokens)
    assert cut.token_ids == [*range(num_tokens)]
    assert cut.num_committed_per_step == steps
    assert sum(steps) == num_tokens - 1
    assert len(cut.num_accepted_per_step) == len(cut.num_offered_per_step) == len(steps)
    assert cut.finish_reason == "stop"
