"""What must hold of a decode state between two dispatches, checked on the host, row by row.

The state stores no cache lengths: a row's `length` says everything, and rolling back is a smaller
one. What can go wrong unseen is therefore that two things which follow from the same history
disagree: the records of the steps, the tokens, the position tables of the rings, the counts of
penalties, the controller. Each rule here compares two of them, or one with its range.

It costs a copy of the integers and none of the keys and values: cheap enough for a test to ask
after every group, and for a person who suspects the engine. It cannot see whether keys and values
are right; equality with plain decoding does.

Rejected: checks inside the compiled loop (`checkify`), which would leave the CUDA graph.

Example of a violation: "row 2: committed_per_step sums to 7, expected length 30 - prompt 21 - 1 =
8", in one line.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mimo_jax.cache import KVCache, LayerCache
from mimo_jax.decode import accept, controller
from mimo_jax.decode.step import DecodeState

_FINISH_NAMES = ("RUNNING", "STOPPED", "LENGTH", "FAILED", "ENDED")
_MAX_SHOWN = 8  # values quoted in a line


class IntegrityError(AssertionError):
    """A decode state that contradicts itself; one line per violation."""


def check_integrity(
    state: DecodeState,
    *,
    draft_block_len: int,
    vocab_size: int,
    prompt_lens: Sequence[int | None] | None = None,
) -> None:
    """Raises IntegrityError if the state contradicts itself; see `violations`.

    `Engine.check_integrity(state)` fills in what the engine knows.
    """
    lines = violations(
        state, draft_block_len=draft_block_len, vocab_size=vocab_size, prompt_lens=prompt_lens
    )
    if lines:
        raise IntegrityError("\n".join(lines))


def violations(
    state: DecodeState,
    *,
    draft_block_len: int,
    vocab_size: int,
    prompt_lens: Sequence[int | None] | None = None,
) -> list[str]:
    """What is wrong with a state, one line each: the row, the field, its values, what is expected.

    Args:
      state: Of a batch or of one row, between two dispatches.
      draft_block_len: Slots of a full block; 1 = plain decoding.
      vocab_size: Of the target.
      prompt_lens: Prompt length of each row, None where it is not known; it then follows from the
        records, which are believed.

    Example: a row of length 9 with max_len 8 -> ["row 0: length 9 is past max_len 8"].
    """
    no_memory: Any = {"target_cache": None, "drafter_cache": None, "pending": None}
    host = jax.device_get(dataclasses.replace(state, **no_memory))
    memories = {"target": state.target_cache, "drafter": state.drafter_cache}
    rings = {
        name: _Ring(name, memory)
        for name, memory in memories.items()
        if isinstance(memory, KVCache)
    }
    pending = None if state.pending is None else np.asarray(state.pending.num)
    lines = []
    if prompt_lens is None:
        prompt_lens = [None] * len(host.length)
    for index, prompt_len in enumerate(prompt_lens):
        row = _Row(host, index, draft_block_len, prompt_len)
        found = [*_lengths(row, host.tokens.shape[1]), *_ids(row, vocab_size)]
        if not row.is_idle and not found:  # the rest would only repeat what is wrong above
            found += [*_records(row), *_finish(row), *_counts(row), *_logprobs(row)]
            num_pending = 0 if pending is None else int(pending[index])
            if pending is not None and state.pending is not None:
                found += _pending(row, num_pending, state.pending.features.shape[1])
            found += _control(row)
            for ring in rings.values():
                found += ring.violations(row, num_pending if ring.name == "drafter" else 0)
        lines += [f"row {index}: {line}" for line in found]
    return lines


class _Row:
    """One row of a host state.

    Attributes:
      length, max_len, finish, num_steps: As in DecodeState.
      prompt_len: As given, or as the records have it.
      tokens: The first `length` ids.
      output: Those behind the prompt.
      committed, accepted, offered: Whole records.
    """

    def __init__(self, host: DecodeState, index: int, draft_block_len: int, prompt_len: int | None):
        self.host, self.index, self.draft_block_len = host, index, draft_block_len
        number = lambda values: int(values[index])
        self.length, self.max_len = number(host.length), number(host.max_len)
        self.finish, self.num_steps = number(host.finish), number(host.num_steps)
        record = lambda values: np.asarray(values[index], np.int64)
        self.committed = record(host.committed_per_step)
        self.accepted = record(host.accepted_per_step)
        self.offered = record(host.offered_per_step)
        if prompt_len is None:
            prompt_len = self.length - 1 - int(self.committed.sum())
        self.prompt_len = prompt_len
        self.tokens = record(host.tokens)[: max(self.length, 0)]
        self.output = self.tokens[max(prompt_len, 0) :]
        self.stop_ids = [int(i) for i in host.stop_ids[index] if i >= 0]
        self.is_idle = self.finish == accept.ENDED and self.max_len == 1  # never held a request
        self.is_running = self.finish == accept.RUNNING


def _show(values) -> str:
    values = list(map(int, values))
    more = ", ..." if len(values) > _MAX_SHOWN else ""
    return ", ".join(map(str, values[:_MAX_SHOWN])) + more


def _lengths(row: _Row, num_columns: int) -> Iterator[str]:
    if row.length < 1:
        yield f"length {row.length} is below 1: the anchor stands at length - 1"
    if row.length > row.max_len:
        yield f"length {row.length} is past max_len {row.max_len}"
    room = num_columns - row.draft_block_len
    if row.max_len > room:
        yield f"max_len {row.max_len} leaves no room for a block in tokens: {room} columns"
    if row.prompt_len < 1 and not row.is_idle:
        yield f"prompt of {row.prompt_len} tokens by length and records; at least 1 is needed"


def _ids(row: _Row, vocab_size: int) -> Iterator[str]:
    bad = row.tokens[(row.tokens < 0) | (row.tokens >= vocab_size)]
    if len(bad):
        yield f"tokens hold {_show(bad)} before length {row.length}; allowed: 0..{vocab_size - 1}"


def _records(row: _Row) -> Iterator[str]:
    n = row.num_steps
    if not 0 <= n < len(row.committed):
        yield f"num_steps {n} is out of range; allowed: 0..{len(row.committed) - 1}"
        return
    for name in ("committed", "accepted", "offered"):
        later = getattr(row, name)[n:]
        if later.any():
            yield f"{name}_per_step holds {_show(later[later != 0])} at or past num_steps {n}"
    committed, accepted, offered = row.committed[:n], row.accepted[:n], row.offered[:n]
    wanted = row.length - row.prompt_len - 1
    failed_first = row.finish == accept.FAILED and n == 0 and wanted == -1  # not even prefill's
    if committed.sum() != wanted and not failed_first:
        yield (
            f"committed_per_step sums to {committed.sum()}, expected length {row.length} - prompt "
            f"{row.prompt_len} - 1 = {wanted}"
        )
    if (committed < 1).any():
        yield f"committed_per_step has {_show(committed[committed < 1])}; a step commits 1 or more"
    wrong = accepted > offered
    if wrong.any():
        yield f"accepted_per_step {_show(accepted[wrong])} exceeds offered {_show(offered[wrong])}"
    # Only the last step is cut, and only by what ended the row.
    is_cut = committed != accepted + 1
    is_cut[-1:] &= row.is_running | (committed[-1:] > accepted[-1:] + 1)
    if is_cut.any():
        yield (
            f"committed_per_step {_show(committed[is_cut])} where accepted_per_step is "
            f"{_show(accepted[is_cut])}; expected one more"
        )
    yield from _offers(row, offered, committed)


def _offers(row: _Row, offered, committed) -> Iterator[str]:
    """A block is as long as its rung, less what the length limit leaves no room for."""
    before = row.prompt_len + 1 + np.cumsum(committed) - committed
    room = row.max_len - before
    lengths = (1,)
    if row.draft_block_len > 1:
        is_adaptive = row.host.control is not None
        lengths = (
            controller.ladder(row.draft_block_len) if is_adaptive else (row.draft_block_len,)
        )
    allowed = np.minimum(np.asarray(lengths)[:, None] - 1, room[None, :])
    wrong = ~(offered[None, :] == allowed).any(axis=0)
    if wrong.any():
        step = int(np.argmax(wrong))
        yield (
            f"offered_per_step is {offered[step]} at step {step}; blocks of {_show(lengths)} with "
            f"room for {room[step]} allow {_show(sorted(set(allowed[:, step])))}"
        )


def _finish(row: _Row) -> Iterator[str]:
    if not 0 <= row.finish < len(_FINISH_NAMES):
        yield f"finish {row.finish} is unknown; allowed: 0..{len(_FINISH_NAMES) - 1}"
        return
    name = _FINISH_NAMES[row.finish]
    where = np.flatnonzero(np.isin(row.output, row.stop_ids))
    expected = [len(row.output) - 1] if row.finish == accept.STOPPED else []
    if where.tolist() != expected:
        yield (
            f"finish {name} with stop ids at {_show(where) or 'no'} place of {len(row.output)} "
            f"output tokens; expected {_show(expected) or 'none'}"
        )
    if row.finish == accept.LENGTH and row.length != row.max_len:
        yield f"finish LENGTH at length {row.length}, expected max_len {row.max_len}"
    if row.finish not in (accept.LENGTH, accept.STOPPED) and row.length >= row.max_len:
        yield f"finish {name} at length {row.length}, which is max_len: expected LENGTH"


def _counts(row: _Row) -> Iterator[str]:
    seen = row.host.seen
    if seen is None:
        return
    counts = np.asarray(seen.num_emitted[row.index])
    expected = np.bincount(row.output, minlength=len(counts))
    for i in np.flatnonzero(counts != expected)[:_MAX_SHOWN]:
        yield f"seen.num_emitted of id {i} is {counts[i]}, expected {expected[i]} as in the output"
    known = np.flatnonzero(np.asarray(seen.is_in_prompt[row.index]))
    asked = np.unique(row.tokens[: row.prompt_len])
    if known.tolist() != asked.tolist():
        yield f"seen.is_in_prompt holds ids {_show(known)}, expected {_show(asked)}"


def _logprobs(row: _Row) -> Iterator[str]:
    logprobs = row.host.logprobs
    if logprobs is None:
        return
    said = slice(row.prompt_len, row.length)
    chosen = np.asarray(logprobs.chosen[row.index, said])
    top = np.asarray(logprobs.top[row.index, said])
    if not (np.isfinite(chosen) & (chosen <= 1e-5)).all():
        yield f"logprobs.chosen reaches {chosen.max()} (or NaN); expected at most 0"
    if (np.diff(top, axis=1) > 0).any():
        yield "logprobs.top is not sorted, best first"
    if top.shape[1] and (chosen > top[:, 0] + 1e-5).any():
        yield "logprobs.chosen is above the likeliest id's"


def _pending(row: _Row, num: int, room: int) -> Iterator[str]:
    steps = row.offered[: row.num_steps]
    drafted = np.flatnonzero(steps)
    num_plain = len(steps) - (drafted[-1] + 1 if len(drafted) else 0)
    if not 0 <= num <= room:
        yield f"pending.num {num} is out of range; allowed: 0..{room}"
    elif row.is_running and num > num_plain:
        yield f"pending.num {num} after {num_plain} plain steps; expected no more than those"


def _control(row: _Row) -> Iterator[str]:
    control = row.host.control
    if control is None:
        return
    top = len(controller.ladder(row.draft_block_len)) - 1
    rung, blocks = int(control.rung[row.index]), int(control.num_blocks[row.index])
    if not 0 <= rung <= top:
        yield f"control.rung {rung} is out of range; allowed: 0..{top}"
    num_drafted = int(np.count_nonzero(row.offered[: row.num_steps]))
    if blocks < num_drafted:  # more: what earlier rows of the scene have seen
        yield f"control.num_blocks {blocks} is below the {num_drafted} blocks of this row alone"
    since = int(control.since_probe[row.index])
    if since <= -controller.BURST_LEN:
        yield f"control.since_probe {since} is below a burst's {1 - controller.BURST_LEN}"
    alpha = np.asarray(control.alpha[row.index])
    if not ((alpha >= 0) & (alpha <= 1)).all():
        yield f"control.alpha {alpha.tolist()} is out of range; allowed: 0..1"


class _Ring:
    """The position table of one memory, and what a row of some length must find in it.

    Slots 0 .. r-1 hold position p at slot p modulo r; a block that starts near the end goes on in
    the `slack` slots behind it, so slot r + i holds what belongs to slot i.
    """

    def __init__(self, name: str, memory: KVCache):
        self.name, self.slack = name, memory.slack
        self.window = next((w for w in memory.windows if w is not None), None)
        table = memory.ring_positions
        self.table = None if table is None else np.asarray(table, np.int64)
        pairs = zip(memory.layers, memory.windows, strict=True)
        linear = [
            layer.keys.shape[2]
            for layer, window in pairs
            if window is None and isinstance(layer, LayerCache)
        ]
        self.num_linear = min(linear, default=None)

    def violations(self, row: _Row, num_pending: int) -> Iterator[str]:
        """Lines about one row whose last num_pending positions are kept elsewhere."""
        end = row.length - 1 + self.slack
        if self.num_linear is not None and end > self.num_linear:
            yield f"{self.name} memory has {self.num_linear} slots; a block would reach {end}"
        if self.table is None or self.window is None:
            return
        name, held = f"{self.name} ring", self.table[row.index]
        num_slots = len(held) - self.slack
        slots = np.flatnonzero(held >= 0)
        positions = held[slots]
        misplaced = slots[positions % num_slots != slots % num_slots]
        if len(misplaced):
            yield f"{name}: slot {misplaced[0]} of {num_slots} holds position {held[misplaced[0]]}"
        ids, counts = np.unique(positions, return_counts=True)
        if (counts > 1).any():
            yield f"{name}: position {_show(ids[counts > 1])} stands twice"
        newest = row.length - 2 + self.slack
        if len(positions) and positions.max() > newest:
            yield f"{name}: position {positions.max()} is past {newest}, which no block can reach"
        # Seen by the anchor's query: `window` keys, itself included, which is not written yet.
        needed = np.arange(max(0, row.length - self.window), row.length - 1 - num_pending)
        missing = needed[~np.isin(needed, positions)]
        if len(missing):
            yield f"{name}: position {_show(missing)} is missing at length {row.length}"
