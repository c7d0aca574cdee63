"""The decode loop as pure functions, for people who bring their own.

    from mimo_jax import Engine, Request, emitted_ids, initial_state, step_function

    engine = Engine(llm.target, llm.drafter, max_len=128, batch_size=2)
    state = initial_state(engine, [Request([40, 41, 42], 32), Request([7, 8], 20)])
    step = jax.jit(step_function(engine), donate_argnums=1)
    while not state.is_done.all():
        state = step(engine.params, state)
        print(emitted_ids(state))

A step is draft, verify, accept and commit (with a policy, or without a drafter, whatever the engine
does), one call of the body that `Engine.run` loops over. It reads nothing but its arguments: it can
be jitted, put into a `lax.while_loop` or `fori_loop` of yours, timed or lowered. A finished row
stands still. `Engine.run` does the same faster where the host has nothing to do between two steps.

What a `DecodeState` holds is documented in `step.py`; `dataclasses.replace(state, ...)` of its
per-row fields (sampling, max_len, finish, stop_ids) between two steps is fine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mimo_jax.config import ConfigError
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.request import Request
from mimo_jax.decode.step import DecodeState


def initial_state(engine: Engine, requests: Sequence[Request]) -> DecodeState:
    """A batch whose prompts are read and whose first tokens are committed.

    Args:
      engine: Fits every request.
      requests: One per row.

    Raises:
      ConfigError: If there are fewer or more, or one does not fit the engine.

    Example: batch_size 2, requests of 3 and 2 prompt ids -> length [4, 3].
    """
    if len(requests) != engine.batch_size:
        raise ConfigError(f"{len(requests)} requests for {engine.batch_size} rows; give one each")
    state = None
    for row, request in enumerate(requests):
        row_state = engine.prefill(request)
        if state is None:
            state = row_state if engine.batch_size == 1 else engine.empty_state(row_state)
        state = engine.insert(state, row_state, row)
    assert state is not None, "there is a request"
    return state


def step_function(
    engine: Engine, num_steps: int = 1
) -> Callable[[Any, DecodeState], DecodeState]:
    """A pure function (engine.params, state) -> state after up to num_steps steps.

    Args:
      engine: That made the state.
      num_steps: >= 1.

    Raises:
      ConfigError: If num_steps is below 1.
    """
    if num_steps < 1:
        raise ConfigError(f"num_steps {num_steps} is out of range; allowed: >= 1")

    def step(params: Any, state: DecodeState) -> DecodeState:
        return engine.steps_program(state)(params, state, *engine.loop_args(num_steps))

    return step


def emitted_ids(state: DecodeState) -> list[list[int]]:
    """Ids that each row has emitted so far, a stop id included; reads the device.

    A row's prompt is what it held before its first step, less the token that prefill sampled.

    Example: prompt of 3, length 6, one step of 2 tokens -> the last 3 of 6 tokens.
    """
    tokens, length, committed = jax.device_get(
        (state.tokens, state.length, state.committed_per_step)
    )
    starts = length - 1 - committed.sum(axis=1, dtype=np.int32)
    return [row[a:b].tolist() for row, a, b in zip(tokens, starts, length, strict=True)]
