"""Experts in training: a fixed number of rows each, on one device or over a mesh.

Problem: shapes must be static, and each expert lives on one device of the "expert" axis while its
tokens lie on all of them. Choice: every expert takes at most `capacity` rows of each *device group*
(the tokens that one device routes: its own rows of the batch; without a mesh, all tokens). The
rows stand in slots [e, capacity], so both directions are gathers (1.8x `ragged_dot` on 2 CPU
cores, 4,096 tokens), and one exchange brings them to the devices that own the experts. It has two
bodies with the same slots, hence the same result:

  * padded: `all_to_all` of all slots. Runs everywhere, and the default.
  * ragged: `ragged_all_to_all` of the filled slots only, one slice per (sender, expert), written
    straight into the slots of the padded form. GPU only: XLA:CPU does not have it (jax 0.12).

What is dropped depends on the group: smaller groups are less even, so a mesh of more devices drops
more at one capacity factor. Where nothing is dropped, the result is that of `moe.run_experts`.
`capacity_factor=None` gives every expert room for its whole group: exact, at e/top_k times the
rows.

Each expert's width may be cut over "tensor": the partial sums are added after the rows have come
back and been weighted, when they are t rows instead of t * top_k * capacity_factor.

Rejected: receiving rows packed and sorting them by expert on the owner. It needs a second pair of
gathers and another way to drop, for a buffer whose worst case is as large.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from mimo_jax.layers.moe import Experts, route_and_run
from mimo_jax.layers.packed import PackedExperts, run_expert
from mimo_jax.sharding import DATA, EXPERT, SEQUENCE, TENSOR

PADDED, RAGGED = "padded", "ragged"
DISPATCHES = (PADDED, RAGGED)


@jax.custom_vjp
def _gather_rows(x, index, users):
    """out[i] = x[index[i]], an index of len(x) giving zeros; `users` serves the way back.

    users [len(x), r] lists for each row of x the outputs that read it (len(out) = none): the
    gradient is then a gather as well, where XLA's own would be a scatter-add.
    """
    padded = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])
    return jnp.take(padded, index, axis=0)


def _gather_rows_fwd(x, index, users):
    return _gather_rows(x, index, users), users


def _gather_rows_bwd(users, grad):
    padded = jnp.concatenate([grad, jnp.zeros((1, grad.shape[1]), grad.dtype)])
    return jnp.take(padded, users, axis=0).sum(axis=1), None, None


_gather_rows.defvjp(_gather_rows_fwd, _gather_rows_bwd)


class Slots(NamedTuple):
    """Which (token, choice) pair stands where in the slots [e * capacity].

    Attributes:
      slot_of_pair: Slot of each pair; e * capacity = dropped.
      pair_of_slot: The inverse; t * top_k = nobody.
      num_filled: Filled slots of each expert, at its front.
    """

    slot_of_pair: Int[Array, "pairs"]
    pair_of_slot: Int[Array, "slots"]
    num_filled: Int[Array, "e"]


def assign_slots(expert_ids: Int[Array, "t top_k"], num_experts: int, capacity: int) -> Slots:
    """Gives each expert's first `capacity` pairs a slot, in token order.

    Example: ids ((0, 1), (0, 2), (0, 1)), three experts, capacity 2
      -> slots (0, 2, 1, 4, 6, 3): the third pair of expert 0 is dropped; filled (2, 2, 1).
    """
    flat_ids = expert_ids.reshape(-1)
    num_pairs, num_slots = flat_ids.shape[0], num_experts * capacity
    chosen = jax.nn.one_hot(flat_ids, num_experts, dtype=jnp.int32)
    rank = jnp.sum((jnp.cumsum(chosen, axis=0) - 1) * chosen, axis=1)
    slot = jnp.where(rank < capacity, flat_ids * capacity + rank, num_slots)
    pair_of_slot = (
        jnp.full((num_slots + 1,), num_pairs, jnp.int32)
        .at[slot]
        .set(jnp.arange(num_pairs, dtype=jnp.int32))[:num_slots]
    )
    return Slots(slot, pair_of_slot, jnp.minimum(chosen.sum(axis=0), capacity))


def _padded_to_owners(rows, num_filled, axis: str):
    del num_filled
    e, c, d = rows.shape
    n = jax.lax.axis_size(axis)
    received = jax.lax.all_to_all(rows.reshape(n, e // n, c, d), axis, 0, 0)
    return received.swapaxes(0, 1).reshape(e // n, n * c, d)


def _padded_to_senders(rows, num_filled, axis: str):
    del num_filled
    own, nc, d = rows.shape
    n = jax.lax.axis_size(axis)
    sent = rows.reshape(own, n, nc // n, d).swapaxes(0, 1)
    return jax.lax.all_to_all(sent, axis, 0, 0).reshape(own * n, nc // n, d)


class _RaggedPlan(NamedTuple):
    """Slices i = (device, one of its experts): where they stand, how long they are.

    Attributes:
      at_sender: Row in the sender's slots [e, c]: of slice i that it sends.
      at_owner: Row in the owner's slots [own, n, c]: of slice i, for the calling sender.
      back_at_owner: Row of the slice that came from device i // own, for expert i % own.
      back_at_sender: Row in that device's slots of the calling owner's expert i % own.
      num_sent: Rows of slice i that the caller sends.
      num_received: Rows that the caller gets from device i // own for its expert i % own.
    """

    at_sender: Int[Array, "e"]
    at_owner: Int[Array, "e"]
    back_at_owner: Int[Array, "e"]
    back_at_sender: Int[Array, "e"]
    num_sent: Int[Array, "e"]
    num_received: Int[Array, "e"]


def _ragged_plan(num_filled, c: int, axis: str) -> _RaggedPlan:
    e, n = num_filled.shape[0], jax.lax.axis_size(axis)
    own, me = e // n, jax.lax.axis_index(axis)
    i = jnp.arange(e, dtype=jnp.int32)
    device, expert = i // own, i % own
    return _RaggedPlan(
        at_sender=i * c,
        at_owner=(expert * n + me) * c,
        back_at_owner=(expert * n + device) * c,
        back_at_sender=(me * own + expert) * c,
        num_sent=num_filled,
        num_received=jax.lax.all_to_all(num_filled, axis, 0, 0, tiled=True),
    )


def _ragged_to_owners(rows, num_filled, axis: str):
    e, c, d = rows.shape
    n, plan = jax.lax.axis_size(axis), _ragged_plan(num_filled, c, axis)
    flat = rows.reshape(e * c, d)
    received = jax.lax.ragged_all_to_all(
        flat,
        jnp.zeros_like(flat),
        plan.at_sender,
        plan.num_sent,
        plan.at_owner,
        plan.num_received,
        axis_name=axis,
    )
    return received.reshape(e // n, n * c, d)


def _ragged_to_senders(rows, num_filled, axis: str):
    own, nc, d = rows.shape
    n = jax.lax.axis_size(axis)
    plan = _ragged_plan(num_filled, nc // n, axis)
    flat = rows.reshape(own * nc, d)
    returned = jax.lax.ragged_all_to_all(
        flat,
        jnp.zeros_like(flat),
        plan.back_at_owner,
        plan.num_received,
        plan.back_at_sender,
        plan.num_sent,
        axis_name=axis,
    )
    return returned.reshape(own * n, nc // n, d)


_EXCHANGES = {
    PADDED: (_padded_to_owners, _padded_to_senders),
    RAGGED: (_ragged_to_owners, _ragged_to_senders),
}


def _run_rows(
    rows: Float[Array, "e c d"], experts: Experts | PackedExperts
) -> Float[Array, "e c d"]:
    """Every expert's SwiGLU on its own rows; packed experts are decoded one at a time."""
    if isinstance(experts, PackedExperts):
        return jax.lax.map(lambda each: run_expert(*each), (rows, experts))
    gate = jnp.einsum("ecd,def->ecf", rows, experts.gate)
    up = jnp.einsum("ecd,def->ecf", rows, experts.up)
    return jnp.einsum("ecf,efd->ecd", jax.nn.silu(gate) * up, experts.down)


def run_experts_with_capacity(
    x: Float[Array, "t d"],
    expert_ids: Int[Array, "t top_k"],
    weights: Float[Array, "t top_k"],
    experts: Experts | PackedExperts,
    *,
    capacity_factor: float | None,
    expert_axis: str | None = None,
    dispatch: str = PADDED,
) -> Float[Array, "t d"]:
    """As `moe.run_experts`, but each expert serves only its first rows of this group of tokens.

    Rows past the capacity, t * top_k / e * capacity_factor rounded up, contribute nothing and get
    no gradient from here.

    Args:
      x: The group's tokens.
      expert_ids: Chosen experts, counted over all devices.
      weights: Of the chosen experts.
      experts: The caller's own experts; all of them without an expert_axis. Packed ones get
        no gradient.
      capacity_factor: Rows an expert may take from the group, in multiples of the mean; None = t.
      expert_axis: Inside `shard_map`, the mesh axis over which experts are spread, device i owning
        the i-th stretch of them.
      dispatch: One of DISPATCHES; only read with an expert_axis.
    """
    t, top_k = expert_ids.shape
    num_devices = 1 if expert_axis is None else jax.lax.axis_size(expert_axis)
    e = experts.down.shape[0] * num_devices
    capacity = t if capacity_factor is None else min(t, -(-int(t * top_k * capacity_factor) // e))
    slots = assign_slots(expert_ids, e, capacity)
    token_of_slot = jnp.where(slots.pair_of_slot < t * top_k, slots.pair_of_slot // top_k, t)
    rows = _gather_rows(x, token_of_slot, slots.slot_of_pair.reshape(t, top_k))
    rows = rows.reshape(e, capacity, -1)
    to_owners, to_senders = _EXCHANGES[dispatch]
    if expert_axis is not None:
        rows = to_owners(rows, slots.num_filled, expert_axis)
    out = _run_rows(rows, experts)
    if expert_axis is not None:
        out = to_senders(out, slots.num_filled, expert_axis)
    out = _gather_rows(
        out.reshape(e * capacity, -1), slots.slot_of_pair, slots.pair_of_slot[:, None]
    )
    return jnp.einsum("tkd,tk->td", out.reshape(t, top_k, -1), weights.astype(x.dtype))


def route_and_run_on_mesh(
    route_fn: Callable,
    x: Float[Array, "b t d"],
    w_router: Float[Array, "d e"],
    selection_bias: Float[Array, "e"],
    experts: Experts | PackedExperts,
    *,
    mesh: Mesh,
    capacity_factor: float | None,
    dispatch: str = PADDED,
) -> tuple[Float[Array, "b t d"], Int[Array, "b t top_k"], Float[Array, "b t top_k"]]:
    """`moe.route_and_run` over a TRAIN mesh, with a capacity; to be called inside `jax.jit`.

    Rows lie over "data" and "expert", their positions over "sequence" (each device routes its own
    tokens), experts over "expert", each expert's width over "tensor". Weights cut over "data" are
    gathered on the way in. Routing is inside as well: the compiler cannot cut a top-k and would
    gather the scores of all tokens.

    Args:
      route_fn: As in `moe.route_and_run`.
      x: All tokens; b divides by data * expert, t by sequence.
      w_router: As in `moe.route`.
      selection_bias: As in `moe.route`.
      experts: All experts; their number divides by expert, their width by tensor.
      mesh: Axes of sharding.TRAIN.
      capacity_factor: As in `run_experts_with_capacity`; the group is one device's tokens.
      dispatch: One of DISPATCHES.
    """

    def run(x, expert_ids, weights, experts):
        # Each width slice gives a partial sum and partial gradients: said here, so that the way
        # back adds those of x and of the weights over "tensor".
        x, weights = (jax.lax.pcast(a, TENSOR, to="varying") for a in (x, weights))
        out = run_experts_with_capacity(
            x,
            expert_ids,
            weights,
            experts,
            capacity_factor=capacity_factor,
            expert_axis=EXPERT,
            dispatch=dispatch,
        )
        return jax.lax.psum(out, TENSOR)

    on_device = functools.partial(route_and_run, route_fn, run=run)
    tokens, whole = P((DATA, EXPERT), SEQUENCE), P()
    if isinstance(experts, PackedExperts):  # as files have them: [e, outputs, inputs]
        into_hidden, out_of_hidden = P(EXPERT, TENSOR, None), P(EXPERT, None, TENSOR)
        stacks = PackedExperts._make((into_hidden,) * 4 + (out_of_hidden,) * 2)
    else:
        into_hidden, out_of_hidden = P(None, EXPERT, TENSOR), P(EXPERT, TENSOR, None)
        stacks = Experts._make((into_hidden, into_hidden, out_of_hidden))
    return jax.shard_map(
        on_device, mesh=mesh, in_specs=(tokens, whole, whole, stacks), out_specs=tokens
    )(x, w_router, selection_bias, experts)
