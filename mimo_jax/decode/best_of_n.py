"""Several answers to one prompt, and which of them is the best.

Candidates are ordinary requests that differ in their seed alone, so each is what that seed gives by
itself, drafted or not; their prompt is read once (`prefix.py`), and since they stand one after the
other in the queue they fill neighbouring rows of the batch. Choosing among them is *not* lossless:
the chosen answers follow another distribution than the target's, which is the point of choosing.

Ranks: "logprob" is the mean log probability of an answer's tokens, from raw logits (the sum would
prefer short answers); "majority" is self-consistency, the share of candidates that come to the same
answer; or a function of the caller gives each candidate a number. Ties go to the higher mean log
probability, then to the lower candidate.

Source: self-consistency, arXiv:2203.11171; n and best_of as OpenAI's API defines them.
"""

import collections
import dataclasses
import decimal
import math
import re
from collections.abc import Callable, Hashable, Iterator, Sequence

from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.jobs import Job, Output, run_jobs
from mimo_jax.decode.params import LOGPROB, MAJORITY, MAX_SEED, RANKS
from mimo_jax.text.tokenizer import Tokenizer

type Rank = str | Callable[[Output], float]
type Extract = Callable[[str], Hashable | None]

# Odd, so that no two candidates of a request share a seed; large and irregular, so that candidate i
# of seed s is not candidate 0 of s + i, which the same user may well ask for.
_SEED_STRIDE = 0x1E3779B9

_NUMBER = re.compile(r"(?:(?<![\w)])-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")


def candidate_seed(seed: int, candidate: int) -> int:
    """Seed of one candidate; candidate 0 has the request's own.

    Example: seed 7, candidates 0, 1, 2 -> 7, 506952128, 1013904249.
    """
    return (seed + candidate * _SEED_STRIDE) % (MAX_SEED + 1)


def candidates_of(job: Job, num_candidates: int) -> list[Job]:
    """A job once per candidate, each with its seed and with the log probabilities to rank by."""
    if num_candidates == 1:
        return [job]
    with_seed = lambda i: dataclasses.replace(
        job.request, seed=candidate_seed(job.request.seed, i)
    )
    logprobs = job.logprobs or 0
    return [
        dataclasses.replace(job, request=with_seed(i), logprobs=logprobs)
        for i in range(num_candidates)
    ]


def last_number(text: str) -> decimal.Decimal | None:
    """The last number of a text, which in worked answers is the result; None without one.

    Equal values are equal answers however they are written. It knows neither fractions nor units:
    pass your own function for those.

    Example: "12 + 30 = 42.0 apples" -> 42; "It costs $1,250." -> 1250; "5-3 is 2, not -2" -> -2.
    """
    found = _NUMBER.findall(text)
    return decimal.Decimal(found[-1].replace(",", "")) if found else None


def check_rank(
    rank: Rank, extract: Extract | None, tokenizer: Tokenizer | None, num_candidates: int
) -> None:
    """Raises ConfigError with one line if candidates cannot be ranked that way.

    Args:
      rank: See the module.
      extract: For majority, or None.
      tokenizer: The checkpoint's, or None.
      num_candidates: The most that any prompt has: one alone is not ranked.
    """
    if not callable(rank) and rank not in RANKS:
        raise ConfigError(
            f"rank {rank!r} is unknown; allowed: {', '.join(RANKS)}, or a function of an Output"
        )
    if rank == MAJORITY and tokenizer is None:
        raise ConfigError("rank majority reads answers, and this checkpoint has no tokenizer.json")
    if extract is not None and rank != MAJORITY:
        raise ConfigError("extract has no meaning without rank majority")
    if rank != LOGPROB and num_candidates == 1:
        name = f"rank {rank}" if isinstance(rank, str) else "a rank"
        raise ConfigError(f"{name} has no meaning for one candidate; give n or best_of above 1")


def mean_logprob(output: Output) -> float:
    """Mean log probability of the tokens of an answer that recorded them."""
    assert output.logprobs is not None, "candidates record log probabilities"
    return sum(output.logprobs) / len(output.logprobs)


def scores(candidates: Sequence[Output], rank: Rank, extract: Extract | None) -> list[float]:
    """What each candidate is ranked by, higher is better.

    Raises:
      ConfigError: If a function of the caller gives something that is not a number.

    Example: majority over answers 42, 41, 42 and none -> .5, .25, .5, 0.
    """
    if callable(rank):
        values = [rank(output) for output in candidates]
        for i, value in enumerate(values):
            if not isinstance(value, int | float) or math.isnan(value):
                raise ConfigError(f"rank gave {value!r} for candidate {i}; allowed: numbers")
        return [float(value) for value in values]
    if rank == MAJORITY:
        answers = [(extract or last_number)(output.text or "") for output in candidates]
        votes = collections.Counter(answer for answer in answers if answer is not None)
        return [votes[answer] / len(candidates) for answer in answers]
    return [mean_logprob(output) for output in candidates]


def choose(
    candidates: Sequence[Output],
    n: int,
    rank: Rank,
    extract: Extract | None = None,
    *,
    keeps_logprobs: bool,
) -> Output:
    """The best of some candidates, the n - 1 next best as its alternatives.

    Args:
      candidates: In the order of their seeds, with log probabilities; a single one comes back.
      n: How many to give, at most as many as there are.
      rank: See the module.
      extract: For majority: text -> answer, None = it has none; default `last_number`.
      keeps_logprobs: Whether the log probabilities were asked for.
    """
    if len(candidates) == 1:
        return candidates[0]
    values = scores(candidates, rank, extract)
    order = sorted(
        range(len(candidates)), key=lambda i: (-values[i], -mean_logprob(candidates[i]), i)
    )
    best, *others = (
        dataclasses.replace(_stripped(candidates[i], keeps_logprobs), score=values[i])
        for i in order[:n]
    )
    return dataclasses.replace(best, alternatives=tuple(others))


def _stripped(output: Output, keeps_logprobs: bool) -> Output:
    if keeps_logprobs:
        return output
    completion = dataclasses.replace(output.completion, logprobs=None, top_logprobs=None)
    return dataclasses.replace(output, completion=completion)


def run_candidates(
    engine: Engine,
    groups: Sequence[Sequence[Job]],
    tokenizer: Tokenizer | None,
    *,
    steps_per_group: int = 64,
    on_tokens: Callable[[int, list[int]], object] | None = None,
) -> Iterator[tuple[int, list[Output]]]:
    """As `jobs.run_jobs`, for the candidates of many prompts.

    Args:
      engine: Fits every job.
      groups: The candidates of each prompt, as `candidates_of` gives them.
      tokenizer: As in `run_jobs`.
      steps_per_group: As in `run_jobs`.
      on_tokens: As in `run_jobs`, with the index of the group.

    Yields:
      (index of the group, its outputs in the order of its jobs) when the last of them is done.
    """
    group_of = [g for g, group in enumerate(groups) for _ in group]
    first = [0]
    for group in groups:
        first.append(first[-1] + len(group))
    done: list[dict[int, Output]] = [{} for _ in groups]
    watch = None
    if on_tokens is not None:
        watch = lambda index, ids: on_tokens(group_of[index], ids)
    jobs = [job for group in groups for job in group]
    for index, output in run_jobs(
        engine, jobs, tokenizer, steps_per_group=steps_per_group, on_tokens=watch
    ):
        g = group_of[index]
        done[g][index - first[g]] = output
        if len(done[g]) == len(groups[g]):
            yield g, [done[g].pop(i) for i in range(len(groups[g]))]
