"""A decode loop in which the controller picks each block's length: plain, half or full.

Every rung is an inner loop of its own width, so that a plain step costs one token and not a padded
block; the outer loop takes them in turn. Rejected: one `lax.switch` per step, which on XLA:CPU
copies the caches that its branches pass on (a plain step then took 1.1 to 1.4 times its time).

While a row decodes plainly its context features are kept aside (`Pending`) and go into the
drafter's memory 128 at a time, or when a block is drafted next: a projection of one position per
step would cost several per cent of it. The controller is asked then, and after each block, not
after each plain step, whose tenth its small operations would be.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mimo_jax.decode import controller
from mimo_jax.decode.step import (
    BlockDrafter,
    DecodeState,
    Pending,
    commit,
    num_running,
    plain_step,
    speculative_step,
    write_at,
)
from mimo_jax.decode.tree import Chain, tree_step
from mimo_jax.models.target import Target

MAX_PENDING = 128  # positions kept aside; at 32 the plain rung was 16-20% behind a plain loop
PIECE_LEN = 32  # of them that are projected at once: the slack of the drafter's memory


def empty_pending(batch_size: int, context_width: int, dtype) -> Pending:
    """Nothing kept aside."""
    return Pending(
        jnp.zeros((batch_size, MAX_PENDING, context_width), dtype),
        jnp.zeros((batch_size,), jnp.int32),
    )


def flush(
    target: Target,
    drafter: BlockDrafter,
    cache: Any,
    pending: Pending,
    tokens: Int[Array, "b s"],
    anchor_pos: Int[Array, "b"],
    is_wanted: Bool[Array, ""],
) -> tuple[Any, Pending]:
    """(memory, nothing pending) where wanted: moves what was kept aside into the drafter's memory.

    In pieces, as a loop: a branch would copy the memory on XLA:CPU. What a row has less than
    another is written as garbage at or past its anchor, where no query looks.
    """
    start, num = anchor_pos - pending.num, jnp.where(is_wanted, pending.num, 0)

    def piece(carry):
        offset, cache = carry
        features = jax.lax.dynamic_slice_in_dim(pending.features, offset, PIECE_LEN, axis=1)
        place = jnp.minimum(start + offset, anchor_pos)
        positions = place[:, None] + jnp.arange(PIECE_LEN, dtype=jnp.int32)[None, :]
        ids = jnp.take_along_axis(tokens, jnp.minimum(positions, tokens.shape[1] - 1), axis=1)
        return offset + PIECE_LEN, drafter.inject_context(
            target, cache, features, ids, place
        )

    none = jnp.zeros((), jnp.int32)
    cache = jax.lax.while_loop(lambda carry: carry[0] < num.max(), piece, (none, cache))[1]
    return cache, pending._replace(num=jnp.where(is_wanted, 0, pending.num))


def _keep(pending: Pending, features) -> Pending:
    """With one more position [b, 1, c] of each row kept."""
    return Pending(write_at(pending.features, features, pending.num), pending.num + 1)


def run_adaptive_steps(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    num_steps: Int[Array, ""],
    held: Int[Array, ""],
    *,
    mode: str,
    draft_block_len: int,
    rule: str,
    policy: str,
    max_verify_nodes: int | None = None,
    row_axis: str | None = None,
) -> DecodeState:
    """As `step.run_steps`, with the block length of each step picked by the controller.

    Args:
      target: Merged target.
      drafter: Merged drafter.
      state: Has control and pending; donated by the caller.
      num_steps: int32 scalar.
      held: int32 scalar, the rung to take whatever the controller says; -1 = what it picks.
      mode: Sampling mode, of sampling.MODES.
      draft_block_len: Slots of a full block.
      rule: Acceptance rule, of accept.RULES.
      policy: Of the controller, COSTS or PROFILE.
      max_verify_nodes: Nodes of the tree that is the top rung; None = there is none.
      row_axis: Mesh axis that the rows are cut over, or None.
    """
    lengths = controller.ladder(draft_block_len, max_verify_nodes is not None)
    top = len(lengths) - 1

    def pick(state: DecodeState):
        """(state, rung of each row, the highest of them)."""
        assert state.control is not None, "an adaptive state has a controller"
        is_running = ~state.is_done
        control, rung = controller.choose(state.control, is_running, lengths, policy, row_axis)
        rung = jnp.where(held < 0, rung, held)
        width = controller.highest(jnp.where(is_running, rung, 0), row_axis)
        return dataclasses.replace(state, control=control), rung, width

    def is_open(carry):
        num_done, running = carry[:2]
        return (num_done < num_steps) & (running > 0)

    def plain_body(carry):
        num_done, _, state = carry
        result, features = plain_step(
            target, state, mode=mode, tap_layer_ids=drafter.config.target_layer_ids
        )
        assert state.pending is not None
        state = dataclasses.replace(state, pending=_keep(state.pending, features))
        state = commit(state, result, target.mesh_axis)
        return num_done + 1, num_running(state, row_axis), state

    def flush_all(state: DecodeState, is_wanted):
        assert state.pending is not None
        memory = (state.drafter_cache, state.pending, state.tokens)
        return flush(target, drafter, *memory, state.length - 1, is_wanted)

    def plainly(carry):
        """Plain steps until as many features are kept as there is room for."""
        num_done, running, _, _, before = carry
        pending = before.pending
        last = num_done + MAX_PENDING - controller.highest(pending.num, row_axis)
        goes_on = lambda carry: is_open(carry) & (carry[0] < last)
        start = (num_done, running, before)
        num_done, running, state = jax.lax.while_loop(goes_on, plain_body, start)
        is_full = num_done == last
        cache, pending = flush_all(state, is_full)
        control = controller.observe_plain(state.control, state.num_steps - before.num_steps)
        state = dataclasses.replace(state, control=control, drafter_cache=cache, pending=pending)
        state, rung, width = pick(state)
        return num_done, running, width, rung, state

    def drafting(length: int, carry, *, is_tree: bool = False):
        """One block or tree."""
        num_done, _, _, rung, state = carry
        is_running = ~state.is_done
        cache, pending = flush_all(state, jnp.ones((), bool))
        state = dataclasses.replace(state, drafter_cache=cache, pending=pending)
        most_active = jnp.take(jnp.asarray(lengths, jnp.int32), rung)
        options: dict[str, Any] = {
            "mode": mode,
            "draft_block_len": length,
            "most_active": most_active,
        }
        if is_tree:
            options["num_nodes"] = max_verify_nodes
            result, chain = tree_step(target, drafter, state, **options)
        else:
            result = speculative_step(target, drafter, state, rule=rule, **options)
            chain = Chain(result.num_accepted, result.num_offered)
        control = controller.observe(
            state.control,
            rung,
            *chain,
            is_running,
            top,
            tree_accepted=result.num_accepted if is_tree else None,
        )
        state = dataclasses.replace(state, control=control)
        state = commit(state, result, target.mesh_axis)
        state, rung, width = pick(state)
        return num_done + 1, num_running(state, row_axis), width, rung, state

    bodies = [plainly, *(functools.partial(drafting, length) for length in lengths[1:])]
    if max_verify_nodes is not None:
        bodies[-1] = functools.partial(drafting, draft_block_len, is_tree=True)

    def in_turn(carry):
        for number, body in enumerate(bodies):
            stays = lambda carry, number=number: is_open(carry) & (carry[2] == number)
            carry = jax.lax.while_loop(stays, body, carry)
        return carry

    state, rung, width = pick(state)
    start = (jnp.zeros((), jnp.int32), num_running(state, row_axis), width, rung, state)
    return jax.lax.while_loop(is_open, in_turn, start)[-1]


def row_control(
    lengths: tuple[int, ...], scene: str | None, has_tree: bool = False
) -> controller.Control:
    """A fresh row's control, with the thresholds of its scene; unknown scenes have chat's."""
    control = controller.initial(1, lengths, has_tree)
    bars = controller.PROFILES.get(scene or "chat", controller.PROFILES["chat"])
    kept: Float[Array, "b r"] = jnp.asarray([bars[-control.thresholds.shape[1] :]], jnp.float32)
    return control._replace(thresholds=kept)
