"""BPE training, encode and decode, streaming. Run: pytest tests/text/test_tokenizer.py"""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo_jax.text.bpe import (
    MIN_VOCAB_SIZE,
    SPECIAL_TOKENS,
    VISIBLE_MARKUP,
    save_tokenizer,
    train_bpe,
)
from mimo_jax.text.tokenizer import IncrementalDetokenizer, Tokenizer

SAMPLE = [
    "def total(values):\n    return sum(values)\n<|endoftext|>",
    "<|im_start|>user\nWhat is 12 + 30?<|im_end|><|im_start|>assistant\nIt is 42.<|im_end|>",
    "the values of the users are the values of the total\n" * 5,
    "12345 " * 20,  # repeated, and still no merge
]
VOCAB_SIZE = 320
TOKENIZER = Tokenizer(train_bpe(SAMPLE, vocab_size=VOCAB_SIZE))


def test_special_tokens_come_first_and_in_order():
    expected = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2, "<think>": 3}
    expected |= {"</think>": 4, "<tool_call>": 5, "</tool_call>": 6, "<tool_response>": 7}
    expected |= {"</tool_response>": 8, "<|mask|>": 9, "<|reserved_0|>": 10, "<|reserved_5|>": 15}
    assert {token: TOKENIZER.token_id(token) for token in expected} == expected
    # 3..8 are markup (<think>, <tool_call>, ...): one id each, but part of the text.
    assert TOKENIZER.special_ids == frozenset(range(16)) - frozenset(range(3, 9))


def test_bytes_follow_the_special_tokens():
    table = TOKENIZER.bytes_by_id()
    assert sorted(table[16:272]) == [bytes([byte]) for byte in range(256)]
    assert all(len(piece) > 1 for piece in table[272:])


def test_merges_fill_the_vocabulary_and_shorten_text():
    assert TOKENIZER.vocab_size <= VOCAB_SIZE
    assert len(TOKENIZER.encode("the values of the total")) < 10


def test_training_is_deterministic(tmp_path):
    first = save_tokenizer(train_bpe(SAMPLE, VOCAB_SIZE), tmp_path / "a")
    second = save_tokenizer(train_bpe(iter(SAMPLE), VOCAB_SIZE), tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()


def test_digits_are_single_tokens():
    ids = TOKENIZER.encode("12345")
    assert [TOKENIZER.decode([i]) for i in ids] == list("12345")


def test_no_merge_crosses_a_special_token():
    bpe = train_bpe(["ab<|im_end|>cd"] * 50, vocab_size=300)
    assert not any("<|" in token for token in bpe.get_vocab() if token not in SPECIAL_TOKENS)
    assert "Ā" not in "".join(token for token in bpe.get_vocab() if len(token) > 1)  # a merged NUL


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_text_is_one_id(token):
    ids = TOKENIZER.encode(f"a{token}b")
    assert ids == [*TOKENIZER.encode("a"), TOKENIZER.token_id(token), *TOKENIZER.encode("b")]
    assert TOKENIZER.decode(ids) == (f"a{token}b" if token in VISIBLE_MARKUP else "ab")
    assert TOKENIZER.decode(ids, skip_special=False) == f"a{token}b"


@given(st.text())
def test_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special=False) == text


@given(st.text(), st.integers(1, 4))
def test_stream_never_emits_half_a_character(text, chunk_len):
    ids = TOKENIZER.encode(text)
    stream = IncrementalDetokenizer(TOKENIZER, skip_special=False)
    pieces = [stream.push(ids[i : i + chunk_len]) for i in range(0, len(ids), chunk_len)]
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == text  # all of it before flush
    assert stream.flush() == ""


def test_stream_waits_for_the_last_byte():
    ids = TOKENIZER.encode("é🙂")
    assert len(ids) == 6  # not in the sample: one id per byte
    stream = IncrementalDetokenizer(TOKENIZER)
    assert [stream.push([i]) for i in ids] == ["", "é", "", "", "", "🙂"]


def test_stream_passes_a_real_replacement_character_at_once():
    stream = IncrementalDetokenizer(TOKENIZER)
    assert stream.push(TOKENIZER.encode("a\ufffdb")) == "a\ufffdb"


def test_flush_shows_an_unfinished_character():
    stream = IncrementalDetokenizer(TOKENIZER)
    assert stream.push(TOKENIZER.encode("é")[:1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(TOKENIZER.encode("a")) == "a"  # usable again


def test_decode_equals_the_library():
    text = "x = 'ä'  # <think>\n\tπ\u00ad"
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == TOKENIZER._bpe.decode(ids, skip_special_tokens=True)


def test_batch_equals_one_by_one():
    texts = ["a b c", "", "<|im_end|>"]
    assert TOKENIZER.encode_batch(texts) == [TOKENIZER.encode(text) for text in texts]


def test_from_file_reads_directory_and_file(tmp_path):
    path = TOKENIZER.save(tmp_path / "model")
    for source in (path, path.parent, str(path.parent)):
        assert Tokenizer.from_file(source).encode("the 1") == TOKENIZER.encode("the 1")


def test_errors_name_the_thing(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer at .*missing"):
        Tokenizer.from_file(tmp_path / "missing")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        Tokenizer.from_file(tmp_path)
    with pytest.raises(ValueError, match=r"'<\|no\|>' is not in the vocabulary"):
        TOKENIZER.token_id("<|no|>")
    with pytest.raises(ValueError, match="id 99999: allowed are 0"):
        TOKENIZER.decode([99999])
    with pytest.raises(ValueError, match=f"vocab_size=100: allowed are values >= {MIN_VOCAB_SIZE}"):
        train_bpe(SAMPLE, vocab_size=100)


def test_other_kinds_of_tokenizer_are_refused(tmp_path):
    spec = json.loads(TOKENIZER.save(tmp_path).read_text())
    spec["decoder"] = {"type": "ByteFallback"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ValueError, match="only byte-level works"):
        IncrementalDetokenizer(Tokenizer.from_file(tmp_path))
