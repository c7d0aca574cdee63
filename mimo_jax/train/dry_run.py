"""What a run would be, without a run directory: parameters, memory of its real steps, time.

Problem: whether a run fits and when it will be done is asked before hours are spent. Choice: both
train steps are lowered with shapes in place of arrays and compiled for the run's mesh; the compiler
then says what a device holds. On a CPU the mesh may have more devices than the machine has cores
(`provide_devices`): memory is per device all the same. Time comes from a few real steps with fresh
weights on random ids, and not from a roofline, which knows neither this machine nor its compiler;
where the devices are not real, or the step does not fit this machine, there is none, and a reason.

`plan/programs.py` lowers the same steps for devices that nobody here has.
"""

import math
import os
import statistics
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.table import Table

from mimo_jax.config import TargetConfig
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.params import abstract, split
from mimo_jax.models.target import Target
from mimo_jax.sharding import TRAIN, full_sizes
from mimo_jax.timing import Stopwatch
from mimo_jax.train.config import DistillConfig, ExperimentConfig, TrainConfig
from mimo_jax.train.data import PackedRows
from mimo_jax.train.drafter_step import make_drafter_step
from mimo_jax.train.optimizer import make_optimizer
from mimo_jax.train.placement import ROWS, num_row_parts, param_shardings, state_shardings
from mimo_jax.train.start import load_float_target, run_mesh
from mimo_jax.train.step import (
    Batch,
    init_state,
    make_target_step,
    place_batch,
)

_TIMED_STEPS = 3


type RunConfig = ExperimentConfig | DistillConfig


def target_config(config: RunConfig) -> TargetConfig:
    """Architecture of the target: its weights in float, as training holds them."""
    if isinstance(config, ExperimentConfig):
        return config.target
    return load_float_target(Path(config.checkpoint)).config


def provide_devices(config: RunConfig) -> None:
    """On CPUs, as many devices as the config's mesh has; before JAX touches any."""
    count = math.prod(config.mesh)
    if count > 1:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:  # JAX has its devices already: they are enough, or `make_mesh` says so
            pass


def counts(config: RunConfig) -> dict[str, Any]:
    """Parameters, steps and tokens; compiles nothing."""

    def count(make_module) -> int:
        _, params = abstract(make_module)
        return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params))

    drafter, rounds = config.drafter_train, 1
    found: dict[str, Any] = {
        "name": config.name,
        "mesh": dict(zip(TRAIN.mesh_axes, full_sizes(TRAIN, config.mesh), strict=True)),
    }
    if isinstance(config, ExperimentConfig):
        target = config.target_train
        found["target"] = {
            "parameters": count(lambda: Target(config.target, rngs=nnx.Rngs(0))),
            "steps": target.num_steps,
            "tokens": target.num_steps * target.batch_rows * config.corpus.row_len,
        }
        found["regenerated_tokens"] = config.regenerate.num_tokens
    else:
        rounds = config.rounds
    steps = drafter.num_steps * rounds
    found["drafter"] = {
        "parameters": count(lambda: Drafter(config.drafter, rngs=nnx.Rngs(0))),
        "steps": steps,
        "tokens": steps * drafter.batch_rows * drafter.row_len,
        "blocks": steps * drafter.batch_rows * drafter.num_anchors,
    }
    return found


def _placed(shapes, shardings):
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
        shapes,
        shardings,
    )


def _on_mesh(params, mesh: Mesh | None):
    return params if mesh is None else _placed(params, param_shardings(params, mesh))


def _state_shapes(params, optimizer, train: TrainConfig, mesh: Mesh | None) -> Any:
    has_ema = train.ema_decay > 0
    state = jax.eval_shape(lambda p: init_state(p, optimizer, has_ema=has_ema), params)
    return state if mesh is None else _placed(state, state_shardings(state, mesh))


def _batch_shapes(mesh: Mesh | None, rows: int, length: int) -> Batch:
    cut = None if mesh is None else NamedSharding(mesh, PartitionSpec(ROWS))
    rows += -rows % num_row_parts(mesh)

    def array(dtype) -> Any:
        return jax.ShapeDtypeStruct((rows, length), dtype, sharding=cut)

    ids = array(jnp.int32)
    return Batch(ids, ids, array(jnp.bool_), ids)


def lower_target_step(config: ExperimentConfig, mesh: Mesh | None) -> jax.stages.Lowered:
    """A whole optimizer step of the target: forward, backward, Muon, balancing; float32."""
    train = config.target_train
    graph, params = abstract(lambda: Target(config.target, rngs=nnx.Rngs(0), dtype=jnp.float32))
    optimizer = make_optimizer(params, train, mesh)
    step = make_target_step(graph, optimizer, train, mesh, config.dispatch)
    batch = _batch_shapes(mesh, train.batch_rows, config.corpus.row_len)
    return step.lower(_state_shapes(params, optimizer, train, mesh), batch)


def _kept_shapes(
    config: RunConfig, frozen: TargetConfig, mesh: Mesh | None
) -> jax.ShapeDtypeStruct | None:
    """Of the target's features that a step is given, if the run keeps them."""
    train, model = config.drafter_train, config.drafter
    if not train.keeps_features or mesh is not None:
        return None
    width = model.context_width + frozen.hidden_size * train.objective.needs_target
    return jax.ShapeDtypeStruct((train.batch_rows, train.row_len, width), jnp.bfloat16)


def lower_drafter_step(config: RunConfig, mesh: Mesh | None) -> jax.stages.Lowered:
    """A whole optimizer step of the drafter, the target's forward included unless it is kept."""
    train, model, frozen = config.drafter_train, config.drafter, target_config(config)
    target_graph, target_params = abstract(
        lambda: Target(frozen, rngs=nnx.Rngs(0), dtype=jnp.float32)
    )
    graph, params = abstract(lambda: Drafter(model, rngs=nnx.Rngs(0), dtype=jnp.float32))
    mask = jax.ShapeDtypeStruct((model.hidden_size,), jnp.float32)
    trained = {"drafter": params, "mask_embedding": mask}
    optimizer = make_optimizer(trained, train, mesh)
    step = make_drafter_step(target_graph, graph, optimizer, train, model, mesh, config.dispatch)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return step.lower(
        _state_shapes(trained, optimizer, train, mesh),
        _on_mesh(target_params, mesh),
        _batch_shapes(mesh, train.batch_rows, train.row_len),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere),
        _kept_shapes(config, frozen, mesh),
    )


def _compile(lowered: jax.stages.Lowered) -> tuple[Any, dict[str, Any]]:
    """The compiled step, and what one device holds while it runs."""
    with Stopwatch() as watch:
        compiled = lowered.compile()
    memory: Any = compiled.memory_analysis()
    kept = memory.argument_size_in_bytes
    # XLA:CPU reports a peak below its own arguments: added up here.
    peak = kept + memory.output_size_in_bytes - memory.alias_size_in_bytes
    facts = {
        "compile_s": round(watch.elapsed_s, 2),
        "state_bytes": kept,
        "scratch_bytes": memory.temp_size_in_bytes,
        "peak_bytes": peak + memory.temp_size_in_bytes,
    }
    return compiled, facts


def _random_batch(rows: int, length: int, vocab_size: int) -> Batch:
    ids = np.random.default_rng(0).integers(1, vocab_size, (rows, length)).astype(np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    return place_batch(PackedRows(ids, np.ones_like(ids), np.ones(ids.shape, bool), positions))


def _seconds_per_step(step, state, *args) -> float:
    """Median of a few steps after one; consumes the state."""
    durations = []
    for _ in range(1 + _TIMED_STEPS):
        with Stopwatch() as watch:
            state, _ = watch.wait_for(step(state, *args))
        durations.append(watch.elapsed_s)
    return statistics.median(durations[1:])


def _fresh_state(params, train: TrainConfig):
    return init_state(params, make_optimizer(params, train), has_ema=train.ema_decay > 0)


def _time_steps(config: RunConfig, steps: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step of each training, on one device with fresh weights."""
    model, seconds = target_config(config), {}
    params = jax.jit(lambda: split(Target(model, rngs=nnx.Rngs(0)))[1])()
    frozen = jax.tree.map(jnp.copy, params)
    if isinstance(config, ExperimentConfig):
        train = config.target_train
        batch = _random_batch(train.batch_rows, config.corpus.row_len, model.vocab_size)
        seconds["target"] = _seconds_per_step(steps["target"], _fresh_state(params, train), batch)
    params = jax.jit(lambda: split(Drafter(config.drafter, rngs=nnx.Rngs(1)))[1])()
    trained = {"drafter": params, "mask_embedding": jnp.ones((config.drafter.hidden_size,))}
    train = config.drafter_train
    batch = _random_batch(train.batch_rows, train.row_len, model.vocab_size)
    state = _fresh_state(trained, train)
    kept = _kept_shapes(config, model, None)
    features = None if kept is None else jnp.zeros(kept.shape, kept.dtype)
    arguments = (frozen, batch, jnp.int32(0), features)
    seconds["drafter"] = _seconds_per_step(steps["drafter"], state, *arguments)
    return seconds


def _why_untimed(mesh: Mesh | None, peak_bytes: int) -> str | None:
    """Why real steps cannot be timed here; None if they can."""
    if mesh is not None:
        return f"steps on a mesh of {mesh.size} devices are compiled here, not run"
    device = jax.devices()[0]
    if device.platform == "cpu":
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        available = (device.memory_stats() or {}).get("bytes_limit", 0)
    if peak_bytes > available:
        return f"a step needs {peak_bytes / 1e9:,.1f} GB and there are {available / 1e9:,.1f}"
    return None


def dry_run(config: RunConfig) -> dict[str, Any]:
    """Builds the train steps of a run and says what they take.

    Args:
      config: Of the run.

    Returns:
      `counts`, and for "target" and "drafter" the compile time and bytes of one device
      (state_bytes, scratch_bytes, peak_bytes), seconds_per_step and seconds of all steps; "seconds"
      of both trainings. Seconds are None with a reason in "why_untimed" where they are not known.

    Raises:
      ConfigError: If there are not enough devices.
    """
    mesh = run_mesh(config)
    found = counts(config)
    lowered = {"drafter": lower_drafter_step(config, mesh)}
    if isinstance(config, ExperimentConfig):
        lowered = {"target": lower_target_step(config, mesh)} | lowered
    steps = {}
    for name, program in lowered.items():
        steps[name], facts = _compile(program)
        found[name] |= facts
    largest = max(found[name]["peak_bytes"] for name in steps)
    found["why_untimed"] = _why_untimed(mesh, largest)
    timed: dict[str, float] = {}
    if found["why_untimed"] is None:
        timed = _time_steps(config, steps)
    for name in steps:
        each = timed.get(name)
        total = None if each is None else round(each * found[name]["steps"], 3)
        found[name] |= {"seconds_per_step": each and round(each, 5), "seconds": total}
    totals = [found[name]["seconds"] for name in steps]
    found["seconds"] = None if None in totals else sum(totals)
    return found


def _duration(seconds: float | None) -> str:
    """Example: 5025.0 -> "1 h 24 min"; 75.0 -> "1 min 15 s"; 0.0125 -> "12.5 ms"."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def table(found: dict[str, Any]) -> Table:
    """What `dry_run` found, to print."""
    megabytes = lambda n: f"{n / 1e6:,.1f} MB"
    mesh = "x".join(map(str, found["mesh"].values()))
    stages = [name for name in ("target", "drafter") if name in found]
    caption = ""
    if "regenerated_tokens" in found:
        caption = f"{found['regenerated_tokens']:,} tokens are regenerated in between. "
    caption += (
        f"Not timed: {found['why_untimed']}."
        if found["seconds"] is None
        else f"In all {_duration(found['seconds'])}, from {_TIMED_STEPS} steps each; "
        "text, regeneration, evaluation and saving not counted."
    )
    title = f"{found['name']}, mesh {mesh}"
    out = Table(title=title, caption=caption, caption_justify="left", min_width=64)
    out.add_column("")
    for name in stages:
        out.add_column(name, justify="right")
    row = lambda label, show: out.add_row(label, *(show(found[n]) for n in stages))
    row("parameters", lambda stage: f"{stage['parameters']:,}")
    row("steps", lambda stage: f"{stage['steps']:,}")
    row("tokens", lambda stage: f"{stage['tokens']:,}")
    row("draft blocks", lambda stage: f"{stage['blocks']:,}" if "blocks" in stage else "–")
    row("kept on a device", lambda stage: megabytes(stage["state_bytes"]))
    row("scratch of a step", lambda stage: megabytes(stage["scratch_bytes"]))
    row("peak on a device", lambda stage: megabytes(stage["peak_bytes"]))
    row("compiling", lambda stage: _duration(stage["compile_s"]))
    row("one step", lambda stage: _duration(stage["seconds_per_step"]))
    row("all steps", lambda stage: _duration(stage["seconds"]))
    return out
