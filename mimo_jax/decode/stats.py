"""Counters of decode steps -> accept length and acceptance rates. Reads no clock.

Every figure follows GLOSSARY.md: tau counts the bonus token and leaves out the token that prefill
samples; alpha_i is conditional on everything before position i; a position that was not offered
(the block shrinks near the length limit) is no rejection. Counters add up, so a long job keeps
one small object per scene.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from mimo_jax.decode.generate import Completion

MAX_LOOP_PERIOD = 40
MIN_LOOP_TOKENS = 12


@dataclasses.dataclass(frozen=True)
class AcceptStats:
    """Sums over decode steps; add two to join them.

    Attributes:
      num_steps: Decode steps; with a drafter these are the verify steps.
      num_committed: Tokens committed by them.
      histogram: Entry i - 1 = steps that committed i tokens; up to draft_block_len.
      tried: Entry i - 1 = steps that offered position i and accepted all positions before it.
      accepted: Entry i - 1 = steps that accepted position i, whether or not it was then cut by a
        stop id or the length.

    Example: a block of 4 with steps accepting 3, 1 and 0 drafts and committing 4, 2 and 1 tokens
      -> tau 7/3, histogram (1, 1, 0, 1), per_position_acceptance (2/3, 1/2, 1/1).
    """

    num_steps: int = 0
    num_committed: int = 0
    histogram: tuple[int, ...] = ()
    tried: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, completions: Iterable[Completion], draft_block_len: int = 1) -> "AcceptStats":
        """Counts the steps of some completions.

        Args:
          completions: As the engine returns them.
          draft_block_len: Of the engine (1 = plain decoding): entries that the result has even
            where no step came that far.
        """
        completions = list(completions)
        longest = max((n for c in completions for n in c.num_committed_per_step), default=1)
        offered_len = 1 + max((n for c in completions for n in c.num_offered_per_step), default=0)
        draft_block_len = max(draft_block_len, longest, offered_len)
        histogram = [0] * draft_block_len
        tried, accepted = [0] * (draft_block_len - 1), [0] * (draft_block_len - 1)
        num_steps = num_committed = 0
        for completion in completions:
            for committed, num_accepted, offered in zip(
                completion.num_committed_per_step,
                completion.num_accepted_per_step,
                completion.num_offered_per_step,
                strict=True,
            ):
                num_steps += 1
                num_committed += committed
                histogram[committed - 1] += 1
                for i in range(min(offered, num_accepted + 1)):
                    tried[i] += 1
                    accepted[i] += i < num_accepted
        return cls(num_steps, num_committed, tuple(histogram), tuple(tried), tuple(accepted))

    def __add__(self, other: "AcceptStats") -> "AcceptStats":
        def joined(ours, theirs):
            return tuple(a + b for a, b in itertools.zip_longest(ours, theirs, fillvalue=0))

        return AcceptStats(
            self.num_steps + other.num_steps,
            self.num_committed + other.num_committed,
            joined(self.histogram, other.histogram),
            joined(self.tried, other.tried),
            joined(self.accepted, other.accepted),
        )

    @property
    def tau(self) -> float | None:
        """Accept length: tokens committed per step; None without steps."""
        return self.num_committed / self.num_steps if self.num_steps else None

    @property
    def per_position_acceptance(self) -> tuple[float | None, ...]:
        """alpha_i = P(i accepted | 1..i-1 accepted, i offered); None where never tried."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return tuple(accepted / tried if tried else None for accepted, tried in pairs)

    @property
    def reach_rates(self) -> tuple[float, ...]:
        """Share of all steps in which position i was accepted."""
        return tuple(accepted / max(self.num_steps, 1) for accepted in self.accepted)

    def to_json(self) -> dict:
        """The figures under the names that every report of this project uses."""
        rounded = lambda values: [None if v is None else round(v, 4) for v in values]
        return {
            "tau": None if self.tau is None else round(self.tau, 4),
            "num_steps": self.num_steps,
            "num_committed": self.num_committed,
            "accept_length_histogram": list(self.histogram),
            "per_position_acceptance": rounded(self.per_position_acceptance),
            "reach_rates": rounded(self.reach_rates),
        }


def tpot_s(completion: Completion) -> float | None:
    """Seconds per output token after the first; None if there is no second one."""
    num_later = len(completion.token_ids) - 1
    return completion.decode_s / num_later if num_later > 0 else None


def is_looping(token_ids: Sequence[int]) -> bool:
    """Whether an output ends in a loop, whose accept length says nothing about real text.

    A loop: the tail repeats with a period of at most 40 tokens, for at least two periods and 12
    tokens.

    Example: [1, 2] + [7, 8, 9] * 4 -> True; [7, 8, 9] * 3 -> False (9 tokens).
    """
    n = len(token_ids)
    for period in range(1, MAX_LOOP_PERIOD + 1):
        tail_len = max(2 * period, MIN_LOOP_TOKENS)
        if tail_len > n:
            continue
        if all(token_ids[i] == token_ids[i - period] for i in range(n - tail_len + period, n)):
            return True
    return False
