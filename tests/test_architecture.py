"""The import order of ARCHITECTURE.md, read off the source: lower modules never import higher ones.

Run: .venv/bin/python -m pytest tests/test_architecture.py

Every import counts, also one inside a function or under TYPE_CHECKING: what is needed there is
needed. Files are parsed, not imported, so this takes no time and sees modules that no test loads.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent

# Lowest first. A module may import its own component and every one on an earlier line; components
# on one line may not import each other.
ORDER = (
    ("pallas_kernels",),
    ("mimo_jax.arrays",),
    ("mimo_jax.config",),
    ("mimo_jax.timing",),
    ("mimo_jax.gpu_flags",),
    ("mimo_jax.witness",),
    ("mimo_jax.distributed",),
    ("mimo_jax.text",),
    ("mimo_jax.sharding",),
    ("mimo_jax.quant",),
    ("mimo_jax.layers",),
    ("mimo_jax.sealed",),
    ("mimo_jax.cache",),
    ("mimo_jax.recall",),
    ("mimo_jax.models",),
    ("mimo_jax.checkpoint",),
    ("mimo_jax.decode",),
    ("mimo_jax.train", "mimo_jax.serving"),
    ("mimo_jax.plan",),
    ("mimo_jax.bench",),
    ("entry points",),
)
RANK = {component: rank for rank, line in enumerate(ORDER) for component in line}
# Scripted drafters, tiny weights and the like: for tests and notebooks, built on anything to here.
TESTING, TESTING_REACHES = "mimo_jax.testing", "mimo_jax.decode"
# The package root holds only public names, so it sits with the entry points; its version is free.
FREE_NAMES = {"mimo_jax.__version__"}
# What the leaf package may use besides the standard library and itself.
LEAF_LIBRARIES = {"jax", "jaxlib", "numpy"}
STOPWATCH = "mimo_jax.timing"


def component_of(module: str) -> str:
    """Maps a dotted module name to its line in ORDER, or to itself when it has none."""
    parts = module.split(".")
    entry_roots = {"train", "serve", "configs"}
    if (
        parts[0] in entry_roots
        or parts[-1] == "__main__"
        or module in ("mimo_jax", "mimo_jax.demo")
    ):
        return "entry points"
    return parts[0] if parts[0] == "pallas_kernels" else ".".join(parts[:2])


def module_name(path: Path) -> str:
    """Dotted name of a file given relative to the repository root."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, dotted name) of all imports; `from a import b` yields both a and a.b."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            # `from mimo_jax import sharding` asks for the submodule, not for the package root.
            if source != "mimo_jax":
                yield node.lineno, source
            else:
                yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def violations(path: Path, source: str) -> list[str]:
    """Describes each import, and each reading of the clock, that the architecture forbids."""
    tree = ast.parse(source)
    importer = component_of(module_name(path))
    if importer not in RANK and importer != TESTING:
        return [f"{path}: {importer} has no place in ORDER; give it one, and in ARCHITECTURE.md"]
    reach = RANK[TESTING_REACHES] + 1 if importer == TESTING else RANK[importer]
    found = []
    for line, imported in imported_modules(path, tree):
        target, root = component_of(imported), imported.split(".")[0]
        if imported in FREE_NAMES or target == importer:
            continue
        if target == TESTING:
            found.append(f"{path}:{line}: only tests and notebooks import {TESTING}")
        elif target in RANK and RANK[target] >= reach:
            found.append(f"{path}:{line}: {importer} is not above {target}, imported as {imported}")
        elif root in ("tests", "notebooks"):
            found.append(f"{path}:{line}: shipped code imports {imported}")
        elif root == "mimo_jax" and target not in RANK:
            found.append(f"{path}:{line}: no such component: {imported}")
        elif importer == "pallas_kernels" and root not in LEAF_LIBRARIES | sys.stdlib_module_names:
            found.append(f"{path}:{line}: the leaf package imports {imported}")
    if module_name(path) != STOPWATCH:
        clocks = {"perf_counter", "perf_counter_ns", "process_time", "process_time_ns"}
        for node in ast.walk(tree):
            names = [getattr(node, "attr", None)]
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            if clocks & set(names):
                found.append(f"{path}:{node.lineno}: reads a clock; {STOPWATCH} is the stopwatch")
    return found


def shipped_files() -> list[Path]:
    folders = ("pallas_kernels", "mimo_jax", "configs")
    files = [path for folder in folders for path in (REPO_ROOT / folder).rglob("*.py")]
    files += [path for name in ("train.py", "serve.py") if (path := REPO_ROOT / name).exists()]
    return sorted(path.relative_to(REPO_ROOT) for path in files)


def test_shipped_code_follows_the_import_order():
    files = shipped_files()
    assert len(files) >= 4, "found next to nothing to check"
    found = [line for path in files for line in violations(path, (REPO_ROOT / path).read_text())]
    assert not found, "\n" + "\n".join(found)


FORBIDDEN = {
    "upwards": ("mimo_jax/layers/attention.py", "from mimo_jax.decode.step import step"),
    "upwards, relative": ("mimo_jax/layers/attention.py", "from ..cache import RingCache"),
    "upwards, submodule of the root": ("mimo_jax/quant/fp8.py", "from mimo_jax import layers"),
    "upwards, inside a function": (
        "mimo_jax/cache.py",
        "def f():\n    import mimo_jax.models.target",
    ),
    "across": ("mimo_jax/serving/engine.py", "from mimo_jax.train import loop"),
    "across, the other way": ("mimo_jax/train/loop.py", "import mimo_jax.serving"),
    "public names from inside": ("mimo_jax/decode/llm.py", "from mimo_jax import LLM"),
    "the root from inside": ("mimo_jax/decode/llm.py", "import mimo_jax"),
    "an entry point": ("mimo_jax/bench/decode_bench.py", "import mimo_jax.plan.__main__"),
    "a config": ("mimo_jax/train/loop.py", "from configs.tiny import get_config"),
    "testing in the product": ("mimo_jax/decode/step.py", "from mimo_jax.testing import tiny"),
    "testing in an entry point": ("mimo_jax/demo.py", "import mimo_jax.testing"),
    "testing reaching too high": ("mimo_jax/testing/tiny.py", "import mimo_jax.train.loop"),
    "tests": ("mimo_jax/decode/step.py", "from tests.oracles import accept"),
    "leaf to package": ("pallas_kernels/formats.py", "from mimo_jax.config import Quant"),
    "leaf to library": ("pallas_kernels/formats.py", "import flax"),
    "unknown importer": ("mimo_jax/utils.py", "import jax"),
    "unknown import": ("mimo_jax/decode/step.py", "from mimo_jax.utils import helper"),
    "clock": ("mimo_jax/bench/decode_bench.py", "import time\nstart = time.perf_counter()"),
    "clock by name": ("mimo_jax/bench/decode_bench.py", "from time import perf_counter"),
}
ALLOWED = {
    "downwards": ("mimo_jax/decode/step.py", "from mimo_jax.models.target import Target"),
    "own component": ("mimo_jax/decode/step.py", "from mimo_jax.decode import accept"),
    "own component, relative": ("mimo_jax/decode/step.py", "from . import accept"),
    "trainer measures": ("mimo_jax/train/loop.py", "from mimo_jax.decode import generate"),
    "kernels": ("mimo_jax/layers/moe.py", "from pallas_kernels.grouped_matmul import api"),
    "leaf": ("pallas_kernels/formats.py", "import functools\nimport jax.numpy as jnp"),
    "leaf to itself": ("pallas_kernels/mxfp4_codec/api.py", "from pallas_kernels import formats"),
    "entry point": ("mimo_jax/checkpoint/__main__.py", "from mimo_jax.decode import generate"),
    "public names": ("mimo_jax/__init__.py", "from mimo_jax.decode.llm import LLM as LLM"),
    "script": ("train.py", "import configs.nano\nfrom mimo_jax.train import loop"),
    "version": ("mimo_jax/train/provenance.py", "from mimo_jax import __version__"),
    "testing": ("mimo_jax/testing/tiny.py", "from mimo_jax.decode import step"),
    "the stopwatch": ("mimo_jax/timing.py", "import time\nstart = time.perf_counter()"),
    "other clocks": ("mimo_jax/serving/admission.py", "import time\nnow = time.monotonic()"),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_reports_what_is_forbidden(case):
    path, source = FORBIDDEN[case]
    assert len(violations(Path(path), source)) == 1


@pytest.mark.parametrize("case", ALLOWED)
def test_accepts_what_is_allowed(case):
    path, source = ALLOWED[case]
    assert violations(Path(path), source) == []
