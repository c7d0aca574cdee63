"""Records to token ids, and which of them are learned: the assistant's turns and nothing else.

Problem: a template turns a conversation into one text and does not say which parts of it the model
would write. Choice: ask the template. What it renders for the messages before a turn, with the
header of the assistant's turn (the generation prompt), is what the model would be given; what it
renders with the turn is that plus the answer. The difference, up to the last special token, is what
the model would have to write itself, its end token included and the newline after it not.

Each stretch is tokenized alone, as at decode time: the prompt's ids are there before the answer's.
Tokenizing the whole text could merge across the border (a newline and the spaces after it are one
token of most tokenizers) and would teach ids that decoding never meets.

Trap: some templates rewrite history, e.g. they drop the thinking of earlier turns; then the text
before a turn is no beginning of the text after it. Of such a conversation only the last turn of
the assistant is learned, after the history as the model sees it there; the tally counts them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mimo_jax.config import ConfigError, require
from mimo_jax.text.chat import load_chat_template, render_chat
from mimo_jax.text.tokenizer import Tokenizer
from mimo_jax.train.data import Document, prompt_of
from mimo_jax.train.records import Record, check_text
from mimo_jax.train.thinking import DEFAULT, THINKING, thinking_kwargs

MIN_RESPONSE_LEN = 2  # a drafter foresees what follows a first token


@dataclasses.dataclass
class Tally:
    """What became of records.

    Attributes:
      num_records: Read.
      num_documents: To be trained on.
      num_learned: Their tokens that are learned.
      num_short: Left out: the response has fewer than MIN_RESPONSE_LEN tokens.
      num_unanswered: Left out: prompts without a response.
      num_last_turn_only: Conversations of which only the last turn is learned.
    """

    num_records: int = 0
    num_documents: int = 0
    num_learned: int = 0
    num_short: int = 0
    num_unanswered: int = 0
    num_last_turn_only: int = 0


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How a model reads text.

    Attributes:
      tokenizer: None: only exact ids can be read.
      template: Chat template, or None: no conversations can be read.
      vocab_size: Ids from here on are refused.
      thinking: Of THINKING.
    """

    tokenizer: Tokenizer | None
    template: str | None
    vocab_size: int
    thinking: str = DEFAULT

    def __post_init__(self):
        thinking_kwargs(self.thinking)

    @classmethod
    def of_checkpoint(
        cls, directory: Path, tokenizer: Tokenizer | None, vocab_size: int, thinking: str
    ) -> "TextFormat":
        """With the chat template of a checkpoint's directory, if it has one."""
        try:
            template = load_chat_template(directory)
        except ValueError:
            template = None  # conversations are then refused, by their line
        return cls(tokenizer, template, vocab_size, thinking)

    def render(self, record: Record, num_messages: int, is_prompt: bool) -> str:
        """The text of a conversation's first messages, if is_prompt with the assistant's header.

        Raises:
          ConfigError: Naming the record, if the template does not take it.
        """
        if self.template is None:
            raise ConfigError(f"{record.where}: messages need a chat template, and there is none")
        try:
            text = render_chat(
                self.template,
                (record.messages or ())[:num_messages],
                record.tools,
                add_generation_prompt=is_prompt,
                **thinking_kwargs(self.thinking),
            )
        except Exception as error:  # a template is foreign code: it may raise anything
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{record.where}: {reason}") from error
        return check_text(text, record.where, "the rendered conversation")

    def encode(self, text: str, record: Record) -> list[int]:
        """Ids of a text; raises ConfigError without a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{record.where}: text needs a tokenizer, and there is none; allowed: prompt_ids "
                "and response_ids"
            )
        return self.tokenizer.encode(text)

    def check_ids(self, ids: Sequence[int], record: Record) -> None:
        """Raises ConfigError for ids beyond the vocabulary."""
        largest = max(ids, default=0)
        require(
            largest < self.vocab_size,
            f"{record.where}: id {largest} is beyond the vocabulary; allowed: "
            f"0..{self.vocab_size - 1}",
        )


def _answer(format_: TextFormat, text: str, record: Record) -> Document:
    """A turn's ids; what stands behind its last special token (a newline) is not learned."""
    ids = format_.encode(text, record)
    special = format_.tokenizer.special_ids if format_.tokenizer else frozenset()
    end = next((i + 1 for i in reversed(range(len(ids))) if ids[i] in special), len(ids))
    is_space = format_.tokenizer is not None and not format_.tokenizer.decode(ids[end:]).strip()
    num_learned = end if is_space else len(ids)
    return Document(ids, [i < num_learned for i in range(len(ids))])


def _turn_ends(format_: TextFormat, record: Record, turns: Sequence[int]) -> list[int] | None:
    """Borders in the text of the conversation up to its last turn, or None if they do not fit.

    Begin and end of each turn in order. Example: "U a U b" with turns a, b -> [2, 3, 6, 7].
    """
    whole = format_.render(record, turns[-1] + 1, is_prompt=False)
    borders = []
    for turn in turns:
        before = format_.render(record, turn, is_prompt=True)
        after = format_.render(record, turn + 1, is_prompt=False)
        if not (whole.startswith(after) and after.startswith(before)):
            return None
        borders += [len(before), len(after)]
    return borders


def _conversation(format_: TextFormat, record: Record, tally: Tally) -> Document:
    messages = record.messages or ()
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return Document([], [])
    borders = _turn_ends(format_, record, turns)
    if borders is None and len(turns) > 1:
        borders = _turn_ends(format_, record, turns[-1:])
        tally.num_last_turn_only += borders is not None
    if borders is None:
        raise ConfigError(
            f"{record.where}: the chat template writes the prompt of the last turn otherwise than "
            "the finished turn, so its answer cannot be told apart; give prompt_ids and "
            "response_ids, or another thinking than "
            f"{format_.thinking!r}; allowed: {', '.join(THINKING)}"
        )
    whole = format_.render(record, turns[-1] + 1, is_prompt=False)
    ids, mask, last = [], [], 0
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        given = format_.encode(whole[last:begin], record)
        answer = _answer(format_, whole[begin:end], record)
        ids += [*given, *answer.token_ids]
        mask += [*(False for _ in given), *answer.loss_mask]
        last = end
    return Document(ids, mask)


def document_of(format_: TextFormat, record: Record, tally: Tally) -> Document | None:
    """The ids of a record and what of them is learned; None if it teaches nothing.

    Args:
      format_: Of the model.
      record: With a response; a conversation ends at its last turn of the assistant.
      tally: Is added to.

    Raises:
      ConfigError: In one line naming the record, if it does not fit the model.

    Example: with a ChatML template, user "2+2?", assistant "4" -> the ids of
      "<|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n" not learned, those of
      "4<|im_end|>" learned, that of "\\n" not learned.
    """
    tally.num_records += 1
    document = record.document
    if record.messages is not None:
        document = _conversation(format_, record, tally)
    elif document is None:
        prompt = format_.encode(record.prompt or "", record)
        document = Document.of_pair(prompt, format_.encode(record.response or "", record))
    format_.check_ids(document.token_ids, record)
    num_learned = sum(document.loss_mask)
    if num_learned < MIN_RESPONSE_LEN:
        has_none = num_learned == 0 and record.response is None
        tally.num_unanswered += has_none
        tally.num_short += not has_none
        return None
    tally.num_documents += 1
    tally.num_learned += num_learned
    return document


def documents(
    format_: TextFormat, records: Iterable[Record], tally: Tally
) -> Iterator[Document]:
    """Documents of all records that teach something; see `document_of`."""
    for record in records:
        document = document_of(format_, record, tally)
        if document is not None:
            yield document


def prompt_ids_of(format_: TextFormat, record: Record) -> list[int]:
    """The ids that the model is to answer: all that comes before the last response.

    Args:
      format_: Of the model.
      record: A response that it has is not looked at.

    Raises:
      ConfigError: In one line naming the record, if it does not fit the model.
    """
    if record.document is not None:
        ids = prompt_of(record.document)
    elif record.messages is not None:
        ids = format_.encode(format_.render(record, num_prompt_messages(record), True), record)
    else:
        ids = format_.encode(record.prompt or "", record)
    format_.check_ids(ids, record)
    return ids


def num_prompt_messages(record: Record) -> int:
    """Messages up to and without a last turn of the assistant."""
    messages: Sequence[Mapping[str, Any]] = record.messages or ()
    return len(messages) - (bool(messages) and messages[-1]["role"] == "assistant")
