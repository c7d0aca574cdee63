"""What the documents name exists: files, make targets, flags, functions, modules.

Run: .venv/bin/python -m pytest tests/test_readme.py
"""

import ast
import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from mimo_jax.distributed import ProcessFlags

REPO_ROOT = Path(__file__).resolve().parent.parent
README = REPO_ROOT / "README.md"
ARCHITECTURE = REPO_ROOT / "ARCHITECTURE.md"
DOCUMENTS = [
    README,
    ARCHITECTURE,
    REPO_ROOT / "CONTRIBUTING.md",
    REPO_ROOT / "GLOSSARY.md",
    REPO_ROOT / "assets" / "README.md",
]
MADE_BY_RUNNING = ("out/", "runs/")
CODE_SUFFIXES = (".py", ".md", ".ipynb", ".toml", ".jsonl", ".json", ".jinja")


def code_blocks(text: str) -> list[tuple[str, str]]:
    """(language, source) of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """Words of every command line in the blocks without a language; comments left out."""
    lines = [
        line
        for language, block in code_blocks(text)
        if not language
        for line in block.replace("\\\n", " ").splitlines()
    ]
    starts = ("make ", "python ", ".venv/bin/python ")
    return [shlex.split(line, comments=True) for line in lines if line.startswith(starts)]


def code_words(text: str) -> list[str]:
    """Words in `code spans` and in commands."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", prose)
    return [w for span in spans for w in span.split()] + [w for c in commands(text) for w in c]


def flags_of(words: list[str]) -> tuple[set[str], set[str]]:
    """(flags that a command line uses, flags that the program has)."""
    if "serve.py" in words:
        from mimo_jax.serving.options import BatchOptions as options
    elif "train.py" in words and "regenerate" in words:
        from mimo_jax.train.answer_options import AnswerOptions as options
    elif "train.py" in words:
        from train import Arguments as options
    elif "mimo_jax.demo" in words:
        from mimo_jax.demo import Arguments as options
    elif "mimo_jax.plan" in words:
        from mimo_jax.plan.__main__ import Arguments as options
    else:
        return set(), set()
    used = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
    fields = [*dataclasses.fields(options), *dataclasses.fields(ProcessFlags)]
    return used, {"--" + field.name.replace("_", "-") for field in fields}


def make_targets() -> set[str]:
    text = (REPO_ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):", text, flags=re.MULTILINE))


def test_the_readme_is_short_and_starts_with_what_to_type():
    lines = README.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    start = "\n".join(lines[:40])
    for needed in ("make demo", "make test", "DRAFT", "VERIFY", "COMMIT", "Where to look next"):
        assert needed in start


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    missing = [
        link for link in links if "://" not in link and not (path.parent / link).resolve().exists()
    ]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPO_ROOT)))
def test_make_targets_exist(path):
    text = path.read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", text))
    named |= {words[1] for words in commands(text) if words[0] == "make"}
    assert named <= make_targets()


@pytest.mark.parametrize("path", [README, ARCHITECTURE], ids=lambda path: path.name)
def test_files_exist(path):
    words = {word.strip(",;:()") for word in code_words(path.read_text(encoding="utf-8"))}
    # A bare file name of a checkpoint (config.json) is no path of this repository.
    files = {
        word
        for word in words
        if ("/" in word or word.endswith((".py", ".md")))
        and not word.startswith((*MADE_BY_RUNNING, ".venv/", "-"))
        and not re.search(r"[A-Z]{3,}/|//|\*", word)
        and word != "dflash/"
    }
    named = re.findall(r"\b[A-Z]+\.md\b", path.read_text(encoding="utf-8"))
    missing = [word for word in {*files, *named} if not (REPO_ROOT / word).exists()]
    assert files
    assert not missing


def test_flags_exist():
    num_checked = 0
    for path in DOCUMENTS:
        for words in commands(path.read_text(encoding="utf-8")):
            used, known = flags_of(words)
            assert used <= known, words
            num_checked += len(used)
    assert num_checked >= 5


def test_python_snippets_import_what_exists():
    import mimo_jax

    snippets = [b for language, b in code_blocks(README.read_text()) if language == "python"]
    assert snippets
    for snippet in snippets:
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom):
                assert node.module == "mimo_jax"
                assert all(hasattr(mimo_jax, alias.name) for alias in node.names)


def test_json_lines_of_the_readme_are_read_by_the_batch_job():
    from mimo_jax.decode.params import SamplingParams
    from mimo_jax.serving.requests import parse_line

    blocks = [b for language, b in code_blocks(README.read_text()) if language == "json"]
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) == 2
    for number, line in enumerate(lines, start=1):
        parse_line(line.encode(), number, SamplingParams())


# --- ARCHITECTURE.md -----------------------------------------------------------------------------


def shipped_modules() -> set[str]:
    paths = [
        p for folder in ("mimo_jax", "pallas_kernels") for p in REPO_ROOT.glob(f"{folder}/**/*.py")
    ]
    names = {str(path.relative_to(REPO_ROOT)) for path in paths}
    is_package = lambda name: name.endswith("/__init__.py") and name.count("/") > 1
    return {n for n in names if not is_package(n) and not n.startswith("mimo_jax/train/corpora/")}


def test_architecture_has_a_line_for_every_module():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([a-z0-9_/]+\.py)` \|", text, flags=re.MULTILINE)
    assert len(set(listed)) == len(listed), "a module is listed twice"
    assert set(listed) == shipped_modules()


def defined_names() -> set[str]:
    """Functions, classes, methods and annotated fields of the product code."""
    names = set()
    for path in [*REPO_ROOT.glob("mimo_jax/**/*.py"), REPO_ROOT / "train.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_architecture_names_functions_that_exist():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    lives = text.split("## The life of a request")[1].split("## Import order")[0]
    spans = re.findall(r"`([^`\n]+)`", lives)
    words = [span for span in spans if re.fullmatch(r"[A-Za-z_][A-Za-z_.]*", span)]
    words = [word for word in words if not word.endswith((".py", ".md", ".json"))]
    defined = defined_names()
    unknown = sorted({word for word in words if word.split(".")[-1] not in defined})
    assert len(words) > 40
    assert not unknown
