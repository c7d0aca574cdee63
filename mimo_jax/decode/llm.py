"""The Python API: a checkpoint directory in, text out.

    from mimo_jax import LLM

    llm = LLM.load("assets/mimo-nano")
    print(llm.generate("def mean(values):", max_tokens=64)[0].text)
    for piece in llm.stream("def mean(values):", temperature=0.8, seed=1):
        print(piece, end="")

An `LLM` joins the token-level `Engine` with tokenizer, chat template and stop strings. It keeps
every engine it has needed, by batch shape and sampling mode: only the first call of a kind
compiles. `make_job` and `open_engine` are the parts that batch jobs are built from.

Trap: dtype "bfloat16" halves the memory but is slow on CPUs, where XLA has no fast bfloat16
product of one row; plain decoding then is many times slower than in float32. Use it on GPUs.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from mimo_jax.checkpoint.safetensors_reader import nearest
from mimo_jax.config import ConfigError, DraftConfig, TargetConfig
from mimo_jax.decode import controller
from mimo_jax.decode.accept import MATCH
from mimo_jax.decode.best_of_n import (
    Extract,
    Rank,
    candidates_of,
    check_rank,
    choose,
    run_candidates,
)
from mimo_jax.decode.engine import (
    LENGTH_BUCKET,
    Engine,
    lay_out_for_decode,
)
from mimo_jax.decode.jobs import Job, Output, share_prefixes, stream_job
from mimo_jax.decode.loading import load_checkpoint
from mimo_jax.decode.params import (
    AUTO,
    CHAIN,
    DRAFTS,
    LOGPROB,
    OFF,
    PROFILE,
    TREE,
    SamplingParams,
)
from mimo_jax.decode.placement import Model
from mimo_jax.decode.request import Request
from mimo_jax.decode.sampling import MODES, mode_for
from mimo_jax.decode.tree import NUM_NODES
from mimo_jax.models.params import flatten
from mimo_jax.quant.kv import NONE, format_named
from mimo_jax.text.chat import load_chat_template, render_chat
from mimo_jax.text.tokenizer import Tokenizer
from pallas_kernels.dispatch import XLA

_IDS_BUCKET = 8  # stop ids and logit biases per row come in multiples of this
# Fields that go to the device as they are.
_REQUEST_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)


def _replace_fields(params: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    """params with some fields replaced; a single stop string or a mapping of biases will do.

    Raises:
      ConfigError: If a field does not exist; names the nearest one.
    """
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"unknown argument {name!r}{nearest(name, known)}")
    fields = dict(fields)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    if isinstance(fields.get("logit_bias"), Mapping):
        fields["logit_bias"] = tuple(fields["logit_bias"].items())
    for name in ("stop", "stop_token_ids", "logit_bias"):
        if fields.get(name) is not None:
            fields[name] = tuple(fields[name])
    return dataclasses.replace(params, **fields)


def _draft_name(draft: bool | str) -> str:
    """Of params.DRAFTS, for True and False too; raises ConfigError for anything else."""
    if isinstance(draft, bool):
        return CHAIN if draft else OFF
    if draft not in DRAFTS:
        raise ConfigError(f"draft {draft!r} is unknown; allowed: {', '.join(DRAFTS)}")
    return draft


class LLM:
    """A target, its drafter if it has one, and the text around them.

    Attributes:
      target: The target.
      drafter: Its drafter, or None: then decoding is plain.
      config: The target's config.
      trained_block_len: Longest draft block; 1 without a drafter.
      tokenizer: None if the checkpoint has none: then prompts are token ids and text is None.
      stop_ids: The checkpoint's end-of-sequence ids.
      directory: Where it came from, or None.
      draft: How calls draft that do not say it, see `generate`.
      kv_format: How engines quantise the memory of global layers; None = not at all.
    """

    def __init__(
        self,
        target: Model[TargetConfig],
        drafter: Model[DraftConfig] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        stop_ids: tuple[int, ...] = (),
        directory: Path | None = None,
        draft: bool | str = CHAIN,
        kv_format: str = NONE,
    ):
        """Joins models that are already in memory; `LLM.load` reads a checkpoint."""
        if not isinstance(target, Model):
            raise ConfigError(
                f"LLM takes models in memory; LLM.load({target!r}) reads a checkpoint"
            )
        self.kv_format = format_named(kv_format)
        self.config, self.trained_block_len = target.config, 1
        if drafter is not None:
            drafter.config.check_fits(target.config)
            self.trained_block_len = drafter.config.draft_block_len
        # Once here: engines would each make a copy of a large model.
        self.target = lay_out_for_decode(target)
        self.drafter = None if drafter is None else lay_out_for_decode(drafter)
        self.tokenizer, self.stop_ids, self.directory = tokenizer, stop_ids, directory
        self.draft = _draft_name(draft)
        self._engines: dict[tuple, Engine] = {}  # by shape and mode
        self._template: str | None = None
        self._special_ids: dict[str, int] = {}
        if tokenizer is not None:
            pieces = tokenizer.bytes_by_id()
            self._special_ids = {pieces[i].decode(): i for i in sorted(tokenizer.special_ids)}

    @classmethod
    def load(
        cls,
        checkpoint_dir: str | Path,
        drafter: str | Path | None = "auto",
        dtype: str = "float32",
        *,
        mesh: Mesh | None = None,
        draft: bool | str = CHAIN,
        has_whole_drafter: bool = False,
        qkv_layout: str | None = None,
        kv_format: str = NONE,
        implementation: str | None = XLA,
        on_progress: Callable[[int, int], object] = lambda done_bytes, total_bytes: None,
    ) -> "LLM":
        """Reads a published checkpoint directory.

        Args:
          checkpoint_dir: Holds config.json and safetensors; tokenizer.json, chat template and
            generation_config.json are used where they exist.
          drafter: "auto" takes the drafter in checkpoint_dir/dflash if there is one; None decodes
            plainly; else the directory of a drafter.
          dtype: Of weights and caches, "float32" or "bfloat16" (slow on CPUs, see the module).
          mesh: Devices to cut the models over, from `make_mesh(DECODE, (1, 8))` or the like; every
            device's part is read directly. None = one device.
          draft: How calls draft that do not say it themselves, see `generate`.
          has_whole_drafter: Keep the drafter whole on every device of the mesh: for one whose heads
            do not divide. `python -m mimo_jax.plan` says which is faster.
          qkv_layout: "plain" for MiMo files re-exported with a fused qkv of rows [Q; K; V], which
            nothing in them tells apart from the published ones; see `hf_target.open_target`.
          kv_format: How global layers remember: "none" = in dtype, or quantised as "int8", "kvarn4"
            or "kvarn2" (see `quant/kv.py`); changes answers slightly, drafting or not.
          implementation: "xla", or "mosaic_gpu": the Pallas kernels, for an H100 or H200 and
            bfloat16; None = these where they run. They have not been tried on a GPU yet: run
            `python -m mimo_jax.bench.gpu_check` first.
          on_progress: Called as parameters are read, with (bytes so far, bytes in all).

        Raises:
          CheckpointError: Naming file and key of whatever cannot be used.
          ConfigError: If the drafter was made for another target, dtype or kv_format is unknown, or
            an axis does not divide over the mesh.
        """
        format_named(kv_format)  # refused before anything is read
        loaded = load_checkpoint(
            checkpoint_dir,
            drafter,
            dtype,
            mesh=mesh,
            has_whole_drafter=has_whole_drafter,
            qkv_layout=qkv_layout,
            implementation=implementation,
            on_progress=on_progress,
        )
        return cls(
            loaded.target,
            loaded.drafter,
            tokenizer=loaded.tokenizer,
            stop_ids=loaded.stop_ids,
            directory=loaded.directory,
            draft=draft,
            kv_format=kv_format,
        )

    def __repr__(self) -> str:
        c = self.config
        drafts = f"blocks of {self.trained_block_len}" if self.drafter else "none"
        return (
            f"LLM({self.directory}: {c.num_layers} layers, width {c.hidden_size}, vocabulary "
            f"{c.vocab_size}, context {c.max_position}; drafter: {drafts})"
        )

    @property
    def dtype(self) -> str:
        """Of weights and caches."""
        return str(flatten(self.target.params)["embedding"].dtype)

    # --- text in -------------------------------------------------------------------------------

    def need_tokenizer(self, why: str) -> Tokenizer:
        """The tokenizer; raises ConfigError, beginning with `why`, if there is none."""
        if self.tokenizer is None:
            raise ConfigError(f"{why}, and this checkpoint has no tokenizer.json; use token ids")
        return self.tokenizer

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation by the checkpoint's chat template.

        Args:
          messages: OpenAI-style, each with `role` and `content`.
          tools: OpenAI-style tool descriptions.
          template_kwargs: More variables for the template, e.g. {"enable_thinking": False}.

        Raises:
          ConfigError: If the checkpoint has no template, or messages do not suit it.
        """
        try:
            if self._template is None:
                if self.directory is None:
                    raise ValueError("no chat template: this LLM was not loaded from a directory")
                self._template = load_chat_template(self.directory)
            return render_chat(self._template, messages, tools, **dict(template_kwargs or {}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        except Exception as error:  # a template is foreign code: it may raise anything
            raise ConfigError(
                f"the chat template failed: {type(error).__name__}: {error}"
            ) from error

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt, which may already be ids.

        Raises:
          ConfigError: For text without a tokenizer.
        """
        if isinstance(prompt, str):
            return self.need_tokenizer("text prompts need a tokenizer").encode(prompt)
        return [int(i) for i in prompt]

    # --- jobs and engines ----------------------------------------------------------------------

    def make_job(
        self, prompt_ids: list[int], params: SamplingParams, scene: str | None = None
    ) -> Job:
        """Checks one request against the model.

        The scene says which requests teach each other's controller; see `controller.py`.

        A stop string that is a special token of the tokenizer becomes a stop id, since special
        tokens have no text.

        Raises:
          ConfigError: In one line, if the prompt is empty, leaves no room in the context or holds
            an id outside the vocabulary, or if stop strings come without a tokenizer.
        """
        p, context, v = len(prompt_ids), self.config.max_position, self.config.vocab_size
        if p == 0:
            raise ConfigError("prompt is empty; at least one token is needed")
        if p >= context:
            raise ConfigError(
                f"prompt of {p} tokens is too long for the model's context of {context}; "
                f"allowed: 1..{context - 1} tokens"
            )
        eos = () if params.ignore_eos else self.stop_ids
        stop_ids = eos if params.stop_token_ids is None else params.stop_token_ids
        biased = [token_id for token_id, _ in params.logit_bias]
        for what, ids in (
            ("prompt token id", prompt_ids),
            ("stop token id", stop_ids),
            ("logit_bias id", biased),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < v):
                bad = next(i for i in ids if not 0 <= i < v)
                raise ConfigError(f"{what} {bad} is not in the vocabulary; allowed: 0..{v - 1}")
        stops = params.stop
        if stops:
            self.need_tokenizer("stop strings need a tokenizer")
            stop_ids += tuple(self._special_ids[s] for s in stops if s in self._special_ids)
            stops = tuple(s for s in stops if s not in self._special_ids)
        request = Request(
            prompt_ids=prompt_ids,
            max_tokens=min(params.max_tokens, context - p),
            stop_ids=stop_ids,
            scene=scene,
            **{name: getattr(params, name) for name in _REQUEST_FIELDS},
        )
        return Job(request, stops, params.logprobs)

    def open_engine(
        self,
        jobs: Sequence[Job],
        *,
        batch_size: int = 1,
        draft: bool | str | None = None,
        draft_block_len: int | None = None,
        max_verify_nodes: int | None = None,
        acceptance: str = MATCH,
    ) -> Engine:
        """The engine that fits every one of some jobs; made once per shape and mode.

        Args:
          jobs: At least one.
          batch_size: Rows decoded at once, >= 1.
          draft: Of `params.DRAFTS`, or whether to draft at all; nothing without a drafter. None =
            as this LLM does.
          draft_block_len: 2.. up to what the drafter was trained for; None = that.
          max_verify_nodes: Nodes of a tree, the anchor included; None = tree.NUM_NODES.
          acceptance: Rule of `accept.RULES` for drafts.

        Raises:
          ConfigError: If an argument is out of range.
        """
        if batch_size < 1:
            raise ConfigError(f"batch_size {batch_size} is out of range; allowed: >= 1")
        draft = self.draft if draft is None else _draft_name(draft)
        drafter = None if draft == OFF else self.drafter
        policy = {AUTO: controller.COSTS, PROFILE: controller.PROFILE}.get(draft)
        trained = self.trained_block_len
        if draft_block_len is None:
            draft_block_len = 1 if drafter is None else trained
        elif drafter is None:
            raise ConfigError(f"draft_block_len {draft_block_len} needs a drafter; none is in use")
        elif not 2 <= draft_block_len <= trained:
            raise ConfigError(
                f"draft_block_len {draft_block_len} is out of range; allowed: 2..{trained} (the "
                "length that the drafter was trained for)"
            )
        rule = MATCH if drafter is None else acceptance
        if max_verify_nodes is not None and (drafter is None or draft not in (TREE, AUTO)):
            raise ConfigError(f"max_verify_nodes is of trees; allowed with draft {TREE} or {AUTO}")
        # With other rules than MATCH, "auto" picks among chains.
        if drafter is not None and (draft == TREE or (draft == AUTO and rule == MATCH)):
            nodes = min(NUM_NODES, self.config.vocab_size)
            max_verify_nodes = nodes if max_verify_nodes is None else max_verify_nodes
        requests = [job.request for job in jobs]
        longest = max(len(r.prompt_ids) + r.max_tokens for r in requests)
        capacity = -(-longest // LENGTH_BUCKET) * LENGTH_BUCKET
        bucket = lambda counts: -(-max(counts) // _IDS_BUCKET) * _IDS_BUCKET
        max_stop_ids = bucket([1, *(len(r.stop_ids) for r in requests)])
        max_bias_ids = bucket([0, *(len(r.logit_bias) for r in requests)])
        mode = max({mode_for(r) for r in requests}, key=MODES.index)
        wanted = [job.logprobs for job in jobs if job.logprobs is not None]
        num_logprobs = max(wanted, default=None)
        key = (
            (capacity, batch_size, mode, draft_block_len, rule, policy if drafter else None),
            max_verify_nodes,
            (max_stop_ids, max_bias_ids, num_logprobs),
        )
        if key not in self._engines:
            self._engines[key] = Engine(
                self.target,
                drafter,
                max_len=min(capacity, self.config.max_position),
                batch_size=batch_size,
                mode=mode,
                draft_block_len=None if drafter is None else draft_block_len,
                rule=rule,
                max_verify_nodes=max_verify_nodes,
                policy=policy,
                max_stop_ids=max_stop_ids,
                max_bias_ids=max_bias_ids,
                num_logprobs=num_logprobs,
                kv_format=self.kv_format,
            )
        return self._engines[key]

    # --- text out ------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        draft: bool | str | None = None,
        draft_block_len: int | None = None,
        max_verify_nodes: int | None = None,
        acceptance: str = MATCH,
        batch_size: int | None = None,
        rank: Rank = LOGPROB,
        extract: Extract | None = None,
        **fields: Any,
    ) -> list[Output]:
        """Answers prompts, in their order.

        What prompts begin with in common is read once.

        Args:
          prompts: One text, one list of token ids, or a list of either.
          params: How to decode; default SamplingParams().
          seed: Of every answer, or one seed per prompt (to sample a prompt several times).
          draft: "chain" drafts full blocks if there is a drafter, "tree" many continuations at
            once, "auto" what pays on this device, "profile" as long blocks as the accept length
            allows, "off" none; True and False are "chain" and "off"; None = as this LLM does. The
            answers are the same, only faster or slower.
          draft_block_len: 2.. up to what the drafter was trained for; None = that.
          max_verify_nodes: Nodes of a tree, the anchor included; None = 16.
          acceptance: "match", or "rejection" or "block" for drafts that are sampled themselves:
            the distribution of answers is the same, the answers of one seed are not.
          batch_size: Rows decoded at once; default as many as a prompt has candidates.
          rank: Where a prompt has several candidates (n, best_of): "logprob", "majority", or a
            function that gives an Output a number, higher is better; see `best_of_n`.
          extract: For majority, the function that finds the answer in a text, None = there is none;
            default: the last number.
          **fields: Fields of SamplingParams, in place of those of params.

        Returns:
          One Output per prompt, also for a single one; with n above 1 the best, which has the
          others as its `alternatives`.

        Raises:
          ConfigError: In one line, if a prompt or an argument cannot be served.

        Example: `llm.generate(["1+1=", "2+2="], max_tokens=4)[1].text`; the answer that most of
          eight agree on: `llm.generate("6*7=", best_of=8, rank="majority", temperature=0.8)`.
        """
        is_ids = lambda p: len(p) > 0 and isinstance(p[0], (int, np.integer))
        is_one = isinstance(prompts, str) or is_ids(prompts)
        many = cast(Sequence[str | Sequence[int]], [prompts] if is_one else prompts)
        params = _replace_fields(params or SamplingParams(), fields)
        if not many:
            return []
        if seed is None:
            seed = params.seed
        seeds = [seed] * len(many) if isinstance(seed, int) else list(seed)
        if len(seeds) != len(many):
            raise ConfigError(f"{len(seeds)} seeds for {len(many)} prompts; give one, or one each")
        num_candidates = params.num_candidates
        check_rank(rank, extract, self.tokenizer, num_candidates)
        jobs = [
            self.make_job(self.encode(prompt), dataclasses.replace(params, seed=s))
            for prompt, s in zip(many, seeds, strict=True)
        ]
        jobs = share_prefixes([c for job in jobs for c in candidates_of(job, num_candidates)])
        engine = self.open_engine(
            jobs,
            batch_size=min(num_candidates if batch_size is None else batch_size, len(jobs)),
            draft=draft,
            draft_block_len=draft_block_len,
            max_verify_nodes=max_verify_nodes,
            acceptance=acceptance,
        )
        groups = list(itertools.batched(jobs, num_candidates))
        done = dict(run_candidates(engine, groups, self.tokenizer))
        keeps = params.logprobs is not None
        return [
            choose(done[i], params.n, rank, extract, keeps_logprobs=keeps)
            for i in range(len(groups))
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Output:
        """Answers a conversation.

        Args:
          messages: OpenAI-style.
          tools: OpenAI-style tool descriptions.
          template_kwargs: More variables for the chat template.
          **options: As in `generate`.

        Example: `llm.chat([{"role": "user", "content": "2+2?"}], max_tokens=16).text`
        """
        return self.generate(self.render_chat(messages, tools, template_kwargs), **options)[0]

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        draft: bool | str | None = None,
        draft_block_len: int | None = None,
        acceptance: str = MATCH,
        steps_per_group: int = 4,
        **fields: Any,
    ) -> Iterator[str]:
        """Yields the answer to one prompt in pieces, never half a character.

        Args:
          prompt: Text (of a conversation: what `render_chat` gives) or token ids.
          params: How to decode; default SamplingParams().
          draft: As in `generate`.
          draft_block_len: As in `generate`.
          acceptance: As in `generate`.
          steps_per_group: Decode steps between two pieces, >= 1.
          **fields: As in `generate`.

        Raises:
          ConfigError: At the call, not at the first piece; also for what a stream of text cannot
            give, log probabilities and several answers.
        """
        tokenizer = self.need_tokenizer("streaming text needs a tokenizer")
        params = _replace_fields(params or SamplingParams(), fields)
        if params.num_candidates > 1:
            raise ConfigError("n and best_of above 1 cannot be streamed; `generate` takes them")
        if params.logprobs is not None:
            raise ConfigError("logprobs cannot be streamed; `generate` reports them")
        if steps_per_group < 1:
            raise ConfigError(f"steps_per_group {steps_per_group} is out of range; allowed: >= 1")
        job = self.make_job(self.encode(prompt), params)
        engine = self.open_engine(
            [job], draft=draft, draft_block_len=draft_block_len, acceptance=acceptance
        )
        return stream_job(engine, job, tokenizer, steps_per_group=steps_per_group)
