"""What a draft block is taught: the loss of every slot, and how much the slot counts.

An objective is a mixture of terms per slot (cross-entropy against the text, divergences from the
target's own distribution there) and one rule for the weights of slots. It is one global weighted
mean, sum(w * l) / sum(w), over all counted slots of the batch, so a mixture needs no balancing of
counts, and a batch may be worked through in pieces: sums add, means do not.

D-PACE weighs slot k by what its being right is worth: the expected number of accepted tokens from
k on, under the drafter's own (smoothed) probabilities. Differs: normalised by the sum of weights
like every other rule here (SpecForge divides by the batch size), so its gradient keeps its size
while the drafter, and with it every weight, grows.

Traps: the target's distribution of slot k (position a + k) comes from its state at a + k - 1, one
before the slot; weights of D-PACE depend on the parameters and must pass no gradient; slots of
weight zero may hold NaN and ids out of range, and are cut out before the softmax, not after it.

Source: DFlash, arXiv:2602.06036, eq. 4; D-PACE, arXiv:2605.18810.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.config import require
from mimo_jax.train.losses import draft_position_weights

POSITION, DPACE = "position", "d-pace"
WEIGHTINGS = (POSITION, DPACE)


@dataclasses.dataclass(frozen=True)
class ObjectiveConfig:
    """Shares of the terms in a slot's loss, and how slots are weighed.

    Attributes:
      cross_entropy: Of -log q(label): the text is right.
      forward_kl: Of KL(p | q), p the target's distribution at the slot, q the drafter's: q must
        cover what p does.
      reverse_kl: Of KL(q | p): q must keep to what p does.
      total_variation: Of the half L1 distance, the chance that a sampled draft is rejected.
      weighting: POSITION (paper) or DPACE.
      gamma: Decay of the position weights exp(-(k - 1) / gamma), in slots.
      dpace_alpha: Floor of the probabilities that D-PACE multiplies; 0 trusts the drafter's own,
        1 weighs by what stands after a slot alone.

    Example: `ObjectiveConfig(cross_entropy=0.1, total_variation=0.9, weighting=DPACE)`.
    """

    cross_entropy: float = 1.0
    forward_kl: float = 0.0
    reverse_kl: float = 0.0
    total_variation: float = 0.0
    weighting: str = POSITION
    gamma: float = 4.0
    dpace_alpha: float = 0.5

    def __post_init__(self):
        shares = (self.cross_entropy, self.forward_kl, self.reverse_kl, self.total_variation)
        require(
            min(shares) >= 0 and sum(shares) > 0,
            f"objective: shares {list(shares)} must be at least 0, and one of them above it",
        )
        require(
            self.weighting in WEIGHTINGS,
            f"objective.weighting {self.weighting!r} is unknown; allowed: {', '.join(WEIGHTINGS)}",
        )
        require(self.gamma > 0, f"objective.gamma {self.gamma} must be above 0")
        require(
            0 <= self.dpace_alpha <= 1,
            f"objective.dpace_alpha {self.dpace_alpha} is out of range; allowed: 0 to 1",
        )

    @property
    def needs_target(self) -> bool:
        """Whether a term reads the target's distribution."""
        return max(self.forward_kl, self.reverse_kl, self.total_variation) > 0


class SlotScores(NamedTuple):
    """Per draft slot [n, m]: its loss, its weight (no gradient), whether the argmax is its label.

    All 0 and False where the slot does not count.
    """

    loss: Float[Array, "n m"]
    weight: Float[Array, "n m"]
    is_correct: Bool[Array, "n m"]


def forward_kl(
    log_q: Float[Array, "*n v"], log_p: Float[Array, "*n v"]
) -> Float[Array, "*n"]:
    """KL(p | q) in nats, of log-probabilities.

    Example: p (1/4, 3/4), q (1/2, 1/2) -> .1308.
    """
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def reverse_kl(
    log_q: Float[Array, "*n v"], log_p: Float[Array, "*n v"]
) -> Float[Array, "*n"]:
    """KL(q | p) in nats, of log-probabilities.

    Example: p (1/4, 3/4), q (1/2, 1/2) -> .1438.
    """
    return forward_kl(log_p, log_q)


def total_variation(
    log_q: Float[Array, "*n v"], log_p: Float[Array, "*n v"]
) -> Float[Array, "*n"]:
    """Half the L1 distance of two distributions given as log-probabilities, in [0, 1].

    Example: p (1/4, 3/4), q (1/2, 1/2) -> .25.
    """
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


def dpace_weights(
    label_probs: Float[Array, "n m"], is_valid: Bool[Array, "n m"], alpha: float
) -> Float[Array, "n m"]:
    """Weights of slots by what their being right is worth; passes no gradient.

    With smoothed probabilities s_k = (1 - alpha) q_k + alpha and their products c_k = s_1 ... s_k,
    slot k weighs c_k + ... + c_m. A slot without a label is 1 in the products and 0 in the sums.

    Args:
      label_probs: The drafter's probability of each slot's label; anything where not valid.
      is_valid: Slots that have a label.
      alpha: In [0, 1].

    Returns:
      float32, 0 where not valid.

    Example: q (.9, .5, .8), all valid, alpha .5 -> c (.95, .7125, .64125),
      weights (2.30375, 1.35375, .64125).

    Source: arXiv:2605.18810.
    """
    label_probs = jnp.where(is_valid, jax.lax.stop_gradient(label_probs), 1.0)
    reach = jnp.cumprod((1 - alpha) * label_probs + alpha, axis=1)
    counted = jnp.where(is_valid, reach, 0.0)
    from_here_on = jnp.cumsum(counted[:, ::-1], axis=1)[:, ::-1]
    return jnp.where(is_valid, from_here_on, 0.0)


def score_slots(
    config: ObjectiveConfig,
    logits: Float[Array, "n m v"],
    labels: Int[Array, "n m"],
    is_valid: Bool[Array, "n m"],
    target_logits: Float[Array, "n m v"] | None = None,
) -> SlotScores:
    """Losses and weights of the draft slots of n blocks.

    Args:
      config: The objective.
      logits: The drafter's, of slots 1..m; any float dtype, computed in float32.
      labels: int32 ids in [0, v) where valid; anything elsewhere.
      is_valid: Slots that count.
      target_logits: The target's of the same slots (its states one position earlier), over the
        drafter's vocabulary; needed if `config.needs_target`. Passes no gradient.

    Returns:
      `SlotScores`; the loss of the batch is sum(weight * loss) / sum(weight) over all its blocks.

    Raises:
      ConfigError: If a term asks for the target's logits and there are none.

    Example: m=1, logits (0, ln 3), label 1, cross-entropy alone -> loss ln(4/3), weight 1.
    """
    require(
        target_logits is not None or not config.needs_target,
        "objective: forward_kl, reverse_kl and total_variation need the target's logits",
    )
    cut_out = lambda x: jnp.where(is_valid[..., None], x.astype(jnp.float32), 0.0)
    logits, labels = cut_out(logits), jnp.where(is_valid, labels, 0)
    log_total = jax.nn.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    cross_entropy = log_total - picked
    loss = config.cross_entropy * cross_entropy
    if config.needs_target:
        assert target_logits is not None
        log_q = logits - log_total[..., None]
        log_p = jax.nn.log_softmax(jax.lax.stop_gradient(cut_out(target_logits)), axis=-1)
        for term in (forward_kl, reverse_kl, total_variation):
            share = getattr(config, term.__name__)
            if share > 0:
                loss += share * term(log_q, log_p)
    if config.weighting == DPACE:
        weight = dpace_weights(jnp.exp(-cross_entropy), is_valid, config.dpace_alpha)
    else:
        of_slot = draft_position_weights(labels.shape[1], config.gamma)
        weight = jnp.where(is_valid, of_slot[None, :], 0.0)
    is_correct = is_valid & (jnp.argmax(logits, axis=-1).astype(labels.dtype) == labels)
    return SlotScores(jnp.where(is_valid, loss, 0.0), weight, is_correct)
