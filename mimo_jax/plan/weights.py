"""Weights by class: what the published files take, what our program holds, and where it lies.

Everything is read off the modules' declared shapes, never off a formula of its own, so that the
account follows the program. Nothing is allocated.

Trap: packed experts are declared as bytes, two weights each. Their scales, and those of FP8
matrices, stand beside them; they are no weights and belong to the format.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from mimo_jax.config import DrafterConfig, TargetConfig
from mimo_jax.models import params as model_params
from mimo_jax.models.cut import as_loaded, cut_shapes
from mimo_jax.models.drafter import Drafter
from mimo_jax.models.mtp import MtpHead
from mimo_jax.models.target import Target
from mimo_jax.plan.published import PublishedModel, StorageFormats
from mimo_jax.sharding import MODEL, AxisRules, check_divides, part_shape

EXPERTS, ATTENTION, DENSE = "experts", "attention", "dense layers"
ROUTER, EMBEDDINGS, NORMS = "router", "embeddings", "norms, sinks"
MTP, DRAFTER = "MTP heads", "drafter"
CLASSES = (EXPERTS, ATTENTION, DENSE, ROUTER, EMBEDDINGS, NORMS, MTP, DRAFTER)

# Bits per weight, with the format's scales: 8 of E8M0 per 32 weights, float32 per 128 x 128.
BITS = {"mxfp4": 4 + 8 / 32, "fp8": 8 + 32 / (128 * 128), "bf16": 16.0, "f32": 32.0}


class Abstract(NamedTuple):
    """A model's structure and its parameters as shapes."""

    graph: nnx.GraphDef
    params: nnx.State


@functools.lru_cache(maxsize=8)  # half a second for 70 layers, and asked for a dozen times
def abstract_target(config: TargetConfig, dtype=jnp.bfloat16) -> Abstract:
    """The target as decoding holds it, without memory."""
    return Abstract(
        *model_params.abstract(lambda: Target(config, rngs=nnx.Rngs(0), dtype=dtype))
    )


@functools.lru_cache(maxsize=8)
def abstract_drafter(config: DrafterConfig, dtype=jnp.bfloat16) -> Abstract:
    """The drafter as decoding holds it, without memory."""
    return Abstract(
        *model_params.abstract(lambda: Drafter(config, rngs=nnx.Rngs(0), dtype=dtype))
    )


@functools.lru_cache(maxsize=8)
def abstract_mtp_head(config: TargetConfig, dtype=jnp.bfloat16) -> Abstract:
    """One MTP head, without memory."""
    return Abstract(
        *model_params.abstract(lambda: MtpHead(config, rngs=nnx.Rngs(0), dtype=dtype))
    )


class Leaf(NamedTuple):
    """One weight: its class, published format, number of weights (0 for scales), and shapes.

    `cut_shape` is `shape` as it lies on a mesh: wider where KV heads are repeated.
    """

    name: str
    kind: str
    file_format: str
    num_weights: int
    shape: tuple[int, ...]
    cut_shape: tuple[int, ...]
    item_bytes: int
    axes: tuple[str | None, ...]

    @property
    def program_bytes(self) -> int:
        return self.item_bytes * math.prod(self.shape)


def _classify(name: str, storage: StorageFormats) -> tuple[str, str]:
    """(class, published format) of a target's parameter."""
    last = name.rsplit(".", 1)[-1].removesuffix("_scale")
    if last.startswith("experts_"):
        return EXPERTS, storage.experts
    if last == "w_qkv":
        return ATTENTION, storage.projections
    if last == "w_out":
        return ATTENTION, "bf16"
    if last in ("w_gate", "w_up", "w_down"):
        return DENSE, storage.projections
    if last == "w_router":
        return ROUTER, storage.router
    if last == "selection_bias":
        return ROUTER, "f32"
    if last in ("embedding", "head", "w_combine"):
        return EMBEDDINGS, "bf16"
    return NORMS, "bf16"


def leaves(model: Abstract, storage: StorageFormats, kind: str | None = None) -> list[Leaf]:
    """Every parameter of a model; `kind` puts all of them into one class, with their formats."""
    found = []
    for path, value in nnx.to_flat_state(model.params):
        name = ".".join(str(part) for part in path)
        own_kind, file_format = _classify(name, storage)
        num_weights = 0 if name.endswith("_scale") else math.prod(value.shape)
        if value.dtype == jnp.uint8:
            num_weights *= 2
        found.append(
            Leaf(
                name,
                kind or own_kind,
                file_format,
                num_weights,
                tuple(value.shape),
                tuple(value.shape),
                jnp.dtype(value.dtype).itemsize,
                value.get_metadata("logical_axes"),
            )
        )
    return found


def _repeated(found: list[Leaf], model: Abstract, config, num_parts: int) -> list[Leaf]:
    """Leaves with the shapes they have on a mesh of the decode program."""
    shapes = nnx.to_flat_state(cut_shapes(model.params, config, num_parts))
    return [
        leaf._replace(cut_shape=tuple(value.shape))
        for leaf, (_, value) in zip(found, shapes, strict=True)
    ]


def all_leaves(model: PublishedModel, num_parts: int = 1) -> list[Leaf]:
    """Parameters of the target, of every MTP head and of the drafter.

    Args:
      model: The model.
      num_parts: Devices along "model" of a decode mesh; with more of them than KV heads, these are
        repeated in `cut_shape`.
    """
    config = as_loaded(model.target, num_parts)
    target = abstract_target(config)
    found = _repeated(leaves(target, model.storage), target, config, num_parts)
    if model.num_mtp_heads:
        head = leaves(abstract_mtp_head(model.target), model.storage, MTP)
        for i in range(model.num_mtp_heads):
            found += [leaf._replace(name=f"mtp.{i}.{leaf.name}") for leaf in head]
    if model.drafter is not None:
        drafter = abstract_drafter(model.drafter)
        own = leaves(drafter, StorageFormats(), DRAFTER)
        own = _repeated(own, drafter, model.drafter, num_parts)
        found += [leaf._replace(name=f"drafter.{leaf.name}") for leaf in own]
    return found


@dataclasses.dataclass(frozen=True)
class ClassBytes:
    """Weights of one class.

    Attributes:
      kind: One of CLASSES.
      num_weights: Scales not counted.
      file_bytes: In the published formats.
      program_bytes: As our decoding holds them (0 where it does not load them).
      device_bytes: The largest part that one device of the mesh holds.
    """

    kind: str
    num_weights: int
    file_bytes: float
    program_bytes: int
    device_bytes: int


def device_bytes(leaf: Leaf, rules: AxisRules, sizes: Mapping[str, int]) -> int:
    """Bytes of a parameter on one device.

    Raises:
      ConfigError: If a cut does not divide; names the parameter and what would.
    """
    spec = check_divides(leaf.name, leaf.cut_shape, leaf.axes, rules, sizes)
    return leaf.item_bytes * math.prod(part_shape(leaf.cut_shape, spec, sizes))


def weigh(
    model: PublishedModel, rules: AxisRules, sizes: Mapping[str, int]
) -> dict[str, ClassBytes]:
    """Weights by class, classes without weights left out.

    Example: MiMo-V2.5-Pro, 8 devices -> experts: 1,000,190,509,056 weights, 531.35 GB of files.

    Raises:
      ConfigError: If the mesh does not divide a parameter.
    """
    rows = {}
    found = all_leaves(model, sizes.get(MODEL, 1))
    for kind in CLASSES:
        own = [leaf for leaf in found if leaf.kind == kind]
        is_loaded = kind != MTP
        if own:
            rows[kind] = ClassBytes(
                kind,
                sum(leaf.num_weights for leaf in own),
                sum(leaf.num_weights * BITS[leaf.file_format] / 8 for leaf in own),
                sum(leaf.program_bytes for leaf in own) if is_loaded else 0,
                sum(device_bytes(leaf, rules, sizes) for leaf in own) if is_loaded else 0,
            )
    return rows


def num_weights(model: Abstract) -> int:
    """Parameters of a model; scales are none."""
    return sum(leaf.num_weights for leaf in leaves(model, StorageFormats()))


def file_bytes(rows: Mapping[str, ClassBytes], *without: str) -> float:
    """Published bytes of all classes but those named."""
    return sum(row.file_bytes for kind, row in rows.items() if kind not in without)


