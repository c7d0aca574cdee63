"""A whole plan: everything that is known about a model on some devices, as plain values.

Analytic parts come first and always; compiled programs are added where a compiler is there. With
no GPU compiler the same programs are compiled for this machine's CPU, cut over as many virtual
devices: shapes, collectives and what is written in place are the same, scratch memory and launches
are not.
"""

import concurrent.futures
import dataclasses
from collections.abc import Iterable
from typing import Any

from mimo_jax.config import require
from mimo_jax.plan import aot, roofline, weights
from mimo_jax.plan.caches import CacheBytes, cache_bytes
from mimo_jax.plan.checks import Check, anchors, promises
from mimo_jax.plan.devices import Device
from mimo_jax.plan.placement import Placement, placements
from mimo_jax.plan.published import PublishedModel
from mimo_jax.plan.verdict import Verdict, judge
from mimo_jax.plan.weights import ClassBytes
from mimo_jax.plan.worker import ProgramFacts
from mimo_jax.sharding import DATA, DECODE, MODEL, TRAIN, fitting_parts
from pallas_kernels.dispatch import XLA

MEMORY, LAUNCHES, ROOFLINE, SHARDING = PARTS = ("memory", "launches", "roofline", "sharding")
PREFILL, PLAIN, DFLASH = "prefill chunk", "plain step", "DFlash step"
WITHOUT_KERNELS = ", XLA alone"
TARGET_TRAIN, DRAFTER_TRAIN = "target train step", "drafter train step"
DEFAULT_CONTEXT = 262_144
# Two compilers at once: 1.3 GB each for a 1T model, and a compilation keeps 1.5 cores busy.
NUM_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Request:
    """What to plan for.

    Attributes:
      config: Path of the config file, read again by the workers.
      model: What it describes.
      device: One of the devices, with overridden rates.
      num_devices: Of one node, all along "model".
      context: Longest prompt and output together.
      batch_size: Rows decoded at once.
      draft_block_len: Slots of a draft block; 1 without a drafter.
      accept_lengths: Scene -> committed tokens per step.
      launches_per_layer: Used where nothing is compiled for a GPU.
    """

    config: str
    model: PublishedModel
    device: Device
    num_devices: int
    context: int
    batch_size: int
    draft_block_len: int
    accept_lengths: dict[str, float]
    launches_per_layer: float

    @property
    def is_drafting(self) -> bool:
        return self.draft_block_len > 1

    @property
    def sizes(self) -> dict[str, int]:
        """Decode mesh: all devices cut every matrix."""
        return {DATA: 1, MODEL: self.num_devices}

    @property
    def train_mesh(self) -> tuple[int, ...]:
        """Train mesh: all devices along "data"."""
        return self.num_devices, *(1 for _ in TRAIN.mesh_axes[1:])


def make_request(
    config: str,
    model: PublishedModel,
    device: Device,
    *,
    num_devices: int,
    context: int | None = None,
    batch_size: int = 1,
    draft_block_len: int | None = None,
    accept_lengths: dict[str, float] | None = None,
    launches_per_layer: float = roofline.XLA_LAUNCHES_PER_LAYER,
) -> Request:
    """A request whose numbers fit the model.

    Raises:
      ConfigError: If the context, block, batch or number of devices cannot be; says what can.
    """
    longest = model.target.max_position
    context = min(longest, DEFAULT_CONTEXT) if context is None else context
    require(num_devices >= 1, f"devices {num_devices} must be >= 1")
    require(batch_size >= 1, f"batch {batch_size} must be >= 1")
    require(
        1 <= context <= longest,
        f"context {context} is beyond the model's {longest}; allowed: 1..{longest}",
    )
    trained = 1 if model.drafter is None else model.drafter.draft_block_len
    block = trained if draft_block_len is None else draft_block_len
    if model.drafter is None:
        require(block == 1, f"draft-block-len {block}: {model.name} has no drafter; allowed: 1")
    else:
        require(2 <= block <= trained, f"draft-block-len {block}; allowed: 2..{trained}")
    lengths = accept_lengths or roofline.SCENE_ACCEPT_LENGTHS
    for scene, length in lengths.items():
        require(length >= 1, f"accept length of {scene} {length} must be >= 1")
    for kind, geometry in model.target.attention.items():
        n = geometry.num_heads
        require(
            n % num_devices == 0,
            f"devices {num_devices}: {n} heads of {kind} layers cannot be cut; allowed: "
            f"{fitting_parts(n)}",
        )
    return Request(
        config, model, device, num_devices, context, batch_size, block, lengths, launches_per_layer
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """One program of a plan: what was found out, or why not."""

    name: str
    facts: ProgramFacts | None
    error: str | None = None


def jobs(request: Request, parts: Iterable[str], target: str | None) -> dict[str, aot.Job]:
    """The programs that the asked parts need, by name."""
    parts = set(parts)
    mesh = (1, request.num_devices)
    common = {"config": request.config, "context": request.context}

    is_memory_alone = not parts & {LAUNCHES, ROOFLINE}

    def job(builder: str, arguments: dict[str, Any], *, is_memory_alone=is_memory_alone) -> aot.Job:
        name = f"mimo_jax.plan.programs:{builder}"
        return aot.Job(
            name, arguments, mesh, target=target, stops_at_buffers=is_memory_alone
        )

    def steps(block: int, **more) -> aot.Job:
        arguments = {"batch_size": request.batch_size, "draft_block_len": block}
        return job("lower_steps", common | arguments | more)

    wanted = {}
    if request.is_drafting and parts & {MEMORY, LAUNCHES, ROOFLINE}:
        wanted[DFLASH] = steps(request.draft_block_len)
    if parts & {MEMORY}:
        # Its launches are in no roofline: memory is all that is asked of it.
        arguments = {"draft_block_len": request.draft_block_len}
        wanted[PREFILL] = job("lower_prefill", common | arguments, is_memory_alone=True)
    if not request.is_drafting or parts & {LAUNCHES, ROOFLINE}:
        wanted[PLAIN] = steps(1)
    if target is not None and LAUNCHES in parts:
        # The same step as it was before the kernels, to compare with.
        name = DFLASH if request.is_drafting else PLAIN
        wanted[name + WITHOUT_KERNELS] = steps(request.draft_block_len, implementation=XLA)
    if request.model.experiment is not None and parts & {MEMORY, LAUNCHES}:
        for name, builder in ((TARGET_TRAIN, "lower_target_step"),
                              (DRAFTER_TRAIN, "lower_drafter_step")):  # fmt: skip
            wanted[name] = aot.Job(
                f"mimo_jax.plan.programs:{builder}",
                {"config": request.config},
                request.train_mesh,
                rules=TRAIN.name,
                target=target,
                stops_at_buffers=True,
            )
    return wanted if parts - {SHARDING} else {}


def compile_programs(wanted: dict[str, aot.Job]) -> dict[str, Program]:
    """Compiles each in its own process, two at a time; a failure is noted, not raised."""

    def one(item) -> Program:
        name, job = item
        try:
            return Program(name, ProgramFacts.from_json(aot.compile_in_worker(job)))
        except aot.NotAvailable as error:
            return Program(name, None, str(error))

    with concurrent.futures.ThreadPoolExecutor(NUM_WORKERS) as pool:
        return {program.name: program for program in pool.map(one, wanted.items())}


@dataclasses.dataclass(frozen=True)
class Speed:
    """Predicted decoding of one kind of step.

    Attributes:
      name: PLAIN or DFLASH, with the account of its bytes: the configuration's, or what the
        compiled operations move. Launches and collectives are counted in the compiled program
        wherever there is one.
      time: Seconds by cause.
      tokens_per_s: Scene -> nothing overlapped; plain steps have one entry, "any".
      overlapped_tokens_per_s: Scene -> everything overlapped.
    """

    name: str
    time: roofline.StepTime
    tokens_per_s: dict[str, float]
    overlapped_tokens_per_s: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything about a model on some devices; see the tables of plan/report.py."""

    request: Request
    compiled_for: str
    weights: dict[str, ClassBytes]
    caches: list[CacheBytes]
    programs: dict[str, Program]
    verdict: Verdict
    speeds: list[Speed]
    bound_tokens_per_s: dict[str, float]
    placements: list[Placement]
    checks: list[Check]


def _speed(name: str, time: roofline.StepTime, lengths: dict[str, float]) -> Speed:
    return Speed(
        name,
        time,
        {scene: time.tokens_per_s(tau) for scene, tau in lengths.items()},
        {scene: time.tokens_per_s(tau, is_overlapped=True) for scene, tau in lengths.items()},
    )


def _traffic_of(facts: ProgramFacts) -> roofline.Traffic | None:
    """Collectives and launches of a compiled step; None if it was not compiled for a GPU."""
    if facts.launches is None:
        return None
    number, num_bytes = facts.collectives.get("all-reduce", (0, 0))
    launches = sum(facts.launches.values()) - facts.launches.get("kCollectiveKernel", 0)
    return roofline.Traffic(number, float(num_bytes), float(launches))


def _picked_bytes(facts: ProgramFacts, model: PublishedModel, num_tokens: int) -> float:
    """Bytes of the experts that kernels are expected to pick."""
    moe = model.target.moe
    if moe is None:
        return 0.0
    share = roofline.expected_distinct(moe, num_tokens) / moe.num_experts
    return share * facts.picked_from_bytes


def _speeds(
    request: Request, rows: dict[str, ClassBytes], programs: dict[str, Program]
) -> list[Speed]:
    found = []
    plain_lengths = {"any": 1.0}
    for name, block in ((PLAIN, 1), (DFLASH, request.draft_block_len)):
        is_drafting = block > 1
        if name == DFLASH and not is_drafting:
            continue
        lengths = request.accept_lengths if is_drafting else plain_lengths
        reads = roofline.of_program(
            request.model,
            rows,
            num_tokens=block,
            batch_size=request.batch_size,
            context=request.context,
            num_devices=request.num_devices,
            is_drafting=is_drafting,
        )
        flops = roofline.step_flops(request.model, rows, block * request.batch_size)
        traffic = roofline.expected_traffic(
            request.model,
            block * request.batch_size,
            is_drafting=is_drafting,
            launches_per_layer=request.launches_per_layer,
        )
        program = programs.get(name)
        facts = program.facts if program is not None else None
        counted = _traffic_of(facts) if facts is not None else None
        rates = (flops, request.device, request.num_devices)
        time = roofline.step_time(reads, counted or traffic, *rates)
        found.append(_speed(f"{name}, configuration", time, lengths))
        if facts is not None and counted is not None:
            picked = _picked_bytes(facts, request.model, block * request.batch_size)
            time = roofline.compiled_step_time(facts.moved_bytes + picked, counted, *rates)
            found.append(_speed(f"{name}, compiled", time, lengths))
    return found


def _placements(request: Request) -> list[Placement]:
    """As the program at hand would cut it: a training run by the rules of training."""
    if request.model.experiment is None:
        return placements(request.model, DECODE, request.sizes)
    sizes = dict(zip(TRAIN.mesh_axes, request.train_mesh, strict=True))
    return placements(request.model, TRAIN, sizes)


def make_plan(
    request: Request,
    parts: Iterable[str],
    target: str | None = None,
    note: str = "nothing",
    *,
    is_analytic: bool = False,
) -> Plan:
    """Plans the asked parts.

    Args:
      request: What for.
      parts: Of PARTS.
      target: The device's name inside the compiler plugin, or None: compile for this CPU.
      note: What was compiled for, in words.
      is_analytic: Compile nothing; the peak is then weights and caches alone.

    Raises:
      ConfigError: If the mesh does not divide the model.
    """
    parts = tuple(parts)
    model, n = request.model, request.num_devices
    rows = weights.weigh(model, DECODE, request.sizes)
    caches = cache_bytes(
        model,
        batch_size=request.batch_size,
        context=request.context,
        draft_block_len=request.draft_block_len,
        num_devices=n,
    )
    programs = {} if is_analytic else compile_programs(jobs(request, parts, target))
    compiled = [program.facts for program in programs.values() if program.facts is not None]
    held = sum(row.device_bytes for row in rows.values()) + sum(c.device_bytes for c in caches)
    largest = max(compiled, key=lambda facts: facts.peak_bytes, default=None)
    verdict = judge(
        float(largest.peak_bytes if largest else held),
        request.device.memory_bytes,
        context=request.context,
        max_position=model.target.max_position,
        cache_bytes_per_token=float(sum(c.bytes_per_token for c in caches)),
        temp_bytes=float(largest.temp_bytes if largest else 0),
    )
    checks = anchors(model, rows)
    loop = programs.get(DFLASH if request.is_drafting else PLAIN)
    if loop is not None and loop.facts is not None:
        layers = model.target.num_layers
        if request.is_drafting and model.drafter is not None:
            layers += model.drafter.num_layers
        own_caches = sum(c.device_bytes for c in caches)
        checks += promises(loop.facts, num_layers=layers, num_devices=n, cache_bytes=own_caches)
    bounds = {
        scene: roofline.weight_bound(
            model,
            rows,
            request.device,
            num_tokens=request.draft_block_len * request.batch_size,
            num_devices=n,
            accept_length=tau,
        )
        for scene, tau in request.accept_lengths.items()
    }
    return Plan(
        request,
        note,
        rows,
        caches,
        programs,
        verdict,
        _speeds(request, rows, programs),
        bounds,
        _placements(request) if SHARDING in parts else [],
        checks,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values, derived figures included."""
    values = dataclasses.asdict(plan)
    values["request"]["model"] = plan.request.model.name
    values["verdict"] |= {"fits": plan.verdict.fits, "text": str(plan.verdict)}
    for speed, entry in zip(plan.speeds, values["speeds"], strict=True):
        time = speed.time
        entry["time"] |= {"sum_s": time.sum_s, "overlap_s": time.overlap_s, "shares": time.shares}
    values["caches"] = [row._asdict() for row in plan.caches]
    values["placements"] = [row._asdict() for row in plan.placements]
    values["checks"] = [row._asdict() for row in plan.checks]
    return values


def choose_target(device: Device, num_devices: int) -> tuple[str | None, str]:
    """(name inside the plugin or None, in words) of what this machine can compile for."""
    reason = aot.why_not(device.target)
    if reason is None:
        return device.target, f"{num_devices} x {device.target}, ahead of time"
    words = f"for {device.target} not available because {reason}"
    return None, f"{num_devices} virtual CPU devices; {words}"


