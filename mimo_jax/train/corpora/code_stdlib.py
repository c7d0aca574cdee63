"""Scene `code-stdlib`: functions and short classes of the running interpreter's standard library.

Real code, read from the files that Python itself brings; nothing is downloaded. Whole files belong
to one side of the split, since functions of one file resemble one another.
Trap: the text depends on the Python version, so a run records it (see provenance).
"""

import ast
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from mimo_jax.train.corpora.document import END_OF_CODE, Document

_SKIPPED_DIRS = frozenset(
    "test tests idlelib idle_test lib2to3 turtledemo ensurepip __pycache__ encodings pydoc_data "
    "site-packages dist-packages".split()
)
MIN_CHARS, MAX_CHARS = 200, 1800
MAX_CLASS_LINES = 40


def stdlib_files() -> list[Path]:
    """Returns the standard library's own source files, sorted by relative path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in files if not _SKIPPED_DIRS.intersection(path.parts)]
    return [root / path for path in sorted(kept)]


def read_file(path: Path) -> Iterator[Document]:
    """Yields the functions, methods and short classes of one source file in order."""
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    lines = source.splitlines(keepends=True)
    yield from _documents_in(tree, lines)


def _documents_in(parent: ast.AST, lines: list[str]) -> Iterator[Document]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.ClassDef):
            document = _document(node, lines)
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if document is not None and num_lines <= MAX_CLASS_LINES:
                yield document  # its methods are inside: do not yield them twice
            else:
                yield from _documents_in(node, lines)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            document = _document(node, lines)
            if document is not None:
                yield document
        elif isinstance(node, ast.If | ast.Try):
            yield from _documents_in(node, lines)


def _document(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]
) -> Document | None:
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    source = textwrap.dedent("".join(lines[start:end]).expandtabs(8))
    if not MIN_CHARS <= len(source) <= MAX_CHARS or "<|" in source:
        return None
    source_lines = source.rstrip().splitlines(keepends=True)
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        prompt_len = (first.end_lineno or first.lineno) - start
    else:
        prompt_len = max(first.lineno - 1 - start, min(3, len(source_lines) - 1))
    prompt = "".join(source_lines[:prompt_len])
    answer = "".join(source_lines[prompt_len:])
    if len(answer.strip()) < 60 or not prompt.strip():
        return None
    return Document("code-stdlib", prompt, answer + "\n" + END_OF_CODE)
