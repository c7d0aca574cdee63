"""Between prefill and the loop: the first token, and the state of one row around it.

Prefill gives logits and leaves the choice to `start_row`, which knows the row's own sampling: so
one prompt that was read once starts any number of rows, each with its own seed, penalties and
limits. Rejected: sampling inside the prefill program, which saves a dispatch only where the prompt
is read once per row, and ties what was read to one row.

A `PromptMemory` holds the target's half and the drafter's half together, so that nobody can restore
one without the other: the text would stay right and only the accept length would drop.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mimo_jax.cache import KVCache
from mimo_jax.decode import accept, adaptive
from mimo_jax.decode.sampling import adjust_logits, count_ids, sample
from mimo_jax.decode.step import DecodeState, SeenIds, logprobs_of


class PromptMemory(NamedTuple):
    """What is left of a prompt, or of its first tokens, once it is read; of one row.

    Attributes:
      logits: float32 [1, 1, v], raw, after the last token; on a mesh cut over the vocabulary.
      caches: Memory of the target, and context memory of the drafter or None.
      num_tokens: How many tokens it holds.
    """

    logits: Float[Array, "1 1 v"]
    caches: tuple[KVCache, KVCache | None]
    num_tokens: int


def start_row(
    tokens: Int[Array, "b s"],
    prompt_len: Int[Array, "b"],
    max_len: Int[Array, "b"],
    stop_ids: Int[Array, "b n"],
    sampling,
    control,
    is_in_prompt,
    logits: Float[Array, "b 1 v"],
    target_cache,
    drafter_cache,
    *,
    mode: str,
    num_logprobs: int | None,
    context: tuple | None = None,
    mesh_axis: str | None = None,
) -> DecodeState:
    """A state whose first token is sampled and committed.

    Args:
      tokens: The prompt, padded to the row's whole length.
      prompt_len: Its length.
      max_len: Length at which the row ends.
      stop_ids: Padded with -1.
      sampling: RowSampling.
      control: Of the controller, or None.
      is_in_prompt: bool [b, v] where the mode adjusts logits, else None.
      logits: Raw, after the prompt.
      target_cache: Holds the prompt.
      drafter_cache: Holds the prompt's context; None without a drafter.
      mode: Of sampling.MODES.
      num_logprobs: Likeliest ids to record per token; None = no log probabilities.
      context: (width, dtype) of the features an adaptive row keeps aside, or None.
      mesh_axis: Over which the vocabulary is cut, or None.
    """
    b, s = tokens.shape
    adjusted, v = logits, logits.shape[-1]
    if is_in_prompt is not None:
        nothing = jnp.zeros((b, 1, v), jnp.int32)
        adjusted = adjust_logits(logits, sampling, nothing, is_in_prompt, mesh_axis)
    first = sample(adjusted, sampling, prompt_len[:, None], mode, mesh_axis)
    column = jnp.arange(s, dtype=jnp.int32)[None, :]
    is_first = column == prompt_len[:, None]
    committed = accept.cut_at_stop_and_limit(
        first,
        jnp.ones((b,), jnp.int32),
        stop_ids,
        max_len - prompt_len,
        jnp.zeros((b,), bool),
    )
    seen = logprobs = None
    if is_in_prompt is not None:
        counts = count_ids(first, jnp.ones((b, 1), bool), v, mesh_axis)
        seen = SeenIds(counts, is_in_prompt)
    if num_logprobs is not None:

        def placed(x):  # [b, 1, ...] -> [b, s, ...]
            where = is_first.reshape(b, s, *(1,) * (x.ndim - 2))
            return jnp.where(where, x, jnp.zeros((), x.dtype))

        logprobs = jax.tree.map(placed, logprobs_of(logits, first, num_logprobs, mesh_axis))
    return DecodeState(
        tokens=jnp.where(is_first, first, tokens),
        length=prompt_len + committed.num_committed,
        max_len=max_len,
        finish=committed.finish,
        stop_ids=stop_ids,
        sampling=sampling,
        seen=seen,
        logprobs=logprobs,
        num_steps=jnp.zeros((b,), jnp.int32),
        committed_per_step=jnp.zeros((b, s), jnp.int8),
        accepted_per_step=jnp.zeros((b, s), jnp.int8),
        offered_per_step=jnp.zeros((b, s), jnp.int8),
        control=control,
        pending=None if context is None else adaptive.empty_pending(b, *context),
        target_cache=target_cache,
        drafter_cache=drafter_cache,
    )
