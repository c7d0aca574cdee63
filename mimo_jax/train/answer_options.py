"""Flags of `train.py regenerate`. Imports no JAX, so that `--help` answers at once."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mimo_jax.config import require
from mimo_jax.decode.params import SamplingParams

AUTO, NONE = "auto", "none"  # the drafter in the checkpoint, and no drafter
# A candidate's seed lies within int32, see `SamplingParams.seed`.
NUM_SEEDS = 2**31


@dataclasses.dataclass(frozen=True)
class AnswerOptions:
    """Let the target answer prompts: the text that a drafter for it has to learn.

    Prompts come from JSON lines, a Hugging Face dataset directory or a file of token ids. Of a
    conversation the last turn of the assistant is written anew. Each answer is one line of OUT as
    soon as it is finished; the same command, given again, goes on where it was stopped.
    OUT.meta.json says which model, sampling and thinking made it; a run with others is refused.
    OUT itself can be read as training text, by its exact ids.
    """

    model: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """The target: config.json, safetensors and, for text, tokenizer.json."""
    data: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """A file, a directory or a pattern of .jsonl, .jsonl.gz, .parquet, .arrow, .npy or .npz."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Answers, JSON lines."""
    drafter: Annotated[str, tyro.conf.arg(metavar="DIR|auto|none")] = AUTO
    """auto is MODEL/dflash if it exists. The answers are the same without one, only slower."""
    temperature: float = SamplingParams.temperature
    """0 is greedy."""
    top_p: float = SamplingParams.top_p
    """Sample from the fewest tokens that have this probability together; 1 is off."""
    max_tokens: int = SamplingParams.max_tokens
    """Most tokens per answer; the model's context may end an answer earlier."""
    seed: int = 0
    """Of all answers; each has its own, made of this and its id."""
    samples: int = 1
    """Answers per prompt; more than one needs a temperature."""
    skip: int = 0
    """Prompts to pass over, from the beginning of the data."""
    limit: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: all)")
    ] = None
    """Prompts to answer, from there on."""
    exclude: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Data whose prompts are held out: they are left out here."""
    thinking: Literal["default", "on", "off"] = "default"
    """Variable enable_thinking of the chat template; default leaves it to the template."""
    batch_size: int = 8
    """Answers decoded at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and caches. bfloat16 is slow on CPUs."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no bar."""

    def check(self) -> None:
        """Raises ConfigError, naming the flag and what is allowed.

        Not at construction, where tyro would make a box of five lines of it.
        """
        self.sampling()
        for name in ("samples", "batch_size", "limit"):
            value = getattr(self, name)
            require(
                value is None or value >= 1, f"{name} {value} is out of range; allowed: >= 1"
            )
        require(self.skip >= 0, f"skip {self.skip} is out of range; allowed: >= 0")
        require(
            self.samples == 1 or self.temperature > 0,
            f"samples {self.samples} has no meaning at temperature 0, where all answers are the "
            "same; allowed: samples 1, or a temperature above 0",
        )

    def sampling(self) -> SamplingParams:
        """How answers are decoded, seeds apart; raises ConfigError for numbers out of range."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
        )
