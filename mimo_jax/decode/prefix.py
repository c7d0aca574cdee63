"""Prompts that begin alike: the shared beginning is read once and kept.

A system prompt stands before every request of a job, and best-of-N asks one prompt many times. What
was read is kept as a `PromptMemory` exactly at the border up to which prompts agree: a ring holds
the last `window` positions only and cannot be cut back to an earlier one, so a memory serves no
other border. It has the target's and the drafter's half, so the accept length is that of a prompt
read whole.

Where the borders are: prompts are compared in pieces of 32 tokens (a shorter rest is padded to as
much anyway, so finer borders would save nothing), and a border is wherever some of the prompts that
came together part. It is kept if all who pass it save at least `MIN_SAVED_TOKENS` together; whole
prompts that are asked more than once always are. Nothing depends on the order of the prompts.

A prompt is always read in the pieces that its borders make, whether or not a memory was kept, so
its rounding depends on the borders alone. Other pieces round in another way: the text is that of
reading whole, up to near ties.

Whatever belongs to one row is not in a memory: penalties look at the row's own prompt, log
probabilities begin with its first token, and an adaptive row's controller and the features it keeps
aside begin after its prompt. On a mesh a memory is cut as a row is.

Rejected: a tree of pages shared between rows, which saves the copy of a row (0.7 ms) and makes
every attention of every step look its keys up.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mimo_jax.decode.engine import MIN_PROMPT_BUCKET, Engine
from mimo_jax.decode.start import PromptMemory

PIECE_LEN = MIN_PROMPT_BUCKET
# A border costs the first prompt one more dispatch (8 ms, as 32 tokens do) and every use a copy
# (0.7 ms); reading 256 tokens takes 54 ms (mimo-nano, two busy Zen 4 cores, 2026-11-30).
MIN_SAVED_TOKENS = 256


class Border(NamedTuple):
    """A place in a prompt up to which others agree with it.

    Attributes:
      num_tokens: Length of the shared beginning.
      prefix_id: The same for two prompts exactly if those tokens are the same.
    """

    num_tokens: int
    prefix_id: int


def shared_borders(prompts: Sequence[Sequence[int]]) -> list[tuple[Border, ...]]:
    """Borders of every prompt at which a memory is worth keeping, shortest first.

    Args:
      prompts: Token ids.

    Example: eight prompts of 100 tokens with the first 70 alike -> (Border(64, 2),) each, which
      saves 7 * 64 tokens; two of them save 64, too few -> () each.
    """
    ids_of: dict[tuple[int, bytes], int] = {}  # (id of the prefix before, next tokens) -> id
    paths: list[list[Border]] = []  # of every prompt: each of its pieces, then its end
    for prompt in prompts:
        ids, node = np.asarray(prompt, np.int32), 0
        path = []
        for end in range(PIECE_LEN, len(ids) + 1, PIECE_LEN):
            piece = ids[end - PIECE_LEN : end].tobytes()
            node = ids_of.setdefault((node, piece), len(ids_of) + 1)
            path.append(Border(end, node))
        rest = ids[len(path) * PIECE_LEN :].tobytes() + b"end"  # no piece is as long
        path.append(Border(len(ids), ids_of.setdefault((node, rest), len(ids_of) + 1)))
        paths.append(path)
    counts = collections.Counter(border.prefix_id for path in paths for border in path)
    return [_worth_keeping(path, counts) for path in paths]


def _worth_keeping(path: list[Border], counts: Mapping[int, int]) -> tuple[Border, ...]:
    """Of a prompt's pieces and its end, those after which others part, if that saves enough."""
    kept, before = [], 0
    for border, following in itertools.pairwise(path):
        num_others = counts[border.prefix_id] - 1
        is_parting = counts[following.prefix_id] <= num_others
        if is_parting and num_others * (border.num_tokens - before) >= MIN_SAVED_TOKENS:
            kept.append(border)
            before = border.num_tokens
    if counts[path[-1].prefix_id] > 1 and path[-1].num_tokens > before:
        kept.append(path[-1])
    return tuple(kept)


class PromptReader:
    """Reads the prompts of a job, every shared beginning once where memory allows.

    Args:
      engine: Reads them.
      prompts: Token ids of all prompts.
      borders: Of every prompt, as `shared_borders` gives them for these or for more prompts.

    Attributes:
      num_read: Tokens that went through prefill so far.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        borders: Sequence[tuple[Border, ...]],
    ):
        self._engine, self._prompts = engine, prompts
        self._borders = borders
        self._num_left = collections.Counter(b.prefix_id for bs in borders for b in bs)
        self._kept: dict[int, PromptMemory] = {}  # least recently used first
        # As many as the batch has rows: what is kept at most doubles the memory of the rows. Two
        # where there is one row: a system prompt, and the prompt behind it that is asked N times.
        self._max_kept = max(2, engine.batch_size)
        self.num_read = 0

    def read(self, index: int) -> PromptMemory:
        """Memory of one prompt, the caller's own. Each prompt may be read once, in any order."""
        prompt, borders = self._prompts[index], self._borders[index]
        memory, num_before = None, 0
        for border in reversed(borders):
            if border.prefix_id in self._kept:
                memory, num_before = self._take(border), border.num_tokens
                break
        for border in borders:
            self._num_left[border.prefix_id] -= 1
            if border.num_tokens > num_before:
                memory = self._go_on(prompt[: border.num_tokens], memory)
                memory = self._keep(border, memory)
            elif not self._num_left[border.prefix_id]:
                self._kept.pop(border.prefix_id, None)
        if memory is None or memory.num_tokens < len(prompt):
            memory = self._go_on(prompt, memory)
        return memory

    def _go_on(self, prompt: Sequence[int], memory: PromptMemory | None) -> PromptMemory:
        self.num_read += len(prompt) - (memory.num_tokens if memory is not None else 0)
        return self._engine.read(prompt, after=memory)

    def _take(self, border: Border) -> PromptMemory:
        """A kept memory, or its copy if others will want it."""
        memory = self._kept.pop(border.prefix_id)
        if self._num_left[border.prefix_id] == 1:
            return memory
        self._kept[border.prefix_id] = memory
        return self._engine.copy(memory)

    def _keep(self, border: Border, memory: PromptMemory) -> PromptMemory:
        """The same memory, and a copy of it kept if others will want it."""
        if not self._num_left[border.prefix_id]:
            return memory
        while len(self._kept) >= self._max_kept:
            del self._kept[next(iter(self._kept))]
        self._kept[border.prefix_id] = memory
        return self._engine.copy(memory)
