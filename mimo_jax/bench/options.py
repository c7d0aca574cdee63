"""Flags of `python -m mimo_jax.bench`. Imports no JAX, so that `--help` answers at once."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclasses.dataclass(frozen=True)
class Decode:
    """Accept length, tokens/s and step costs of plain decoding and DFlash.

    Takes about 6 minutes on 2 quiet cores; --num-prompts 40 about 3.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    num_prompts: int = 200
    """Prompts per scene for accept lengths."""
    num_speed_prompts: int = 40
    """Prompts per scene for tokens/s."""
    max_tokens: int = 200
    """Longest answer."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    """Temperatures at which accept lengths are measured."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Parts to run, any of tau, speed, auto, dense, loop; default all."""
    json: Path | None = Path("out/bench/decode.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Drafters:
    """DFlash, several passes, EAGLE-3 and MTP heads on one target, trained equally long.

    Trains each kind for --seconds of processor time (kept, resumed and reused), then measures for
    about 10 minutes on 2 cores.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a DFlash drafter in dflash/, which gives the others their shape."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    directory: Path = Path("out/bench/drafters")
    """Where trained drafters are kept."""
    text: Path = Path("out/bench/drafters/text")
    """The target's own answers as training rows; made if missing. Another home of them is the
    directory regenerate/ of a training run of this target."""
    seconds: float = 480.0
    """Processor seconds of training per drafter."""
    num_prompts: int = 20
    """Prompts per scene."""
    max_tokens: int = 200
    """Longest answer."""
    json: Path | None = Path("out/bench/drafters.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Drafted answers against plain decoding's, token for token, greedy, float32.

    Every way of drafting at every batch size: 24 runs over all prompts, half an hour on 2 busy
    cores. Exit code 1 if an answer differs where the target was in no near tie.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    count: int = 200
    """Prompts per scene."""
    max_tokens: int = 32
    """Longest answer."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Ways of drafting to run, e.g. chain; default all."""
    batch_sizes: tuple[int, ...] = (1, 3, 8)
    """Rows decoded at once."""
    json: Path | None = Path("out/bench/lossless.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Train:
    """Signals per second and memory of the drafter's loss against one dense mask, and a long row.

    Takes about 5 minutes on 2 quiet cores and 8 GB of memory, for the dense mask.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    row_len: int = 4096
    """Tokens of the row that both forms get."""
    anchors: int = 512
    """Draft blocks in it."""
    long_row_len: int = 32768
    """Tokens of the long row; a multiple of 1,024."""
    long_anchors: int = 2944
    """Draft blocks in it."""
    rounds: int = 5
    """Calls of each form."""
    json: Path | None = Path("out/bench/train.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Prefix:
    """Time to the first token and of a job whose prompts share a system prompt, read once or not.

    Takes about a minute on 2 quiet cores.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    num_prompts: int = 40
    """Prompts, of chat and math in turn."""
    system_len: int = 256
    """Tokens of the system prompt."""
    max_tokens: int = 48
    """Longest answer."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Rows."""
    json: Path | None = Path("out/bench/prefix.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Time of a step and of a prompt chunk by context, and answers with quantised memory.

    Takes about 15 minutes on 2 quiet cores and 2 GB of memory.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Checkpoint directory with a drafter in dflash/."""
    prompts: Path = Path("assets/prompts")
    """Directory of held-out prompts, SCENE.jsonl."""
    num_prompts: int = 12
    """Prompts per scene for answers."""
    rounds: int = 7
    """Turns per measurement."""
    only: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Parts to run, any of steps, short, prefill, answers; default all."""
    json: Path | None = Path("out/bench/context.json")
    """Where the figures are written."""
    plot: Path | None = Path("out/bench/context.png")
    """Where the picture of part steps is drawn."""


@dataclasses.dataclass(frozen=True)
class Qat:
    """Held-out loss of a target in float, rounded to MXFP4, and trained for it.

    Compares what `train.py` made of configs/nano.py and configs/qat_nano.py. Takes about a minute
    on 2 quiet cores.
    """

    plain: Path = Path("runs/nano/target/export")
    """Target trained in float."""
    qat: Path = Path("runs/qat-nano/target/export")
    """Target trained with experts seen as MXFP4."""
    text: Path = Path("runs/qat-nano/corpus/heldout")
    """Directory of held-out rows, SCENE.npz."""
    rule: Literal["floor", "even", "rceil"] = "even"
    """Scale rule by which the float target is rounded."""
    json: Path | None = Path("out/bench/qat.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Rate and memory of reading a checkpoint into 8 virtual CPU devices, against dd."""

    directory: Path = Path("out/bench/load")
    """Where the synthetic checkpoint is written, once; it stays there."""
    num_layers: int = 20
    """Layers of it, 0.2 GB each."""
    json: Path | None = Path("out/bench/load.json")
    """Where the figures are written."""


@dataclasses.dataclass(frozen=True)
class Moe:
    """One layer of MXFP4 experts against every float32 form of it, in turn.

    Takes about a minute on 2 quiet cores, and 0.5 GB.
    """

    experts: int = 16
    """Experts of the layer."""
    top_k: int = 2
    """Chosen per token."""
    width: int = 1024
    """Of the model; a multiple of 32."""
    hidden: int = 1024
    """Of an expert; a multiple of 32."""
    tokens: tuple[int, ...] = (1, 8, 64, 512)
    """Tokens of a step."""
    rounds: int = 9
    """Calls of each form."""
    json: Path | None = None
    """Also write the figures here."""


@dataclasses.dataclass(frozen=True)
class Fp8:
    """A product with an FP8 weight against the same weight in float32 and bfloat16, in turn."""

    rows: int = 4096
    """Outputs of the weight."""
    width: int = 4096
    """Inputs of the weight."""
    tokens: tuple[int, ...] = (1, 8, 64)
    """Rows that meet it."""
    rounds: int = 15
    """Calls of each form."""
    json: Path | None = None
    """Also write the figures here."""


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """Steps that Muon needs to come to AdamW's held-out loss.

    An untrained target shaped as the embedded one, each optimizer with each of its rates, from the
    same weights on the same batches. Takes about 8 minutes of one CPU core.
    """

    checkpoint: Path = Path("assets/mimo-nano")
    """Gives the architecture and the tokenizer; its weights are not used."""
    steps: int = 120
    """Of each run."""
    batch_rows: int = 8
    """Rows per step."""
    row_len: int = 128
    """Tokens per row."""
    eval_every: int = 6
    """Steps between evaluations of held-out loss."""
    adamw_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    """Peak rates of AdamW, for all weights."""
    muon_rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2)
    """Peak rates of Muon, for matrices; the rest has AdamW's middle rate."""
    json: Path | None = Path("out/bench/optimizers.json")
    """Where the figures are written."""
