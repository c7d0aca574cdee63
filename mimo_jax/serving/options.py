"""Flags of `serve.py batch`. Imports no JAX, so that `--help` answers at once."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mimo_jax.config import SCENES, ConfigError
from mimo_jax.decode.params import SamplingParams
from mimo_jax.distributed import ProcessFlags


def _optional(metavar: str, default: str):
    """How `--help` shows a flag whose default is None."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """Answer a file of prompts, one JSON object per line.

    A line holds "prompt" (text), "prompt_token_ids" or "messages"; or it is a request of an OpenAI
    batch file. It may hold id, scene, tools, chat_template_kwargs, and in place of the flags of the
    same names max_tokens, temperature, top_p, top_k, min_p, repetition_penalty, presence_penalty,
    frequency_penalty, logprobs, seed, stop, n, best_of, and beside them logit_bias, stop_token_ids,
    ignore_eos.

    Every line gets one line of output, in the order of the input. A line that cannot be answered
    gets one with "error", and the exit code is 1. The same command, given again, goes on where it
    was stopped.

    Several processes share the lines, each with its own devices; the first one merges what they
    wrote. All need the same files under the same names.
    """

    checkpoint: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The target: config.json, safetensors and, for text, tokenizer.json."""
    input: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Prompts, JSON lines; - for stdin."""
    output: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Answers, JSON lines; - for stdout. Ids that it holds already are skipped."""
    drafter: Annotated[Path | None, _optional("DIR", "CHECKPOINT/dflash if it exists")] = None
    """The drafter."""
    draft: Annotated[
        Literal["off", "chain", "tree", "auto", "profile"] | None,
        _optional("{off,chain,tree,auto,profile}", "chain if there is a drafter"),
    ] = None
    """chain: a full block per step; tree: many continuations at once; auto: what pays on this
    device, measured first; profile: as long a block as the accept length of the scene allows; off:
    none. The answers are the same."""
    acceptance: Literal["match", "rejection", "block"] = "match"
    """Rule for drafts. rejection and block sample the drafts too, which changes the answers of a
    seed but not their distribution."""
    draft_block_len: Annotated[int | None, _optional("INT", "what the drafter was made for")] = None
    """Tokens per draft block, the anchor included; at most the default."""
    max_verify_nodes: Annotated[int | None, _optional("INT", "16")] = None
    """Nodes of a draft tree, the anchor included."""
    max_tokens: int = 256
    """Most tokens per answer; the model's context may end an answer earlier."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Sample from the fewest tokens that have this probability together; 1 is off."""
    top_k: int = 0
    """Sample from this many most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Sample from tokens with at least this share of the largest probability; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that were said or asked become less likely; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were said; 0 is off."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time that a token was said; 0 is off."""
    logprobs: Annotated[int | None, _optional("INT", "none")] = None
    """Also write the log probability of each token and of this many likeliest ones."""
    seed: int = 0
    """Of every request; the same seed and prompt give the same answer."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """String that ends an answer."""
    n: int = 1
    """Answers per prompt, best first; more than one needs a temperature. They share the reading of
    the prompt, and are decoded side by side where --batch-size has room."""
    best_of: Annotated[int | None, _optional("INT", "n")] = None
    """Candidates per prompt, of which the n best are written."""
    rank: Literal["logprob", "majority"] = "logprob"
    """What is best: the highest mean log probability, or the answer (last number) that most
    candidates come to."""
    scene: Annotated[str | None, _optional("NAME", "none")] = None
    """Scene of lines that name none; groups the statistics."""
    batch_size: int = 1
    """Rows decoded at once; more rows give more tokens per second and later answers."""
    chat_template_kwargs: Annotated[str | None, _optional("JSON", "none")] = None
    """Variables of the chat template for every conversation, e.g. '{"enable_thinking": false}'; a
    line's own go before them."""
    qkv_layout: Annotated[
        Literal["chunked", "plain"] | None, _optional("{chunked,plain}", "as the files' family")
    ] = None
    """How a fused qkv is stored; "plain" for re-exported MiMo files with rows [Q; K; V]."""
    mesh: Annotated[str | None, _optional("DATAxMODEL", "one device")] = None
    """Devices to use: rows of the batch over DATA, heads, widths and vocabulary over MODEL."""
    whole_drafter: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Keep the drafter whole on every device: for one whose heads do not divide over the mesh."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and caches. bfloat16 is slow on CPUs."""
    implementation: Literal["xla", "mosaic_gpu"] = "xla"
    """What runs a step: plain XLA, or the Pallas kernels (H100 or H200, bfloat16, untried)."""
    kv_format: Literal["none", "int8", "kvarn4", "kvarn2"] = "none"
    """How the memory of global layers is quantised: for long contexts. Changes answers slightly."""
    detailed: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also write prompt_token_ids and num_committed_per_step."""
    metrics_json: Annotated[Path | None, _optional("FILE", "none")] = None
    """Gets the figures of the table at the end."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """No progress bar and no table."""
    processes: tyro.conf.OmitArgPrefixes[ProcessFlags] = ProcessFlags()

    def template_variables(self) -> dict:
        """chat_template_kwargs as an object.

        Raises:
          ConfigError: If it is no JSON object.
        """
        if self.chat_template_kwargs is None:
            return {}
        try:
            variables = json.loads(self.chat_template_kwargs)
        except ValueError:
            variables = None
        if not isinstance(variables, dict):
            raise ConfigError(
                f"chat_template_kwargs {self.chat_template_kwargs!r} is no JSON object; allowed: "
                'for instance {"enable_thinking": false}'
            )
        return variables

    def sampling(self) -> SamplingParams:
        """What a line without fields of its own is decoded with.

        Raises:
          ConfigError: If a flag is out of range.
        """
        if self.scene is not None and self.scene not in SCENES:
            raise ConfigError(f"scene {self.scene!r} is unknown; allowed: {', '.join(SCENES)}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size {self.batch_size} is out of range; allowed: >= 1")
        if self.draft == "off" and self.draft_block_len is not None:
            raise ConfigError("draft_block_len has no meaning with draft off; allowed: draft chain")
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=self.logprobs,
            seed=self.seed,
            stop=self.stop,
            n=self.n,
            best_of=self.best_of,
        )
