"""Programs for the compiler's own process: a loop whose layers attend, at published sizes.

Called by name in another process (plan/aot.py), so they take plain values only.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.add_norm.api import add_norm
from pallas_kernels.grouped_matmul.api import swiglu_experts
from pallas_kernels.grouped_matmul.tiles import TiledWeights, tiled_shapes
from pallas_kernels.router_top_k.api import router_top_k
from pallas_kernels.sink_attention import api, block
from pallas_kernels.sink_attention.arg_specs import ARG_SPECS, ArgSpec


def chain_of(start, spec: ArgSpec) -> dict:
    """What all layers of a kind share; made once per step."""
    depths = jnp.arange(spec.tokens, dtype=jnp.int32)[None]
    sees = depths[:, :, None] >= depths[:, None, :]
    angles = (start[:, None] + depths).astype(jnp.float32)[:, :, None]
    angles = angles * jnp.ones((1, 1, spec.rope_dim // 2), jnp.float32)
    return {
        "start": start,
        "depths": depths,
        "sees": block.pack_bits(sees),
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "window": spec.window,
        "write": spec.write,
    }


def lower_attention(mesh: Mesh, *, layers: list[str], has_context: bool = False):
    """A loop until position 100,000 over layers that do nothing but attend.

    Args:
      mesh: Of one device.
      layers: Names in ARG_SPECS.
      has_context: Also writes a drafter's context.
    """
    specs = [ARG_SPECS[name] for name in layers]

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def memory_of(spec: ArgSpec):
        k, s = spec.num_kv_heads, spec.slots
        return of((1, k, s, spec.head_dim)), of((1, k, s, spec.v_head_dim))

    def layer(spec: ArgSpec, qkv, memory, weights, positions, start):
        ring = None if spec.window is None else spec.slots - spec.tokens
        return api.sink_attention(
            qkv, *memory, **chain_of(start, spec),
            slot_positions=None if ring is None else positions[spec.slots],
            sink=weights["sink"] if spec.has_sink else None,
            q_norm=weights["norm"] if spec.has_norms else None,
            k_norm=weights["norm"] if spec.has_norms else None,
            norm_eps=1e-6, value_scale=0.612,
            first_slot=start if ring is None else start % ring,
            implementation="mosaic_gpu",
        )  # fmt: skip

    def program(qkvs, memories, outs, weights, positions, context):
        def body(carry):
            memories, _, context, start = carry
            results = [
                layer(*each, positions, start)
                for each in zip(specs, qkvs, memories, weights, strict=True)
            ]
            # A block that is not written is handed out beside the output, so that it stays alive.
            outs, written = [], []
            for spec, memory, result in zip(specs, memories, results, strict=True):
                outs.append(result[:1] if spec.write else result)
                written.append(result[1:] if spec.write else memory)
            if has_context:
                drafter = ARG_SPECS["pro drafter"]
                chain = chain_of(start, drafter)
                tables = {name: chain[name] for name in ("cos", "sin")}
                context = api.write_context(
                    qkvs[0][:, :8, :256], *context, first_slot=start % 1032, **tables,
                    implementation="mosaic_gpu",
                )  # fmt: skip
            return written, outs, context, start + 8

        carry = (memories, outs, context, jnp.zeros((1,), jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[3][0] < 100_000, body, carry)[:3]

    def out_of(spec: ArgSpec):
        block_of = (1, spec.num_kv_heads, spec.tokens)
        out = [of((1, spec.tokens, spec.num_heads * spec.v_head_dim))]
        if spec.write:
            return tuple(out)
        return *out, of((*block_of, spec.head_dim)), of((*block_of, spec.v_head_dim))

    weights = [
        {
            "sink": of((spec.num_heads,)),
            "norm": of((spec.head_dim,)),
        }
        for spec in specs
    ]
    return jax.jit(program, donate_argnums=(1, 2, 5)).lower(
        [of((1, spec.tokens, spec.qkv_width)) for spec in specs],
        [memory_of(spec) for spec in specs],
        [out_of(spec) for spec in specs],
        weights,
        {spec.slots: of((1, spec.slots), jnp.int32) for spec in specs if spec.window is not None},
        memory_of(ARG_SPECS["pro drafter"]) if has_context else (),
    )


def lower_sparse_layers(mesh: Mesh, *, tokens: int):
    """Three of 69 sparse layers of the Pro on one device of eight, their experts in one stack."""
    num_layers, e, d, f, top_k = 69, 384, 6144, 256, 8

    def of(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def stack(n: int, k: int):
        tile_shape, scale_shape = tiled_shapes((num_layers, e, n, k))
        return TiledWeights(of(tile_shape, jnp.int32), of(scale_shape, jnp.uint8))

    def program(x, addend, norm, w_router, bias, stacks):
        for layer in (0, 40, 68):
            x, normed = add_norm(x, addend, norm, eps=1e-5, implementation="mosaic_gpu")
            logits = jnp.matmul(w_router, normed.T, preferred_element_type=jnp.float32)
            choice = router_top_k(logits, bias, top_k=top_k, implementation="mosaic_gpu")
            index = jnp.array([layer], jnp.int32)
            addend = swiglu_experts(normed, *stacks, choice, index, implementation="mosaic_gpu")
        return x, addend

    row = of((tokens, d))
    stacks = (stack(f, d), stack(f, d), stack(d, f))
    return jax.jit(program).lower(
        row, row, of((d,)), of((e, d)), of((e,), jnp.float32), stacks
    )
