"""An engine: compiled decoding of one batch shape.

It holds the parameters of a target (and a drafter) and the programs compiled for one shape: one
prefill per prompt bucket, one row insertion, one step group. It knows token ids only: no text, no
files. Compile time is measured apart from run time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from mimo_jax import cache as kv
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig
from mimo_jax.decode import accept, adaptive, controller
from mimo_jax.decode.placement import (
    ONE_ROW,
    ROWS,
    Model,
    cache_specs,
    dtype_of,
    is_cut,
    param_specs,
    program,
    row_specs,
    rows_per_device,
)
from mimo_jax.decode.request import Request, check_request, one_row, row_sampling
from mimo_jax.decode.sampling import ADJUSTED, GREEDY, adjust_logits, count_ids, sample
from mimo_jax.decode.step import (
    DecodeState,
    Logprobs,
    SeenIds,
    logprobs_of,
    plain_step,
    run_steps,
    speculative_step,
)
from mimo_jax.models.params import transpose_weights
from mimo_jax.quant.kv import KVFormat
from mimo_jax.sharding import DATA, DECODE, MODEL
from mimo_jax.timing import Stopwatch

MIN_PROMPT_BUCKET = 32  # prompts are padded to powers of two from here: few programs to compile
PROMPT_CHUNK = 512  # longer prompts are prefilled in chunks of this length
LENGTH_BUCKET = 128  # capacity of a batch is rounded up to this


def prompt_bucket(num_tokens: int) -> int:
    """Length that a prompt chunk is padded to. Example: 33 -> 64."""
    return max(MIN_PROMPT_BUCKET, 1 << (num_tokens - 1).bit_length())


# A model past this size does not stay in a CPU's last-level cache from step to step.
_CACHE_BYTES = 64 << 20


def prefers_transposed(num_bytes: int) -> bool:
    """Whether matrices of a model of this size are read fastest as [out, in] on this platform."""
    return jax.default_backend() == "cpu" and num_bytes >= _CACHE_BYTES


def lay_out_for_decode[Config: (TargetConfig, DrafterConfig)](
    model: Model[Config],
) -> Model[Config]:
    """The model with its matrices as this platform's small matmuls read them fastest.

    Models that outgrow the cache of a CPU are stored [out, in] (see layers/linear.py); all others
    are returned as they are. Engines do this themselves; do it once and drop the original where
    several engines share a large model.
    """
    if model.mesh is not None:
        return model
    if not prefers_transposed(sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))):
        return model
    return Model(model.config, *transpose_weights(model.graph, model.params))


def _compiler_options() -> dict[str, str]:
    """XLA:CPU's tree reduction turns each RMS norm into five small operations, of which a decode
    step has hundreds: three norms are 10 fusions with it and 4 without (jax 0.12.0.1)."""
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_disable_hlo_passes": "tree_reduction_rewriter"}


class Engine:
    """Compiled decoding of one batch shape.

    Args:
      target: The target model.
      drafter: Its drafter, or None for plain decoding.
      max_len: Longest prompt + output that a row may reach.
      batch_size: Rows.
      mode: Sampling mode of the program, of sampling.MODES; must cover every request.
      draft_block_len: Slots per draft block; default and maximum is what the drafter was trained
        for.
      rule: Acceptance rule, of accept.RULES.
      policy: How the controller picks the block length of each step, controller.COSTS or PROFILE;
        None = every block is full.
      max_stop_ids: Stop ids per request.
      max_bias_ids: Logit biases per request.
      num_logprobs: Record the log probability of every token, and of this many likeliest ids at
        its position; None = record none.
      kv_format: How the memory of the target's global layers is quantised, of quant.kv.FORMATS;
        None = not at all. Drafting changes no answer then either, up to rounding: what a position
        sees in codes is told by the position, but a key computed in a block differs by 1e-7, and
        a number on the edge between two codes may then take the other (1 of 90 answers).

    Raises:
      ConfigError: If drafter and target do not fit, or a length is out of range.
    """

    def __init__(
        self,
        target: Model[TargetConfig],
        drafter: Model[DrafterConfig] | None = None,
        *,
        max_len: int,
        batch_size: int = 1,
        mode: str = GREEDY,
        draft_block_len: int | None = None,
        rule: str = accept.MATCH,
        policy: str | None = None,
        max_stop_ids: int = 8,
        max_bias_ids: int = 0,
        num_logprobs: int | None = None,
        kv_format: KVFormat | None = None,
    ):
        if max_len > target.config.max_position:
            raise ConfigError(
                f"length {max_len} is beyond the model's context of {target.config.max_position}"
            )
        self.draft_block_len = 1
        if drafter is not None:
            drafter.config.check_fits(target.config)
            trained = drafter.config.draft_block_len
            self.draft_block_len = trained if draft_block_len is None else draft_block_len
            if not 2 <= self.draft_block_len <= trained:
                raise ConfigError(
                    f"draft_block_len {draft_block_len} is out of range; allowed: 2..{trained} "
                    "(the drafter was trained for blocks of that length)"
                )
        self.target = lay_out_for_decode(target)
        self.drafter = None if drafter is None else lay_out_for_decode(drafter)
        self.mesh = target.mesh
        if drafter is not None and drafter.mesh != target.mesh:
            raise ConfigError("target and drafter must be placed on the same mesh")
        rows_per_device(batch_size, self.mesh)
        self.batch_size, self.mode, self.max_stop_ids = batch_size, mode, max_stop_ids
        if rule not in accept.RULES:
            raise ConfigError(f"rule {rule!r} is unknown; allowed: {', '.join(accept.RULES)}")
        if policy not in (None, controller.COSTS, controller.PROFILE):
            allowed = f"{controller.COSTS}, {controller.PROFILE}"
            raise ConfigError(f"policy {policy!r} is unknown; allowed: {allowed}")
        self.policy = None if drafter is None else policy
        self.lengths = controller.ladder(self.draft_block_len)
        self._costs = None
        self._controls: dict[tuple, controller.Control] = {}  # fresh ones, by scene and costs
        self.rule, self.max_bias_ids, self.num_logprobs = rule, max_bias_ids, num_logprobs
        self.kv_format = kv_format
        if kv_format is not None and PROMPT_CHUNK % kv_format.group_len:
            raise ConfigError(
                f"group_len {kv_format.group_len} does not divide prompt chunks of {PROMPT_CHUNK}"
            )
        self.max_len = max_len
        self.capacity = -(-max_len // LENGTH_BUCKET) * LENGTH_BUCKET
        self.compile_s = 0.0
        self._programs = {}

    @property
    def target_axis(self) -> str | None:
        """Mesh axis that heads, widths and vocabulary are cut over."""
        return None if self.mesh is None else MODEL

    @property
    def _params(self):
        return self.target.params, None if self.drafter is None else self.drafter.params

    def _merge(self, params):
        target = nnx.merge(self.target.graph, params[0])
        drafter = None if self.drafter is None else nnx.merge(self.drafter.graph, params[1])
        return target, drafter

    def _program(self, name, make: Callable, *args):
        """The compiled program for these argument shapes; `make` gives it jitted. Compiles once."""
        if name not in self._programs:
            with Stopwatch() as watch:
                lowered = make().lower(*args)
                compiled = lowered.compile(compiler_options=_compiler_options())
            self.compile_s += watch.elapsed_s
            self._programs[name] = compiled
        return self._programs[name]

    # --- where things are on a mesh ------------------------------------------------------------

    def _param_specs(self):
        if self.mesh is None:
            return None
        return param_specs(self.target), self.drafter and param_specs(self.drafter)

    def _cache_specs(self, rows: str | None):
        if self.mesh is None:
            return None, None
        target_cache, drafter_cache = jax.eval_shape(
            lambda params: self._empty_row(*self._merge(params)), self._params
        )
        target_cache = cache_specs(target_cache, rows)
        if drafter_cache is not None and self.drafter is not None:
            drafter_cache = cache_specs(drafter_cache, rows, is_cut=is_cut(self.drafter))
        return target_cache, drafter_cache

    def _state_specs(self, state: DecodeState, rows: str | None):
        if self.mesh is None:
            return None
        caches = self._cache_specs(rows)
        bare = dataclasses.replace(state, seen=None, target_cache=None, drafter_cache=None)
        vocab_spec: Any = self._vocab_spec(rows)
        seen = None if state.seen is None else SeenIds(vocab_spec, vocab_spec)
        return dataclasses.replace(
            row_specs(bare, rows), seen=seen, target_cache=caches[0], drafter_cache=caches[1]
        )

    # --- prefill -------------------------------------------------------------------------------

    def _empty_row(self, target, drafter):
        slack = self.draft_block_len
        target_cache = target.make_cache(1, self.capacity, slack, form=self.kv_format)
        if drafter is None:
            return target_cache, None
        if self.policy is not None:
            slack = max(slack, adaptive.PIECE_LEN)
        return target_cache, drafter.make_cache(1, self.capacity, slack)

    def prefill_program(self, is_first: bool):
        """Jitted prompt chunk: (params, token_ids [1, t], caches, start, num_valid, sampling,
        is_in_prompt) -> (id, its log probabilities, caches).

        Args:
          is_first: Whether the chunk begins the prompt; then caches are (None, None) and are made.
        """
        taps = () if self.drafter is None else self.drafter.config.target_layer_ids

        def prefill(params, token_ids, caches, start, num_valid, sampling, is_in_prompt):
            target, drafter = self._merge(params)
            if is_first:
                caches = self._empty_row(target, drafter)
            target_cache, drafter_cache = caches
            out = target.prefill(
                token_ids, target_cache, start, num_valid, is_first=is_first, tap_layer_ids=taps
            )
            if drafter is not None:
                drafter_cache = drafter.inject_prompt(
                    drafter_cache, out.context_features, start, num_valid
                )
            next_pos = (start + num_valid)[:, None]
            axis, logits, logprobs = target.mesh_axis, out.logits, None
            if is_in_prompt is not None:
                nothing = jnp.zeros((*logits.shape[:2], logits.shape[-1]), jnp.int32)
                logits = adjust_logits(logits, sampling, nothing, is_in_prompt, axis)
            first = sample(logits, sampling, next_pos, self.mode, axis)
            if self.num_logprobs is not None:
                logprobs = logprobs_of(out.logits, first, self.num_logprobs, axis)
            return first[:, 0], logprobs, (out.cache, drafter_cache)

        caches, one = self._cache_specs(ONE_ROW), DECODE.spec((ONE_ROW,))
        given = (None, None) if is_first else caches
        in_specs = (self._param_specs(), one, given, one, one, one, self._vocab_spec(ONE_ROW))
        out_specs = (one, None if self.num_logprobs is None else one, caches)
        return program(prefill, self.mesh, in_specs, out_specs, donate=(2,))

    def _vocab_spec(self, rows: str | None):
        """Of arrays [b, v]; None where the mode keeps none."""
        return DECODE.spec((rows, "vocab")) if self.mode == ADJUSTED else None

    def prefill(
        self, request: Request, earlier: controller.Control | None = None
    ) -> DecodeState:
        """A state of one row with the prompt read and the first token committed.

        Args:
          request: What to continue.
          earlier: Control of an earlier row of the same scene, to go on from.

        Raises:
          ConfigError: If the prompt is empty, max_tokens < 1, an id is not in the vocabulary, or
            prompt and output do not fit the engine's max_len.
        """
        self.check(request)
        prompt = np.asarray(request.prompt_ids, np.int32)
        p = len(prompt)
        sampling, is_in_prompt = row_sampling(request, self.max_bias_ids), None
        if self.mode == ADJUSTED:
            is_in_prompt = np.zeros((1, self.target.config.vocab_size), bool)
            is_in_prompt[0, prompt] = True
        caches, first, logprobs = (None, None), None, None
        for start in range(0, p, PROMPT_CHUNK):
            chunk = prompt[start : start + PROMPT_CHUNK]
            room = min(self.capacity - start, PROMPT_CHUNK)
            bucket = min(prompt_bucket(len(chunk)), room)
            padded = np.zeros((1, bucket), np.int32)
            padded[0, : len(chunk)] = chunk
            place = (one_row(start), one_row(len(chunk)))
            args = (self._params, padded, caches, *place, sampling, is_in_prompt)
            is_first = start == 0
            prefill = self._program(
                ("prefill", bucket, is_first),
                lambda is_first=is_first: self.prefill_program(is_first),
                *args,
            )
            first, logprobs, caches = prefill(*args)
        tokens = np.zeros((1, self.capacity + self.draft_block_len), np.int32)
        tokens[0, :p] = prompt
        stop_ids = np.full((1, self.max_stop_ids), -1, np.int32)
        stop_ids[0, : len(request.stop_ids)] = request.stop_ids
        args = (
            tokens,
            first,
            logprobs,
            one_row(p),
            one_row(p + request.max_tokens),
            stop_ids,
            sampling,
            self._control(request, earlier),
            is_in_prompt,
            *caches,
        )
        start = self._program("start", lambda: self._start_program(args), *args)
        return start(*args)

    def _start_program(self, args):
        context = None
        if self.policy is not None and self.drafter is not None:
            context = (self.drafter.config.context_width, dtype_of(self.target))
        start = functools.partial(_start_state, context=context, mesh_axis=self.target_axis)
        caches = self._cache_specs(ONE_ROW)
        rows = row_specs(args[:-3], ONE_ROW)
        whole = functools.partial(_start_state, context=context)
        out = self._state_specs(jax.eval_shape(whole, *args), ONE_ROW)
        in_specs = (*rows, self._vocab_spec(ONE_ROW), *caches)
        return program(start, self.mesh, in_specs, out, donate=(9, 10))

    def _control(self, request: Request, earlier: controller.Control | None):
        """The controller's state of a fresh row, or None where block lengths are fixed."""
        if self.policy is None:
            return None
        costs = self.costs() if self.policy == controller.COSTS else self.lengths
        key = (request.scene, *costs)  # kept: made anew they are a dozen dispatches per request
        if key not in self._controls:
            fresh = adaptive.row_control(self.lengths, request.scene)
            self._controls[key] = fresh._replace(costs=jnp.asarray([costs], jnp.float32))
        return controller.carried(self._controls[key], earlier)

    def costs(self) -> list[float]:
        """Seconds of a step of each rung on this device, measured once.

        Where the engine's rows are too short to measure, a step's cost is its length.
        """
        if self._costs is None:
            self._costs = [float(length) for length in self.lengths]  # also while measuring
            self._costs = measure_costs(self) or self._costs
        return self._costs

    def check(self, request: Request) -> None:
        """Raises ConfigError with one line if the request cannot be served by this engine."""
        check_request(
            request,
            vocab_size=self.target.config.vocab_size,
            max_len=self.max_len,
            max_stop_ids=self.max_stop_ids,
            max_bias_ids=self.max_bias_ids,
            mode=self.mode,
        )

    # --- rows and steps ------------------------------------------------------------------------

    def empty_state(self, row_state: DecodeState) -> DecodeState:
        """A batch of finished rows, shaped after a state of one row."""
        make = lambda: self._empty_program(row_state)
        return self._program("empty", make, row_state)(row_state)

    def _empty_program(self, row_state: DecodeState):
        b = rows_per_device(self.batch_size, self.mesh)

        def blank(row_state):
            blank = lambda leaf: jnp.zeros((b, *leaf.shape[1:]), leaf.dtype)
            state = jax.tree.map(blank, row_state)
            done = jnp.full((b,), accept.STOPPED, jnp.int32)
            # length 1: an idle row steps too (masked out), and its anchor must stand somewhere.
            ones = lambda: jnp.ones((b,), jnp.int32)
            return dataclasses.replace(state, finish=done, length=ones(), max_len=ones())

        specs = [self._state_specs(row_state, rows) for rows in (ONE_ROW, ROWS)]
        return program(blank, self.mesh, (specs[0],), specs[1])

    def state_shapes(self) -> DecodeState:
        """A batch's state as shapes with their shardings: to lower programs without any array."""
        make_caches = lambda params: self._empty_row(*self._merge(params))
        caches = jax.eval_shape(
            program(make_caches, self.mesh, (self._param_specs(),), self._cache_specs(ONE_ROW)),
            self._params,
        )
        one: Any = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct((1, *s), dtype)
        n, is_in_prompt, logprobs = self.num_logprobs, None, None
        if n is not None:
            f32 = jnp.float32
            logprobs = Logprobs(one(1, dtype=f32), one(1, n), one(1, n, dtype=f32))
        if self.mode == ADJUSTED:
            is_in_prompt = one(self.target.config.vocab_size, dtype=jnp.bool_)
        args = (
            one(self.capacity + self.draft_block_len),
            one(),
            logprobs,
            one(),
            one(),
            one(self.max_stop_ids),
            row_sampling(Request((), 1), self.max_bias_ids),
            None if self.policy is None else controller.initial(1, self.lengths),
            is_in_prompt,
            *caches,
        )
        row_state = jax.eval_shape(self._start_program(args), *args)
        state = jax.eval_shape(self._empty_program(row_state), row_state)
        mesh = self.mesh
        if mesh is None:
            return state
        placed = lambda leaf, spec: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )
        return jax.tree.map(placed, state, self._state_specs(row_state, ROWS))

    def insert(self, state: DecodeState, row_state: DecodeState, row: int) -> DecodeState:
        """Replaces one row of the batch; the old state is consumed."""
        if self.batch_size == 1:
            return row_state
        args = (state, row_state, np.int32(row))
        return self._program("insert", lambda: self._insert_program(*args[:2]), *args)(*args)

    def _insert_program(self, state, row_state):
        b = rows_per_device(self.batch_size, self.mesh)

        def insert(state, row_state, row):
            if self.mesh is None:
                return kv.insert_row(state, row_state, row)
            local = row - jax.lax.axis_index(DATA) * b
            slot = jnp.clip(local, 0, b - 1)
            held = jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis=0), state
            )
            one = jax.tree.map(lambda new, old: jnp.where(local == slot, new, old), row_state, held)
            return kv.insert_row(state, one, slot)

        batch = self._state_specs(state, ROWS)
        in_specs = (batch, self._state_specs(row_state, ONE_ROW), DECODE.spec(()))
        return program(insert, self.mesh, in_specs, batch, donate=(0,))

    def place_rows(self, rows_tree):
        """Arrays of the whole batch where the programs want them."""
        if self.mesh is None:
            return rows_tree
        place = NamedSharding(self.mesh, DECODE.spec((ROWS,)))
        return jax.device_put(rows_tree, place)

    def steps_program(self, state: DecodeState):
        """Jitted (params, state, num_steps) -> state for states of this structure."""

        has_more_rows = rows_per_device(self.batch_size, self.mesh) < self.batch_size

        def group(params, state, num_steps):
            target, drafter = self._merge(params)
            return self._loop(target, drafter, state, num_steps, DATA if has_more_rows else None)

        specs = self._state_specs(state, ROWS)
        in_specs = (self._param_specs(), specs, DECODE.spec(()))
        return program(group, self.mesh, in_specs, specs, donate=(1,))

    def _loop(self, target, drafter, state: DecodeState, num_steps, row_axis: str | None):
        """The loop that this engine compiles."""
        options: dict[str, Any] = {"mode": self.mode}
        if drafter is not None:
            options |= {"draft_block_len": self.draft_block_len, "rule": self.rule}
        if self.policy is not None and drafter is not None:
            options |= {"policy": self.policy, "row_axis": row_axis}
            return adaptive.run_adaptive_steps(target, drafter, state, num_steps, **options)
        if drafter is None:
            step = lambda state: plain_step(target, state, **options)[0]
        else:
            step = lambda state: speculative_step(target, drafter, state, **options)
        axis = self.target_axis
        return run_steps(step, state, num_steps, mesh_axis=axis, row_axis=row_axis)

    def group_program(self, state: DecodeState):
        """The compiled step group, for inspection: (params, state, num_steps) -> state."""
        args = (self._params, state, np.int32(1))
        return self._program("group", lambda: self.steps_program(state), *args)

    def run(self, state: DecodeState, num_steps: int) -> DecodeState:
        """Up to num_steps decode steps in one dispatch; the old state is consumed."""
        return self.group_program(state)(self._params, state, np.int32(num_steps))


def measure_costs(engine: Engine, num_steps: int = 24, rounds: int = 7) -> list[float] | None:
    """Seconds of a step of each rung of an adaptive engine; None if its rows are too short.

    The rungs take turns, and the medians count: what neighbours do to the shared cache lasts longer
    than one measurement.
    """
    room = engine.max_len - 2
    num_steps = min(num_steps, room // engine.draft_block_len)
    if num_steps < 4:
        return None

    def seconds(rung: int) -> float:
        row = engine.prefill(Request((0,), room))
        state = row if engine.batch_size == 1 else engine.empty_state(row)
        for slot in range(engine.batch_size if engine.batch_size > 1 else 0):
            state = engine.insert(state, row, slot)
        assert state.control is not None, "an engine with a policy has a controller"
        control = engine.place_rows(controller.forced(state.control, rung))
        state = dataclasses.replace(state, control=control)
        engine.group_program(state)
        with Stopwatch() as watch:
            state = engine.run(state, num_steps)
            watch.wait_for(state.length)
        return watch.elapsed_s / num_steps

    rungs = range(len(engine.lengths))
    times = [[seconds(rung) for rung in rungs] for _ in range(rounds + 1)]
    return np.median(times[1:], axis=0).tolist()  # the first warms up


def _start_state(
    tokens,
    first,
    logprobs,
    prompt_len,
    max_len,
    stop_ids,
    sampling,
    control,
    is_in_prompt,
    target_cache,
    drafter_cache,
    *,
    context=None,
    mesh_axis=None,
):
    """A one-row state whose first token, sampled by prefill, is committed."""
    b, s = tokens.shape
    column = jnp.arange(s, dtype=jnp.int32)[None, :]
    tokens = jnp.where(column == prompt_len[:, None], first[:, None], tokens)
    committed = accept.cut_at_stop_and_limit(
        first[:, None],
        jnp.ones((b,), jnp.int32),
        stop_ids,
        max_len - prompt_len,
        jnp.zeros((b,), bool),
    )
    seen = None
    if is_in_prompt is not None:
        v = is_in_prompt.shape[1]
        counts = count_ids(first[:, None], jnp.ones((b, 1), bool), v, mesh_axis)
        seen = SeenIds(counts, is_in_prompt)
    if logprobs is not None:
        at_start = lambda x: jnp.zeros((b, s, *x.shape[2:]), x.dtype).at[0, prompt_len[0]].set(
            x[0, 0]
        )
        logprobs = jax.tree.map(at_start, logprobs)
    return DecodeState(
        tokens=tokens,
        length=prompt_len + 1,
        max_len=max_len,
        finish=committed.finish,
        stop_ids=stop_ids,
        sampling=sampling,
        seen=seen,
        logprobs=logprobs,
        num_steps=jnp.zeros((b,), jnp.int32),
        committed_per_step=jnp.zeros((b, s), jnp.int8),
        accepted_per_step=jnp.zeros((b, s), jnp.int8),
        offered_per_step=jnp.zeros((b, s), jnp.int8),
        control=control,
        pending=None if context is None else adaptive.empty_pending(b, *context),
        target_cache=target_cache,
        drafter_cache=drafter_cache,
    )
