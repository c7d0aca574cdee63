"""An engine: compiled decoding of one batch shape.

It holds the parameters of a target (and a drafter) and the programs compiled for one shape: one
prefill per prompt bucket, one row insertion, one step group. It knows token ids only: no text, no
files. Compile time is measured apart from run time.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from mimo_jax import cache as kv
from mimo_jax.config import ConfigError, DraftConfig, DrafterConfig, TargetConfig
from mimo_jax.decode import accept, adaptive, controller
from mimo_jax.decode.integrity import check_integrity
from mimo_jax.decode.placement import (
    ONE_ROW,
    ROWS,
    Model,
    cache_specs,
    is_cut,
    param_specs,
    program,
    row_specs,
    rows_per_device,
)
from mimo_jax.decode.request import Request, check_request, one_row, row_sampling
from mimo_jax.decode.sampling import ADJUSTED, GREEDY
from mimo_jax.decode.start import PromptMemory, start_row
from mimo_jax.decode.step import (
    DecodeState,
    SeenIds,
    plain_step,
    run_steps,
    speculative_step,
)
from mimo_jax.decode.tree import MAX_NODES, tree_step
from mimo_jax.models.kernels import use_kernels, why_not
from mimo_jax.models.params import flatten, transpose_weights
from mimo_jax.models.unpacked import has_packed_experts, unpack_experts, unpacked_bytes
from mimo_jax.quant.kv import KVFormat
from mimo_jax.sharding import DATA, DECODE, MODEL
from mimo_jax.timing import Stopwatch
from pallas_kernels.dispatch import MOSAIC_GPU, XLA

MIN_PROMPT_BUCKET = 32  # prompts are padded to powers of two from here: few programs to compile
PROMPT_CHUNK = 512  # longer prompts are prefilled in chunks of this length
LENGTH_BUCKET = 128  # capacity of a batch is rounded up to this

_LOGITS = DECODE.spec((ONE_ROW, None, "vocab"))  # of one row: [1, 1, v]


def prompt_bucket(num_tokens: int) -> int:
    """Length that a prompt chunk is padded to. Example: 33 -> 64."""
    return max(MIN_PROMPT_BUCKET, 1 << (num_tokens - 1).bit_length())


# A model past this size does not stay in a CPU's last-level cache from step to step.
_CACHE_BYTES = 64 << 20


def prefers_transposed(num_bytes: int) -> bool:
    """Whether matrices of a model of this size are read fastest as [out, in] on this platform."""
    return jax.default_backend() == "cpu" and num_bytes >= _CACHE_BYTES


def lay_out_for_decode[Config](
    model: Model[Config], implementation: str | None = XLA
) -> Model[Config]:
    """The model with its matrices as this platform's small matmuls read them fastest.

    Models that outgrow the cache of a CPU are stored [out, in] (see layers/linear.py), float32 ones
    that stay in it have their packed experts decoded (see models/unpacked.py); where kernels are
    asked for, they are switched to (see models/kernels.py); all others are returned as they are.
    Engines do this themselves; do it once and drop the original where several engines share a
    large model.

    Args:
      model: Any; baselines' drafters never use kernels.
      implementation: Of pallas_kernels.dispatch; None = the kernels where they run.
    """
    model = switch_to_kernels(model, implementation)
    if model.mesh is not None:
        return model
    if not prefers_transposed(sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))):
        return _with_unpacked_experts(model)
    return Model(model.config, *transpose_weights(model.graph, model.params))


def switch_to_kernels[Config](
    model: Model[Config], implementation: str | None, *, consumes: bool = False
) -> Model[Config]:
    """The model on the Pallas kernels, if these are asked for.

    Args:
      model: As in `lay_out_for_decode`.
      implementation: As in `lay_out_for_decode`.
      consumes: As in `models.kernels.use_kernels`.

    Raises:
      ConfigError: If the compiled kernels are asked for where they cannot run; says why.
    """
    if not isinstance(model.config, TargetConfig | DrafterConfig):
        return model
    if implementation in (None, MOSAIC_GPU):
        reason = why_not(model.config, model.dtype, model.mesh)
        if implementation is not None and reason is not None:
            raise ConfigError(f"implementation {implementation}: {reason}; allowed here: {XLA}")
        implementation = XLA if reason is not None else MOSAIC_GPU
    graph, params = use_kernels(
        model.graph, model.params, implementation, model.mesh, consumes=consumes
    )
    return Model(model.config, graph, params, model.mesh)


def _with_unpacked_experts[Config](model: Model[Config]) -> Model[Config]:
    if jax.default_backend() != "cpu" or not has_packed_experts(model.params):
        return model
    # Not in bfloat16, in which a CPU multiplies one token at 1 GB/s.
    is_float32 = flatten(model.params)["embedding"].dtype == jnp.float32
    if not is_float32 or unpacked_bytes(model.params) >= _CACHE_BYTES:
        return model
    return Model(model.config, *unpack_experts(model.graph, model.params))


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
      max_verify_nodes: Nodes of a draft tree per step, the anchor included; None = draft a chain.
        With the policy COSTS the tree is one more rung. Trees know the rule MATCH only.
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
        drafter: Model[DraftConfig] | None = None,
        *,
        max_len: int,
        batch_size: int = 1,
        mode: str = GREEDY,
        draft_block_len: int | None = None,
        rule: str = accept.MATCH,
        max_verify_nodes: int | None = None,
        policy: str | None = None,
        max_stop_ids: int = 8,
        max_bias_ids: int = 0,
        num_logprobs: int | None = None,
        kv_format: KVFormat | None = None,
        implementation: str | None = XLA,
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
        self.target = lay_out_for_decode(target, implementation)
        self.drafter = drafter and lay_out_for_decode(drafter, implementation)
        self.mesh = target.mesh
        if drafter is not None and drafter.mesh != target.mesh:
            raise ConfigError("target and drafter must be placed on the same mesh")
        rows_per_device(batch_size, self.mesh)
        self.batch_size, self.mode, self.max_stop_ids = batch_size, mode, max_stop_ids
        if rule not in accept.RULES:
            raise ConfigError(f"rule {rule!r} is unknown; allowed: {', '.join(accept.RULES)}")
        self.max_verify_nodes = None if drafter is None else max_verify_nodes
        if self.max_verify_nodes is not None:
            if not 2 <= self.max_verify_nodes <= min(MAX_NODES, target.config.vocab_size):
                allowed = f"2..{min(MAX_NODES, target.config.vocab_size)}"
                raise ConfigError(
                    f"max_verify_nodes {max_verify_nodes} is out of range; allowed: {allowed}"
                )
            if rule != accept.MATCH:
                raise ConfigError(f"trees know the rule {accept.MATCH} only, not {rule}")
        if self.max_verify_nodes is not None and policy == controller.PROFILE:
            raise ConfigError(f"the policy {policy} knows chains only, not trees")
        if policy not in (None, controller.COSTS, controller.PROFILE):
            allowed = f"{controller.COSTS}, {controller.PROFILE}"
            raise ConfigError(f"policy {policy!r} is unknown; allowed: {allowed}")
        self.policy = None if drafter is None else policy
        self.lengths = controller.ladder(self.draft_block_len, self.max_verify_nodes is not None)
        self.costs: list[float] | None = None  # of a step of each rung; see costs.py
        # Fresh ones by scene, with the costs that they hold.
        self._controls: dict[str | None, tuple[list[float], controller.Control]] = {}
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
    def params(self):
        """What every program takes first: parameters of the target, and of the drafter or None."""
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
            lambda params: self._empty_row(*self._merge(params)), self.params
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
        """Jitted prompt chunk: (params, token_ids [1, t], caches, start, num_valid) -> (logits
        [1, 1, v] after the last valid token, caches); the caches are consumed.

        Args:
          is_first: Whether the chunk begins the prompt; then caches are (None, None) and are made.
        """
        taps = () if self.drafter is None else self.drafter.config.target_layer_ids

        def prefill(params, token_ids, caches, start, num_valid):
            target, drafter = self._merge(params)
            if is_first:
                caches = self._empty_row(target, drafter)
            target_cache, drafter_cache = caches
            out = target.prefill(
                token_ids, target_cache, start, num_valid, is_first=is_first, tap_layer_ids=taps
            )
            if drafter is not None:
                drafter_cache = drafter.inject_prompt(
                    target, drafter_cache, out.context_features, token_ids, start, num_valid
                )
            return out.logits, (out.cache, drafter_cache)

        caches, one = self._cache_specs(ONE_ROW), DECODE.spec((ONE_ROW,))
        given = (None, None) if is_first else caches
        in_specs = (self._param_specs(), one, given, one, one)
        return program(prefill, self.mesh, in_specs, (_LOGITS, caches), donate=(2,))

    def _vocab_spec(self, rows: str | None):
        """Of arrays [b, v]; None where the mode keeps none."""
        return DECODE.spec((rows, "vocab")) if self.mode == ADJUSTED else None

    def read(self, prompt_ids: Sequence[int], after: PromptMemory | None = None) -> PromptMemory:
        """What both models remember of a prompt.

        Args:
          prompt_ids: Ids in the vocabulary, at least one, at most capacity of them.
          after: Memory of the first after.num_tokens of them, fewer than all; it is consumed.

        Example: read([5, 8, 3], after=read([5, 8])) is read([5, 8, 3]), up to rounding.
        """
        ids, begin = np.asarray(prompt_ids, np.int32), 0
        logits, caches = None, cast(Any, (None, None))  # made by the first chunk
        if after is not None:
            begin, caches = after.num_tokens, after.caches
        for start in range(begin, len(ids), PROMPT_CHUNK):
            chunk = ids[start : start + PROMPT_CHUNK]
            room = min(self.capacity - start, PROMPT_CHUNK)
            bucket = min(prompt_bucket(len(chunk)), room)
            padded = np.zeros((1, bucket), np.int32)
            padded[0, : len(chunk)] = chunk
            args = (self.params, padded, caches, one_row(start), one_row(len(chunk)))
            is_first = start == 0
            prefill = self._program(
                ("prefill", bucket, is_first),
                lambda is_first=is_first: self.prefill_program(is_first),
                *args,
            )
            logits, caches = prefill(*args)
        assert logits is not None, "a prompt has tokens that are not read yet"
        return PromptMemory(logits, caches, len(ids))

    def copy(self, memory: PromptMemory) -> PromptMemory:
        """A second memory of the same prompt: `read` and `start` consume theirs."""
        arrays, specs = (memory.logits, memory.caches), (_LOGITS, self._cache_specs(ONE_ROW))
        duplicate = lambda *arrays: jax.tree.map(jnp.copy, arrays)
        make = lambda: program(duplicate, self.mesh, specs, specs)
        logits, caches = self._program("copy", make, *arrays)(*arrays)
        return PromptMemory(logits, caches, memory.num_tokens)

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
        return self.start(request, self.read(request.prompt_ids), earlier)

    def start(
        self,
        request: Request,
        memory: PromptMemory,
        earlier: controller.Control | None = None,
    ) -> DecodeState:
        """As `prefill`, for a prompt that is read already: samples the first token.

        Args:
          request: What to continue; has passed `check`.
          memory: Of its whole prompt; it is consumed.
          earlier: As in `prefill`.
        """
        prompt = np.asarray(request.prompt_ids, np.int32)
        p = len(prompt)
        assert memory.num_tokens == p, "the memory is of another prompt"
        is_in_prompt = None
        if self.mode == ADJUSTED:
            is_in_prompt = np.zeros((1, self.target.config.vocab_size), bool)
            is_in_prompt[0, prompt] = True
        tokens = np.zeros((1, self.capacity + self.draft_block_len), np.int32)
        tokens[0, :p] = prompt
        stop_ids = np.full((1, self.max_stop_ids), -1, np.int32)
        stop_ids[0, : len(request.stop_ids)] = request.stop_ids
        args = (
            tokens,
            one_row(p),
            one_row(p + request.max_tokens),
            stop_ids,
            row_sampling(request, self.max_bias_ids),
            self._control(request, earlier),
            is_in_prompt,
            memory.logits,
            *memory.caches,
        )
        return self._program("start", lambda: self._start_program(args), *args)(*args)

    def _start_program(self, args):
        context = None
        if self.policy is not None and self.drafter is not None:
            context = (self.drafter.config.context_width, self.target.dtype)
        start = functools.partial(
            start_row, mode=self.mode, num_logprobs=self.num_logprobs, context=context
        )
        rows = row_specs(args[:-4], ONE_ROW)
        out = self._state_specs(jax.eval_shape(start, *args), ONE_ROW)
        in_specs = (*rows, self._vocab_spec(ONE_ROW), _LOGITS, *self._cache_specs(ONE_ROW))
        start = functools.partial(start, mesh_axis=self.target_axis)
        return program(start, self.mesh, in_specs, out, donate=(8, 9))

    def _control(self, request: Request, earlier: controller.Control | None):
        """The controller's state of a fresh row, or None where block lengths are fixed."""
        if self.policy is None:
            return None
        costs = self.costs or self.nominal_costs
        of_costs, fresh = self._controls.get(request.scene, (None, None))
        if fresh is None or of_costs != costs:  # kept: made anew it is a dozen dispatches
            has_tree = self.max_verify_nodes is not None
            fresh = adaptive.row_control(self.lengths, request.scene, has_tree)
            fresh = fresh._replace(costs=jnp.asarray([costs], jnp.float32))
            self._controls[request.scene] = (costs, fresh)
        return controller.carried(fresh, earlier)

    @property
    def rung_names(self) -> tuple[str, ...]:
        """Of the rungs of the controller. Example: ("1", "4", "8", "tree of 16")."""
        if self.max_verify_nodes is None:
            return tuple(map(str, self.lengths))
        return (*map(str, self.lengths[:-1]), f"tree of {self.max_verify_nodes}")

    @property
    def nominal_costs(self) -> list[float]:
        """Costs of the rungs before anything was measured: tokens that the target reads."""
        nodes = [] if self.max_verify_nodes is None else [float(self.max_verify_nodes)]
        chains = self.lengths[: len(self.lengths) - len(nodes)]
        return [*map(float, chains), *nodes]

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
            done = jnp.full((b,), accept.ENDED, jnp.int32)
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
            self.params,
        )
        one: Any = lambda *s, dtype=jnp.int32: jax.ShapeDtypeStruct((1, *s), dtype)
        v, is_in_prompt = self.target.config.vocab_size, None
        if self.mode == ADJUSTED:
            is_in_prompt = one(v, dtype=jnp.bool_)
        args = (
            one(self.capacity + self.draft_block_len),
            one(),
            one(),
            one(self.max_stop_ids),
            row_sampling(Request((), 1), self.max_bias_ids),
            None if self.policy is None else controller.initial(
                1, self.lengths, self.max_verify_nodes is not None
            ),
            is_in_prompt,
            one(1, v, dtype=jnp.float32),
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
        """Jitted (params, state, num_steps) -> state for states of this structure.

        With a policy there is a fourth argument: the rung to hold, -1 = what the controller picks.
        """

        has_more_rows = rows_per_device(self.batch_size, self.mesh) < self.batch_size

        def group(params, state, num_steps, *held):
            target, drafter = self._merge(params)
            row_axis = DATA if has_more_rows else None
            return self._loop(target, drafter, state, num_steps, row_axis, *held)

        specs = self._state_specs(state, ROWS)
        in_specs = (self._param_specs(), specs, *[DECODE.spec(())] * (2 if self.policy else 1))
        return program(group, self.mesh, in_specs, specs, donate=(1,))

    def _loop(
        self, target, drafter, state: DecodeState, num_steps, row_axis: str | None, *held
    ):
        """The loop that this engine compiles."""
        options: dict[str, Any] = {"mode": self.mode}
        if drafter is not None:
            options |= {"draft_block_len": self.draft_block_len, "rule": self.rule}
        if self.policy is not None and drafter is not None:
            options |= {"policy": self.policy, "row_axis": row_axis}
            options["max_verify_nodes"] = self.max_verify_nodes
            return adaptive.run_adaptive_steps(target, drafter, state, num_steps, *held, **options)
        if drafter is None:
            step = lambda state: plain_step(target, state, **options)[0]
        elif self.max_verify_nodes is not None:
            options = {"mode": self.mode, "draft_block_len": self.draft_block_len}
            options["num_nodes"] = self.max_verify_nodes
            step = lambda state: tree_step(target, drafter, state, **options)[0]
        else:
            step = lambda state: speculative_step(target, drafter, state, **options)
        axis = self.target_axis
        return run_steps(step, state, num_steps, mesh_axis=axis, row_axis=row_axis)

    def group_program(self, state: DecodeState):
        """The compiled step group, for inspection; arguments as of `steps_program`."""
        args = (self.params, state, *self.loop_args(1))
        return self._program("group", lambda: self.steps_program(state), *args)

    def check_integrity(
        self, state: DecodeState, prompt_lens: Sequence[int | None] | None = None
    ) -> None:
        """Raises IntegrityError, a line per violation, if a state contradicts itself.

        For tests and for the suspicious: it copies the state's integers to the host.

        Args:
          state: Between two dispatches.
          prompt_lens: Prompt length of each row, None where it is not known.
        """
        check_integrity(
            state,
            draft_block_len=self.draft_block_len,
            vocab_size=self.target.config.vocab_size,
            prompt_lens=prompt_lens,
        )

    def run(self, state: DecodeState, num_steps: int, held: int | None = None) -> DecodeState:
        """Up to num_steps decode steps in one dispatch; the old state is consumed.

        Args:
          state: Of this engine.
          num_steps: At most so many steps.
          held: Rung to take in every step, for engines with a policy; None = the controller picks.
        """
        args = (self.params, state, *self.loop_args(num_steps, held))
        return self.group_program(state)(*args)

    def loop_args(self, num_steps: int, held: int | None = None) -> tuple[np.int32, ...]:
        """What `steps_program` takes after the state; arguments as of `run`."""
        if self.policy is None:
            return (np.int32(num_steps),)
        return np.int32(num_steps), np.int32(-1 if held is None else held)
