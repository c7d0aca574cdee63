"""Routed experts: the router, and four ways to run the chosen experts, all exact.

Experts are stored gate and up [d, e, f], down [e, f, d]: all experts together are then three plain
matrices, [d, e*f] twice and [e*f, d]. Gate and up stay two matrices, here and in dense layers: 8
tokens through both cost 38 us, through one fused matrix 69 (192 to 384 twice, XLA:CPU, which runs
the two products side by side and fuses what follows).

Which way is a question of how many tokens there are, never of the result (training has a way of its
own, which may drop a token: `layers/dispatch.py`):

  * sliced:   a step of one token. Reads the chosen experts only, one dynamic slice each.
  * dense:    a draft block when experts are few. All experts as two wide matmuls, the unchosen
              weighted by zero: 8 tokens choosing 2 of 8 touch about 7 experts anyway. (Batched
              over experts the same products took 3x the time on XLA:CPU.)
  * grouped:  many tokens. Sort by expert, `lax.ragged_dot`.
  * packed:   MXFP4 experts, decoded where they are used: `layers/packed.py`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mimo_jax.layers.linear import linear
from mimo_jax.layers.packed import PackedExperts as PackedExperts
from mimo_jax.layers.packed import run_packed
from mimo_jax.layers.scaled import Fp8Weight


def swiglu(
    x: Float[Array, "*b d"],
    w_gate: Float[Array, "_ _"] | Fp8Weight,
    w_up: Float[Array, "_ _"] | Fp8Weight,
    w_down: Float[Array, "_ _"] | Fp8Weight,
    *,
    is_transposed: bool = False,
    sum_over: str | None = None,
):
    """down(silu(gate x) * (up x)), unclamped; weights [d, f], [d, f], [f, d] as `linear` takes.

    On a mesh each device holds a part of f; see `linear` for sum_over.
    """
    gate = linear(x, w_gate, is_transposed=is_transposed)
    up = linear(x, w_up, is_transposed=is_transposed)
    hidden = jax.nn.silu(gate) * up
    return linear(hidden, w_down, is_transposed=is_transposed, sum_over=sum_over)


def route(
    x: Float[Array, "t d"],
    w_router: Float[Array, "d e"],
    selection_bias: Float[Array, "e"],
    *,
    top_k: int,
    routed_scale: float,
    scoring: str = "sigmoid",
) -> tuple[Int[Array, "t top_k"], Float[Array, "t top_k"], Float[Array, "t e"]]:
    """Chooses top_k experts per token, in float32 whatever the dtype of x.

    The bias moves the choice only; weights come from the unbiased scores and are renormalised.
    Ties go to the lower index.

    Returns:
      expert ids int32 [t, top_k], weights float32 [t, top_k], logits float32 [t, e].

    Example: scores (.5, .6, .4), bias (0, 0, .3), top_k=2 -> ids (2, 1), weights (.4, .6).

    Source: arXiv:2412.19437 section 2.1.2 (auxiliary-loss-free balancing).
    """
    logits = x.astype(jnp.float32) @ w_router.astype(jnp.float32)
    if scoring == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    else:
        scores = jax.nn.softmax(logits, axis=-1)
    choice = scores + selection_bias.astype(jnp.float32)[None, :]
    _, expert_ids = jax.lax.top_k(choice, top_k)
    weights = jnp.take_along_axis(scores, expert_ids, axis=-1)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20) * routed_scale
    return expert_ids, weights, logits


class Experts(NamedTuple):
    """Weights of one layer's experts."""

    gate: Float[Array, "d e f"]
    up: Float[Array, "d e f"]
    down: Float[Array, "e f d"]


def run_experts(
    x: Float[Array, "t d"],
    expert_ids: Int[Array, "t top_k"],
    weights: Float[Array, "t top_k"],
    experts: Experts | PackedExperts,
) -> Float[Array, "t d"]:
    """Weighted sum of the chosen experts' SwiGLU, exact; picks the way by the number of tokens."""
    t, top_k = expert_ids.shape
    if isinstance(experts, PackedExperts):
        return run_packed(x, expert_ids, weights, experts)
    e = experts.down.shape[0]
    if t == 1 or t * top_k < e // 2:
        return _run_sliced(x, expert_ids, weights, experts)
    if e <= 4 * top_k:
        return _run_dense(x, expert_ids, weights, experts)
    return _run_grouped(x, expert_ids, weights, experts)


def route_and_run(
    route_fn: Callable,
    x: Float[Array, "b t d"],
    w_router: Float[Array, "d e"],
    selection_bias: Float[Array, "e"],
    experts: Experts | PackedExperts,
    *,
    run: Callable = run_experts,
) -> tuple[Float[Array, "b t d"], Int[Array, "b t top_k"], Float[Array, "b t top_k"]]:
    """A sparse layer: chooses experts and runs them; training puts its own way in its place.

    Args:
      route_fn: `route` with its options bound: (x, w_router, selection_bias) -> ids, weights, ...
      x: Tokens.
      w_router: As in `route`.
      selection_bias: As in `route`.
      experts: All experts.
      run: As `run_experts`.

    Returns:
      Weighted sum of the chosen experts, their ids, and their weights.
    """
    flat = x.reshape(-1, x.shape[-1])
    expert_ids, weights, _ = route_fn(flat, w_router, selection_bias)
    out = run(flat, expert_ids, weights, experts)
    back = lambda y: y.reshape(*x.shape[:-1], -1)
    return back(out), back(expert_ids), back(weights)


def _run_sliced(x, expert_ids, weights, experts):
    pick = jax.lax.dynamic_index_in_dim
    rows = []
    for i in range(x.shape[0]):
        total = None
        for j in range(expert_ids.shape[1]):
            expert = expert_ids[i, j]
            gate = x[i : i + 1] @ pick(experts.gate, expert, axis=1, keepdims=False)
            up = x[i : i + 1] @ pick(experts.up, expert, axis=1, keepdims=False)
            hidden = jax.nn.silu(gate) * up * weights[i, j].astype(x.dtype)
            out = hidden @ pick(experts.down, expert, keepdims=False)
            total = out if total is None else total + out
        rows.append(total)
    return rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)


def _run_dense(x, expert_ids, weights, experts):
    e, f, d = experts.down.shape
    t = x.shape[0]
    chosen = jax.nn.one_hot(expert_ids, e, dtype=jnp.float32)  # [t, top_k, e]
    weight_of_expert = jnp.einsum("tke,tk->te", chosen, weights).astype(x.dtype)
    gate, up = x @ experts.gate.reshape(d, e * f), x @ experts.up.reshape(d, e * f)
    hidden = (jax.nn.silu(gate) * up).reshape(t, e, f) * weight_of_expert[:, :, None]
    return hidden.reshape(t, e * f) @ experts.down.reshape(e * f, d)


def _run_grouped(x, expert_ids, weights, experts):
    t, top_k = expert_ids.shape
    flat_ids = expert_ids.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    rows = jnp.take(x, order // top_k, axis=0)
    group_sizes = jnp.bincount(flat_ids, length=experts.down.shape[0]).astype(jnp.int32)
    gate = jax.lax.ragged_dot(rows, experts.gate.transpose(1, 0, 2), group_sizes)
    up = jax.lax.ragged_dot(rows, experts.up.transpose(1, 0, 2), group_sizes)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts.down, group_sizes)
    out = out * jnp.take(weights.reshape(-1), order)[:, None].astype(x.dtype)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(t * top_k, dtype=order.dtype))
    return jnp.take(out, back, axis=0).reshape(t, top_k, -1).sum(axis=1)
