"""`python -m mimo_jax.checkpoint inspect|forward|doctor|export`: looks into checkpoints."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table

QkvLayout = Literal["chunked", "plain"]


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Where every tensor of a checkpoint goes, and whether it would load.

    Reads headers, and of packed experts the scales.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Directory with config.json and safetensors (a drafter in dflash/ is looked at too)."""
    qkv_layout: QkvLayout | None = None
    """How a fused qkv is stored, where it is not as the published files; see the docs of load."""
    devices: int = 1
    """Devices that the model would be cut over: what of each tensor one of them would hold."""
    all: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """One line per tensor instead of one per parameter part (experts folded)."""
    json: Path | None = None
    """Also write every tensor and the verdict here."""


@dataclasses.dataclass(frozen=True)
class Forward:
    """Runs whole rows of ids through a checkpoint and writes what it computes, float32."""

    checkpoint: tyro.conf.Positional[Path]
    """Directory of the target."""
    input: Path
    """.npy of token ids, int [rows, tokens]."""
    output: Path
    """.npz to write: logits [rows, tokens, vocab]; per sparse layer i router_idx_i (sorted) and
    router_w_i [rows, tokens, top_k]."""
    hidden: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Also layer_out [layers, rows, tokens, width], the residual stream after each layer."""
    drafter: Path | None = None
    """Directory of a drafter: also block_logits [rows, block, vocab] of one draft block."""
    anchor: int | None = None
    """Position of the block's anchor token, 1..tokens-1; its context is what stands before it.
    Default: the last token."""
    qkv_layout: QkvLayout | None = None
    """As in inspect."""


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Teacher-forced acceptance of a drafter on a text: as shipped, and with one thing changed."""

    checkpoint: tyro.conf.Positional[Path]
    """Directory of the target, with a tokenizer."""
    text: Path
    """Text file; the target's own answers tell most."""
    drafter: Path | None = None
    """Directory of the drafter; default: CHECKPOINT/dflash."""
    max_tokens: int = 1024
    """Tokens of the text that are used."""
    num_anchors: int = 256
    """Draft blocks, at random positions."""
    json: Path | None = None
    """Also write the figures here."""


@dataclasses.dataclass(frozen=True)
class Export:
    """Writes a checkpoint anew, with its drafter and text files.

    The layout "transformers" holds plain weights, q, k and v apart; "published" is that of the
    MiMo repositories: FP8 with block scales, MTP heads, and q, k and v fused or, as in V2-Flash,
    apart, whichever the source's config.json says. MXFP4 experts stay packed, unless --dtype asks
    for plain numbers.
    """

    checkpoint: tyro.conf.Positional[Path]
    """Directory of the target."""
    output: tyro.conf.Positional[Path]
    """Directory to write."""
    layout: Literal["transformers", "published"] = "transformers"
    """Names and formats of the tensors."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of all weights in the layout "transformers", MXFP4 experts decoded (either holds their values
    exactly): for engines that know no packed ones. Default: experts stay packed, the rest bfloat16.
    "published" prescribes its own."""
    qkv_layout: QkvLayout | None = None
    """As in inspect."""


def run_inspect(arguments: Inspect, console: Console) -> int:
    """Prints the table and the verdict; 1 if the checkpoint would not load."""
    from mimo_jax.checkpoint.audit import audit, fold_experts

    if arguments.devices < 1:
        raise ValueError(f"--devices {arguments.devices} is out of range; allowed: >= 1")
    audits = audit(
        arguments.checkpoint, qkv_layout=arguments.qkv_layout, num_devices=arguments.devices
    )
    for part, result in audits.items():
        table = Table(title=f"{part}: {arguments.checkpoint}", title_justify="left")
        for column in ("key", "file", "dtype", "shape", "goes to"):
            table.add_column(column, overflow="fold")
        table.add_column("tensors", justify="right")
        table.add_column("bytes", justify="right")
        table.add_column("bytes per device", justify="right")
        rows = [(e, 1) for e in result.entries] if arguments.all else fold_experts(result.entries)
        for entry, count in rows:
            shape = "x".join(str(size) for size in entry.shape)
            table.add_row(
                entry.key, entry.file, entry.dtype, shape, entry.goes_to, str(count),
                f"{entry.num_bytes:,}", f"{entry.device_bytes:,}",
            )
        console.print(table)
        console.print(f"{part}: {len(result.entries):,} tensors, {result.num_bytes:,} bytes, "
                      f"{result.device_bytes:,} per device")
    for part, result in audits.items():
        verdict = "would load" if result.problem is None else result.problem
        console.print(f"{part}: {verdict}", soft_wrap=True, markup=False)
        for key, count in result.num_odd_scales.items():
            console.print(
                f"{part}: {key}: {count} scale bytes of 253 to 255, whose values are infinite or "
                "NaN",
                soft_wrap=True,
                markup=False,
            )
    if arguments.json is not None:
        report = {part: dataclasses.asdict(result) for part, result in audits.items()}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(any(result.problem is not None for result in audits.values()))


def run_forward(arguments: Forward, console: Console) -> int:
    """Writes the arrays; see `Forward`."""
    import numpy as np

    from mimo_jax.bench.parity import forward_arrays

    try:
        token_ids = np.load(arguments.input, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{arguments.input}: cannot be read as .npy: {error}") from error
    if token_ids.ndim != 2 or token_ids.dtype.kind not in "iu" or not token_ids.size:
        raise ValueError(
            f"{arguments.input}: must be integer ids [rows, tokens], is {token_ids.dtype} "
            f"{list(token_ids.shape)}"
        )
    arrays = forward_arrays(
        arguments.checkpoint,
        token_ids.astype(np.int32),
        with_hidden=arguments.hidden,
        drafter_dir=arguments.drafter,
        anchor_pos=arguments.anchor,
        qkv_layout=arguments.qkv_layout,
    )
    temporary = arguments.output.with_name(arguments.output.name + ".partial")
    with temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    os.replace(temporary, arguments.output)
    for name, array in arrays.items():
        console.print(f"{name:18} {array.dtype} {list(array.shape)}", markup=False)
    console.print(f"written to {arguments.output}", soft_wrap=True)
    return 0


def run_doctor(arguments: Doctor, console: Console) -> int:
    """Prints acceptance as shipped and of every variation; names those that raise it."""
    from mimo_jax.bench.doctor import examine

    report = examine(
        arguments.checkpoint,
        arguments.drafter,
        arguments.text,
        max_tokens=arguments.max_tokens,
        num_anchors=arguments.num_anchors,
    )
    m = len(report.variations[0].acceptance)
    table = Table(title="Teacher-forced acceptance", title_justify="left")
    table.add_column("variation")
    table.add_column("accept length", justify="right")
    for k in range(1, m + 1):
        table.add_column(f"slot {k}", justify="right")
    for variation in report.variations:
        cells = [f"{share:.2f}" for share in variation.acceptance]
        table.add_row(variation.name, f"{variation.accept_length:.2f}", *cells)
    console.print(table)
    console.print(
        f"{report.num_blocks} blocks over {report.num_tokens} tokens; mask vector norm "
        f"{report.mask_norm:.3g}, mean embedding norm {report.embedding_norm:.3g}"
    )
    for line in report.findings:
        console.print(line, soft_wrap=True, markup=False)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n")
    return 0


def run_export(arguments: Export, console: Console) -> int:
    """Loads and saves target, drafter and text files."""
    import shutil

    import jax.numpy as jnp

    from mimo_jax.checkpoint.hf_drafter import find_drafter, load_drafter, save_drafter
    from mimo_jax.checkpoint.hf_published import save_published
    from mimo_jax.checkpoint.hf_target import (
        load_mtp_heads,
        load_target,
        projection_layout,
        save_target,
    )
    from mimo_jax.checkpoint.json_config import read_json
    from mimo_jax.models.packing import unpack_experts

    is_published = arguments.layout == "published"
    # Products of FP8 codes and scales (experts, MTP heads) need float32 to be found again.
    dtype = jnp.dtype("float32" if is_published else arguments.dtype or "bfloat16")
    source, out = arguments.checkpoint, arguments.output
    if out.resolve() == source.resolve():
        raise ValueError(f"{out}: the output is the checkpoint itself; choose another directory")
    values = read_json(source / "config.json")
    projections = projection_layout(values, source / "config.json") if is_published else None
    config, _, params = load_target(
        source, dtype, qkv_layout=arguments.qkv_layout, expands_fp8=not is_published
    )
    is_packed = config.moe is not None and config.moe.is_mxfp4
    if is_packed and not is_published and arguments.dtype is not None:
        config, _, params = unpack_experts(config, params)
    kept = {key: values[key] for key in TOKEN_KEYS if values.get(key) is not None}
    drafter_dir = find_drafter(source)
    if drafter_dir is not None:
        drafter_config, _, drafter_params = load_drafter(drafter_dir, dtype)
        drafter_dtype = jnp.bfloat16 if is_published else dtype
        save_drafter(out / "dflash", drafter_config, drafter_params, dtype=drafter_dtype)
    out.mkdir(parents=True, exist_ok=True)
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if projections is not None:
        heads = load_mtp_heads(source, dtype, qkv_layout=arguments.qkv_layout)
        mtp_params = [head for _, head in heads]
        save_published(
            out, config, params,
            projections=projections, mtp_params=mtp_params, extra_config=kept,
        )
    else:
        save_target(out, config, params, dtype=dtype, extra_config=kept, max_shard_bytes=4 << 30)
    console.print(f"written to {out}", soft_wrap=True)
    return 0


PIPE_WIDTH = 160
TOKEN_KEYS = ("eos_token_id", "pad_token_id", "bos_token_id")
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
RUNNERS = {Inspect: run_inspect, Forward: run_forward, Doctor: run_doctor, Export: run_export}


def main(argv: list[str] | None = None) -> int:
    """0 = done, 1 = the checkpoint would not load, 2 = the request itself is wrong."""
    from mimo_jax.checkpoint.safetensors_reader import CheckpointError
    from mimo_jax.config import ConfigError

    arguments = tyro.extras.subcommand_cli_from_dict(
        {"inspect": Inspect, "forward": Forward, "doctor": Doctor, "export": Export},
        prog="python -m mimo_jax.checkpoint",
        description="Looks into published checkpoints: layout, parity, acceptance.",
        args=argv,
    )
    # Piped output has no width of its own; the tables need about this much.
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH)
    try:
        return RUNNERS[type(arguments)](arguments, console)
    except (CheckpointError, ConfigError, OSError, ValueError) as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
