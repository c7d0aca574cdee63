"""The host side of decoding: requests into the rows of a batch, and the loop over step groups.

A row whose request is finished takes the next one while the others go on. Between two dispatches
the host only reads counters and new tokens.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np

from mimo_jax.decode import accept
from mimo_jax.decode.controller import COSTS
from mimo_jax.decode.costs import Learnt, measure
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.prefix import PromptReader
from mimo_jax.decode.request import Request
from mimo_jax.decode.step import DecodeState
from mimo_jax.timing import Stopwatch

# RUNNING is not among them: an answer that only the host has ended says "length".
FINISH_REASONS = {accept.STOPPED: "stop", accept.LENGTH: "length", accept.FAILED: "error"}


def broken_logits(num_tokens: int) -> str:
    """Why an answer of num_tokens tokens has no next one."""
    return (
        f"the model's logits after {num_tokens} tokens of the answer are not finite (NaN or "
        "infinity); its weights or their dtype do not work for this text"
    )


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one request.

    Attributes:
      token_ids: Emitted ids, a stop id included.
      finish_reason: "stop", "length" or "error": the model gave no usable logits.
      num_committed_per_step: Tokens committed by each decode step; the token that prefill
        samples is not among them, so they sum to len(token_ids) - 1.
      num_accepted_per_step: Drafts accepted per step, before cuts by stop ids and length.
      num_offered_per_step: Drafts that could have been accepted per step.
      ttft_s: Seconds from the start of prefill to the first token on the host.
      decode_s: Seconds from then to the end, shared with the other rows of the batch.
      logprobs: Log probability of each id of token_ids; None unless the engine records them.
      top_logprobs: Per id of token_ids the likeliest ids there, best first, as (id, log
        probability) pairs; None unless the engine records them.
    """

    token_ids: list[int]
    finish_reason: str
    num_committed_per_step: list[int]
    num_accepted_per_step: list[int]
    num_offered_per_step: list[int]
    ttft_s: float
    decode_s: float
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    @property
    def error(self) -> str | None:
        """One line that says why the answer broke off; None unless finish_reason is "error"."""
        has_failed = self.finish_reason == FINISH_REASONS[accept.FAILED]
        return broken_logits(len(self.token_ids)) if has_failed else None


@dataclasses.dataclass
class _Row:
    """A request in flight."""

    index: int
    request: Request
    ttft_s: float
    watch: Stopwatch  # running since the row was inserted
    compile_before_s: float  # the engine's compile_s at that time
    num_streamed: int = 0


def generate(
    engine: Engine,
    requests: Iterable[Request],
    *,
    learnt: Learnt | None = None,
    reader: PromptReader | None = None,
    steps_per_group: int = 64,
    on_tokens: Callable[[int, list[int]], bool | None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Decodes requests through the engine's rows; yields (index, completion) as they finish.

    Each dispatch runs up to steps_per_group steps on the device; between two dispatches the host
    reads the new tokens, yields finished rows and refills them.

    Args:
      engine: Compiled for a batch shape that fits every request.
      requests: Consumed lazily.
      learnt: What the controller knows: read and added to, so that a caller may keep it for the
        next job; None = nothing.
      reader: Of their prompts, in this order: reads what they share once. None reads each alone.
      steps_per_group: Steps per dispatch: small for streaming, large for throughput.
      on_tokens: Called with (index, new token ids) after each group, for streaming; a row for
        which it returns True ends there.

    Yields:
      In order of completion; `index` counts requests from 0.
    """
    queue = enumerate(requests)
    learnt = Learnt() if learnt is None else learnt
    if engine.policy == COSTS and engine.costs is None:
        measure(engine)
    rows: list[_Row | None] = [None] * engine.batch_size
    state = None
    exhausted = False
    while True:
        for slot in range(engine.batch_size):
            while rows[slot] is None and not exhausted:
                item = next(queue, None)
                if item is None:
                    exhausted = True
                    break
                index, request = item
                compile_before = engine.compile_s
                with Stopwatch() as watch:
                    engine.check(request)
                    memory = reader.read(index) if reader else engine.read(request.prompt_ids)
                    earlier = learnt.controls.get(request.scene)
                    row_state = engine.start(request, memory, earlier)
                    watch.wait_for(row_state.length)
                ttft_s = watch.elapsed_s - (engine.compile_s - compile_before)
                if state is None and engine.batch_size > 1:
                    state = engine.empty_state(row_state)
                state = row_state if state is None else engine.insert(state, row_state, slot)
                engine.group_program(state)  # compiles outside of the row's clock
                rows[slot] = _Row(
                    index, request, ttft_s, Stopwatch.started(), engine.compile_s
                )
        if state is None or all(row is None for row in rows):
            return
        with Stopwatch() as watch:
            state = engine.run(state, steps_per_group)
            watch.wait_for(state.length)
        if engine.policy == COSTS:
            state = learnt.trial(engine, state, watch.elapsed_s)
        finish, length = np.asarray(state.finish), np.asarray(state.length)
        finished = [i for i, row in enumerate(rows) if row is not None and finish[i]]
        if not finished and on_tokens is None:
            continue
        host = _Host(state)
        if on_tokens is not None:
            for slot, row in enumerate(rows):
                if row is not None:
                    emitted = host.tokens[slot, len(row.request.prompt_ids) : length[slot]]
                    must_end = on_tokens(row.index, emitted[row.num_streamed :].tolist())
                    row.num_streamed = len(emitted)
                    if must_end and slot not in finished:
                        finished.append(slot)
                        ended = state.finish.at[slot].set(accept.ENDED)
                        state = dataclasses.replace(state, finish=ended)
        for slot in finished:
            row = rows[slot]
            assert row is not None  # `finished` holds occupied slots only
            # Another row's prompt may have compiled a program meanwhile.
            decode_s = row.watch.elapsed_s - (engine.compile_s - row.compile_before_s)
            if host.control is not None:
                row_of = lambda x, slot=slot: x[slot : slot + 1]
                learnt.controls[row.request.scene] = jax.tree.map(row_of, host.control)
            yield row.index, host.completion(slot, row.request, row.ttft_s, decode_s)
            rows[slot] = None


class _Host:
    """Host copies of the counters of a state."""

    def __init__(self, state: DecodeState):
        self.tokens = np.asarray(state.tokens)
        self.length = np.asarray(state.length)
        self.finish = np.asarray(state.finish)
        self.num_steps = np.asarray(state.num_steps)
        self.committed = np.asarray(state.committed_per_step)
        self.accepted = np.asarray(state.accepted_per_step)
        self.logprobs = jax.tree.map(np.asarray, state.logprobs)
        self.offered = np.asarray(state.offered_per_step)
        self.control = jax.tree.map(np.asarray, state.control)

    def completion(self, slot: int, request: Request, ttft_s, decode_s) -> Completion:
        p, n = len(request.prompt_ids), int(self.num_steps[slot])
        logprobs = top_logprobs = None
        if self.logprobs is not None:
            said = slice(p, int(self.length[slot]))
            logprobs = self.logprobs.chosen[slot, said].tolist()
            ids, values = (x[slot, said].tolist() for x in self.logprobs[1:])
            top_logprobs = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
        return Completion(
            token_ids=self.tokens[slot, p : self.length[slot]].tolist(),
            finish_reason=FINISH_REASONS.get(int(self.finish[slot]), "length"),
            num_committed_per_step=self.committed[slot, :n].tolist(),
            num_accepted_per_step=self.accepted[slot, :n].tolist(),
            num_offered_per_step=self.offered[slot, :n].tolist(),
            ttft_s=ttft_s,
            decode_s=decode_s,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
        )


def generate_all(engine: Engine, requests: Sequence[Request], **kwargs) -> list[Completion]:
    """Completions of all requests, in the order of the requests."""
    done = dict(generate(engine, requests, **kwargs))
    return [done[index] for index in range(len(done))]
