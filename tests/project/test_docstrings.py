"""The docstrings of public functions are complete, and their examples run."""

from __future__ import annotations

import doctest
import inspect
import json
from pathlib import Path

import pytest

import brim
from tests.conftest import write_files
from tests.generators.bids import sessions
from tests.generators.tokenizers import made_tokenizers
from tests.publishing import Machine

datasets = pytest.importorskip("datasets")
pytest.importorskip("tokenizers")
ROOT = Path(__file__).parents[2]
RUN = "from tests.project.test_docstrings import run_examples; run_examples({name!r})"

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
STEPS = """
import numpy

def clean(row):
    return {"text": row["text"].strip()}

def model():
    return lambda batch: numpy.ones((len(batch["text"]), 4), numpy.float32)
"""
KERNEL_LOG = (
    "Jan 10 12:00:00 host kernel: Out of memory: Killed process 1540763 (python) total-vm:9000000kB, "
    "anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:1000 pgtables:16000kB oom_score_adj:0\n"
)
FUNCTIONS = [name for name in brim.__all__ if inspect.isfunction(getattr(brim, name))]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with all files that the examples read."""
    folder = tmp_path_factory.mktemp("samples")
    write_files(folder / "photos", {"cat/1.txt": b"meow", "dog/2.txt": b"woof"})
    write_files(folder / "study", sessions())
    (folder / "photos.csv").write_text("photo\nphotos/cat/1.txt\nphotos/dog/2.txt\n")
    (folder / "tokenizers").mkdir()
    (folder / "tokenizer.json").write_bytes(made_tokenizers(folder / "tokenizers")["bpe"].read_bytes())
    (folder / "steps.py").write_text(STEPS)
    (folder / "kern.log").write_text(KERNEL_LOG)
    rows = [{"text": f"line {number}", "n": number} for number in range(3)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    brim.build(folder / "photos", folder / "published", label_from="parent", memory="500MB", progress=False)
    return folder


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_is_complete(name: str) -> None:
    """The docstring explains every parameter and has all sections of a reference."""
    function = getattr(brim, name)
    text = inspect.getdoc(function) or ""
    missing = [section for section in ("Returns:", "Raises:", "Examples:") if section not in text]
    assert not missing
    if name in DROP_INS:
        assert {"progress"} <= {each for each in inspect.signature(function).parameters if f"{each}:" in text}
        return
    unexplained = [each for each in inspect.signature(function).parameters if f"{each.lstrip('*')}:" not in text]
    assert not unexplained


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"push_to_hub"}))
def test_examples_run(name: str, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of the examples runs and prints the output in the docstring."""
    monkeypatch.chdir(samples)
    monkeypatch.setenv("BRIM_CACHE", str(samples / "cache"))
    run_examples(name)


def test_example_of_push_to_hub_runs(machine: Machine) -> None:
    """The example runs in a separate process, because the Hub's client reads the address at import time."""
    machine.python(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{RUN.format(name='push_to_hub')}")


def run_examples(name: str) -> None:
    examples = doctest.DocTestFinder().find(getattr(brim, name), name, globs={"brim": brim, "datasets": datasets})
    assert "SKIP" not in "".join(example.docstring or "" for example in examples)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    output: list[str] = []
    for example in examples:
        runner.run(example, out=output.append)
    assert not runner.failures, "".join(output)
    assert sum(len(example.examples) for example in examples)
