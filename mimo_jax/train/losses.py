"""Losses of the target and the drafter: weighted cross-entropy, and the metric beside it.

Every loss here is one global weighted mean, sum(w * ce) / sum(w), over all positions of the batch,
never a mean of per-row or per-block means: a block cut short by its document's end then counts for
what it holds. Positions of weight zero are cut out before the softmax, so that garbage (NaN logits,
ids out of range) in padding reaches neither the value nor the gradient.

Trap: with gradient accumulation, average the pieces by `weight_sum`, not equally.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class LossAux(NamedTuple):
    """What a loss gives beside its value; `accuracy` is the weighted share of argmax hits."""

    weight_sum: Float[Array, ""]
    accuracy: Float[Array, ""]
    cross_entropy: Float[Array, "*n"]
    is_correct: Bool[Array, "*n"]


def draft_position_weights(num_draft_tokens: int, gamma: float) -> Float[Array, "m"]:
    """Weights of draft slots 1..m in the drafter's loss: exp(-(k - 1) / gamma).

    An early slot matters more because a later one counts only if all before it were accepted. The
    anchor slot has no weight and no entry here.

    Args:
      num_draft_tokens: m, the draft block without its anchor.
      gamma: Decay length in slots; published: 4 for blocks of 8, 5 for 10, 7 for 16.

    Returns:
      float32 weights, the first one 1.

    Example: m=7, gamma=4 -> 1, .7788, .6065, .4724, .3679, .2865, .2231 (sum 3.7352).

    Source: DFlash, arXiv:2602.06036, eq. 4.
    """
    return jnp.exp(-jnp.arange(num_draft_tokens, dtype=jnp.float32) / gamma)


def weighted_cross_entropy(
    logits: Float[Array, "*n v"], labels: Int[Array, "*n"], weights: Float[Array, "*n"]
) -> tuple[Float[Array, ""], LossAux]:
    """Cross-entropy against hard labels as one weighted mean over all positions.

    Does not shift labels and does not decide weights.

    Args:
      logits: Any float dtype; computed in float32.
      labels: int32 ids in [0, v) wherever the weight is positive; anything elsewhere.
      weights: Float, >= 0; zero removes a position.

    Returns:
      (loss, aux): float32 scalar, 0 if all weights are zero; and `LossAux`, whose per-position
      entries are 0 and False where the weight is zero.

    Example: logits (0, 0) and (0, ln 3), labels 0 and 1, weights 1 and .5
      -> (1 * ln 2 + .5 * ln(4/3)) / 1.5 = .5580.
    """
    is_counted = weights > 0
    logits = jnp.where(is_counted[..., None], logits.astype(jnp.float32), 0.0)
    labels = jnp.where(is_counted, labels, 0)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    cross_entropy = jnp.where(is_counted, jax.nn.logsumexp(logits, axis=-1) - picked, 0.0)
    is_correct = is_counted & (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels)
    weights = weights.astype(jnp.float32)
    weight_sum = jnp.sum(weights)
    safe_sum = jnp.where(weight_sum > 0, weight_sum, 1.0)
    loss = jnp.sum(weights * cross_entropy) / safe_sum
    accuracy = jnp.sum(weights * is_correct.astype(jnp.float32)) / safe_sum
    return loss, LossAux(weight_sum, accuracy, cross_entropy, is_correct)


def shift_labels(
    token_ids: Int[Array, "b s"], loss_mask: Bool[Array, "b s"], segment_ids: Int[Array, "b s"]
) -> tuple[Int[Array, "b s"], Bool[Array, "b s"]]:
    """Turns a packed row into next-token labels that never cross a document.

    Args:
      token_ids: Packed ids.
      loss_mask: True on tokens to be learned (the answers).
      segment_ids: 0 is padding, 1.. number the documents.

    Returns:
      (labels, mask): labels[i] = token_ids[i + 1]; mask[i] iff token i + 1 is to be learned and
      stands in the same document as token i. The last label is 0 and masked out.

    Example: ids (5, 6, 7, 8), learned (F, T, T, T), documents (1, 1, 2, 2)
      -> labels (6, 7, 8, 0), mask (T, F, T, F).
    """
    labels = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    is_same = (segment_ids[:, :-1] == segment_ids[:, 1:]) & (segment_ids[:, 1:] > 0)
    mask = jnp.pad(loss_mask[:, 1:] & is_same, ((0, 0), (0, 1)))
    return labels, mask


def next_token_loss(
    logits: Float[Array, "b s v"], labels: Int[Array, "b s"], mask: Bool[Array, "b s"]
) -> tuple[Float[Array, ""], LossAux]:
    """Mean cross-entropy of the next token over the masked-in positions.

    Does not shift: labels come from `shift_labels`.

    Args:
      logits: Prediction after each position.
      labels: The id that follows each position.
      mask: True where the label counts.

    Returns:
      (loss, aux) as `weighted_cross_entropy`; `weight_sum` is the number of counted tokens.

    Example: logits all equal over v=11 ids -> ln 11 = 2.3979, whatever the mask.
    """
    return weighted_cross_entropy(logits, labels, mask.astype(jnp.float32))


def divergence(
    logits: Float[Array, "b s v"],
    teacher_logits: Float[Array, "b s v"],
    mask: Bool[Array, "b s"],
) -> Float[Array, ""]:
    """Mean Kullback-Leibler divergence of a student from its teacher, KL(teacher | student).

    Stops no gradient: that is the caller's.

    Args:
      logits: The student's.
      teacher_logits: Of the same positions.
      mask: Positions that count; others may hold anything.

    Returns:
      float32 nats per position, >= 0; 0 if no position counts.

    Example: teacher (0, ln 3), student (0, 0) -> .25 ln(.25 / .5) + .75 ln(.75 / .5) = .1308.
    """
    safe = lambda x: jnp.where(mask[..., None], x.astype(jnp.float32), 0.0)
    student = jax.nn.log_softmax(safe(logits), axis=-1)
    teacher = jax.nn.log_softmax(safe(teacher_logits), axis=-1)
    per_position = jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)
    count = jnp.sum(mask.astype(jnp.float32))
    return jnp.sum(jnp.where(mask, per_position, 0.0)) / jnp.maximum(count, 1.0)


def accept_lengths(
    is_correct: Bool[Array, "*n m"], is_valid: Bool[Array, "*n m"]
) -> tuple[Float[Array, "*n"], Bool[Array, "*n"]]:
    """Accept length that greedy decoding would see on each block: 1 + accepted prefix.

    A proxy measured on the training text; the true accept length comes from decoding.

    Args:
      is_correct: Draft slot k's argmax equals its label.
      is_valid: Slot k has a label. A slot without one ends the prefix, so blocks cut by their
        document's end count with what they hold; blocks whose first slot has none do not count.

    Returns:
      (lengths, is_counted): float32 in [1, m + 1], 0 where the block does not count.

    Example: m=3, all valid, hits (T, T, F) and (F, T, T) -> lengths 3 and 1.
    """
    hits = (is_correct & is_valid).astype(jnp.float32)
    accept_len = 1.0 + jnp.sum(jnp.cumprod(hits, axis=-1), axis=-1)
    is_counted = is_valid[..., 0]
    return jnp.where(is_counted, accept_len, 0.0), is_counted
