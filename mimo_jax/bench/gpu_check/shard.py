"""One device's share of the 8-way Pro on one GPU: the program of device 0, without its neighbours.

The share is made as `models/cut.py` makes it: all 384 experts at an eighth of their width, 16 query
heads and one KV head per layer, an eighth of the vocabulary. It runs as the whole engine does, on a
mesh of one device, where an all-reduce is nothing: so the times leave all collectives out. Ids of
the other seven stretches of the vocabulary embed as zeros, as they do on device 0.

Weights are random, made on the device leaf by leaf; nothing of what they say is looked at, only
that it stays finite. Drafts of random weights are not accepted, which costs what acceptance costs:
a step verifies its whole block either way.

What one layer costs is a difference of two short models: it takes seconds to compile, where the
whole program takes a minute.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mimo_jax.bench.gpu_check.kernel_check import kernel_implementation
from mimo_jax.bench.gpu_check.parts import Note
from mimo_jax.bench.gpu_check.settings import XLA, Size
from mimo_jax.cache import KVCache
from mimo_jax.config import GLOBAL, SLIDING, DrafterConfig, TargetConfig
from mimo_jax.decode import accept
from mimo_jax.decode.engine import Engine
from mimo_jax.decode.placement import Model
from mimo_jax.decode.step import DecodeState
from mimo_jax.models.cut import cut_shapes, part_graph
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.kernels import use_kernels
from mimo_jax.models.params import abstract, named_shardings, partition_specs
from mimo_jax.models.target import Target
from mimo_jax.plan.published import PublishedModel, read_config
from mimo_jax.sharding import DATA, DECODE, MODEL, make_mesh, part_shape
from mimo_jax.timing import Stopwatch

NUM_DEVICES = 8
CONFIG = Path(__file__).resolve().parents[3] / "configs/drafter_mimo_v25_pro.py"
CAPACITY = {"pro": 262_144, "toy": 256}
CONTEXT = {"pro": 8_192, "toy": 150}
NUM_STEPS = {"pro": 32, "toy": 1}
NUM_ROUNDS = {"pro": 7, "toy": 1}
MORE_LAYERS = {"pro": 4, "toy": 1}  # by which a longer model exceeds the short one


def model_of(size: Size) -> PublishedModel:
    """The Pro with its drafter, or one of its structure with small numbers."""
    pro = read_config(CONFIG)
    if size == "pro":
        return pro
    assert pro.drafter is not None
    assert pro.target.moe is not None
    target = dataclasses.replace(
        pro.target,
        vocab_size=1024,
        hidden_size=256,
        layer_kinds=(GLOBAL, SLIDING, GLOBAL),
        is_moe_layer=(False, True, True),
        attention={
            k: dataclasses.replace(a, num_heads=16) for k, a in pro.target.attention.items()
        },
        dense_hidden_size=1024,
        moe=dataclasses.replace(pro.target.moe, num_experts=16, top_k=2, hidden_size=1024),
    )
    return dataclasses.replace(pro, name="toy", target=target, drafter=_drafter_for(pro, target, 1))


def _drafter_for(
    model: PublishedModel, target: TargetConfig, num_layers: int
) -> DrafterConfig | None:
    """The model's drafter, made to fit another target of its structure: taps after layer 0."""
    drafter = model.drafter
    if drafter is None:
        return None
    return dataclasses.replace(
        drafter,
        hidden_size=target.hidden_size,
        target_hidden_size=target.hidden_size,
        num_layers=num_layers,
        windows=drafter.windows[:num_layers],
        is_causal=drafter.is_causal[:num_layers],
        attention=dataclasses.replace(
            drafter.attention, num_heads=target.layer_attention(0).num_heads
        ),
        dense_hidden_size=target.dense_hidden_size,
        target_layer_ids=(0,),
        num_target_layers=target.num_layers,
        vocab_size=target.vocab_size,
        mask_token_id=target.vocab_size - 1,
    )


def of_layers(model: PublishedModel, kinds: tuple[str, ...]) -> PublishedModel:
    """A short model of the same layers: the first dense, the others sparse."""
    is_moe = (False, *(True,) * (len(kinds) - 1))
    target = dataclasses.replace(model.target, layer_kinds=kinds, is_moe_layer=is_moe)
    return dataclasses.replace(model, target=target, drafter=_drafter_for(model, target, 1))


def short_models(model: PublishedModel, num_more: int) -> dict[str, PublishedModel]:
    """One dense global layer and a sliding one; and longer by num_more layers of either kind."""
    base = (GLOBAL, SLIDING)
    return {
        "base": of_layers(model, base),
        "sliding": of_layers(model, (*base, *(SLIDING,) * num_more)),
        "global": of_layers(model, (*base, *(GLOBAL,) * num_more)),
    }


# --- a device's share, with random weights -------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "kind"))
def _draw(key: jax.Array, *, shape: tuple[int, ...], dtype: Any, kind: str) -> jax.Array:
    if kind == "scale":  # E8M0: codes of MXFP4 have a mean square of 8.6, a matrix wants 1 / width
        return jax.random.randint(key, shape, 117, 121, jnp.int32).astype(dtype)
    if kind == "bits":
        unsigned = jnp.uint32 if dtype == jnp.int32 else dtype
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, unsigned), dtype)
    if kind == "one":
        return jnp.ones(shape, dtype)
    spread = 1.0 if kind == "unit" else shape[0] ** -0.5
    return (jax.random.normal(key, shape, jnp.float32) * spread).astype(dtype)


def _kind(name: str, dtype: Any) -> str:
    if jnp.issubdtype(dtype, jnp.integer):
        return "scale" if name.endswith(("_scale", "_scales")) else "bits"
    if name.endswith("norm"):
        return "one"
    return "unit" if name == "embedding" else "matrix"


def random_share[Config: (TargetConfig, DrafterConfig)](
    config: Config,
    mesh: Mesh,
    *,
    seed: int,
    implementation: str = XLA,
    num_devices: int = NUM_DEVICES,
) -> Model[Config]:
    """What device 0 of `num_devices` holds of a model, placed on a mesh of one device.

    Experts for the kernels are drawn as tiles: there is no room for both forms.
    """
    if isinstance(config, TargetConfig):
        make = lambda: Target(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    else:
        make = lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    graph, shapes = abstract(make)
    local = part_graph(graph, shapes, config, num_devices)
    local, whole = use_kernels(
        local, cut_shapes(shapes, config, num_devices), implementation, num_parts=num_devices
    )
    sizes = {DATA: 1, MODEL: num_devices}
    specs = dict(nnx.to_flat_state(partition_specs(whole, DECODE, sizes)))
    places = dict(nnx.to_flat_state(named_shardings(whole, DECODE, mesh)))
    entries, key = [], jax.random.key(seed)
    for number, (path, leaf) in enumerate(nnx.to_flat_state(whole)):
        shape = part_shape(leaf.shape, specs[path].get_value(), sizes)
        kind = _kind(str(path[-1]), leaf.dtype)
        value = _draw(jax.random.fold_in(key, number), shape=shape, dtype=leaf.dtype, kind=kind)
        entries.append((path, leaf.replace(jax.device_put(value, places[path].get_value()))))
    return Model(config, local, nnx.from_flat_state(entries), mesh)


def implementation_of(way: str) -> str:
    """What a decode program of one of the two ways is told: plain XLA, or the kernels."""
    return XLA if way == XLA else kernel_implementation()


# --- a state that runs ---------------------------------------------------------------------------


def _filled(cache: KVCache, context: int, seed: int) -> KVCache:
    """Random keys and values, and rings that hold the last positions before `context`."""
    leaves, structure = jax.tree.flatten(cache.layers)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        _draw(key, shape=leaf.shape, dtype=leaf.dtype, kind="unit")
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    positions: Any = cache.ring_positions
    if positions is not None:
        # Slots behind the ring's end take what a block writes across it: they hold nothing here.
        num_slots = positions.shape[1] - cache.slack
        slot = np.arange(positions.shape[1], dtype=np.int32)
        newest = (context - 2 - slot) // num_slots * num_slots + slot
        positions = jnp.asarray(np.where(slot < num_slots, newest, -1)[None, :])
    return dataclasses.replace(
        cache, layers=jax.tree.unflatten(structure, drawn), ring_positions=positions
    )


def running_state(engine: Engine, context: int) -> DecodeState:
    """A state of one row of `context` committed tokens, its memory random."""
    shapes = engine.state_shapes()
    caches = shapes.target_cache, shapes.drafter_cache
    filled = [None if one is None else _filled(one, context, seed=9) for one in caches]
    bare = dataclasses.replace(shapes, target_cache=None, drafter_cache=None)
    one = lambda value: jnp.full((1,), value, jnp.int32)
    state = dataclasses.replace(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), bare),
        length=one(context),
        max_len=one(engine.capacity),
        finish=one(accept.RUNNING),
        stop_ids=jnp.full(shapes.stop_ids.shape, -1, jnp.int32),
        target_cache=filled[0],
        drafter_cache=filled[1],
    )
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, shapes))


class StepTimes(NamedTuple):
    """Of one engine.

    Attributes:
      step_ms: Median over rounds, per step.
      min_ms: Of the fastest round.
      compile_s: Of the loop.
      committed_per_step: Tokens; about 1 with random weights.
    """

    step_ms: float
    min_ms: float
    compile_s: float
    committed_per_step: float


def time_engine(engine: Engine, size: Size) -> StepTimes:
    """Milliseconds of a step, from dispatches of many steps.

    Raises:
      RuntimeError: If the row ended, which is what logits that are not finite look like.
    """
    num_steps, durations = NUM_STEPS[size], []
    state = engine.run(running_state(engine, CONTEXT[size]), num_steps)
    for _ in range(NUM_ROUNDS[size]):
        with Stopwatch() as watch:
            state = watch.wait_for(engine.run(state, num_steps))
        durations.append(watch.elapsed_s / num_steps * 1e3)
    steps = int(state.num_steps[0])
    if int(state.finish[0]) != accept.RUNNING or steps != num_steps * (1 + len(durations)):
        raise RuntimeError(f"the row ended after {steps} steps (finish {int(state.finish[0])})")
    committed = (int(state.length[0]) - CONTEXT[size]) / steps
    return StepTimes(float(np.median(durations)), min(durations), engine.compile_s, committed)


def times_by_loop(
    model: PublishedModel, size: Size, way: str, mesh: Mesh
) -> Iterator[tuple[str, dict[str, float]]]:
    """Yields "plain", then "dflash" over the same target, each with its `StepTimes` and weights."""
    implementation = implementation_of(way)
    share = functools.partial(random_share, mesh=mesh, implementation=implementation)
    target = share(model.target, seed=1)
    drafters: list[Callable[[], Any]] = [lambda: None]
    if (config := model.drafter) is not None:
        drafters.append(lambda: share(config, seed=2))
    for name, make_drafter in zip(("plain", "dflash"), drafters, strict=False):
        drafter = make_drafter()
        engine = Engine(
            target, drafter, max_len=CAPACITY[size], implementation=implementation
        )
        times = time_engine(engine, size)
        params = [target.params] if drafter is None else [target.params, drafter.params]
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        yield name, {**times._asdict(), "weights_gb": num_bytes / 1e9}


# --- the parts -----------------------------------------------------------------------------------


def time_layers(size: Size, note: Note, way: str) -> None:
    """Milliseconds that one more layer of a kind adds to a step, plain and of a draft block."""
    mesh, num_more = make_mesh(DECODE, (1, 1)), MORE_LAYERS[size]
    steps: dict[str, dict[str, dict[str, float]]] = {}
    for name, model in short_models(model_of(size), num_more).items():
        steps[name] = dict(times_by_loop(model, size, way, mesh))
        note({"short_models": steps})
        if name != "base":
            added = {
                loop: (steps[name][loop]["step_ms"] - base["step_ms"]) / num_more
                for loop, base in steps["base"].items()
            }
            note({f"{name}_layer_ms": added})


def time_steps(size: Size, note: Note, way: str) -> None:
    """Milliseconds of a step of all layers, plain and DFlash."""
    steps: dict[str, dict[str, float]] = {}
    for loop, times in times_by_loop(model_of(size), size, way, make_mesh(DECODE, (1, 1))):
        steps[loop] = times
        note({"steps": steps})
