"""Thousands of damaged headers and configs: each is read or refused in one line, without harm.

Run: .venv/bin/python -m pytest -m slow tests/checkpoint/test_fuzz.py

What "without harm" means: CheckpointError and nothing else, no list or array of a made-up size.
"""

import copy
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimo_jax.checkpoint.hf_drafter import drafter_config_from_json
from mimo_jax.checkpoint.hf_target_config import target_config_from_json
from mimo_jax.checkpoint.safetensors_reader import CheckpointError, SafetensorsDir
from mimo_jax.config import DrafterConfig, TargetConfig
from tests.checkpoint.test_safetensors_reader import BODY, JSON_VALUES, mutated_headers, write
from tests.golden.files import DATA

NUM_EXAMPLES = 2000
MAX_BYTES = 64 << 20
CONFIGS = {
    name: json.loads((DATA / name / "config.json").read_text())
    for name in ("mimo-tiny", "pro-tiny", "qwen3-tiny", "pro-tiny/dflash", "qwen3-tiny-dflash")
}
WILD = JSON_VALUES | st.sampled_from([-1, 0, 2**31, 2**63, 10**30, 1e308, float("nan"), "", [], {}])


def places(value, path=()):
    """Every key path of nested objects and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


@st.composite
def mutated_configs(draw) -> tuple[str, dict]:
    name = draw(st.sampled_from(sorted(CONFIGS)))
    values = copy.deepcopy(CONFIGS[name])
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(sorted(places(values), key=repr)))
        inner = values
        for key in parents:
            inner = inner[key]
        if draw(st.booleans()):
            del inner[last]
        else:
            inner[last] = draw(WILD)
        if not values:
            break
    return name, values


def check(read, kinds, *, file: str) -> None:
    tracemalloc.start()
    try:
        assert isinstance(read(), kinds)
        message = file
    except CheckpointError as error:
        message = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert file in message
    assert "\n" not in message
    assert len(message) < 4000
    assert peak < MAX_BYTES


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES)
@given(mutated_configs())
def test_configs(case):
    name, values = case
    read = drafter_config_from_json if "dflash" in name else target_config_from_json
    check(lambda: read(values, "config.json"), (TargetConfig, DrafterConfig), file="config.json")


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES)
@given(text=mutated_headers(), cut=st.integers(0, 3))
def test_headers(tmp_path_factory, text, cut):
    path = tmp_path_factory.getbasetemp() / "m.safetensors"
    write(path, text, BODY[: len(BODY) - cut])

    def read():
        tensors = SafetensorsDir(path)
        for name in tensors.names():
            assert tensors.get(name).shape == tensors.shape(name)
        return tensors

    check(read, SafetensorsDir, file="m.safetensors")
