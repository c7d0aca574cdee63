"""How long a decode step must take: bytes, sums, collectives and launches, each over its rate.

Two accounts of the same step. `of_files` is what the published formats would force any engine to
read, experts counted once however many tokens chose them. `of_program` is what our program reads:
its formats, what it keeps on every device, one read per (token, expert) pair (the XLA path
gathers experts without sorting), and every position of the global caches.

Two bounds from one account: `sum_s` lets nothing overlap, `overlap_s` everything (the slowest of
memory, arithmetic, communication and launching). A program lies between; one made of small kernels
lies near the sum.

Expert choices count as independent and uniform: real neighbours share experts more often, and
then fewer bytes are read.
"""

import dataclasses
from typing import NamedTuple

from mimo_jax.config import MoeConfig, require
from mimo_jax.plan.caches import DRAFTER_CACHE, cache_bytes
from mimo_jax.plan.devices import Device
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.weights import (
    ATTENTION,
    BITS,
    DENSE,
    DRAFTER,
    EXPERTS,
    NORMS,
    ROUTER,
    ClassBytes,
)

# Accept lengths of the published Pro drafter, block of 8 (the vendor's announcement, 2026-06).
SCENE_ACCEPT_LENGTHS = {"code": 6.30, "math": 5.56, "agent": 4.29}
# XLA alone, per layer and step, counted in the thunk lists of compiled programs.
XLA_LAUNCHES_PER_LAYER = 29.0


def expected_distinct(moe: MoeConfig, num_tokens: int) -> float:
    """Experts of a layer that a block of tokens touches, each choosing top_k of them at random.

    Example: 8 of 384 experts, 8 tokens -> 59.5; 1 token -> 8.
    """
    untouched = (1 - moe.top_k / moe.num_experts) ** num_tokens
    return moe.num_experts * (1 - untouched)


class Reads(NamedTuple):
    """Bytes that one device reads in one step, by what they belong to."""

    experts: float
    dense: float
    head: float
    caches: float
    drafter: float

    @property
    def total(self) -> float:
        return sum(self)


def _expert_bytes(model: PublishedModel, bits: float) -> float:
    """Bytes of one expert in all sparse layers."""
    moe = model.target.moe
    if moe is None:
        return 0.0
    layers = sum(model.target.is_moe_layer)
    return layers * 3 * model.target.hidden_size * moe.hidden_size * bits / 8


# Classes that every step reads whole; of embeddings it reads a few rows, and the head.
READ_WHOLE = (ATTENTION, DENSE, ROUTER, NORMS)


def of_files(
    model: PublishedModel, rows: dict[str, ClassBytes], *, num_tokens: int, num_devices: int
) -> Reads:
    """Reads of any engine: published formats, cut evenly, no caches and no drafter.

    Example: MiMo-V2.5-Pro, 8 tokens, 8 devices -> 13.8 GB, 2.88 ms of an H200.
    """
    dense = float(sum(rows[kind].file_bytes for kind in READ_WHOLE if kind in rows))
    moe = model.target.moe
    experts = 0.0
    if moe is not None:
        distinct = expected_distinct(moe, num_tokens)
        experts = distinct * _expert_bytes(model, BITS[model.storage.experts])
    head = _head_weights(model) * BITS["bf16"] / 8
    return Reads(experts / num_devices, dense / num_devices, head / num_devices, 0.0, 0.0)


def _head_weights(model: PublishedModel) -> float:
    return float(model.target.vocab_size * model.target.hidden_size)


def of_program(
    model: PublishedModel,
    rows: dict[str, ClassBytes],
    *,
    num_tokens: int,
    batch_size: int,
    context: int,
    num_devices: int,
    is_drafting: bool,
) -> Reads:
    """Reads of our XLA program: its formats, what every device repeats, whole caches."""
    dense = float(sum(rows[kind].device_bytes for kind in READ_WHOLE if kind in rows))
    moe, experts = model.target.moe, 0.0
    if moe is not None:
        bits = BITS["mxfp4"] if moe.is_mxfp4 else BITS["bf16"]
        picked = batch_size * num_tokens * moe.top_k
        experts = picked * _expert_bytes(model, bits) / num_devices
        experts = min(experts, float(rows[EXPERTS].device_bytes))
    head = _head_weights(model) * BITS["bf16"] / 8 / num_devices
    kinds = cache_bytes(
        model,
        batch_size=batch_size,
        context=context,
        draft_block_len=num_tokens,
        num_devices=num_devices,
    )
    target_cache = float(sum(row.device_bytes for row in kinds if row.kind != DRAFTER_CACHE))
    drafter = 0.0
    if is_drafting:
        drafter = rows[DRAFTER].device_bytes + head
        drafter += sum(row.device_bytes for row in kinds if row.kind == DRAFTER_CACHE)
    return Reads(experts, dense, head, target_cache, drafter)


def step_flops(model: PublishedModel, rows: dict[str, ClassBytes], num_tokens: int) -> float:
    """Twice the multiply-adds of the weights, over all devices; attention to caches left out."""
    active = sum(rows[kind].num_weights for kind in (ATTENTION, DENSE, ROUTER) if kind in rows)
    active += _head_weights(model)
    moe = model.target.moe
    if moe is not None:
        active += moe.top_k * _expert_bytes(model, 8.0)
    if DRAFTER in rows:
        active += rows[DRAFTER].num_weights + _head_weights(model)
    return 2.0 * active * num_tokens


class Traffic(NamedTuple):
    """What a step starts besides reading: collectives and launches."""

    num_all_reduces: int
    all_reduce_bytes: float
    num_launches: float


def expected_traffic(
    model: PublishedModel,
    num_tokens: int,
    *,
    is_drafting: bool,
    launches_per_layer: float = XLA_LAUNCHES_PER_LAYER,
) -> Traffic:
    """Two all-reduces per layer of bfloat16 [tokens, width], one for the embedding, one to choose.

    A drafter has one more, for the fusion of the taps: the Pro's 70 + 5 layers make 155, as in the
    compiled loop. Used where no program has been compiled.
    """
    layers, width = model.target.num_layers, model.target.hidden_size
    if is_drafting and model.drafter is not None:
        layers += model.drafter.num_layers
    number = 2 * layers + (5 if is_drafting else 2)
    return Traffic(number, number * num_tokens * width * 2.0, launches_per_layer * layers)


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one step by cause; see the module for the two bounds.

    Attributes:
      terms_s: Cause -> seconds; those of memory are first and named in MEMORY_TERMS.
      flops_s: Arithmetic at the peak rate.
    """

    terms_s: dict[str, float]
    flops_s: float

    @property
    def memory_s(self) -> float:
        return sum(s for name, s in self.terms_s.items() if name in MEMORY_TERMS)

    @property
    def sum_s(self) -> float:
        """Nothing overlaps (arithmetic hides behind the reads it belongs to)."""
        return max(self.memory_s, self.flops_s) + sum(
            s for name, s in self.terms_s.items() if name not in MEMORY_TERMS
        )

    @property
    def overlap_s(self) -> float:
        """Everything overlaps."""
        others = (s for name, s in self.terms_s.items() if name not in MEMORY_TERMS)
        return max(self.memory_s, self.flops_s, *others)

    def tokens_per_s(self, accept_length: float, *, is_overlapped: bool = False) -> float:
        """Committed tokens per second of one row at an accept length."""
        return accept_length / (self.overlap_s if is_overlapped else self.sum_s)

    @property
    def shares(self) -> dict[str, float]:
        """Each cause's part of the sum."""
        whole = sum(self.terms_s.values())
        return {name: s / whole for name, s in self.terms_s.items()}


READ = "bytes the program moves"
MEMORY_TERMS = ("experts", "dense weights", "head", "caches", "drafter and its head", READ)
ALL_REDUCES, LAUNCHES = "all-reduces", "launches"


def step_time(
    reads: Reads, traffic: Traffic, flops: float, device: Device, num_devices: int
) -> StepTime:
    """Time of a step from an account of its reads.

    Args:
      reads: Per device.
      traffic: Of the step.
      flops: Over all devices.
      device: Rates.
      num_devices: 1 = no collectives.
    """
    names = ("experts", "dense weights", "head", "caches", "drafter and its head")
    memory = dict(zip(names, (b / device.hbm_bytes_per_s for b in reads), strict=True))
    return _with_traffic(
        {name: s for name, s in memory.items() if s}, traffic, flops, device, num_devices
    )


def compiled_step_time(
    moved_bytes: float, traffic: Traffic, flops: float, device: Device, num_devices: int
) -> StepTime:
    """Time of a step of a compiled program, from the bytes its operations move."""
    memory = {READ: moved_bytes / device.hbm_bytes_per_s}
    return _with_traffic(memory, traffic, flops, device, num_devices)


def _with_traffic(memory, traffic, flops, device, num_devices) -> StepTime:
    terms = dict(memory)
    if num_devices > 1:
        # One-shot: every device reads the other devices' parts.
        wire = traffic.all_reduce_bytes * (num_devices - 1) / device.link_bytes_per_s
        terms[ALL_REDUCES] = traffic.num_all_reduces * device.all_reduce_s + wire
    terms[LAUNCHES] = traffic.num_launches * device.launch_s
    return StepTime(terms, flops / (num_devices * device.bf16_flops_per_s))


class DrafterChoice(NamedTuple):
    """Seconds per step of a drafter cut over the devices, and of one kept whole on each."""

    cut_s: float
    whole_s: float


def drafter_choice(
    model: PublishedModel,
    rows: dict[str, ClassBytes],
    device: Device,
    *,
    num_tokens: int,
    num_devices: int,
) -> DrafterChoice:
    """What cutting the drafter's layers buys: fewer bytes per device, two all-reduces per layer.

    The head, the embedding and the choice of ids are the target's, cut either way.

    Example: the Pro's five layers, 8 tokens, 8 x H200 -> 0.22 ms cut, 1.15 ms whole.
    """
    assert model.drafter is not None, "a model with a drafter"
    held = rows[DRAFTER]
    layers, width = model.drafter.num_layers, model.drafter.hidden_size
    reduces = 2 * layers + 1  # and one for the fusion of the taps
    wire = num_tokens * width * 2.0 * (num_devices - 1) / device.link_bytes_per_s
    cut = held.device_bytes / device.hbm_bytes_per_s + reduces * (device.all_reduce_s + wire)
    return DrafterChoice(cut, held.num_weights * BITS["bf16"] / 8 / device.hbm_bytes_per_s)


def weight_bound(
    model: PublishedModel,
    rows: dict[str, ClassBytes],
    device: Device,
    *,
    num_tokens: int,
    num_devices: int,
    accept_length: float,
) -> float:
    """Tokens per second if a step took only the reading of its published weights.

    Example: MiMo-V2.5-Pro, 8 tokens, 8 H200, accept length 6.30 -> 2,187.
    """
    require(accept_length >= 1, f"accept length {accept_length} must be >= 1")
    reads = of_files(model, rows, num_tokens=num_tokens, num_devices=num_devices)
    return accept_length / (reads.total / device.hbm_bytes_per_s)

