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
as often as 1% of the time allows. The state may be carried to the next prompt of the same scene.
"""

from typing import NamedTuple

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
_PROBE_SHARE = 0.01
_MIN_PROBE_EVERY, _MAX_PROBE_EVERY = 32, 4096
_PROFILE_PROBE_EVERY = 64
_PRIOR = 0.8  # acceptance rate of a position that was never tried
_PRIOR_GAIN = 0.5  # tokens per tree, before one was tried


class Control(NamedTuple):
    """State of the controller, per row.

    Attributes:
      alpha: float32 [b, m], acceptance rate of each position, given the ones before.
      num_blocks: int32 [b], blocks that the estimate has seen.
      rung: int32 [b], 0 = plain.
      since_probe: int32 [b], steps since the last full block; negative within a burst.
      costs: float32 [b, r], time of a step of each rung, in any unit.
      thresholds: float32 [b, rungs of chains - 1], accept length from which each is kept.
      tree_gain: float32 [b], tokens that a tree commits beyond what its first choices alone would;
        None where the ladder has no tree.
    """

    alpha: Float[Array, "b m"]
    num_blocks: Int[Array, "b"]
    rung: Int[Array, "b"]
    since_probe: Int[Array, "b"]
    costs: Float[Array, "b r"]
    thresholds: Float[Array, "b r1"]
    tree_gain: Float[Array, "b"] | None


def ladder(draft_block_len: int, has_tree: bool = False) -> tuple[int, ...]:
    """Block lengths of the rungs; a tree, if any, is the last.

    Example: 8 -> (1, 4, 8), with a tree (1, 4, 8, 8); 3 -> (1, 3).
    """
    half = draft_block_len // 2
    chains = (1, half, draft_block_len) if half >= 2 else (1, draft_block_len)
    return (*chains, draft_block_len) if has_tree else chains


def initial(batch_size: int, lengths: tuple[int, ...], has_tree: bool = False) -> Control:
    """A controller that has seen nothing and starts with the top rung."""
    m, top = lengths[-1] - 1, len(lengths) - 1
    fill = lambda value: jnp.full((batch_size,), value, jnp.int32)
    return Control(
        alpha=jnp.full((batch_size, m), _PRIOR, jnp.float32),
        num_blocks=fill(0),
        rung=fill(top),
        since_probe=fill(0),
        costs=jnp.broadcast_to(jnp.asarray(lengths, jnp.float32), (batch_size, top + 1)),
        thresholds=jnp.zeros((batch_size, top - has_tree), jnp.float32),
        tree_gain=jnp.full((batch_size,), _PRIOR_GAIN, jnp.float32) if has_tree else None,
    )


def expected_tokens(
    alpha: Float[Array, "b m"],
    lengths: tuple[int, ...],
    tree_gain: Float[Array, "b"] | None = None,
) -> Float[Array, "b r"]:
    """Tokens that a step of each rung is expected to commit.

    Example: alpha (.5, .4, .5), lengths (1, 2, 4) -> 1, 1 + .5, 1 + .5 + .2 + .1; lengths
      (1, 2, 4, 4) and a tree's gain of .3 -> the same and 2.1.
    """
    sums = jnp.pad(jnp.cumsum(jnp.cumprod(alpha, axis=1), axis=1), ((0, 0), (1, 0)))
    tokens = 1.0 + jnp.stack([sums[:, length - 1] for length in lengths], axis=1)
    return tokens if tree_gain is None else tokens.at[:, -1].add(tree_gain)


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
    tokens = expected_tokens(control.alpha, lengths, control.tree_gain)
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
    # What a burst costs beyond the kept rung's time for as many tokens, in plain steps.
    at = lambda x: jnp.take_along_axis(x, rung[:, None], axis=1)[:, 0]
    worth = tokens[:, top] * at(control.costs) / at(tokens)
    loss = jnp.maximum(control.costs[:, top] - worth, 0.0) / control.costs[:, 0] * BURST_LEN
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
    tree_accepted: Int[Array, "b"] | None = None,
) -> Control:
    """The control after one block.

    Args:
      control: As `choose` returned it.
      rung: As `choose` returned it.
      num_accepted: Drafts accepted; of a tree, of its chain of first choices.
      num_offered: Drafts that could have been; 0 for a row that took a step of the block's width
        plainly.
      is_running: Rows that took the step.
      top: Number of the top rung.
      tree_accepted: Nodes accepted, if it was a tree.
    """
    slot = jnp.arange(1, control.alpha.shape[1] + 1, dtype=jnp.int32)[None, :]
    drafted = is_running & (num_offered > 0)
    rate = jnp.maximum(_RATE, 1.0 / (control.num_blocks + 4).astype(jnp.float32))[:, None]
    survived = (slot <= num_accepted[:, None]).astype(jnp.float32)
    moved = control.alpha + rate * (survived - control.alpha)
    is_tried = drafted[:, None] & (slot <= jnp.minimum(num_accepted + 1, num_offered)[:, None])
    gain = control.tree_gain
    if gain is not None and tree_accepted is not None:
        # A tree that ends where its first choices were all right does not say what a chain had won.
        is_whole = num_accepted < num_offered
        extra = jnp.where(is_whole, tree_accepted - num_accepted, 0).astype(jnp.float32)
        gain = jnp.where(drafted, gain + rate[:, 0] * (extra - gain), gain)
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
        tree_gain=gain,
    )


def observe_plain(control: Control, num_steps: Int[Array, "b"]) -> Control:
    """The control after some plain steps of each row."""
    return control._replace(since_probe=control.since_probe + num_steps)


def carried(control: Control, earlier: Control | None) -> Control:
    """A fresh row's control with what an earlier row of the same scene has learnt."""
    if earlier is None:
        return control
    return earlier._replace(costs=control.costs, thresholds=control.thresholds)
