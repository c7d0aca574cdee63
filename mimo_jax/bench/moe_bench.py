"""What a layer of packed experts costs against every float32 form of it, in turn.

The float32 forms are those that the program has (layers/moe.py), and two that it has not: rows
gathered by expert, and a loop over the chosen experts. Packed experts must be compared with the
best of all of them, whoever wins.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from mimo_jax.layers import moe, packed
from mimo_jax.timing import alternate
from pallas_kernels.formats import decode_mxfp4

# Past it, the gathered rows of the float32 stacks take gigabytes.
_MOST_GATHERED_TOKENS = 8


@dataclasses.dataclass(frozen=True)
class Layer:
    """Sizes of a sparse layer: experts, chosen per token, model width, expert width."""

    num_experts: int
    top_k: int
    width: int
    hidden: int

    @property
    def num_weights(self) -> int:
        """Of one expert."""
        return 3 * self.width * self.hidden


def _draw(layer: Layer) -> moe.PackedExperts:
    rng = np.random.default_rng(0)
    e, d, f = layer.num_experts, layer.width, layer.hidden

    def pair(rows: int, width: int):
        yield jnp.asarray(rng.integers(0, 256, (e, rows, width // 2), dtype=np.uint8))
        yield jnp.asarray(rng.integers(118, 122, (e, rows, width // 32), dtype=np.uint8))

    return moe.PackedExperts(*pair(f, d), *pair(f, d), *pair(d, f))


def _unpack(experts: moe.PackedExperts) -> moe.Experts:
    gate, up = (
        decode_mxfp4(w, s).transpose(2, 0, 1)
        for w, s in ((experts.gate, experts.gate_scale), (experts.up, experts.up_scale))
    )
    return moe.Experts(gate, up, decode_mxfp4(experts.down, experts.down_scale).transpose(0, 2, 1))


def _gathered(x, expert_ids, weights, experts: moe.Experts):
    t, top_k = expert_ids.shape
    ids, rows = expert_ids.reshape(-1), jnp.repeat(x, top_k, axis=0)
    gate, up = (jnp.einsum("rd,drf->rf", rows, w[:, ids]) for w in (experts.gate, experts.up))
    out = jnp.einsum("rf,rfd->rd", jax.nn.silu(gate) * up, experts.down[ids])
    return (out * weights.reshape(-1, 1)).reshape(t, top_k, -1).sum(axis=1)


def _looped(x, expert_ids, weights, experts: moe.Experts):
    """All tokens through each chosen expert; matrices [e, f, d] and [e, d, f]."""
    e = experts.down.shape[0]
    one_hot = jax.nn.one_hot(expert_ids, e, dtype=jnp.float32)
    weight_of, is_chosen = jnp.einsum("tke,tk->et", one_hot, weights), one_hot.sum((0, 1)) > 0
    order = jnp.argsort(~is_chosen, stable=True)

    def add(i, total):
        gate, up, down = (
            jax.lax.dynamic_index_in_dim(w, order[i], keepdims=False) for w in experts
        )
        hidden = jax.nn.silu(gate @ x.T) * (up @ x.T) * weight_of[order[i]][None]
        return total + down @ hidden

    total = jnp.zeros((x.shape[1], x.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, is_chosen.sum(dtype=jnp.int32), add, total).T


def compare_forms(layer: Layer, num_tokens: int, *, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds, scratch and weights per second of one layer in every form, by name.

    Args:
      layer: Sizes.
      num_tokens: Each chooses its experts at random.
      rounds: Calls of each form.

    Returns:
      As `time_forms`, the packed form first; weights are those of the experts chosen.

    Raises:
      RuntimeError: If a form differs from the packed one.
    """
    rng = np.random.default_rng(num_tokens)
    ids = np.stack(
        [rng.permutation(layer.num_experts)[: layer.top_k] for _ in range(num_tokens)]
    ).astype(np.int32)
    x = jnp.asarray(rng.standard_normal((num_tokens, layer.width)), jnp.float32)
    weights = jnp.asarray(rng.random(ids.shape), jnp.float32)
    in_fp4 = _draw(layer)
    in_float = jax.jit(_unpack)(in_fp4)
    by_expert = moe.Experts(
        *(jnp.array(w.transpose(axes)) for w, axes in zip(
            in_float, ((1, 2, 0), (1, 2, 0), (0, 2, 1)), strict=True))
    )  # fmt: skip
    forms = {
        "packed": (packed.run_packed, in_fp4),
        "dense": (moe._run_dense, in_float),
        "grouped": (moe._run_grouped, in_float),
        "looped": (_looped, by_expert),
    }
    if num_tokens <= _MOST_GATHERED_TOKENS:
        forms |= {"sliced": (moe._run_sliced, in_float), "gathered": (_gathered, in_float)}
    args = lambda experts: (x, jnp.asarray(ids), weights, experts)
    num_weights = len(np.unique(ids)) * layer.num_weights
    return time_forms(
        {name: (run, args(experts)) for name, (run, experts) in forms.items()},
        num_weights,
        rounds=rounds,
    )


def time_forms(
    forms: Mapping[str, tuple[Callable, tuple]],
    num_weights: int,
    *,
    rounds: int,
    tolerance: float = 1e-4,
) -> dict[str, dict[str, float]]:
    """Forms of one computation, compiled and called in turn.

    Args:
      forms: Name -> (function, arguments), the baseline first.
      num_weights: That each has to read.
      rounds: Calls of each form.
      tolerance: How far results may differ from the baseline's, of its largest value.

    Returns:
      Form -> ms (median), min_ms, temp_mb, weights_per_ns (by the minimum), and over_first, its
      time by that of the baseline (median over rounds).

    Raises:
      RuntimeError: If a form differs by more.
    """
    calls, temp_bytes = {}, {}
    for name, (run, args) in forms.items():
        compiled = jax.jit(run).lower(*args).compile()
        memory = compiled.memory_analysis()
        temp_bytes[name] = 0 if memory is None else memory.temp_size_in_bytes
        calls[name] = lambda compiled=compiled, args=args: compiled(*args)
    check_equal({name: call() for name, call in calls.items()}, tolerance)
    found = alternate(calls, rounds=rounds)
    return {
        name: {
            "ms": 1e3 * timing.median_s,
            "min_ms": 1e3 * timing.min_s,
            "temp_mb": temp_bytes[name] / 1e6,
            "weights_per_ns": num_weights / timing.min_s / 1e9,
            "over_first": found.median_ratios[name],
        }
        for name, timing in found.timings.items()
    }


def check_equal(results: dict[str, Array], tolerance: float) -> None:
    """Raises RuntimeError, naming the form, where a result is not the first one."""
    reference = np.asarray(next(iter(results.values())), np.float32)
    for name, result in results.items():
        error = np.abs(np.asarray(result, np.float32) - reference).max() / np.abs(reference).max()
        if not error < tolerance:
            raise RuntimeError(f"the form {name} differs by {error:.1e}")
