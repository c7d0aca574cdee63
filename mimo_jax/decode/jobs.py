"""Requests with text around them: stop strings in, decoded text out, on top of `generate`.

The engine knows token ids only. A `Job` carries what it does not know, and `run_jobs` watches the
text of running rows, so that an answer ends at its stop string.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mimo_jax.config import ConfigError
from mimo_jax.decode import accept
from mimo_jax.decode.answer import AnswerText, cut_completion
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import Completion, broken_logits, generate
from mimo_jax.decode.prefix import Border, PromptReader, shared_borders
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Job:
    """One request as the engine takes it, and what else is wanted of its answer.

    Attributes:
      request: Token ids and sampling.
      stops: Stop strings, which the engine does not know.
      logprobs: Likeliest ids per token to report, or None: no log probabilities.
      borders: Up to where its prompt agrees with others, see `share_prefixes`.
    """

    request: Request
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    borders: tuple[Border, ...] = ()


def share_prefixes(jobs: Sequence[Job]) -> list[Job]:
    """The same jobs, knowing what their prompts begin with in common: that is then read once.

    Give it all jobs that belong together, also when only some will be run: where a prompt is read
    in pieces, and so its rounding, then does not depend on which.
    """
    borders = shared_borders([job.request.prompt_ids for job in jobs])
    return [dataclasses.replace(job, borders=b) for job, b in zip(jobs, borders, strict=True)]


@dataclasses.dataclass(frozen=True)
class Output:
    """The answer to one prompt; prints as its text.

    Attributes:
      prompt_ids: Token ids of the prompt.
      token_ids: Emitted ids; the last may be a stop id, or have completed a stop string. Empty if
        the model had no usable logits for the first.
      text: Their text without stop id, stop string and special tokens; None without a tokenizer.
      finish_reason: "stop", "length" or "error".
      completion: Counts of every decode step, log probabilities and times of this answer.
      stats: Accept statistics of this answer.
      score: What it was ranked by, see `best_of_n`; None where it is the only candidate.
      alternatives: The next best answers to the same prompt, best first, where n was above 1.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    completion: Completion
    stats: AcceptStats
    score: float | None = None
    alternatives: tuple["Output", ...] = ()

    @property
    def logprobs(self) -> list[float] | None:
        """Log probability of each of token_ids; None unless asked for."""
        return self.completion.logprobs

    @property
    def top_logprobs(self) -> list[list[tuple[int, float]]] | None:
        """Likeliest (id, log probability) pairs at each of token_ids; None unless asked for."""
        return self.completion.top_logprobs

    @property
    def error(self) -> str | None:
        """Why the answer broke off, in one line; None unless finish_reason is "error"."""
        return self.completion.error

    @property
    def tau(self) -> float | None:
        """Tokens committed per decode step; None if prefill alone gave the answer."""
        return self.stats.tau

    def ids_by_step(self) -> list[list[int]]:
        """Ids grouped by the step that committed them; the first group is prefill's.

        Example: ids 5 8 3 9 7, num_committed_per_step 3 1 -> [[5], [8, 3, 9], [7]].
        """
        runs, start = [self.token_ids[:1]], 1
        for count in self.completion.num_committed_per_step:
            runs.append(self.token_ids[start : start + count])
            start += count
        return runs

    def __str__(self) -> str:
        return str(self.token_ids) if self.text is None else self.text


def run_jobs(
    engine: Engine,
    jobs: Sequence[Job],
    tokenizer: Tokenizer | None,
    *,
    steps_per_group: int = 64,
    on_tokens: Callable[[int, list[int]], object] | None = None,
) -> Iterator[tuple[int, Output]]:
    """Decodes jobs; yields (index in jobs, output) as they finish.

    Args:
      engine: Fits every job.
      jobs: Each is started when a row becomes free.
      tokenizer: None: no text, and then no job may have stop strings.
      steps_per_group: Decode steps between two looks of the host: a stop string is noticed, and a
        free row refilled, this much later at most.
      on_tokens: Called with (index, new token ids) after each group.
    """
    texts: dict[int, AnswerText] = {}

    def watch(index: int, new_ids: list[int]) -> Any:
        """Whether the row may end now, since a stop string is complete."""
        if on_tokens is not None:
            on_tokens(index, new_ids)
        if tokenizer is None or not jobs[index].stops:
            return False
        if index not in texts:
            texts[index] = AnswerText(tokenizer, jobs[index].stops)
        texts[index].push(new_ids)
        return texts[index].is_stopped

    prompts, borders = [job.request.prompt_ids for job in jobs], [job.borders for job in jobs]
    must_watch = on_tokens is not None or any(job.stops for job in jobs)
    for index, completion in generate(
        engine,
        (job.request for job in jobs),
        reader=PromptReader(engine, prompts, borders),
        steps_per_group=steps_per_group,
        on_tokens=watch if must_watch else None,
    ):
        texts.pop(index, None)
        yield index, _output(jobs[index], completion, tokenizer, engine.draft_block_len)


def _output(
    job: Job, completion: Completion, tokenizer: Tokenizer | None, draft_block_len: int
) -> Output:
    text = None
    if tokenizer is not None:
        ids = completion.token_ids
        answer = AnswerText(tokenizer, job.stops)
        # A stop id ends the text and is not part of it, special or not.
        answer.push(ids[:-1] if ids and ids[-1] in job.request.stop_ids else ids)
        answer.finish()
        text = answer.text
        if answer.is_stopped:
            completion = cut_completion(completion, answer.num_tokens)
    top = completion.top_logprobs
    if job.logprobs is None:  # another job of the engine wanted them
        completion = dataclasses.replace(completion, logprobs=None, top_logprobs=None)
    elif top is not None:
        cut = [likeliest[: job.logprobs] for likeliest in top]
        completion = dataclasses.replace(completion, top_logprobs=cut)
    return Output(
        prompt_ids=list(job.request.prompt_ids),
        token_ids=completion.token_ids,
        text=text,
        finish_reason=completion.finish_reason,
        completion=completion,
        stats=AcceptStats.of([completion], draft_block_len),
    )


def stream_job(
    engine: Engine, job: Job, tokenizer: Tokenizer, *, steps_per_group: int = 4
) -> Iterator[str]:
    """Yields the text of one job in pieces, never half a character or part of a stop string.

    Raises ConfigError where the model gives no usable logits: what was yielded before is right.

    Args:
      engine: Of batch size 1; fits the job.
      job: What to decode.
      tokenizer: Gives the text.
      steps_per_group: Decode steps between two pieces.
    """
    answer = AnswerText(tokenizer, job.stops)
    state = engine.prefill(job.request)
    num_seen = len(job.request.prompt_ids)
    while True:
        length, finish = int(state.length[0]), int(state.finish[0])
        new_ids = np.asarray(state.tokens)[0, num_seen:length].tolist()
        num_seen = length
        answer.push(new_ids[:-1] if finish == accept.STOPPED else new_ids)
        if finish != accept.RUNNING:
            answer.finish()
        piece = answer.take_new()
        if piece:
            yield piece
        if finish == accept.FAILED:
            raise ConfigError(broken_logits(length - len(job.request.prompt_ids)))
        if finish != accept.RUNNING or answer.is_stopped:
            return
        state = engine.run(state, steps_per_group)
