"""Docstrings and comments refer only to existing files."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = {
    path.name
    for folder in ("src", "tests", "benchmarks", "examples", "docs")
    for path in ROOT.joinpath(folder).rglob("*.*")
}
# A module or page in prose: `ledger.py`, state/ledger.py, docs/concepts/scale.md.
REFERENCE = re.compile(r"(?<![\w./*{<-])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?![\w/*}])")


# User files in examples.
EXAMPLES = {"FILE.py", "path/to/file.py", "train.py"}


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module with their lines."""
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node, clean=False)
        ):
            yield getattr(node, "lineno", 1), docstring
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize(
    "package", sorted(path.name for path in ROOT.joinpath("src/brim").iterdir() if path.name != "__pycache__")
)
def test_docstrings_name_existing_files(package: str) -> None:
    """A file in a docstring or comment exists: by its path from the root or src/brim, or by its name."""
    start = ROOT / "src/brim" / package
    wrong = []
    for path in [start] if start.is_file() else start.rglob("*.py"):
        if path.suffix != ".py":
            continue
        for line, text in prose_of(path):
            for name in set(REFERENCE.findall(text)) - EXAMPLES:
                bases = (ROOT, ROOT / "src/brim", path.parent)
                exists = any((base / name).exists() for base in bases) if "/" in name else name in NAMES
                if not exists:
                    wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong
