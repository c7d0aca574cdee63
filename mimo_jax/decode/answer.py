"""The text of one answer while its tokens arrive, and the stop strings that end it.

Stop strings cannot be found on the device: a stop may begin inside one token and end inside
another. They are looked for on the host, in the text as it grows; what the device decoded past
the token that completed the stop is dropped.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from mimo_jax.decode.generate import Completion
from mimo_jax.text.chat import find_stop, held_back_len
from mimo_jax.text.tokenizer import IncrementalDetokenizer, Tokenizer


class AnswerText:
    """Collects the tokens of one answer; ends at the first stop string.

    Attributes:
      text: Characters so far, without the stop string.
      num_tokens: Tokens taken, up to and with the one that completed the stop.
      is_stopped: Whether a stop string was found; later tokens are ignored.

    Example: stops ("\\n\\n",), tokens "a\\n", "\\nb", "c" -> text "a", num_tokens 2.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
        """Starts an empty answer."""
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        # A head may be padded to more rows than the tokenizer has ids; those have no text.
        self._num_known = len(tokenizer.bytes_by_id())
        self._stops = tuple(stops)
        self._longest_stop = max((len(stop) for stop in stops), default=0)
        self._num_shown = 0
        self._is_finished = False
        self.text = ""
        self.num_tokens = 0
        self.is_stopped = False

    def push(self, ids: Iterable[int]) -> None:
        """Takes more tokens."""
        # One by one only where it matters which token completes a stop.
        groups = [[token_id] for token_id in ids] if self._stops else [list(ids)]
        for group in groups:
            if self.is_stopped:
                return
            self.num_tokens += len(group)
            self._append(self._detokenizer.push(i for i in group if i < self._num_known))

    def finish(self) -> None:
        """Ends the answer: bytes that form no whole character come out as U+FFFD."""
        if not self.is_stopped:
            self._append(self._detokenizer.flush())
        self._is_finished = True

    def take_new(self) -> str:
        """Text not yet taken, less an end that may turn out to be the start of a stop string."""
        end = len(self.text)
        if self._stops and not self.is_stopped and not self._is_finished:
            end -= held_back_len(self.text[-self._longest_stop :], self._stops)
        new = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return new

    def _append(self, piece: str) -> None:
        # A stop that is complete only now ends in this piece.
        first = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        if self._stops and piece:
            found = find_stop(self.text[first:], self._stops)
            if found is not None:
                self.text, self.is_stopped = self.text[: first + found], True


def cut_completion(completion: Completion, num_tokens: int) -> Completion:
    """A completion that ends after num_tokens tokens because a stop string was complete there.

    Steps past the end are dropped and the last one counts what it really committed, so the counts
    still sum to len(token_ids) - 1.

    Example: 9 tokens by steps of (4, 3, 1), cut at 6 -> steps of (4, 1), finish_reason "stop".
    """
    committed, left = [], num_tokens - 1
    for count in completion.num_committed_per_step:
        if left <= 0:
            break
        committed.append(min(count, left))
        left -= committed[-1]
    cut = lambda values: values if values is None else values[:num_tokens]
    return dataclasses.replace(
        completion,
        logprobs=cut(completion.logprobs),
        top_logprobs=cut(completion.top_logprobs),
        token_ids=completion.token_ids[:num_tokens],
        finish_reason="stop",
        num_committed_per_step=committed,
        num_accepted_per_step=completion.num_accepted_per_step[: len(committed)],
        num_offered_per_step=completion.num_offered_per_step[: len(committed)],
    )
