"""Attention of one block, compiled for an H200 at published sizes: registers, launches, copies.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_sink_attention_compiled.py

One compiler process for chains and one for trees: starting one costs as much as ten kernels.
"""

import dataclasses
import json
import re
import subprocess
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from mimo_jax.plan import aot
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.worker import ProgramFacts
from pallas_kernels.sink_attention import api
from pallas_kernels.sink_attention.arg_specs import ARG_SPECS, PRO_GLOBAL, PRO_SLIDING
from tests.pallas_kernels.programs import chain_of

TIMEOUT_S = 240  # a layout that cannot be inferred searches for minutes
GIGABYTE = 10**9
CHAIN = ("pro sliding", "pro sliding", "pro sliding", "pro global")
TREE = ("pro sliding tree", "pro global tree", "pro drafter", "qwen3 drafter")


class Compiled(NamedTuple):
    """Facts about a program, and (registers, bytes spilled) of its kernels."""

    facts: ProgramFacts
    kernels: list[tuple[int, int]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    target = DEVICES["h200"].target
    reason = aot.why_not(target)
    if reason is not None:
        pytest.skip(reason)

    def compile_layers(layers: tuple[str, ...], *, has_context: bool) -> Compiled:
        folder = tmp_path_factory.mktemp("compiled")
        arguments = {"layers": layers, "has_context": has_context}
        builder = "tests.pallas_kernels.programs:lower_attention"
        job = aot.Job(builder, arguments, (1, 1), target=target)
        job_path, answer_path, dump = folder / "job.json", folder / "answer.json", folder / "dump"
        job_path.write_text(json.dumps(dataclasses.asdict(job)))
        command = [sys.executable, "-m", "mimo_jax.plan.worker", job_path, answer_path, dump]
        environment = aot.worker_environment(job, str(dump)) | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        answer = json.loads(answer_path.read_text())
        assert "error" not in answer, answer["error"]
        said = done.stdout + done.stderr
        registers = [int(x) for x in re.findall(r"Used (\d+) registers", said)]
        spilled = [int(x) for x in re.findall(r"(\d+) bytes spill stores", said)]
        return Compiled(ProgramFacts.from_json(answer), list(zip(registers, spilled, strict=True)))

    return {
        "chain": compile_layers(CHAIN, has_context=True),
        "tree": compile_layers(TREE, has_context=False),
    }


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_nothing_spills(compiled, name):
    kernels = compiled[name].kernels
    # A kernel of one shape is compiled once: ring, splits, merge and context; rings of both kinds
    # and splits and merges of both.
    assert len(kernels) == {"chain": 4, "tree": 6}[name]
    assert all(spilled == 0 for _, spilled in kernels)
    assert all(registers <= 240 for registers, _ in kernels), kernels


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_a_ring_is_one_launch_and_a_linear_memory_two(compiled, name):
    launches = compiled[name].facts.launches
    # 3 rings, 1 linear, 1 context; 2 rings, 2 linear.
    assert launches["kCustomCall"] == {"chain": 3 + 2 + 1, "tree": 2 + 2 * 2}[name]
    # The tables of a step, however many layers ask for them.
    tables = sum(launches.values()) - launches["kCustomCall"]
    assert tables <= {"chain": 11, "tree": 18}[name], launches


@pytest.mark.parametrize("name", ["chain", "tree"])
def test_memory_is_written_where_it_lies(compiled, name):
    facts = compiled[name].facts
    assert facts.large_copies == []
    # 128 splits of two tiles of 64 rows, 130 floats each: 8.5 MB per linear layer.
    assert facts.temp_bytes < 40e6
    assert facts.is_one_graph
    if name == "chain":
        assert facts.alias_bytes >= PRO_GLOBAL.slots * (192 + 128) * 2


# 1 and 12 tokens: the simulator would also take what whole tiles cannot fetch.
@pytest.mark.parametrize(
    "spec",
    [PRO_SLIDING._replace(tokens=1), PRO_SLIDING._replace(tokens=12), PRO_GLOBAL],
    ids=["sliding, 1 token", "sliding, 12 tokens", "global"],
)
def test_lowers_for_cuda_where_there_is_no_plugin(spec):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    positions = jnp.full((1, spec.slots), -1, jnp.int32) if spec.window else None

    def layer(qkv, keys, values, start):
        return api.sink_attention(
            qkv, keys, values, **chain_of(start, spec), slot_positions=positions,
            first_slot=start, implementation="mosaic_gpu",
        )  # fmt: skip

    memory = of(1, 1, spec.slots, 192), of(1, 1, spec.slots, 128)
    start = jax.ShapeDtypeStruct((1,), jnp.int32)
    exported = jax.export.export(jax.jit(layer), platforms=["cuda"])(
        of(1, spec.tokens, spec.qkv_width), *memory, start
    )
    # Per kernel: its custom call and its cubin-to-be carry the name.
    assert exported.mlir_module().count("custom_call @mosaic_gpu") == (1 if spec.window else 2)


def test_sizes_are_of_one_device_of_eight():
    assert ARG_SPECS["pro sliding"].qkv_width == 3392
