"""Expert, router and norm kernels compiled for an H200 at published sizes: spills, scratch, copies.

Run: .venv/bin/python -m pytest tests/pallas_kernels/test_experts_compiled.py
"""

import pytest

from mimo_jax.plan import aot
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.worker import ProgramFacts
from tests.pallas_kernels.lowering import compile_kernels

STACK_BYTES = 69 * 384 * 3 * 256 * 6144 * 17 // 32


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> tuple[ProgramFacts, list[int]]:
    target = DEVICES["h200"].target
    reason = aot.why_not(target)
    if reason is not None:
        pytest.skip(f"compiling for a GPU is not available because {reason}")
    builder = "tests.pallas_kernels.programs:lower_sparse_layers"
    job = aot.Job(builder, {"tokens": 8}, (1, 1), target=target)
    answer, spills = compile_kernels(job, tmp_path_factory.mktemp("compiled"))
    assert "error" not in answer, answer["error"]
    return ProgramFacts.from_json(answer), spills


def test_no_kernel_spills(compiled):
    """Sum and norm, router, gate with up, down: compiled once each for all layers."""
    _, spills = compiled
    assert spills == [0, 0, 0, 0]


def test_a_stack_of_all_layers_is_not_copied(compiled):
    facts, _ = compiled
    assert facts.argument_bytes > STACK_BYTES
    assert facts.large_copies == []
    # Hidden values of 64 slots, 8 tokens, 256 columns in bfloat16, and small change.
    assert facts.temp_bytes < 1e6


def test_five_launches_a_layer(compiled):
    """Sum and norm, the gate's product, router, gate with up, down: nothing between them."""
    facts, _ = compiled
    assert facts.launches is not None
    assert facts.launches["kCustomCall"] == 4 * 3
    assert sum(facts.launches.values()) <= 5 * 3 + 3
