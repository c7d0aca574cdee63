"""How one answer is to be decoded: the sampling fields of every way in, and their limits.

One dataclass serves the Python API, the command line and the fields of a batch line, so that a
value is refused everywhere with the same line. Imports no JAX: `--help` needs the defaults only.
"""

import dataclasses
import numbers
from typing import Any

from mimo_jax.config import ConfigError

MAX_SEED = 2**31 - 1  # a seed is an int32 on the device
# How the drafter is used: never; full blocks; trees; what the controller picks among these by
# measured costs; blocks by the accept lengths that a scene's profile asks for.
DRAFTS = OFF, CHAIN, TREE, AUTO, PROFILE = ("off", "chain", "tree", "auto", "profile")
# What candidates are ranked by: mean log probability, or how many others give the same answer.
RANKS = LOGPROB, MAJORITY = ("logprob", "majority")
MAX_CANDIDATES = 128

_NUMBERS = (
    *((name, numbers.Integral, "an integer") for name in ("max_tokens", "top_k", "seed", "n")),
    *(
        (name, numbers.Real, "a number")
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
    ),
)


def _require(is_right: bool, name: str, value: object, allowed: str) -> None:
    if not is_right:
        raise ConfigError(f"{name} {value} is out of range; allowed: {allowed}")


def check_sampling(fields: Any) -> None:
    """Raises ConfigError, naming field and range, for numbers that float32 cannot work with.

    Logits of some hundreds over a temperature below 1e-5 come near float32's largest number; a
    top_p that float32 rounds to 0 would keep no token at all.

    Args:
      fields: Has the sampling fields of SamplingParams, as `request.Request` does too.
    """
    is_in = lambda value, least, most: least <= value <= most  # False for NaN
    temperature, penalty = fields.temperature, fields.repetition_penalty
    is_temperature = temperature == 0 or is_in(temperature, 1e-5, 1e5)
    _require(is_temperature, "temperature", temperature, ">= 0 (0 = greedy), else 1e-5..1e5")
    _require(is_in(fields.top_p, 1e-6, 1), "top_p", fields.top_p, "above 0 (1e-6), up to 1 (= off)")
    _require(0 <= fields.top_k < 2**31, "top_k", fields.top_k, ">= 0 (0 = off)")
    _require(0 <= fields.min_p < 1, "min_p", fields.min_p, "0 up to below 1 (0 = off)")
    _require(is_in(penalty, 1e-3, 1e3), "repetition_penalty", penalty, "1e-3..1e3 (1 = off)")
    for name in ("presence_penalty", "frequency_penalty"):
        _require(abs(getattr(fields, name)) <= 2, name, getattr(fields, name), "-2..2 (0 = off)")
    _require(len(fields.logit_bias) <= 300, "logit_bias", "of so many ids", "at most 300 ids")
    for token_id, value in fields.logit_bias:
        _require(abs(value) <= 100, f"logit_bias of id {token_id}", value, "-100..100")
    _require(0 <= fields.seed <= MAX_SEED, "seed", fields.seed, f"0..{MAX_SEED}")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one answer.

    Attributes:
      max_tokens: Most tokens to emit, >= 1; the model's context may end the answer earlier.
      temperature: 0 = greedy, else 1e-5..1e5.
      top_p: Nucleus mass in 1e-6..1; 1 = off.
      top_k: 0 = off.
      min_p: Least probability as a share of the largest, in [0, 1); 0 = off.
      repetition_penalty: In 1e-3..1e3; positive logits of ids that were said or asked are divided
        by it, negative ones multiplied; 1 = off.
      presence_penalty: In [-2, 2], subtracted from the logits of ids that were said; 0 = off.
      frequency_penalty: In [-2, 2], subtracted once for each time an id was said; 0 = off.
      logit_bias: (id, value) pairs, values in [-100, 100], added to logits; at most 300.
      logprobs: Report the log probability of each token and of this many likeliest ids at its
        position, 0..20; None = report none.
      seed: Of the noise, 0..2^31-1. The same seed and prompt give the same answer.
      stop: Strings that end the answer; neither they nor what follows is part of the text.
      stop_token_ids: Ids that end the answer, in place of the checkpoint's own; None = its own.
      ignore_eos: Whether the checkpoint's own stop ids are ignored.
      n: Answers to give, best first, 1..128; more than one needs a temperature.
      best_of: Candidates to decode, n..128, of which the n best are given; None = n.

    Raises:
      ConfigError: Naming the field and what is allowed.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None

    @property
    def num_candidates(self) -> int:
        """Answers to decode."""
        return self.n if self.best_of is None else self.best_of

    def __post_init__(self):
        for name, kind, what in _NUMBERS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ConfigError(f"{name} is {value!r}, expected {what}")
        _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        check_sampling(self)
        _require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", self.logprobs,
                 "0..20")
        _require(all(self.stop), "stop", "''", "strings of at least one character")
        _require(1 <= self.n <= MAX_CANDIDATES, "n", self.n, f"1..{MAX_CANDIDATES}")
        is_enough = self.n <= self.num_candidates <= MAX_CANDIDATES
        allowed = f"n..{MAX_CANDIDATES}, and n is {self.n}"
        _require(is_enough, "best_of", self.best_of, allowed)
        if self.num_candidates > 1 and self.temperature == 0:
            # Not one answer in place of n: whoever asks for three counts on three choices.
            name = "n" if self.best_of is None else "best_of"
            raise ConfigError(
                f"{name} {self.num_candidates} has no meaning at temperature 0, where all answers "
                f"are the same; allowed: {name} 1, or a temperature above 0"
            )
