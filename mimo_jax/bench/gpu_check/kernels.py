"""Every kernel of the decode program, at the shapes of one device of the eight-way Pro.

A row of CHECKS is one kernel: shapes, inputs, the call, and what XLA would run in its place. Memory
is not written here (`write=False` reads the same bytes): a program that calls a kernel many times
over inputs it must keep would copy what it writes over.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mimo_jax.bench.gpu_check.kernel_check import Arrays, KernelCheck, check_numerics, check_speed
from mimo_jax.bench.gpu_check.parts import Figures, Note
from mimo_jax.bench.gpu_check.settings import Size
from mimo_jax.layers.moe import PackedExperts, run_experts
from mimo_jax.layers.norm import rms_norm
from pallas_kernels.fp8_matmul import arg_specs as products
from pallas_kernels.fp8_matmul.api import dense_matmul, fp8_matmul
from pallas_kernels.grouped_matmul.api import swiglu_experts
from pallas_kernels.grouped_matmul.tiles import TiledWeights, tiled_shapes
from pallas_kernels.router_top_k.api import router_top_k
from pallas_kernels.sink_attention import arg_specs as attention
from pallas_kernels.sink_attention.api import sink_attention
from pallas_kernels.sink_attention.block import pack_bits

EPS = 1e-5

# --- dense products ------------------------------------------------------------------------------

PRODUCTS: dict[Size, dict[str, products.ArgSpec]] = {
    "pro": products.PRIMARY,
    "toy": {"normed": products.TOY["normed"]},
}


def draw_product(key: jax.Array, spec: products.ArgSpec) -> Arrays:
    keys = jax.random.split(key, 4)
    weights = jax.random.normal(keys[0], (spec.out_len, spec.in_len), jnp.bfloat16)
    blocks = (-(-spec.out_len // 128), -(-spec.in_len // 128))
    return {
        "x": jax.random.normal(keys[1], (spec.num_rows, spec.in_len), jnp.bfloat16),
        "weights": weights,
        "codes": weights.astype(jnp.float8_e4m3fn),
        "scale": jax.random.uniform(keys[2], blocks, jnp.float32, 0.5, 1.5),
        "norm": jax.random.uniform(keys[3], (spec.in_len,), jnp.bfloat16, 0.5, 1.5),
    }


def _norm(arrays: Arrays, spec: products.ArgSpec):
    return (arrays["norm"], EPS) if spec.has_norm else None


def call_fp8(arrays: Arrays, spec: products.ArgSpec, implementation: str) -> jax.Array:
    return fp8_matmul(
        arrays["x"], arrays["codes"], arrays["scale"],
        norm=_norm(arrays, spec), implementation=implementation,
    )  # fmt: skip


def call_dense(arrays: Arrays, spec: products.ArgSpec, implementation: str) -> jax.Array:
    return dense_matmul(
        arrays["x"], arrays["weights"], norm=_norm(arrays, spec), implementation=implementation
    )


def xla_product(arrays: Arrays, spec: products.ArgSpec) -> jax.Array:
    """Over bfloat16 weights, as the models hold them."""
    x = arrays["x"]
    if spec.has_norm:
        x = rms_norm(x, arrays["norm"], eps=EPS)
    return x @ arrays["weights"].T


def _fp8_bytes(spec: products.ArgSpec) -> float:
    return spec.out_len * spec.in_len * 1.0


def _bf16_bytes(spec: products.ArgSpec) -> float:
    return spec.out_len * spec.in_len * 2.0


_product = functools.partial(
    KernelCheck,
    specs=PRODUCTS,
    draw=draw_product,
    rival=xla_product,
    num_read_by_rival=_bf16_bytes,
)

# --- attention of a block ------------------------------------------------------------------------

ATTENTION: dict[Size, dict[str, attention.ArgSpec]] = {
    "pro": {
        name: attention.ARG_SPECS[name]._replace(write=False)
        for name in ("pro sliding", "pro global", "pro drafter")
    },
    "toy": {"ring": attention.ArgSpec(4, 1, 32, 16, 16, 8, 24, 12, has_sink=True, write=False)},
}


def draw_block(key: jax.Array, spec: attention.ArgSpec) -> Arrays:
    """A chain of tokens behind a full memory: of a ring the newest positions, else all slots."""
    keys = jax.random.split(key, 5)
    t, slots, k = spec.tokens, spec.slots, spec.num_kv_heads
    normal = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
    angles = jax.random.uniform(keys[3], (1, t, spec.rope_dim // 2), jnp.float32, -3.0, 3.0)
    # A ring has as many slots behind its end as a block has tokens; they hold nothing here.
    ring = slots - t
    start = ring if spec.window is None else 3 * ring + 5
    slot = jnp.arange(slots, dtype=jnp.int32)
    newest = jnp.where(slot < ring, (start - 1 - slot) // ring * ring + slot, -1)
    chain = jnp.tril(jnp.ones((1, t, t), jnp.bool_))
    return {
        "qkv": normal(keys[0], (1, t, spec.qkv_width)),
        "keys": normal(keys[1], (1, k, slots, spec.head_dim)),
        "values": normal(keys[2], (1, k, slots, spec.v_head_dim)),
        "start": jnp.full((1,), start, jnp.int32),
        "depths": jnp.arange(t, dtype=jnp.int32)[None, :],
        "sees": pack_bits(chain),
        "slot_positions": None if spec.window is None else newest[None, :],
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "sink": normal(keys[4], (spec.num_heads,)) if spec.has_sink else None,
        "first_slot": jnp.full((1,), start % ring, jnp.int32),
    }


def call_attention(arrays: Arrays, spec: attention.ArgSpec, implementation: str) -> jax.Array:
    arrays = dict(arrays)
    positional = [arrays.pop(name) for name in ("qkv", "keys", "values")]
    out = sink_attention(
        *positional, **arrays, window=spec.window, write=spec.write, implementation=implementation
    )
    return jnp.concatenate([one.reshape(-1) for one in out])


def _memory_bytes(spec: attention.ArgSpec) -> float:
    return spec.num_kv_heads * spec.slots * (spec.head_dim + spec.v_head_dim) * 2.0


# --- experts and their choice --------------------------------------------------------------------


class Experts(NamedTuple):
    """One sparse layer: tokens, width, experts, their width, chosen per token."""

    num_tokens: int
    d: int
    e: int
    f: int
    top_k: int

    @property
    def num_distinct(self) -> float:
        """Experts that all tokens together choose, on average."""
        return self.e * (1 - (1 - self.top_k / self.e) ** self.num_tokens)


EXPERTS: dict[Size, dict[str, Experts]] = {
    "pro": {"pro block": Experts(8, 6144, 384, 256, 8), "pro token": Experts(1, 6144, 384, 256, 8)},
    "toy": {"small": Experts(3, 128, 5, 128, 2)},
}


def draw_choice(key: jax.Array, spec: Experts) -> Arrays:
    logits, bias = jax.random.split(key)
    return {
        "logits": jax.random.normal(logits, (spec.e, spec.num_tokens), jnp.float32),
        "bias": jax.random.normal(bias, (spec.e,), jnp.float32) / 8,
    }


def call_router(arrays: Arrays, spec: Experts, implementation: str) -> jax.Array:
    choice = router_top_k(
        arrays["logits"], arrays["bias"], top_k=spec.top_k, implementation=implementation
    )
    ids = choice.choices.astype(jnp.float32)
    return jnp.concatenate([ids.reshape(-1), choice.weights.reshape(-1)])


def draw_experts(key: jax.Array, spec: Experts) -> Arrays:
    """Random codes in tiles for the kernel, and as many as the files hold them for XLA."""
    keys = jax.random.split(key, 3)
    matrices = {"gate": (spec.f, spec.d), "up": (spec.f, spec.d), "down": (spec.d, spec.f)}
    num_codes = {name: spec.e * n * k for name, (n, k) in matrices.items()}
    # One draw for all: a dozen would take XLA:CPU a minute to compile.
    codes = jax.random.bits(keys[0], (sum(num_codes.values()) // 2,), jnp.uint8)
    tiled, packed, first = {}, [], 0
    for name, (n, k) in matrices.items():
        tiles, tile_scales = tiled_shapes((1, spec.e, n, k))
        part = codes[first : first + num_codes[name] // 2]
        first += part.size
        # Powers 2**-10 .. 2**-7: with codes of mean square 8.6 sums stay near one.
        scales = 117 + (part[: part.size // 16] & 3)
        words = jax.lax.bitcast_convert_type(part.reshape(*tiles, 4), jnp.int32)
        tiled[name] = TiledWeights(words, scales.reshape(tile_scales))
        packed += [part.reshape(spec.e, n, k // 2), scales.reshape(spec.e, n, k // 32)]
    x = jax.random.normal(keys[1], (spec.num_tokens, spec.d), jnp.bfloat16)
    return {"x": x, **tiled, "packed": PackedExperts(*packed), **draw_choice(keys[2], spec)}


def _choice(arrays: Arrays, spec: Experts):
    return router_top_k(arrays["logits"], arrays["bias"], top_k=spec.top_k, implementation="xla")


def call_experts(arrays: Arrays, spec: Experts, implementation: str) -> jax.Array:
    return swiglu_experts(
        arrays["x"], arrays["gate"], arrays["up"], arrays["down"],
        _choice(arrays, spec), jnp.zeros((1,), jnp.int32), implementation=implementation,
    )  # fmt: skip


def xla_experts(arrays: Arrays, spec: Experts) -> jax.Array:
    """Gathered by (token, expert), as the models run them without kernels."""
    choice = _choice(arrays, spec)
    return run_experts(arrays["x"], choice.choices.T, choice.weights.T, arrays["packed"])


def _expert_bytes(spec: Experts) -> float:
    return 3 * spec.d * spec.f * 17 / 32  # four bits, and eight per group of 32


CHECKS = (
    _product("fp8_matmul", call=call_fp8, num_read=_fp8_bytes),
    _product("dense_matmul", call=call_dense, num_read=_bf16_bytes),
    KernelCheck(
        "sink_attention", ATTENTION, draw_block, call_attention,
        lambda arrays, spec: call_attention(arrays, spec, "xla"), _memory_bytes, _memory_bytes,
    ),
    KernelCheck(
        "router_top_k", EXPERTS, draw_choice, call_router,
        lambda arrays, spec: call_router(arrays, spec, "xla"),
        lambda spec: 4.0 * spec.e * spec.num_tokens, lambda spec: 4.0 * spec.e * spec.num_tokens,
    ),
    KernelCheck(
        "swiglu_experts", EXPERTS, draw_experts, call_experts, xla_experts,
        lambda spec: spec.num_distinct * _expert_bytes(spec),
        lambda spec: spec.num_tokens * spec.top_k * _expert_bytes(spec),
    ),
)  # fmt: skip


def check_kernels(size: Size, note: Note) -> None:
    """Every kernel and shape; a failure of one is noted in its place."""
    rows: dict[str, Figures] = {}
    for check in CHECKS:
        for name, spec in check.specs[size].items():
            row = rows[f"{check.name}, {name}"] = {"shape": str(spec)}
            try:
                row |= check_numerics(check, spec, size)
                row |= check_speed(check, spec, size)
            except Exception as error:  # a kernel that does not compile leaves the others alone
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
            note({"kernels": rows})
