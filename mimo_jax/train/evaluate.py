"""Simulated accept length: walk a drafter over text the target has already written.

With the target's own greedy continuation at hand, a decode needs no verification: a draft token
is accepted iff it equals the text. All anchors are drafted in parallel, then the walk is
arithmetic. Equal to the decode loop's accept length for greedy decoding (a test holds the two
together), at a fraction of its cost during training.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.layers.dispatch import PADDED
from mimo_jax.layers.vocab import argmax_lowest
from mimo_jax.train.data import PackedRows
from mimo_jax.train.drafter_step import draft_logits_at_anchors
from mimo_jax.train.placement import whole_over_data
from mimo_jax.train.step import Batch, place_batch, run_target, sparse_layer

ANCHOR_CHUNK = 32


def make_propose(
    target_graph, drafter_graph, mesh: Mesh | None = None, dispatch: str = PADDED
):
    """Returns propose(target_params, trained, batch, first_anchor) -> int32 [r, 32, m].

    Proposals at the anchors first_anchor .. first_anchor + 31 of every row.
    """

    def propose(target_params, trained, batch: Batch, first_anchor):
        target_params, trained = (whole_over_data(p, mesh) for p in (target_params, trained))
        target = nnx.merge(target_graph, target_params)
        drafter = nnx.merge(drafter_graph, trained["drafter"])
        out = run_target(
            target,
            batch,
            mesh,
            tap_layer_ids=drafter.config.target_layer_ids,
            run_sparse=sparse_layer(mesh, None, dispatch),
        )
        r = batch.token_ids.shape[0]
        anchors = first_anchor + jnp.arange(ANCHOR_CHUNK, dtype=jnp.int32)[None, :]
        logits = draft_logits_at_anchors(
            target,
            drafter,
            batch,
            out.context_features,
            jnp.broadcast_to(anchors, (r, ANCHOR_CHUNK)),
            trained["mask_embedding"],
            mesh,
        )
        return argmax_lowest(logits).reshape(r, ANCHOR_CHUNK, -1)

    return jax.jit(propose)


def walk(token_ids: np.ndarray, proposals: np.ndarray, first: int, end: int) -> list[int]:
    """Tokens committed per step of a greedy decode of known text.

    Args:
      token_ids: The row.
      proposals: int [s, m]; row a holds what is drafted at anchor a.
      first: Index of the first answer token (prefill commits it).
      end: One past the last answer token.

    Returns:
      One count per step; they sum to end - first - 1.

    Example: text 7 8 9 9, first=0, end=4, proposals at 0 = (8, 9, 1) -> [3].
    """
    committed, anchor = [], first
    while anchor < end - 1:
        room = end - 1 - anchor
        drafted = proposals[anchor][:room]
        matches = drafted == token_ids[anchor + 1 : anchor + 1 + len(drafted)]
        num_accepted = int(np.cumprod(matches).sum())
        committed.append(min(num_accepted + 1, room))
        anchor += committed[-1]
    return committed


def simulated_accept_length(
    propose, target_params, trained, rows: PackedRows, mesh: Mesh | None = None
) -> float:
    """τ over rows that hold one document each, prompt then the target's greedy answer."""
    batch = place_batch(rows, mesh)
    r, s = rows.token_ids.shape
    answers = [np.flatnonzero(mask) for mask in rows.loss_mask]
    spans = [(int(a[0]), int(a[-1]) + 1) if len(a) else (0, 0) for a in answers]
    first = min(start for start, end in spans if end)
    last = max(end for _, end in spans)
    starts = [min(start, s - ANCHOR_CHUNK) for start in range(first, last, ANCHOR_CHUNK)]
    chunks = [np.asarray(propose(target_params, trained, batch, jnp.int32(i))) for i in starts]
    proposals = np.full((r, s, chunks[0].shape[2]), -1, np.int32)
    for start, chunk in zip(starts, chunks, strict=True):
        proposals[:, start : start + ANCHOR_CHUNK] = chunk[:r]  # the rest fills a mesh up
    steps = [
        count
        for row in range(r)
        for count in walk(rows.token_ids[row], proposals[row], *spans[row])
    ]
    return sum(steps) / max(len(steps), 1)
