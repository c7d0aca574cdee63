"""One prompt to continue, in token ids, and its sampling fields as a row of arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from mimo_jax.config import ConfigError
from mimo_jax.decode.params import check_sampling
from mimo_jax.decode.sampling import MODES, RowSampling, mode_for


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      prompt_ids: Token ids, at least one.
      max_tokens: Most tokens to emit, >= 1.
      stop_ids: Ids that end the output; the stop id itself is emitted.
      temperature: 0 = greedy.
      top_p: Nucleus mass in (0, 1].
      top_k: 0 = off.
      min_p: Least probability, as a share of the largest; 0 = off.
      repetition_penalty: Divides positive logits of ids that were said or asked; 1 = off.
      presence_penalty: Subtracted from logits of ids that were said; 0 = off.
      frequency_penalty: Subtracted once for each time an id was said; 0 = off.
      logit_bias: (id, value) pairs added to logits.
      seed: Of this request's noise.
      scene: Of config.SCENES or None: what the controller has learnt is kept apart by scene.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    scene: str | None = None


def one_row(value, dtype: Any = np.int32) -> Any:
    """A NumPy array of one entry: building arguments with jnp would compile tiny programs."""
    return np.full((1,), value, dtype)


def row_sampling(request: Request, max_bias_ids: int) -> RowSampling:
    """The request's sampling fields as arrays of one row."""
    bias_ids: Any = np.full((1, max_bias_ids), -1, np.int32)
    bias_values: Any = np.zeros((1, max_bias_ids), np.float32)
    for i, (token_id, value) in enumerate(request.logit_bias):
        bias_ids[0, i], bias_values[0, i] = token_id, value
    number = lambda value: one_row(value, np.float32)
    return RowSampling(
        temperature=number(request.temperature),
        top_p=number(request.top_p),
        top_k=one_row(request.top_k),
        min_p=number(request.min_p),
        repetition_penalty=number(request.repetition_penalty),
        presence_penalty=number(request.presence_penalty),
        frequency_penalty=number(request.frequency_penalty),
        bias_ids=bias_ids,
        bias_values=bias_values,
        seed=one_row(request.seed),
    )


def check_request(
    request: Request,
    *,
    vocab_size: int,
    max_len: int,
    max_stop_ids: int,
    max_bias_ids: int,
    mode: str,
) -> None:
    """Raises ConfigError with one line if an engine of these limits cannot serve the request."""
    p = len(request.prompt_ids)
    if p == 0:
        raise ConfigError("prompt is empty; at least one token is needed")
    if request.max_tokens < 1:
        raise ConfigError(f"max_tokens {request.max_tokens} must be >= 1")
    if p + request.max_tokens > max_len:
        raise ConfigError(
            f"prompt of {p} tokens and max_tokens {request.max_tokens} exceed the context of "
            f"{max_len} tokens"
        )
    check_sampling(request)
    biased = [token_id for token_id, _ in request.logit_bias]
    for what, ids in (
        ("prompt token", request.prompt_ids),
        ("stop token", request.stop_ids),
        ("logit_bias", biased),
    ):
        bad = [i for i in ids if not 0 <= i < vocab_size]
        if bad:
            raise ConfigError(f"{what} id {bad[0]} is not in the vocabulary 0..{vocab_size - 1}")
    for what, count, most in (
        ("stop ids", len(request.stop_ids), max_stop_ids),
        ("logit biases", len(biased), max_bias_ids),
    ):
        if count > most:
            raise ConfigError(f"{count} {what}; at most {most} are allowed")
    needed = mode_for(request)
    if MODES.index(needed) > MODES.index(mode):
        raise ConfigError(f"this request needs an engine of mode {needed}, not {mode}")
