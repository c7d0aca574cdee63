"""The real programs at full size, compiled for devices that are not here: do they fit?

Run: .venv/bin/python -m pytest tests/plan/test_capacity.py

Four programs, two at a time, about a minute on two quiet cores. Memory, collectives and copies are
known once buffers are assigned; the shape of the loop needs machine code, which is made for the
whole speculative loop of the Pro, with the kernels in. Prefill holds most, so it decides what fits.
"""

import concurrent.futures

import pytest

from mimo_jax.plan import aot
from mimo_jax.plan.checks import failed, promises
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.verdict import USABLE
from mimo_jax.plan.worker import ProgramFacts

PRO, FLASH = "configs/drafter_mimo_v25_pro.py", "configs/target_mimo_v26_flash.py"
CONTEXT = 262_144
PRO_LAYERS = 70 + 5
PRO_CACHE_BYTES = 1_685_964_800  # global layers, rings and drafter context of one device


def _job(device: str, config: str, num_devices: int, block: int, **changes) -> aot.Job:
    arguments = {"config": config, "context": CONTEXT, "draft_block_len": block}
    return aot.Job(
        "mimo_jax.plan.programs:lower_steps",
        arguments | {"batch_size": 1},
        (1, num_devices),
        target=DEVICES[device].target,
        stops_at_buffers=changes.get("stops_at_buffers", True),
    )


def _prefill(job: aot.Job) -> aot.Job:
    arguments = {name: v for name, v in job.arguments.items() if name != "batch_size"}
    return aot.Job("mimo_jax.plan.programs:lower_prefill", arguments, job.mesh, target=job.target,
                   stops_at_buffers=True)  # fmt: skip


PRO_STEPS = _job("h200", PRO, 8, 8, stops_at_buffers=False)
JOBS = {
    "pro h200": PRO_STEPS,
    "pro h200 prefill": _prefill(PRO_STEPS),
    "pro b200 prefill": _prefill(_job("b200", PRO, 8, 8)),
    "flash h200 prefill": _prefill(_job("h200", FLASH, 4, 1)),
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, ProgramFacts]:
    reason = aot.why_not(DEVICES["h200"].target)
    if reason is not None:
        pytest.skip(f"compiling for a GPU is not available because {reason}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = pool.map(aot.compile_in_worker, JOBS.values())
    return {name: ProgramFacts.from_json(a) for name, a in zip(JOBS, answers, strict=True)}


@pytest.mark.parametrize("program", ["pro h200", "pro h200 prefill", "pro b200 prefill"])
def test_the_pro_with_its_drafter_fits_eight(compiled, program):
    found = compiled[program]
    assert found.peak_bytes < USABLE * DEVICES[program.split()[1]].memory_bytes
    # 531 GB of experts and 36 GB of the rest (FP8 as published), an eighth each, 1.7 GB of caches.
    assert 72e9 < found.argument_bytes < 74e9


def test_a_v2_flash_with_packed_experts_fits_four_h200(compiled):
    found = compiled["flash h200 prefill"]
    assert found.peak_bytes < USABLE * DEVICES["h200"].memory_bytes
    assert found.argument_bytes < 46e9
    assert found.collectives.keys() == {"all-reduce"}


def test_a_step_needs_little_scratch_memory(compiled):
    """Partial sums of ten global layers. No scores of a memory, no experts decoded to memory
    (2.4 GB a layer), no copied caches."""
    assert compiled["pro h200"].temp_bytes <= 64e6


def test_prefill_needs_the_scores_of_a_chunk(compiled):
    """512 queries of 16 heads against 262,144 keys in float32 are 8.6 GB, and 4.3 in bfloat16."""
    assert compiled["pro h200 prefill"].temp_bytes < 14e9


def test_the_loop_keeps_its_promises(compiled):
    found = compiled["pro h200"]
    assert found.is_step_loop
    checks = promises(
        found, num_layers=PRO_LAYERS, num_devices=8, cache_bytes=PRO_CACHE_BYTES
    )
    assert failed(checks) is None, checks
    assert found.collectives.keys() == {"all-reduce"}
    number, num_bytes = found.collectives["all-reduce"]
    assert number <= 2 * PRO_LAYERS + 6
    assert num_bytes < number * 8 * 6144 * 4  # float32 of a block at most: no logits, no experts


def test_the_whole_loop_is_one_cuda_graph(compiled):
    found = compiled["pro h200"]
    assert found.is_one_graph
    assert found.top_level == {"kCommandBuffer": 1}
    assert found.num_command_buffers == 1
    assert found.num_inner_loops == 0
    assert found.why_no_kernels is None


def test_launches_of_a_step_are_counted(compiled):
    """XLA alone has 2,038. Kernels: 75 attentions and 10 merges of split memories, 5 writes of
    context, 2 for the experts and 1 for the router of 69 layers, 150 sums with norms."""
    launches = compiled["pro h200"].launches
    assert sum(launches.values()) <= 12 * PRO_LAYERS
    assert launches["kCollectiveKernel"] <= 2 * PRO_LAYERS + 6
    assert launches["kCustomCall"] >= 75 + 10 + 5 + 3 * 69 + 2 * PRO_LAYERS
    # Every expert of 69 layers is there to be picked: 66.4 GB, and no other stack.
    assert compiled["pro h200"].picked_from_bytes == pytest.approx(66.42e9, rel=1e-3)


@pytest.mark.slow
def test_blackwell_runs_the_whole_pro_in_plain_xla():
    """Its devices have no wgmma; the reason is on record."""
    job = _job("b200", PRO, 8, 8, stops_at_buffers=False)
    found = ProgramFacts.from_json(aot.compile_in_worker(job))
    checks = promises(
        found, num_layers=PRO_LAYERS, num_devices=8, cache_bytes=PRO_CACHE_BYTES
    )
    assert failed(checks) is None, checks
    assert found.launches is not None
    assert sum(found.launches.values()) < 29 * PRO_LAYERS
    assert "compute capability 10.0, the kernels are for 9.0" in (found.why_no_kernels or "")
    assert found.host_peak_bytes < 3e9
