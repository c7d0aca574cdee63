"""A checkpoint directory -> what decoding needs of it: both models, tokenizer and stop ids.

Refuses what would load and then speak nonsense: a tokenizer with more ids than the model, or a
drafter made for another tokenizer.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from mimo_jax.checkpoint.hf_drafter import find_drafter, load_drafter
from mimo_jax.checkpoint.hf_target import load_target
from mimo_jax.checkpoint.json_config import read_json
from mimo_jax.checkpoint.safetensors_reader import CheckpointError
from mimo_jax.config import ConfigError, DrafterConfig, TargetConfig
from mimo_jax.decode.engine import prefers_transposed, switch_to_kernels
from mimo_jax.decode.placement import Model, place_on_mesh
from mimo_jax.text.tokenizer import Tokenizer

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What a checkpoint directory holds; see `LLM` for the fields."""

    target: Model[TargetConfig]
    drafter: Model[DrafterConfig] | None
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]
    directory: Path


def read_stop_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End-of-sequence ids of a checkpoint: generation_config.json, else config.json.

    Raises:
      CheckpointError: If `eos_token_id` is no id or list of ids of the vocabulary.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        eos = read_json(path).get("eos_token_id") if path.is_file() else None
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size:
                raise CheckpointError(
                    f"{path}: eos_token_id is {eos!r}; allowed: ids in 0..{vocab_size - 1}"
                )
        return tuple(dict.fromkeys(ids))
    return ()


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None if it has none.

    Raises:
      CheckpointError: If it is damaged, not byte-level, or has ids that the model has not.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(path)
        num_ids = len(tokenizer.bytes_by_id())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if num_ids > vocab_size:
        raise CheckpointError(
            f"{path}: has ids up to {num_ids - 1}, but vocab_size in config.json is {vocab_size}"
        )
    return tokenizer


def check_same_tokenizer(ours: Tokenizer | None, drafter_dir: Path) -> None:
    """Refuses a drafter that brings a tokenizer with other pieces: its ids would mean other text.

    Raises:
      CheckpointError: Naming the first id that differs; also if the drafter's file is damaged.
    """
    path = drafter_dir / "tokenizer.json"
    if ours is None or not path.is_file():
        return
    try:
        theirs = Tokenizer.from_file(path).bytes_by_id()
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for token_id, (mine, other) in enumerate(zip(ours.bytes_by_id(), theirs, strict=False)):
        if mine != other:
            raise CheckpointError(
                f"{path}: id {token_id} is {other!r}, expected {mine!r} as in the target's; the "
                "drafter was made for another tokenizer"
            )


def load_checkpoint(
    checkpoint_dir: str | Path,
    drafter: str | Path | None,
    dtype: str,
    *,
    mesh: Mesh | None,
    has_whole_drafter: bool,
    qkv_layout: str | None,
    implementation: str | None,
    on_progress: Callable[[int, int], object],
) -> Loaded:
    """Reads a published checkpoint directory; arguments and errors are those of `LLM.load`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; allowed: {', '.join(DTYPES)}")
    directory = Path(checkpoint_dir)
    file_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    place: dict[str, Any] = {"mesh": mesh, "is_transposed": prefers_transposed(file_bytes)}
    config, graph, params = load_target(
        directory, DTYPES[dtype], qkv_layout=qkv_layout, on_progress=on_progress, **place
    )
    drafter_dir = find_drafter(directory) if drafter == "auto" else drafter
    tokenizer = read_tokenizer(directory, config.vocab_size)
    if drafter_dir is not None:
        check_same_tokenizer(tokenizer, Path(drafter_dir))
    drafter_model = None
    if drafter_dir is not None and has_whole_drafter:
        whole = load_drafter(drafter_dir, DTYPES[dtype], is_transposed=place["is_transposed"])
        drafter_model = place_on_mesh(Model(*whole), mesh, is_replicated=True)
    elif drafter_dir is not None:
        drafter_model = Model(*load_drafter(drafter_dir, DTYPES[dtype], **place), mesh)
    return Loaded(
        # Here and not in an engine: there is no room for a large model's experts in both forms.
        target=switch_to_kernels(Model(config, graph, params, mesh), implementation, consumes=True),
        drafter=drafter_model and switch_to_kernels(drafter_model, implementation),
        tokenizer=tokenizer,
        stop_ids=read_stop_ids(directory, config.vocab_size),
        directory=directory,
    )

