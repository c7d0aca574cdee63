"""The host side of decoding: compiled programs, rows, and the loop over step groups.

An `Engine` holds the parameters of a target (and a drafter) and the programs compiled for one
batch shape. It knows token ids only: no text, no files. `generate` feeds requests into the rows
of a batch; a row whose request is finished takes the next one while the others go on.

Programs: one prefill per prompt bucket, one row insertion, one step group. Compile time is
measured apart from run time.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mimo_jax import cache as kv
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig
from mimo_jax.decode import accept
from mimo_jax.decode.sampling import GREEDY, RowSampling, mode_for, sample
from mimo_jax.decode.step import DecodeState, run_steps
from mimo_jax.models.params import transpose_weights
from mimo_jax.timing import Stopwatch

PROMPT_BUCKET = 32  # prompts are padded to multiples: one prefill program per multiple
PROMPT_CHUNK = 512  # longer prompts are prefilled in chunks of this length
LENGTH_BUCKET = 128  # capacity of a batch is rounded up to this


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
      prompt_ids: Token ids, at least one.
      max_tokens: Most tokens to emit, >= 1.
      stop_ids: Ids that end the output; the stop id itself is emitted.
      temperature: 0 = greedy.
      top_p: Nucleus mass in (0, 1].
      top_k: 0 = off.
      seed: Of this request's noise.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one request.

    Attributes:
      token_ids: Emitted ids, a stop id included.
      finish_reason: "stop" or "length".
      num_committed_per_step: Tokens committed by each decode step; the token that prefill
        samples is not among them, so they sum to len(token_ids) - 1.
      num_accepted_per_step: Drafts accepted per step, before cuts by stop ids and length.
      num_offered_per_step: Drafts that could have been accepted per step.
      ttft_s: Seconds from the start of prefill to the first token on the host.
      decode_s: Seconds from then to the end, shared with the other rows of the batch.
    """

    token_ids: list[int]
    finish_reason: str
    num_committed_per_step: list[int]
    num_accepted_per_step: list[int]
    num_offered_per_step: list[int]
    ttft_s: float
    decode_s: float


@dataclasses.dataclass(frozen=True)
class Model[Config: (TargetConfig, DrafterConfig)]:
    """A config with its split module: what checkpoint loaders return."""

    config: Config
    graph: Any
    params: Any


# A model past this size does not stay in a CPU's last-level cache from step to step.
_CACHE_BYTES = 64 << 20


def lay_out_for_decode[Config: (TargetConfig, DrafterConfig)](
    model: Model[Config],
) -> Model[Config]:
    """The model with its matrices as this platform's small matmuls read them fastest.

    Models that outgrow the cache of a CPU are stored [out, in] (see layers/linear.py); all others
    are returned as they are. Engines do this themselves; do it once and drop the original where
    several engines share a large model.
    """
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    if jax.default_backend() != "cpu" or num_bytes < _CACHE_BYTES:
        return model
    return Model(model.config, *transpose_weights(model.graph, model.params))


class Engine:
    """Compiled decoding of one batch shape.

    Args:
      target: The target model.
      drafter: Its drafter, or None for plain decoding.
      max_len: Longest prompt + output that a row may reach.
      batch_size: Rows.
      mode: Sampling mode of the program (sampling.GREEDY, SAMPLED or FILTERED); must cover every
        request.
      draft_block_len: Slots per draft block; default and maximum is what the drafter was trained
        for.
      max_stop_ids: Stop ids per request.

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
        max_stop_ids: int = 8,
    ):
        if max_len > target.config.max_position:
            raise ConfigError(
                f"length {max_len} is beyond the model's context of {target.config.max_position}"
            )
        self.draft_block_len = 1
        if drafter is not None:
            drafter.config.check_fits(target.config)
            trained = drafter.config.draft_block_len
            self.draft_block_len = draft_block_len or trained
            if not 2 <= self.draft_block_len <= trained:
                raise ConfigError(
                    f"draft_block_len {draft_block_len} is out of range; allowed: 2..{trained} "
                    "(the drafter was trained for blocks of that length)"
                )
        self.target = lay_out_for_decode(target)
        self.drafter = None if drafter is None else lay_out_for_decode(drafter)
        self.batch_size, self.mode, self.max_stop_ids = batch_size, mode, max_stop_ids
        self.capacity = -(-max_len // LENGTH_BUCKET) * LENGTH_BUCKET
        self.compile_s = 0.0
        self._programs = {}

    @property
    def _params(self):
        return self.target.params, None if self.drafter is None else self.drafter.params

    def _merge(self, params):
        target = nnx.merge(self.target.graph, params[0])
        drafter = None if self.drafter is None else nnx.merge(self.drafter.graph, params[1])
        return target, drafter

    def _program(self, name, make: Callable, *args, donate=()):
        """The compiled program for these argument shapes; compiles once."""
        if name not in self._programs:
            with Stopwatch() as watch:
                program = jax.jit(make(), donate_argnums=donate).lower(*args).compile()
            self.compile_s += watch.elapsed_s
            self._programs[name] = program
        return self._programs[name]

    # --- prefill -------------------------------------------------------------------------------

    def _empty_row(self, target, drafter):
        slack = self.draft_block_len
        target_cache = target.make_cache(1, self.capacity, slack)
        if drafter is None:
            return target_cache, None
        return target_cache, drafter.make_cache(1, self.capacity, slack)

    def _make_prefill(self, is_first: bool):
        taps = () if self.drafter is None else self.drafter.config.target_layer_ids

        def prefill(params, token_ids, caches, start, num_valid, sampling):
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
            first = sample(out.logits, sampling, next_pos, self.mode)[:, 0]
            return first, (out.cache, drafter_cache)

        return prefill

    def prefill(self, request: Request) -> DecodeState:
        """A state of one row with the prompt read and the first token committed.

        Raises:
          ConfigError: If the prompt is empty, max_tokens < 1, an id is not in the vocabulary, or
            prompt and output do not fit the engine's max_len.
        """
        self.check(request)
        prompt = np.asarray(request.prompt_ids, np.int32)
        p = len(prompt)
        sampling = RowSampling(
            jnp.full((1,), request.temperature, jnp.float32),
            jnp.full((1,), request.top_p, jnp.float32),
            jnp.full((1,), request.top_k, jnp.int32),
            jnp.full((1,), request.seed, jnp.int32),
        )
        caches, first = (None, None), None
        for start in range(0, p, PROMPT_CHUNK):
            chunk = prompt[start : start + PROMPT_CHUNK]
            room = min(self.capacity - start, PROMPT_CHUNK)
            bucket = min(-(-len(chunk) // PROMPT_BUCKET) * PROMPT_BUCKET, room)
            padded = np.zeros((1, bucket), np.int32)
            padded[0, : len(chunk)] = chunk
            args = (
                self._params,
                jnp.asarray(padded),
                caches,
                jnp.full((1,), start, jnp.int32),
                jnp.full((1,), len(chunk), jnp.int32),
                sampling,
            )
            is_first = start == 0
            program = self._program(
                ("prefill", bucket, is_first),
                lambda is_first=is_first: self._make_prefill(is_first),
                *args,
                donate=(2,),
            )
            first, caches = program(*args)
        tokens = np.zeros((1, self.capacity + self.draft_block_len), np.int32)
        tokens[0, :p] = prompt
        stop_ids = np.full((1, self.max_stop_ids), -1, np.int32)
        stop_ids[0, : len(request.stop_ids)] = request.stop_ids
        args = (jnp.asarray(tokens), first, jnp.full((1,), p, jnp.int32),
                jnp.full((1,), p + request.max_tokens, jnp.int32), jnp.asarray(stop_ids),
                sampling, *caches)
        return self._program("start", lambda: _start_state, *args, donate=(6, 7))(*args)

    def check(self, request: Request) -> None:
        """Raises ConfigError with one line if the request cannot be served by this engine."""
        p = len(request.prompt_ids)
        if p == 0:
            raise ConfigError("prompt is empty; at least one token is needed")
        if request.max_tokens < 1:
            raise ConfigError(f"max_tokens {request.max_tokens} must be >= 1")
        if p + request.max_tokens > self.capacity:
            raise ConfigError(
                f"prompt of {p} tokens and max_tokens {request.max_tokens} exceed the context of "
                f"{self.capacity} tokens"
            )
        v = self.target.config.vocab_size
        bad = [i for i in request.prompt_ids if not 0 <= i < v]
        if bad:
            raise ConfigError(f"prompt token id {bad[0]} is not in the vocabulary 0..{v - 1}")
        if len(request.stop_ids) > self.max_stop_ids:
            raise ConfigError(
                f"{len(request.stop_ids)} stop ids; at most {self.max_stop_ids} are allowed"
            )
        modes = (GREEDY, "sampled", "filtered")
        needed = mode_for(request.temperature, request.top_p, request.top_k)
        if modes.index(needed) > modes.index(self.mode):
            raise ConfigError(f"a {needed} request needs an engine of mode {needed}")

    # --- rows and steps ------------------------------------------------------------------------

    def empty_state(self, row_state: DecodeState) -> DecodeState:
        """A batch of finished rows, shaped after a state of one row."""

        def blank(leaf):
            return jnp.zeros((self.batch_size, *leaf.shape[1:]), leaf.dtype)

        state = jax.tree.map(blank, row_state)
        done = jnp.full((self.batch_size,), accept.STOPPED, jnp.int32)
        # length 1: an idle row steps too (masked out), and its anchor must stand somewhere.
        ones = lambda: jnp.ones((self.batch_size,), jnp.int32)  # two buffers: each is donated
        return dataclasses.replace(state, finish=done, length=ones(), max_len=ones())

    def insert(self, state: DecodeState, row_state: DecodeState, row: int) -> DecodeState:
        """Replaces one row of the batch; the old state is consumed."""
        if self.batch_size == 1:
            return row_state
        args = (state, row_state, jnp.int32(row))
        return self._program("insert", lambda: kv.insert_row, *args, donate=(0,))(*args)

    def _make_group(self):
        def group(params, state, num_steps):
            target, drafter = self._merge(params)
            return run_steps(
                target,
                drafter,
                state,
                num_steps,
                mode=self.mode,
                draft_block_len=self.draft_block_len,
            )

        return group

    def group_program(self, state: DecodeState):
        """The compiled step group, for inspection: (params, state, num_steps) -> state."""
        args = (self._params, state, jnp.int32(1))
        return self._program("group", self._make_group, *args, donate=(1,))

    def run(self, state: DecodeState, num_steps: int) -> DecodeState:
        """Up to num_steps decode steps in one dispatch; the old state is consumed."""
        return self.group_program(state)(self._params, state, jnp.int32(num_steps))


def _start_state(
    tokens, first, prompt_len, max_len, stop_ids, sampling, target_cache, drafter_cache
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
    return DecodeState(
        tokens=tokens,
        length=prompt_len + 1,
        max_len=max_len,
        finish=committed.finish,
        stop_ids=stop_ids,
        sampling=sampling,
        num_steps=jnp.zeros((b,), jnp.int32),
        committed_per_step=jnp.zeros((b, s), jnp.int8),
        accepted_per_step=jnp.zeros((b, s), jnp.int8),
        target_cache=target_cache,
        drafter_cache=drafter_cache,
    )


@dataclasses.dataclass
class _Row:
    """A request in flight."""

    index: int
    request: Request
    ttft_s: float
    watch: Stopwatch  # running since the row was inserted
    num_streamed: int = 0


def generate(
    engine: Engine,
    requests: Iterable[Request],
    *,
    steps_per_group: int = 64,
    on_tokens: Callable[[int, list[int]], None] | None = None,
) -> Iterator[tuple[int, Completion]]:
    """Decodes requests through the engine's rows; yields (index, completion) as they finish.

    Each dispatch runs up to steps_per_group steps on the device; between two dispatches the host
    reads the new tokens, yields finished rows and refills them.

    Args:
      engine: Compiled for a batch shape that fits every request.
      requests: Consumed lazily.
      steps_per_group: Steps per dispatch: small for streaming, large for throughput.
      on_tokens: Called with (index, new token ids) after each group, for streaming.

    Yields:
      In order of completion; `index` counts requests from 0.
    """
    queue = enumerate(requests)
    rows: list[_Row | None] = [None] * engine.batch_size
    state = None
    exhausted = False
    while True:
        for slot in range(engine.batch_size):
            while rows[slot] is None and not exhausted:
                item = next(queue, None)
                if item is None:
                    exhausted = True
                    break
                index, request = item
                compile_before = engine.compile_s
                with Stopwatch() as watch:
                    row_state = engine.prefill(request)
                    watch.wait_for(row_state.length)
                ttft_s = watch.elapsed_s - (engine.compile_s - compile_before)
                if state is None and engine.batch_size > 1:
                    state = engine.empty_state(row_state)
                state = row_state if state is None else engine.insert(state, row_state, slot)
                engine.group_program(state)  # compiles outside of the row's clock
                rows[slot] = _Row(index, request, ttft_s, Stopwatch.started())
        if state is None or all(row is None for row in rows):
            return
        state = engine.run(state, steps_per_group)
        finish, length = np.asarray(state.finish), np.asarray(state.length)
        finished = [i for i, row in enumerate(rows) if row is not None and finish[i]]
        if not finished and on_tokens is None:
            continue
        host = _Host(state)
        if on_tokens is not None:
            for slot, row in enumerate(rows):
                if row is not None:
                    emitted = host.tokens[slot, len(row.request.prompt_ids) : length[slot]]
                    on_tokens(row.index, emitted[row.num_streamed :].tolist())
                    row.num_streamed = len(emitted)
        for slot in finished:
            row = rows[slot]
            assert row is not None  # `finished` holds occupied slots only
            yield row.index, host.completion(slot, row.request, row.ttft_s, row.watch.elapsed_s)
            rows[slot] = None


class _Host:
    """Host copies of the counters of a state."""

    def __init__(self, state: DecodeState):
        self.tokens = np.asarray(state.tokens)
        self.length = np.asarray(state.length)
        self.finish = np.asarray(state.finish)
        self.num_steps = np.asarray(state.num_steps)
        self.committed = np.asarray(state.committed_per_step)
        self.accepted = np.asarray(state.accepted_per_step)
        self.block_len = 1 if state.drafter_cache is None else state.drafter_cache.slack

    def completion(self, slot: int, request: Request, ttft_s, decode_s) -> Completion:
        p, n = len(request.prompt_ids), int(self.num_steps[slot])
        committed = self.committed[slot, :n].tolist()
        offered, length = [], p + 1
        for count in committed:
            offered.append(min(self.block_len, p + request.max_tokens - length + 1) - 1)
            length += count
        return Completion(
            token_ids=self.tokens[slot, p : self.length[slot]].tolist(),
            finish_reason="stop" if self.finish[slot] == accept.STOPPED else "length",
            num_committed_per_step=committed,
            num_accepted_per_step=self.accepted[slot, :n].tolist(),
            num_offered_per_step=offered,
            ttft_s=ttft_s,
            decode_s=decode_s,
        )


def generate_all(engine: Engine, requests: Sequence[Request], **kwargs) -> list[Completion]:
    """Completions of all requests, in the order of the requests."""
    done = dict(generate(engine, requests, **kwargs))
    return [done[index] for index in range(len(done))]
