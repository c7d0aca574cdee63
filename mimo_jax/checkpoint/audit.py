"""What every tensor of a checkpoint becomes, read from headers alone.

No weight is touched, so a headers-only copy of a 570 GB checkpoint is audited like a whole one. The
one thing that is read are MXFP4 scales (1/17 of packed experts), since bytes 253..255 stand for
numbers that are infinite or NaN, and a file holds such only by mistake.
"""

import dataclasses
import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from flax import nnx

from mimo_jax.checkpoint import name_map
from mimo_jax.checkpoint.decoded import QKV_PARTS, DecodedTensors
from mimo_jax.checkpoint.hf_drafter import (
    MASK_EMBEDDING,
    drafter_config_from_json,
    drafter_leaves,
    find_drafter,
    read_mask_embedding,
)
from mimo_jax.checkpoint.hf_target import (
    IGNORED_PREFIXES,
    MTP_PREFIX,
    is_ignored,
    mtp_leaves,
    num_mtp_layers,
    open_kept,
    open_target,
    target_leaves,
)
from mimo_jax.checkpoint.json_config import read_json
from mimo_jax.checkpoint.kept import KeptTensors
from mimo_jax.checkpoint.name_map import Leaf
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import ConfigError, TargetConfig
from mimo_jax.models.cut import cut_shapes, drafter_part, target_part
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.mtp import MtpHead, mtp_layer_config
from mimo_jax.models.params import abstract, flatten, partition_specs
from mimo_jax.models.target import Target
from mimo_jax.quant.policy import mxfp4_axis
from mimo_jax.sharding import DATA, DECODE, MODEL, part_shape

FIRST_ODD_SCALE = 253
_STAT_BLOCK_BYTES = 512  # of st_blocks, whatever the file system
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
      key: Its name.
      file: Name of the file that holds it.
      dtype: As stored.
      shape: As stored.
      goes_to: Parameter it is part of, or why it is left out.
      num_bytes: As stored.
      device_bytes: Of one device's part, as stored; 0 where it is left out.
    """

    key: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    goes_to: str
    num_bytes: int
    device_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Audit:
    """The tensors of a directory and the verdict.

    Attributes:
      entries: Every tensor of every file, sorted by part and key.
      problem: The error that loading would raise, or None.
      num_odd_scales: Key of each MXFP4 scale tensor with bytes of 253 to 255 -> how many.
    """

    entries: tuple[Entry, ...]
    problem: str | None
    num_odd_scales: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def device_bytes(self) -> int:
        return sum(entry.device_bytes for entry in self.entries)


def _shares(make_module: Callable, config, num_devices: int, part: str = "") -> dict[str, float]:
    """Parameter name -> share of it that one device holds; KV heads may be repeated."""
    _, shapes = abstract(make_module)
    sizes = {DATA: 1, MODEL: num_devices}
    cut = flatten(cut_shapes(shapes, config, num_devices))
    specs = flatten(partition_specs(cut_shapes(shapes, config, num_devices), DECODE, sizes))
    return {
        part + name: math.prod(part_shape(cut[name].shape, specs[name], sizes))
        / math.prod(whole.shape)
        for name, whole in flatten(shapes).items()
    }


def _with_device_bytes(entries: Iterable[Entry], shares: dict[str, float]) -> tuple[Entry, ...]:
    share_of = lambda entry: shares.get(entry.goes_to.removesuffix(" (scale)"), 0.0)
    return tuple(
        dataclasses.replace(entry, device_bytes=round(entry.num_bytes * share_of(entry)))
        for entry in entries
    )


def _entries(tensors: SafetensorsDir, goes_to: dict[str, str], prefix: str = "") -> list[Entry]:
    found = []
    for name in tensors.names():
        shape, dtype = tensors.shape(name), tensors.dtype(name)
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        place = goes_to.get(name.removeprefix(prefix), "NOWHERE")
        found.append(
            Entry(name, tensors.file_of(name).name, dtype.name, shape, place, num_bytes)
        )
    return found


def _places(leaves: Iterable[Leaf], part: str) -> dict[str, str]:
    return {source: f"{part}{leaf.name}" for leaf in leaves for source in leaf.sources}


def _target_places(config: TargetConfig, tensors: DecodedTensors | KeptTensors) -> dict[str, str]:
    """Stored name -> where it goes, for a target with its MTP heads."""
    places = _places(target_leaves(config), "")
    for i in range(num_mtp_layers(tensors.tensors)):
        places |= _places(mtp_leaves(config, i), f"mtp.{i}.")
    for name in tensors.tensors.names():
        if name.endswith("qkv_proj.weight"):
            first = name.replace("qkv_proj", QKV_PARTS[0])
            places.setdefault(name, places.get(first, "NOWHERE"))
    for name, place in list(places.items()):
        if name.endswith("qkv_proj.weight"):  # kept in FP8, whatever the files hold it as
            for part in QKV_PARTS:
                places.setdefault(name.replace("qkv_proj", part), place)
    for name in tensors.tensors.names():
        if name.endswith("_scale_inv"):
            places[name] = places.get(name.removesuffix("_scale_inv"), "NOWHERE") + " (scale)"
        elif name not in places and is_ignored(config, name):
            is_tower = name.startswith(IGNORED_PREFIXES)
            places[name] = "left out: " + ("not text" if is_tower else "derived")
    return places


def _check_target(config: TargetConfig, tensors: DecodedTensors | KeptTensors) -> None:
    name_map.check_leaves(
        tensors, target_leaves(config), is_ignored=lambda name: is_ignored(config, name)
    )
    for i in range(num_mtp_layers(tensors.tensors)):
        others = lambda name, i=i: not name.startswith(f"{MTP_PREFIX}{i}.")
        name_map.check_leaves(tensors, mtp_leaves(config, i), is_ignored=others)


def count_odd_scales(entries: Iterable[Entry], tensors: SafetensorsDir) -> dict[str, int]:
    """Key -> scale bytes of 253 to 255, of the MXFP4 scales that have any.

    Says nothing about files with holes: those are headers without data.
    """
    is_whole = {}
    found = {}
    for entry in entries:
        weight = entry.goes_to.removesuffix("_scale")
        if weight == entry.goes_to or mxfp4_axis(weight) is None:
            continue
        if entry.file not in is_whole:
            status = tensors.file_of(entry.key).stat()
            is_whole[entry.file] = status.st_blocks * _STAT_BLOCK_BYTES >= status.st_size
        if is_whole[entry.file]:
            scale = tensors.get(entry.key).view(np.uint8)
            num_odd = int(np.count_nonzero(scale >= FIRST_ODD_SCALE))
            if num_odd:
                found[entry.key] = num_odd
    return found


def audit_target(
    directory: str | os.PathLike, *, qkv_layout: str | None = None, num_devices: int = 1
) -> Audit:
    """Audits a target and its MTP heads; never raises for what it finds in the directory.

    Args:
      directory: Of the target.
      qkv_layout: See `open_target`.
      num_devices: Devices of a decode mesh that the model would be cut over.

    Example: pro-tiny -> 531 entries, problem None.
    """
    try:
        config, tensors = open_kept(directory, qkv_layout=qkv_layout, num_parts=num_devices)
    except CheckpointError as error:
        return Audit((), str(error))
    entries = tuple(_entries(tensors.tensors, _target_places(config, tensors)))
    try:
        _check_target(config, tensors)
        target_part(config, num_devices)
        shares = _shares(lambda: Target(config, rngs=nnx.Rngs(0)), config, num_devices)
        for i in range(num_mtp_layers(tensors.tensors)):
            make = lambda: MtpHead(config, rngs=nnx.Rngs(0))
            shares |= _shares(make, mtp_layer_config(config), num_devices, f"mtp.{i}.")
    except (CheckpointError, ConfigError) as error:
        return Audit(entries, str(error))
    return Audit(
        _with_device_bytes(entries, shares), None, count_odd_scales(entries, tensors.tensors)
    )


def audit_drafter(
    directory: str | os.PathLike, target: TargetConfig | None = None, *, num_devices: int = 1
) -> Audit:
    """Audits a drafter and, when a target is given, whether the two fit."""
    directory = Path(directory)
    entries: tuple[Entry, ...] = ()
    try:
        path = directory / "config.json"
        config = drafter_config_from_json(read_json(path), path)
        tensors = SafetensorsDir(directory, ignore_files=(f"{MASK_EMBEDDING}.safetensors",))
        places = _places(drafter_leaves(config), "drafter.")
        entries = tuple(_entries(tensors, places, "model."))
        mask = read_mask_embedding(directory, config)
        if mask is not None:
            file = f"{MASK_EMBEDDING}.*"
            place = "drafter.mask_embedding"
            entries += (
                Entry("embedding", file, mask.dtype.name, mask.shape, place, mask.nbytes),
            )
        name_map.check_leaves(tensors, drafter_leaves(config), prefix="model.")
        if target is not None:
            config.check_fits(target)
        config = dataclasses.replace(config, has_mask_embedding=mask is not None)
        drafter_part(config, num_devices)
        make = lambda: Drafter(config, rngs=nnx.Rngs(0))
        entries = _with_device_bytes(entries, _shares(make, config, num_devices, "drafter."))
    except (CheckpointError, ConfigError) as error:
        return Audit(entries, str(error))
    return Audit(entries, None)


def audit(
    directory: str | os.PathLike, *, qkv_layout: str | None = None, num_devices: int = 1
) -> dict[str, Audit]:
    """Audits of a directory: "target", and "drafter" if it holds one in dflash/."""
    layout = {"qkv_layout": qkv_layout, "num_devices": num_devices}
    audits = {"target": audit_target(directory, **layout)}
    drafter = find_drafter(directory)
    if drafter is not None:
        target = None
        if audits["target"].problem is None:
            target = open_target(directory, qkv_layout=qkv_layout)[0]
        audits["drafter"] = audit_drafter(drafter, target, num_devices=num_devices)
    return audits


def fold_experts(entries: Iterable[Entry]) -> list[tuple[Entry, int]]:
    """Entries with the experts of a layer on one line: (entry, number of tensors).

    Example: 384 gate_proj.weight of a layer -> key "...experts.*.gate_proj.weight", 384.
    """
    folded: dict[tuple, list[Entry]] = {}
    for entry in entries:
        key = _EXPERT.sub(".experts.*.", entry.key)
        folded.setdefault((key, entry.dtype, entry.shape, entry.goes_to), []).append(entry)
    rows = []
    for (key, *_), group in folded.items():
        files = sorted({entry.file for entry in group})
        file = files[0] if len(files) == 1 else f"{files[0]} .. {files[-1]}"
        folded_entry = dataclasses.replace(
            group[0],
            key=key,
            file=file,
            num_bytes=sum(entry.num_bytes for entry in group),
            device_bytes=sum(entry.device_bytes for entry in group),
        )
        rows.append((folded_entry, len(group)))
    return rows
