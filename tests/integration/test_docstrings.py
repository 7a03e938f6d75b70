"""The docstrings of public functions: complete, and with examples that run."""

from __future__ import annotations

import doctest
import inspect
import json
from pathlib import Path

import pytest

import brim
from tests.conftest import write_files

# Their docstrings explain only what differs from `datasets`.
DROP_INS = [
    "concatenate_datasets",
    "filter",
    "flatten_indices",
    "map",
    "push_to_hub",
    "shuffle",
    "sort",
    "train_test_split",
]
FUNCTIONS = [name for name in brim.__all__ if inspect.isfunction(getattr(brim, name))]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the examples read: photos/, corpus.jsonl, and the dataset out/ that was built from photos/."""
    folder = tmp_path_factory.mktemp("samples")
    write_files(folder / "photos", {"cat/1.txt": b"meow", "dog/2.txt": b"woof"})
    rows = [{"text": f"line {number}", "n": number} for number in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    brim.build(folder / "photos", folder / "published", label_from="parent", memory="500MB", progress=False)
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_is_complete(name: str) -> None:
    """Every parameter is explained, and there are the sections of a reference."""
    function = getattr(brim, name)
    text = inspect.getdoc(function) or ""
    missing = [section for section in ("Returns:", "Raises:", "Examples:") if section not in text]
    assert not missing
    if name in DROP_INS:
        assert {"progress"} <= {each for each in inspect.signature(function).parameters if f"{each}:" in text}
        return
    unexplained = [each for each in inspect.signature(function).parameters if f"{each.lstrip('*')}:" not in text]
    assert not unexplained


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples_run(name: str, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(samples)
    examples = doctest.DocTestFinder().find(getattr(brim, name), name, globs={"brim": brim})
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    said: list[str] = []
    for example in examples:
        runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)
    assert sum(len(example.examples) for example in examples)
