"""Simulated accept length: walk a drafter over text the target has already written.

With the target's own greedy continuation at hand, a decode needs no verification: a draft token
is accepted iff it equals the text. All anchors are drafted in parallel, then the walk is
arithmetic. Equal to the decode loop's accept length for greedy decoding (a test holds the two
together), at a fraction of its cost during training.

Beside it stands the real one, through the engine that serves users, on a few of the same prompts:
it would show a fault that training and simulation have in common. It decodes on one device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array

from mimo_jax.config import DrafterConfig
from mimo_jax.decode.engine import Engine, lay_out_for_decode
from mimo_jax.decode.generate import Completion, generate_all
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.stats import AcceptStats
from mimo_jax.layers.dispatch import PADDED
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, flatten, unflatten
from mimo_jax.sharding import to_host
from mimo_jax.train.data import PackedRows
from mimo_jax.train.drafter_step import draft_logits_at_anchors
from mimo_jax.train.placement import whole_over_data
from mimo_jax.train.step import Batch, place_batch, run_target, sparse_layer

ANCHOR_CHUNK = 32


def make_propose(
    target_graph, drafter_graph, mesh: Mesh | None = None, dispatch: str = PADDED
):
    """Returns propose(target_params, trained, batch, starts) -> list of int32 [r, 32, m].

    Proposals at the anchors start .. start + 31 of every row, for each of the starts; the target
    reads the rows once for all of them.
    """

    @jax.jit
    def read(target_params, trained, batch: Batch):
        target = nnx.merge(target_graph, whole_over_data(target_params, mesh))
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        out = run_target(
            target,
            batch,
            mesh,
            tap_layer_ids=drafter.config.target_layer_ids,
            run_sparse=sparse_layer(mesh, None, dispatch),
        )
        return out.context_features

    @jax.jit
    def draft(target_params, trained, batch: Batch, features, first_anchor):
        target_params, trained = (whole_over_data(p, mesh) for p in (target_params, trained))
        target = nnx.merge(target_graph, target_params)
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        r = batch.token_ids.shape[0]
        anchors = first_anchor + jnp.arange(ANCHOR_CHUNK, dtype=jnp.int32)[None, :]
        logits = draft_logits_at_anchors(
            target,
            drafter,
            batch,
            features,
            jnp.broadcast_to(anchors, (r, ANCHOR_CHUNK)),
            trained["mask_embedding"],
            mesh,
        )
        return argmax_lowest(logits).reshape(r, ANCHOR_CHUNK, -1)

    def propose(target_params, trained, batch: Batch, starts: Sequence[int]) -> list[Array]:
        features = read(target_params, trained, batch)
        return [draft(target_params, trained, batch, features, jnp.int32(i)) for i in starts]

    return propose


def walk(token_ids: np.ndarray, proposals: np.ndarray, first: int, end: int) -> Completion:
    """What a greedy decode of known text would have returned, with its counts per step.

    Args:
      token_ids: The row.
      proposals: int [s, m]; row a holds what is drafted at anchor a.
      first: Index of the first answer token (prefill commits it).
      end: One past the last answer token.

    Returns:
      A completion that took no time; its num_committed_per_step sum to end - first - 1.

    Example: text 7 8 9 9, first=0, end=4, proposals at 0 = (8, 9, 1) -> one step that was offered
      3, accepted 2 and committed 3.
    """
    committed, accepted, offered, anchor = [], [], [], first
    while anchor < end - 1:
        drafted = proposals[anchor][: end - 1 - anchor]  # a block shrinks at the length limit
        matches = drafted == token_ids[anchor + 1 : anchor + 1 + len(drafted)]
        offered.append(len(drafted))
        accepted.append(int(np.cumprod(matches).sum()))
        committed.append(min(accepted[-1] + 1, end - 1 - anchor))
        anchor += committed[-1]
    return Completion(
        token_ids[first:end].tolist(), "length", committed, accepted, offered, 0.0, 0.0
    )


def _answer_span(loss_mask: np.ndarray) -> tuple[int, int]:
    """First and one past the last answer token of a row that holds one document."""
    answer = np.flatnonzero(loss_mask)
    return (int(answer[0]), int(answer[-1]) + 1) if len(answer) else (0, 0)


def simulate(
    propose, target_params, trained, rows: PackedRows, mesh: Mesh | None = None
) -> AcceptStats:
    """Counts over rows that hold one document each, prompt then the target's greedy answer.

    Args:
      propose: From `make_propose`.
      target_params: Of the target.
      trained: {"drafter": params, "mask_embedding": [d]}.
      rows: Held out.
      mesh: Where rows lie.

    Returns:
      Counts; those of `make_real_accept_length` on the same texts, but for the last block of each:
      the loop shortens it to what may still be said, and in a short block a drafter may say
      something else.
    """
    batch = place_batch(rows, mesh)
    r, s = rows.token_ids.shape
    spans = [_answer_span(mask) for mask in rows.loss_mask]
    first = min((start for start, end in spans if end), default=0)
    last = max(end for _, end in spans)
    starts = [min(start, s - ANCHOR_CHUNK) for start in range(first, max(last, 1), ANCHOR_CHUNK)]
    chunks = [to_host(chunk) for chunk in propose(target_params, trained, batch, starts)]
    m = chunks[0].shape[2]
    proposals = np.full((r, s, m), -1, np.int32)
    for start, chunk in zip(starts, chunks, strict=True):
        proposals[:, start : start + ANCHOR_CHUNK] = chunk[:r]  # the rest fills a mesh up
    walks = [walk(rows.token_ids[row], proposals[row], *spans[row]) for row in range(r)]
    return AcceptStats.of(walks, m + 1)


def simulated_accept_length(
    propose, target_params, trained, rows: PackedRows, mesh: Mesh | None = None
) -> float:
    """τ of `simulate`; 0.0 without steps."""
    return simulate(propose, target_params, trained, rows, mesh).tau or 0.0


def known_requests(rows: PackedRows, count: int) -> list[Request]:
    """Greedy requests for the first rows' prompts, each as long as the answer that is known.

    Args:
      rows: As for `simulate`.
      count: Most requests; rows without an answer of two tokens are passed over.
    """
    requests = []
    for token_ids, loss_mask in zip(rows.token_ids, rows.loss_mask, strict=True):
        first, end = _answer_span(loss_mask)
        if len(requests) < count and first > 0 and end - first > 1:
            requests.append(Request(token_ids[:first].tolist(), max_tokens=end - first))
    return requests


def make_real_accept_length(
    target: Model, config: DrafterConfig, *, max_len: int, batch_size: int
) -> Callable[[Any, Sequence[Request]], AcceptStats]:
    """Accept length by decoding with the weights of the moment; compiles at the first call only.

    The engine's programs take the drafter's parameters as arguments, so other weights are other
    arguments. The mask vector that is trained beside them becomes the drafter's own, which leaves
    the target's parameters alone.

    Args:
      target: On one device, where decoding runs.
      config: Of the drafter that is trained.
      max_len: Longest prompt and answer.
      batch_size: Rows decoded at once.

    Returns:
      measure(trained, requests) -> counts; trained is {"drafter": params, "mask_embedding": [d]}.

    Raises:
      ConfigError: If target and drafter do not fit, or a request is longer than max_len.
    """
    config = dataclasses.replace(config, has_mask_embedding=True)
    graph, like = abstract(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    engine: list[Engine] = []

    def measure(trained, requests: Sequence[Request]) -> AcceptStats:
        flat = flatten(trained["drafter"]) | {"mask_embedding": trained["mask_embedding"]}
        drafter = lay_out_for_decode(Model(config, graph, unflatten(like, flat)))
        if not engine:
            engine.append(Engine(target, drafter, max_len=max_len, batch_size=batch_size))
        engine[0].drafter = drafter
        done = generate_all(engine[0], requests)
        engine[0].drafter = None  # a train step may donate what these weights are made of
        return AcceptStats.of(done, config.draft_block_len)

    return measure
