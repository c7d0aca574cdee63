"""Settings of every test run: devices, strictness, compile cache, seeds. No test data.

Everything at module level runs before the first test module imports JAX, and must: the number of
virtual devices is fixed once JAX has started.

Strictness that costs nothing elsewhere catches a bug here: mixing dtypes or ranks without saying
so is an error, and every jaxtyping annotation of our packages is checked at run time.
"""

import hashlib
import importlib.util
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

# A default and not an order: `JAX_PLATFORMS=cuda pytest -m gpu` runs the tests that need a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Nearly all of a run is compiling, and no test computes for long: with LLVM's optimiser on,
    # the same tests take half as long again.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jaxtyping
import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
HAS_BEARTYPE = importlib.util.find_spec("beartype") is not None


def _cpu_fingerprint() -> str:
    """A short id of this machine's instruction set: compiled code must not reach another one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()[:12]


jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(REPO_ROOT / ".cache/jax" / _cpu_fingerprint()))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# GPU images often come without beartype; there the annotations go unchecked (see the header line).
if HAS_BEARTYPE:
    jaxtyping.install_import_hook(["mimo_jax", "pallas_kernels"], "beartype.beartype")

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No deadline: the first example of a property compiles, the others do not. Derandomized: a
    # commit is either red or green, on every machine.
    settings.register_profile("mimo_jax", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("mimo_jax")


def pytest_report_header() -> str:
    checks = "checked by beartype" if HAS_BEARTYPE else "NOT checked: beartype is not installed"
    return f"jax {jax.__version__}, platform {os.environ['JAX_PLATFORMS']}, annotations {checks}"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Turns a run in which every test was skipped red: nothing has been tested."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or exitstatus != pytest.ExitCode.OK:
        return
    if reporter.stats.get("skipped") and not reporter.stats.get("passed"):
        reporter.write_line("every test was skipped, so nothing has been tested", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def getkey(request: pytest.FixtureRequest) -> Callable[[], jax.Array]:
    """Returns a function that gives a new PRNG key per call, the same ones in every run.

    Keys follow from the test's name, so neither order nor selection of tests changes them.
    """
    key = jax.random.key(zlib.crc32(request.node.nodeid.encode()))
    num_given = 0

    def next_key() -> jax.Array:
        nonlocal num_given
        num_given += 1
        return jax.random.fold_in(key, num_given)

    return next_key


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Lets dtypes mix as JAX does by default, for tests that run code which is not ours.

    optax raises its decay rates to an integer step count, which strict promotion refuses
    (optax 0.2.8: adamw, muon and ema). Use it on the test, never to quiet our own code.
    """
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def unchecked_annotations() -> Iterator[None]:
    """Turns annotation checks off, for tests of the errors our own code raises on a bad shape.

    Users run without the checks, so they meet that error; in a test the annotation would speak
    first.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
