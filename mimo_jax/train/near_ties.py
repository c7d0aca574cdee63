"""Which prompts lead a target through a near tie, so that a demo can show the others first.

Plain decoding and verifying a block compute the same logits in another order of summation and
differ by about 1e-5 (1.4e-4 at most, 3,832 positions of the embedded default). Where the target's
two best logits are nearer than that, both texts are right and may differ.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.decode.engine import Engine
from mimo_jax.decode.generate import generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request

NEAR_TIE = 2e-4
_BATCH_ROWS = 16


def smallest_margins(target: Model, requests: Sequence[Request], *, max_len: int) -> np.ndarray:
    """Per greedy request, the smallest gap between the two best logits along its answer.

    Args:
      target: The target, float32.
      requests: Greedy requests.
      max_len: Of prompt and answer together.

    Returns:
      float32 [requests].

    Example: an answer of two tokens with best logits (3.0, 1.5) and (2.0, 1.9) -> 0.1.
    """
    engine = Engine(target, max_len=max_len, batch_size=min(_BATCH_ROWS, len(requests)))
    answers = generate_all(engine, requests)

    @jax.jit
    def gaps(params, token_ids):
        logits = nnx.merge(target.graph, params)(token_ids).logits
        best = jax.lax.top_k(logits, 2)[0]
        return best[..., 0] - best[..., 1]

    margins = []
    for first in range(0, len(requests), _BATCH_ROWS):
        rows = np.zeros((_BATCH_ROWS, max_len), np.int32)
        spans = []
        pairs = zip(requests[first:], answers[first : first + _BATCH_ROWS], strict=False)
        for row, (request, answer) in enumerate(pairs):
            text = [*request.prompt_ids, *answer.token_ids]
            rows[row, : len(text)] = text
            spans.append((len(request.prompt_ids) - 1, len(text) - 1))
        gap = np.asarray(gaps(target.params, jnp.asarray(rows)))
        margins += [gap[row, start:end].min() for row, (start, end) in enumerate(spans)]
    return np.asarray(margins, np.float32)


def margin_between(
    target: Model, request: Request, ours: Sequence[int], theirs: Sequence[int]
) -> tuple[int, float | None]:
    """Where two answers part, and by how much the target prefers one of the two tokens there.

    A third voice: one forward over the whole text, without caches. Below `NEAR_TIE` rounding
    decides; more is a bug.

    Args:
      target: The target, float32.
      request: That both answer.
      ours: One answer.
      theirs: The other.

    Returns:
      (tokens before they part, gap of logits; None where one answer has ended).

    Example: answers (5, 8, 9) and (5, 8, 4), logits 2.0 of id 9 and 1.9 of id 4 -> (2, 0.1).
    """
    num_both = min(len(ours), len(theirs))
    shared = next((i for i in range(num_both) if ours[i] != theirs[i]), num_both)
    if shared == num_both:
        return shared, None
    forward = jax.jit(lambda params, ids: nnx.merge(target.graph, params)(ids).logits[0, -1])
    text = jnp.asarray([[*request.prompt_ids, *theirs[:shared]]], jnp.int32)
    logits = forward(target.params, text)
    return shared, abs(float(logits[ours[shared]] - logits[theirs[shared]]))


def ties_last(margins: np.ndarray) -> list[int]:
    """Indices in order, those with a margin below NEAR_TIE behind all others.

    Example: margins .1, 1e-5, .2 -> 0, 2, 1.
    """
    return sorted(range(len(margins)), key=lambda i: bool(margins[i] < NEAR_TIE))
