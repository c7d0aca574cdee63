"""Every notebook runs from top to bottom in a fresh kernel, and is stored without outputs.

Run: .venv/bin/python -m pytest tests/test_notebooks.py
"""

import json
import sys
from pathlib import Path

import jax
import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPO_ROOT / "notebooks").glob("*.ipynb"))
_NANO = REPO_ROOT / "assets" / "mimo-nano" / "config.json"
NEEDS = dict.fromkeys(
    ("01_tour.ipynb", "03_mxfp4.ipynb", "04_draft_verify.ipynb", "05_training.ipynb"), _NANO
)
TIMEOUT_S = 300  # per cell; the slowest one compiles for some seconds


def code_cells(path: Path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS][:2] == ["01_tour.ipynb", "02_masks.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_is_stored_without_outputs(path):
    for cell in code_cells(path):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_first_cell_finds_the_package_when_it_is_not_installed(path, monkeypatch):
    """As in Colab before an install: only the folder that the notebook lies in is known."""
    source = "".join(code_cells(path)[0]["source"])
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", ["elsewhere"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names: dict = {}
    exec(compile(source, str(path), "exec"), names)
    assert names["root"] == REPO_ROOT
    assert str(REPO_ROOT) in sys.path


@pytest.mark.notebooks
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs(path, monkeypatch):
    needed = NEEDS.get(path.name)
    if needed is not None and not needed.is_file():
        pytest.skip(f"{needed.relative_to(REPO_ROOT)} is missing; `make train-demo` makes it")
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    # The kernel is another process: it takes the platform and the compile cache from here.
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    monkeypatch.setenv("XLA_FLAGS", "")  # as its readers run it: it trains for a minute
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    pictures = sum(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    )
    assert pictures >= 1, "nothing was drawn"
