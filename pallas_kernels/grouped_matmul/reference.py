"""The experts' products in plain JAX: float32, every chosen expert's matrices decoded by name."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats import decode_mxfp4
from pallas_kernels.grouped_matmul.tiles import TiledWeights, untile_weights


def _matrices(weights: TiledWeights, layer, expert_ids):
    """float32 [slots, n, k]; indices beyond the stack mean its last matrix."""
    last = [size - 1 for size in weights.tiles.shape[:2]]
    layer, expert_ids = jnp.clip(layer, 0, last[0]), jnp.clip(expert_ids, 0, last[1])
    chosen = TiledWeights(*(part[layer][expert_ids][None] for part in weights))
    return decode_mxfp4(*untile_weights(chosen))[0]


def weight_of_slots(expert_ids, num_active, choices, choice_weights):
    """float32 [slots, t]: how much a token wants of each slot's expert; 0 = not at all."""
    is_choice = choices[None] == expert_ids[:, None, None]
    weights = jnp.where(is_choice, choice_weights[None], 0.0).sum(axis=1)
    is_active = jnp.arange(expert_ids.shape[0], dtype=jnp.int32) < num_active
    return jnp.where(is_active[:, None], weights, 0.0)


def up(x, gate, up, layer, expert_ids):
    x = x.astype(jnp.float32)
    gate_out = jnp.einsum("td,sfd->stf", x, _matrices(gate, layer, expert_ids))
    return jax.nn.silu(gate_out) * jnp.einsum("td,sfd->stf", x, _matrices(up, layer, expert_ids))


def down(hidden, down, layer, expert_ids, num_active, choices, choice_weights):
    wanted = weight_of_slots(expert_ids, num_active, choices, choice_weights)[:, :, None]
    matrices = _matrices(down, layer, expert_ids)
    out = jnp.einsum("stf,sdf->std", hidden.astype(jnp.float32), matrices)
    # A broken expert is its own tokens' business, and slots that are not active hold anything.
    return jnp.where(wanted != 0, out * wanted, 0.0).sum(axis=0)
