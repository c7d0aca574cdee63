"""What a long context costs: time of a step, and of a prompt chunk, by context.

A small target with random weights, once with sliding layers only and once with global layers, whose
rows are put at a given length: milliseconds by context and by capacity, against the bytes of keys
and values that a step reads and the rate at which this machine sums memory. Memory holds zeros; how
long reading takes does not depend on what is read.

Processor time stands beside the time that passed: a step is single-threaded where it reads long
memories, and on a shared machine the former is what repeats.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax.cache import KVCache
from mimo_jax.config import GLOBAL, SLIDING, AttentionConfig, DrafterConfig, TargetConfig
from mimo_jax.decode import accept
from mimo_jax.decode.engine import PROMPT_CHUNK, Engine
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request, one_row
from mimo_jax.decode.step import DecodeState
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import split
from mimo_jax.models.target import Target
from mimo_jax.quant.kv import FORMATS, NONE, KVFormat
from mimo_jax.sealed import SealedLayer
from mimo_jax.timing import alternate

CONTEXTS = (2_000, 8_000, 32_000, 100_000, 200_000)
CAPACITY = 262_144
_BLOCK_LEN = 8


def _attention(window: int | None) -> AttentionConfig:
    """Two query heads, each with keys of its own."""
    return AttentionConfig(
        num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, rope_theta=1e6, rope_dim=64,
        window=window,
    )  # fmt: skip


def context_models(num_global: int, *, width: int = 128) -> tuple[Model, Model]:
    """A target of four layers, the last num_global of them global, and a drafter; random."""
    target = TargetConfig(
        vocab_size=512,
        hidden_size=width,
        layer_kinds=(SLIDING,) * (4 - num_global) + (GLOBAL,) * num_global,
        attention={GLOBAL: _attention(None), SLIDING: _attention(128)},
        dense_hidden_size=2 * width,
        max_position=CAPACITY,
    )
    drafter = DrafterConfig(
        hidden_size=width,
        num_layers=1,
        attention=_attention(None),
        dense_hidden_size=2 * width,
        target_layer_ids=(0, 2),
        num_target_layers=4,
        draft_block_len=_BLOCK_LEN,
        mask_token_id=511,
        vocab_size=512,
        windows=(128,),
        max_position=CAPACITY,
    )
    return (
        Model(target, *split(Target(target, rngs=nnx.Rngs(0)))),
        Model(drafter, *split(Drafter(drafter, rngs=nnx.Rngs(1)))),
    )


def at_length(state: DecodeState, length: int, form: KVFormat | None) -> DecodeState:
    """A running state of one row as if it had `length` tokens."""
    one = lambda value: jnp.full((1,), value, jnp.int32)
    cache = state.target_cache
    if form is not None:
        cache = dataclasses.replace(cache, num_sealed=one((length - 1) // form.group_len))
    return dataclasses.replace(
        state,
        length=one(length),
        max_len=one(state.tokens.shape[1]),
        finish=one(accept.RUNNING),
        num_steps=one(0),
        target_cache=cache,
    )


def read_bytes(cache: KVCache, context: int) -> int:
    """Bytes of keys and values that a step at a context must read once."""
    total = 0
    for layer, window in zip(cache.layers, cache.windows, strict=True):
        if isinstance(layer, SealedLayer):
            groups = sum(x.nbytes / x.shape[2] for x in jax.tree.leaves((layer.keys, layer.values)))
            assert cache.form is not None
            num_sealed = max(context // cache.form.group_len - 1, 0)
            total += groups * num_sealed + layer.tail_keys.nbytes + layer.tail_values.nbytes
        else:
            slots = layer.keys.shape[2]
            kept = slots if window is not None else min(context, slots)
            total += (layer.keys.nbytes + layer.values.nbytes) * kept / slots
    return round(total)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One engine of the table.

    Attributes:
      name: In tables.
      num_global: Global layers of its target.
      kv_format: Of quant.kv.FORMATS.
      is_drafting: Whether a step drafts and verifies a block.
    """

    name: str
    num_global: int
    kv_format: str = NONE
    is_drafting: bool = False


VARIANTS = (
    Variant("sliding", 0),
    Variant("sliding, block of 8", 0, is_drafting=True),
    Variant("global", 2),
    Variant("global, block of 8", 2, is_drafting=True),
    Variant("global, int8", 2, "int8"),
    Variant("global, kvarn4", 2, "kvarn4"),
    Variant("global, kvarn2", 2, "kvarn2"),
)


class Stepper:
    """An engine whose one row is put at any length and stepped."""

    def __init__(self, variant: Variant, capacity: int):
        target, drafter = context_models(variant.num_global)
        self.form = FORMATS[variant.kv_format]
        self.engine = Engine(
            target,
            drafter if variant.is_drafting else None,
            max_len=capacity,
            kv_format=self.form,
        )
        self.state = self.engine.prefill(Request((1, 2, 3), 8))

    def steps(self, length: int, num_steps: int):
        """A function that runs num_steps steps from a length; each call starts there again."""

        def run():
            self.state = self.engine.run(at_length(self.state, length, self.form), num_steps)
            return self.state.length

        return run


def step_times(
    variant: Variant, lengths: Sequence[int], capacity: int, *, num_steps: int, rounds: int
) -> dict[int, dict]:
    """Of a step by context, lengths in turn: milliseconds, the processor's own, bytes read."""
    stepper = Stepper(variant, capacity)
    num_bytes = {n: read_bytes(stepper.state.target_cache, n) for n in lengths}
    runs = {str(n): stepper.steps(n, num_steps) for n in lengths}
    timings = alternate(runs, rounds=rounds).timings
    processor = alternate(runs, rounds=rounds, is_processor_time=True).timings
    of = lambda seconds: seconds / num_steps * 1e3
    return {
        n: {
            "ms": of(timings[str(n)].median_s),
            "min_ms": of(timings[str(n)].min_s),
            "processor_ms": of(processor[str(n)].min_s),
            "read_mb": num_bytes[n] / 1e6,
        }
        for n in lengths
    }


def growth(rows: dict[int, dict]) -> dict[str, float | None]:
    """How a step grows from the shortest to the longest context, and the rate of what it adds."""
    first, last = rows[min(rows)], rows[max(rows)]
    added_gb = (last["read_mb"] - first["read_mb"]) / 1e3

    def rate(clock: str) -> float | None:
        added_s = (last[clock] - first[clock]) / 1e3
        return added_gb / added_s if added_gb > 0 and added_s > 0 else None

    return {
        "ratio": last["min_ms"] / first["min_ms"],
        "processor_ratio": last["processor_ms"] / first["processor_ms"],
        "gb_per_s": rate("min_ms"),
        "processor_gb_per_s": rate("processor_ms"),
    }


def short_rows(
    length: int, capacities: Sequence[int], *, rounds: int
) -> dict[str, dict[int, dict]]:
    """A short row in small and large memories: by variant and capacity, as `step_times`."""
    return {
        v.name: {
            c: step_times(v, (length,), c, num_steps=32, rounds=rounds)[length] for c in capacities
        }
        for v in VARIANTS
    }


def memory_rate(num_bytes: int = 1 << 28) -> dict[str, float]:
    """GB/s at which XLA sums float32: as time passes, and by the processor's time (one core's)."""
    x = jnp.ones((num_bytes // 4,), jnp.float32)
    total = jax.jit(lambda x: x.sum())
    rate = lambda **clock: num_bytes / 1e9 / alternate(
        {"sum": lambda: total(x)}, rounds=9, **clock
    ).timings["sum"].min_s
    return {"gb_per_s": rate(), "processor_gb_per_s": rate(is_processor_time=True)}


def prefill_costs(
    variant: Variant, starts: Sequence[int], capacity: int, *, rounds: int
) -> dict[str, object]:
    """Scratch of a prompt chunk's program by XLA's account, and its milliseconds by start."""
    stepper = Stepper(variant, capacity)
    engine, cache = stepper.engine, stepper.state.target_cache
    caches = (cache, stepper.state.drafter_cache)
    ids = np.ones((1, PROMPT_CHUNK), np.int32)
    place = lambda start: (one_row(start), one_row(PROMPT_CHUNK))
    args = lambda start, caches: (engine.params, ids, caches, *place(start))
    compiled = engine.prefill_program(False).lower(*args(0, caches)).compile()
    held = {"caches": caches}

    def chunk(start: int):
        def run():
            target_cache = at_length(
                dataclasses.replace(stepper.state, target_cache=held["caches"][0]),
                start + 1,
                stepper.form,
            ).target_cache
            logits, held["caches"] = compiled(*args(start, (target_cache, held["caches"][1])))
            return logits

        return run

    timing = alternate({str(n): chunk(n) for n in starts}, rounds=rounds, is_processor_time=True)
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA:CPU accounts for its memory"
    return {
        "scratch_mb": analysis.temp_size_in_bytes / 1e6,
        "memory_mb": sum(x.nbytes for x in jax.tree.leaves(held["caches"])) / 1e6,
        "processor_ms": {n: timing.timings[str(n)].min_s * 1e3 for n in starts},
    }
