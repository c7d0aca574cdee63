"""Text to token ids and back, whole or as a stream.

Problem: a streamed answer arrives in tokens that may end in the middle of a UTF-8 character.
Choice: keep a table id -> bytes and feed it to Python's incremental UTF-8 decoder, which holds back
exactly the unfinished bytes. The usual way (decode everything, wait while the text ends in U+FFFD)
is quadratic or windowed, and stalls on text that really contains U+FFFD.
Trap: only byte-level tokenizers (Qwen, MiMo, Llama 3, GPT-2) have such a table; others are refused.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _HfTokenizer


class Tokenizer:
    """A byte-level BPE read from `tokenizer.json`; encodes special-token text as special ids."""

    def __init__(self, bpe: _HfTokenizer):
        """Wraps an already built `tokenizers.Tokenizer`."""
        self._bpe = bpe
        self._special_ids = frozenset(
            token_id for token_id, added in bpe.get_added_tokens_decoder().items() if added.special
        )
        self._bytes_by_id: list[bytes] | None = None

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Reads a tokenizer from a `tokenizer.json` or from the directory that holds one.

        Raises:
            ValueError: If there is no such file or it is not a tokenizer.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"no tokenizer at {file}: expected a tokenizer.json or its directory")
        try:
            return cls(_HfTokenizer.from_file(str(file)))
        except Exception as error:  # the library raises bare Exception for malformed files
            raise ValueError(f"{file} is not a tokenizer.json: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, special and added tokens included."""
        return self._bpe.get_vocab_size(with_added_tokens=True)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default."""
        return self._special_ids

    def token_id(self, token: str) -> int:
        """Returns the id of one exact token.

        Raises:
            ValueError: If the vocabulary has no such token.
        """
        token_id = self._bpe.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"token {token!r} is not in the vocabulary of {self.vocab_size}; specials are "
                + " ".join(str(self._bpe.id_to_token(i)) for i in sorted(self._special_ids))
            )
        return token_id

    def encode(self, text: str) -> list[int]:
        """Returns the ids of text; adds no begin or end token of its own."""
        return self._bpe.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Same as `encode` for many texts, on all cores."""
        encodings = self._bpe.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Returns the text of ids; bytes that form no UTF-8 character become U+FFFD.

        Raises:
            ValueError: If an id is outside the vocabulary.
        """
        decoder = IncrementalDetokenizer(self, skip_special=skip_special)
        return decoder.push(ids) + decoder.flush()

    def save(self, directory: str | Path) -> Path:
        """Writes `tokenizer.json` into directory and returns its path."""
        path = Path(directory) / "tokenizer.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bpe.save(str(path))
        return path

    def bytes_by_id(self) -> list[bytes]:
        """Returns the UTF-8 bytes of every id, built on first use.

        Raises:
            ValueError: If the tokenizer is not byte-level.
        """
        if self._bytes_by_id is None:
            spec = json.loads(self._bpe.to_str())
            if "ByteLevel" not in json.dumps(spec.get("decoder")):
                raise ValueError("the tokenizer's decoder is not ByteLevel: only byte-level works")
            byte_of = {char: byte for byte, char in _byte_to_char().items()}
            self._bytes_by_id = [b""] * (max(self._bpe.get_vocab().values()) + 1)
            for token, token_id in self._bpe.get_vocab().items():
                is_mapped = all(char in byte_of for char in token)
                self._bytes_by_id[token_id] = (
                    bytes(byte_of[char] for char in token) if is_mapped else token.encode()
                )
            for token_id, added in self._bpe.get_added_tokens_decoder().items():
                self._bytes_by_id[token_id] = added.content.encode()
        return self._bytes_by_id


class IncrementalDetokenizer:
    """Turns a stream of ids into text, one instance per stream; never emits half a character.

    Example: the ids of the two halves of "é" pushed one by one -> "" and then "é".
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        """Starts an empty stream; skip_special leaves special tokens out of the text."""
        self._bytes_by_id = tokenizer.bytes_by_id()
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        """Adds ids and returns the characters they complete.

        Raises:
            ValueError: If an id is outside the vocabulary.
        """
        pieces = []
        for token_id in ids:
            token_id = int(token_id)
            if not 0 <= token_id < len(self._bytes_by_id):
                raise ValueError(f"id {token_id}: allowed are 0..{len(self._bytes_by_id) - 1}")
            if token_id not in self._skipped:
                pieces.append(self._bytes_by_id[token_id])
        return self._decoder.decode(b"".join(pieces))

    def flush(self) -> str:
        """Ends the stream; unfinished bytes come out as U+FFFD, and nothing if there are none."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


def _byte_to_char() -> dict[int, str]:
    """GPT-2's table: printable Latin-1 bytes stand for themselves, the rest for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(0x100 + len(table) - len(printable))
    return table
