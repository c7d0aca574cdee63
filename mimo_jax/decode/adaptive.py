"""A decode step whose block length the controller picks: plain, half or full, in one program.

Every rung is a branch of one `lax.switch` of its own width, so that a plain step costs one token
and not a padded block. While a row decodes plainly its context features are kept aside (`Pending`)
and go into the drafter's memory 32 at a time, or when a block is drafted next: a projection of one
position per step would cost several per cent of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from mimo_jax.decode import controller
from mimo_jax.decode.step import (
    BlockDrafter,
    DecodeState,
    Pending,
    StepResult,
    plain_step,
    speculative_step,
)
from mimo_jax.models.target import Target

MAX_PENDING = 32


def empty_pending(batch_size: int, context_width: int, dtype) -> Pending:
    """Nothing kept aside."""
    return Pending(
        jnp.zeros((batch_size, MAX_PENDING, context_width), dtype),
        jnp.zeros((batch_size,), jnp.int32),
    )


def flush(drafter: BlockDrafter, cache, pending: Pending, anchor_pos: Int[Array, "b"]):
    """(memory, nothing pending): moves what was kept aside into the drafter's memory.

    Rows with less than 32 write garbage behind it, at or past their anchor, where no query looks.
    """
    cache = drafter.inject_context(cache, pending.features, anchor_pos - pending.num)
    return cache, pending._replace(num=jnp.zeros_like(pending.num))


def _keep(pending: Pending, features) -> Pending:
    """With one more position [b, 1, c] of each row kept."""
    slots = jnp.arange(MAX_PENDING, dtype=jnp.int32)[None, :]
    is_next = (slots == pending.num[:, None])[:, :, None]
    return Pending(jnp.where(is_next, features, pending.features), pending.num + 1)


def adaptive_step(
    target: Target,
    drafter: BlockDrafter,
    state: DecodeState,
    *,
    mode: str,
    draft_block_len: int,
    rule: str,
    policy: str,
) -> tuple[DecodeState, StepResult]:
    """One step of the rung that the controller picks.

    Returns:
      (state with control and kept features as after the step, result padded to a full block).
    """
    assert state.control is not None, "an adaptive state has a controller"
    lengths = controller.ladder(draft_block_len)
    top, is_running = len(lengths) - 1, ~state.is_done
    control, rung = controller.choose(state.control, is_running, lengths, policy)
    width = jnp.max(jnp.where(is_running, rung, 0))

    def pad(result: StepResult) -> StepResult:
        behind = draft_block_len - result.emitted.shape[1]
        fill = lambda x: jnp.pad(x, ((0, 0), (0, behind)) + ((0, 0),) * (x.ndim - 2))
        return result._replace(
            emitted=fill(result.emitted), logprobs=jax.tree.map(fill, result.logprobs)
        )

    def flush_if(is_wanted, cache, pending, anchor_pos):
        return jax.lax.cond(
            is_wanted, lambda c, p: flush(drafter, c, p, anchor_pos), lambda c, p: (c, p), cache,
            pending,
        )

    def plainly(state: DecodeState):
        result, features = plain_step(
            target, state, mode=mode, tap_layer_ids=drafter.config.target_layer_ids
        )
        assert state.pending is not None
        pending = _keep(state.pending, features)
        is_full = (pending.num == MAX_PENDING).any()
        cache, pending = flush_if(is_full, state.drafter_cache, pending, state.length)
        return pending, pad(result._replace(drafter_cache=cache))

    def drafting(length: int):
        def run(state: DecodeState):
            assert state.pending is not None
            has_kept = (state.pending.num > 0).any()
            cache, pending = flush_if(
                has_kept, state.drafter_cache, state.pending, state.length - 1
            )
            state = dataclasses.replace(state, drafter_cache=cache)
            most = jnp.take(jnp.asarray(lengths, jnp.int32), rung)
            result = speculative_step(
                target,
                drafter,
                state,
                mode=mode,
                draft_block_len=length,
                rule=rule,
                most_active=most,
            )
            return pending, pad(result)

        return run

    branches = [plainly, *(drafting(length) for length in lengths[1:])]
    pending, result = jax.lax.switch(width, branches, state)
    control = controller.observe(
        control, rung, result.num_accepted, result.num_offered, is_running, top
    )
    return dataclasses.replace(state, control=control, pending=pending), result


def row_control(lengths: tuple[int, ...], scene: str | None) -> controller.Control:
    """A fresh row's control, with the thresholds of its scene; unknown scenes have chat's."""
    control = controller.initial(1, lengths)
    bars = controller.PROFILES.get(scene or "chat", controller.PROFILES["chat"])
    kept: Int[Array, "b"] = jnp.asarray([bars[-(len(lengths) - 1) :]], jnp.float32)
    return control._replace(thresholds=kept)
