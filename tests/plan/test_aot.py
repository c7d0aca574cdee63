"""The worker: programs compiled in another process, and what is said when that fails.

Run: .venv/bin/python -m pytest tests/plan/test_aot.py

Each job starts a process (about 4 s).
"""

import re
import subprocess
import sys

import pytest

from mimo_jax.config import ConfigError
from mimo_jax.plan import aot
from mimo_jax.plan.devices import DEVICES
from mimo_jax.plan.targets import read_targets, target_text
from mimo_jax.plan.worker import ProgramFacts

H200 = DEVICES["h200"].target
LOOP = "tests.plan.stand_in:lower_loop"


@pytest.fixture(scope="module")
def gpu_compiler() -> None:
    reason = aot.why_not(H200)
    if reason is not None:
        pytest.skip(f"compiling for a GPU is not available because {reason}")


def compiled(builder: str, *, target: str | None = None, mesh=(1, 8), **job) -> ProgramFacts:
    arguments = job.pop("arguments", {})
    job = aot.Job(builder, arguments, mesh, target=target, **job)
    return ProgramFacts.from_json(aot.compile_in_worker(job))


def test_the_cpu_stands_in():
    found = compiled(LOOP)
    assert found.is_step_loop
    assert found.collectives == {"all-reduce": (1, 8 * 256 * 4)}
    assert found.num_aliased == 2
    assert found.alias_bytes == (8 + 20_000) * 256 * 4
    # A device's part: an eighth of both matrices.
    assert found.argument_bytes == found.alias_bytes + 2 * 256 * 80 * 4
    assert found.large_copies == []
    assert found.launches is None


@pytest.mark.usefixtures("gpu_compiler")
def test_a_loop_for_eight_h200():
    found = compiled(LOOP, target=H200)
    assert found.is_one_graph
    assert found.num_command_buffers == 1
    assert found.launches is not None
    assert found.launches["kCollectiveKernel"] == 1
    assert found.collectives == {"all-reduce": (1, 8192)}
    assert found.temp_bytes < 1_000_000
    # So small a program may be finished before anybody looks; the facts are the same either way.
    early = compiled(LOOP, target=H200, stops_at_buffers=True)
    for name in ("argument_bytes", "alias_bytes", "collectives", "num_aliased", "is_step_loop"):
        assert getattr(early, name) == getattr(found, name), name
    assert early.peak_bytes == pytest.approx(found.peak_bytes, rel=1e-4)


@pytest.mark.usefixtures("gpu_compiler")
def test_what_should_not_be_there_is_seen():
    found = compiled(LOOP, target=H200, arguments={"copies_cache": True, "gathers": True})
    assert "all-gather" in found.collectives
    assert any(copy.num_bytes >= 20_000 * 256 * 4 for copy in found.large_copies)
    assert not found.is_one_graph


def unavailable(make) -> str:
    with pytest.raises(aot.NotAvailable) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_compiler_that_dies_is_one_line():
    message = unavailable(lambda: compiled("tests.plan.stand_in:die"))
    assert message.startswith("the compiler died of SIGABRT: ")
    assert message.endswith("Check failed: ptxas is not there")


def test_a_compiler_without_ptxas_is_one_line():
    message = unavailable(lambda: compiled("tests.plan.stand_in:fail"))
    assert message == "RuntimeError: UNAVAILABLE: No PTX compilation provider is available."


def test_a_configuration_that_cannot_be_is_one_line():
    message = unavailable(lambda: compiled("tests.plan.stand_in:refuse"))
    assert message == "heads 6 cannot be cut into 4 parts"


def test_no_plugin_is_one_line(monkeypatch):
    monkeypatch.setattr(aot, "plugin_folder", lambda: None)
    message = unavailable(lambda: compiled(LOOP, target=H200))
    assert message == "the GPU compiler is not installed (make setup puts it into the environment)"
    assert aot.why_not("some other device") == message


def test_a_plugin_that_is_not_one_is_one_line(tmp_path, monkeypatch):
    library = tmp_path / aot.PLUGIN / aot.LIBRARY
    library.parent.mkdir(parents=True)
    library.write_bytes(b"not a library")
    (library.parent / "__init__.py").write_text("raise ImportError('no libcuda')\n")
    monkeypatch.setattr(aot, "plugin_folder", lambda: tmp_path)
    assert "no libcuda" in unavailable(lambda: compiled(LOOP, target=H200))


def test_a_slow_compiler_is_given_up():
    job = aot.Job(LOOP, {}, (1, 8))
    assert "longer than 0 s" in unavailable(lambda: aot.compile_in_worker(job, timeout_s=0.1))


def test_the_folder_of_the_environment_comes_first(tmp_path, monkeypatch):
    library = tmp_path / "aot" / aot.PLUGIN / aot.LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert aot.plugin_folder() == tmp_path / "aot"


def test_workers_look_for_no_gpu_and_have_our_flags(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_somebody_else=1")
    monkeypatch.setattr(aot, "plugin_folder", lambda: "/plugin")
    found = aot.worker_environment(aot.Job(LOOP, {}, (1, 8), target=H200), "/dump")
    assert found["JAX_PLATFORMS"] == "cpu"
    assert found["PYTHONPATH"].startswith("/plugin:")
    assert "somebody" not in found["XLA_FLAGS"]
    for flag in aot.WORKER_XLA_FLAGS:
        assert flag in found["XLA_FLAGS"].split()
    on_cpu = aot.worker_environment(aot.Job(LOOP, {}, (1, 8)), "/dump")
    assert "xla_gpu" not in on_cpu["XLA_FLAGS"]
    assert "/plugin" not in on_cpu["PYTHONPATH"]


def test_device_texts_are_read_from_the_library(tmp_path):
    library = tmp_path / "plugin.so"
    text = 'gpu_device_info { }\ndevice_description_str: "NVIDIA H200 141GB HBM3e"\n'
    head = "# proto-message: stream_executor.GpuTargetConfigProto\n"
    library.write_bytes(b"\x7fELF\x00" + (head + text).encode() + b"\x00rest\x00")
    assert read_targets(library) == {H200: text}
    assert target_text(library, H200) == text
    words = "no 'NVIDIA H200 141GB'.*nearest: NVIDIA H200 141.*1 others"
    with pytest.raises(ConfigError, match=words):
        target_text(library, "NVIDIA H200 141GB")


def test_the_plugin_describes_every_device_of_ours():
    folder = aot.plugin_folder()
    if folder is None:
        pytest.skip("the GPU compiler is not installed")
    found = read_targets(folder / aot.PLUGIN / aot.LIBRARY)
    assert {device.target for device in DEVICES.values()} <= set(found)
    # Its own rates and ours speak of the same device: within 5%, memory within 8%.
    for device in DEVICES.values():
        text = found[device.target]
        rate = float(re.findall(r"memory_bandwidth: (\d+)", text)[0])
        memory = float(re.findall(r"device_memory_size: (\d+)", text)[0])
        assert device.hbm_bytes_per_s == pytest.approx(rate, rel=0.05), device.name
        assert device.memory_bytes <= memory * 1.001, device.name


def test_users_of_the_environment_do_not_notice_the_plugin():
    """Neither a warning nor a CUDA error: it is on nobody's path."""
    command = "import jax, importlib.util; print(jax.default_backend(), " \
        "importlib.util.find_spec('jax_plugins'))"  # fmt: skip
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", command],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    if "cuda" in done.stdout:
        pytest.skip("this environment has the plugin for GPUs of its own")
    assert done.stdout.startswith("cpu None")
    assert done.stderr == ""
