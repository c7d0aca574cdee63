"""How long the next draft block shall be: a state machine per row, inside the loop, without a host.

Drafting pays where a round's expected tokens exceed its cost in plain steps, which depends on the
text and on the machine. The controller keeps, per row, a running estimate of the acceptance rate of
each position, and each step takes the rung of a ladder (plain, half block, full block) by one of
two policies. The rates are conditional (given that all earlier drafts were accepted), so that half
blocks teach something about full ones.

  * costs     the rung with the most expected tokens per second, all rows together, from measured
              times of a step of each rung on this device. One program serves all rungs, so the
              batch moves together and switching compiles nothing.
  * profile   thresholds on a row's own running accept length, by scene.

A rung is left only for one that is 5% better (costs) or by 0.3 tokens (profile): without this the
estimate's noise makes it flutter. Below the top rung a burst of full blocks probes now and then,
as often as 2% of the time allow. The state may be carried to a job's next prompt of the same scene.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.layers.linear import psum_over
from mimo_jax.layers.vocab import max_over

COSTS, PROFILE = "costs", "profile"

# Running accept length from which a row keeps (half blocks, full blocks); the seed system's bars.
PROFILES = {
    "code": (3.0, 6.0),
    "code-gen": (3.0, 6.0),
    "code-stdlib": (3.0, 6.0),
    "math": (2.5, 5.0),
    "agent": (2.0, 4.0),
    "chat": (2.0, 4.0),
}

_RATE = 1 / 16  # of the running estimate, once it has seen 12 blocks
_BETTER = 1.05
_MARGIN = 0.3
BURST_LEN = 4  # full blocks per probe: one alone says little
_PROBE_SHARE = 0.02
_MIN_PROBE_EVERY, _MAX_PROBE_EVERY = 32, 4096
_PROFILE_PROBE_EVERY = 64
_PRIOR = 0.8  # acceptance rate of a position that was never tried


class Control(NamedTuple):
    """State of the controller, per row.

    Attributes:
      alpha: float32 [b, m], acceptance rate of each position, given the ones before.
      num_blocks: int32 [b], blocks that the estimate has seen.
      rung: int32 [b], 0 = plain.
      since_probe: int32 [b], steps since the last full block; negative within a burst.
      costs: float32 [b, r], time of a step of each rung, in any unit.
      thresholds: float32 [b, r - 1], accept length from which each rung above plain is kept.
    """

    alpha: Float[Array, "b m"]
    num_blocks: Int[Array, "b"]
    rung: Int[Array, "b"]
    since_probe: Int[Array, "b"]
    costs: Float[Array, "b r"]
    thresholds: Float[Array, "b r1"]


def ladder(draft_block_len: int) -> tuple[int, ...]:
    """Block lengths of the rungs. Example: 8 -> (1, 4, 8); 3 -> (1, 3)."""
    half = draft_block_len // 2
    return (1, half, draft_block_len) if half >= 2 else (1, draft_block_len)


def initial(batch_size: int, lengths: tuple[int, ...]) -> Control:
    """A controller that has seen nothing and starts with full blocks."""
    m, top = lengths[-1] - 1, len(lengths) - 1
    fill = lambda value: jnp.full((batch_size,), value, jnp.int32)
    return Control(
        alpha=jnp.full((batch_size, m), _PRIOR, jnp.float32),
        num_blocks=fill(0),
        rung=fill(top),
        since_probe=fill(0),
        costs=jnp.broadcast_to(jnp.asarray(lengths, jnp.float32), (batch_size, top + 1)),
        thresholds=jnp.zeros((batch_size, top), jnp.float32),
    )


def expected_tokens(alpha: Float[Array, "b m"], lengths: tuple[int, ...]) -> Float[Array, "b r"]:
    """Tokens that a step of each rung is expected to commit.

    Example: alpha (.5, .4, .5), lengths (1, 2, 4) -> 1, 1 + .5, 1 + .5 + .2 + .1.
    """
    sums = jnp.pad(jnp.cumsum(jnp.cumprod(alpha, axis=1), axis=1), ((0, 0), (1, 0)))
    return 1.0 + jnp.stack([sums[:, length - 1] for length in lengths], axis=1)


def choose(
    control: Control,
    is_running: Bool[Array, "b"],
    lengths: tuple[int, ...],
    policy: str,
    row_axis: str | None = None,
) -> tuple[Control, Int[Array, "b"]]:
    """The rung of each row for the next step, and the control with its lasting choice noted.

    Choosing twice without an observation in between changes nothing.

    Args:
      control: State.
      is_running: Rows that still decode; the others do not vote.
      lengths: As `ladder` gives them.
      policy: COSTS or PROFILE.
      row_axis: Mesh axis that the rows are cut over: all of them vote.

    Returns:
      (control, rung int32 [b]); within a probe the rung is the top one while control.rung stays.
    """
    top = len(lengths) - 1
    tokens = expected_tokens(control.alpha, lengths)
    if policy == COSTS:
        votes = jnp.where(is_running[:, None], tokens / control.costs, 0.0).sum(axis=0)
        votes = psum_over(votes, row_axis)
        held = highest(jnp.where(is_running, control.rung, 0), row_axis)
        best = jnp.argmax(votes).astype(jnp.int32)
        kept = jnp.where(votes[best] > _BETTER * votes[held], best, held)
        rung = jnp.broadcast_to(kept, control.rung.shape)
    else:
        running_len = tokens[:, -1:]
        moves_up = jnp.arange(1, top + 1, dtype=jnp.int32)[None, :] > control.rung[:, None]
        bar = control.thresholds + jnp.where(moves_up, _MARGIN, 0.0)
        rung = (running_len >= bar).sum(axis=1, dtype=jnp.int32)
    relative = control.costs[:, top] / control.costs[:, 0]
    loss = jnp.maximum(relative - tokens[:, top], 0.0) * BURST_LEN  # in plain steps
    every = jnp.clip(loss / _PROBE_SHARE, _MIN_PROBE_EVERY, _MAX_PROBE_EVERY)
    if policy == PROFILE:  # without measured costs
        every = jnp.full_like(every, _PROFILE_PROBE_EVERY)
    since = control.since_probe.astype(jnp.float32)
    is_due = (since >= every) | (since < 0)
    is_due &= is_running
    if policy == COSTS:
        is_due = jnp.broadcast_to(highest(is_due.astype(jnp.int32), row_axis) > 0, is_due.shape)
    return control._replace(rung=rung), jnp.where(is_due, top, rung)


def highest(x: Int[Array, "b"], row_axis: str | None) -> Int[Array, ""]:
    """The maximum over all rows, those of other devices included."""
    return max_over(x.max().astype(jnp.float32), row_axis).astype(jnp.int32)


def observe(
    control: Control,
    rung: Int[Array, "b"],
    num_accepted: Int[Array, "b"],
    num_offered: Int[Array, "b"],
    is_running: Bool[Array, "b"],
    top: int,
) -> Control:
    """The control after one block.

    Args:
      control: As `choose` returned it.
      rung: As `choose` returned it.
      num_accepted: Drafts accepted.
      num_offered: Drafts that could have been; 0 for a row that took a step of the block's width
        plainly.
      is_running: Rows that took the step.
      top: Number of the top rung.
    """
    slot = jnp.arange(1, control.alpha.shape[1] + 1, dtype=jnp.int32)[None, :]
    drafted = is_running & (num_offered > 0)
    rate = jnp.maximum(_RATE, 1.0 / (control.num_blocks + 4).astype(jnp.float32))[:, None]
    survived = (slot <= num_accepted[:, None]).astype(jnp.float32)
    moved = control.alpha + rate * (survived - control.alpha)
    is_tried = drafted[:, None] & (slot <= jnp.minimum(num_accepted + 1, num_offered)[:, None])
    is_top = rung == top
    # The first full block of a probe begins a burst, which counts up from below zero.
    since = jnp.where(
        is_top & (control.since_probe > 0) & (control.rung < top),
        1 - BURST_LEN,
        jnp.where(is_top & (control.rung == top), 0, control.since_probe + 1),
    )
    return control._replace(
        alpha=jnp.where(is_tried, moved, control.alpha),
        num_blocks=control.num_blocks + drafted.astype(jnp.int32),
        since_probe=jnp.where(is_running, since, control.since_probe),
    )


def observe_plain(control: Control, num_steps: Int[Array, "b"]) -> Control:
    """The control after some plain steps of each row."""
    return control._replace(since_probe=control.since_probe + num_steps)


def carried(control: Control, earlier: Control | None) -> Control:
    """A fresh row's control with what an earlier row of the same scene has learnt."""
    if earlier is None:
        return control
    return earlier._replace(costs=control.costs, thresholds=control.thresholds)


def forced(control: Control, rung: int) -> Control:
    """A control that takes one rung whatever happens: to measure its cost."""
    r = control.costs.shape[1]
    costs = jnp.where(jnp.arange(r) == rung, 1.0, 1e9)
    never = jnp.full_like(control.since_probe, 0)
    return jax.tree.map(
        jnp.asarray,
        control._replace(
            costs=jnp.broadcast_to(costs, control.costs.shape),
            rung=jnp.full_like(control.rung, rung),
            since_probe=never,
        ),
    )
