"""The results of the guides about selecting. `make test-docs` runs the pages and compares their output."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.api.test_api import tokenizer_file
from tests.forked import brim
from tests.generators.arc import make_arc
from tests.hub import TestHub
from tests.publishing import Machine

DOCS = Path(__file__).parents[2] / "docs/how-to"


def commands(page: str) -> list[list[str]]:
    blocks = (DOCS / page).read_text().split("```console\n")[1:]
    lines = [line for block in blocks for line in block.split("```")[0].splitlines()]
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ brim ")]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine, and a Hub with me/arc and me/corpus."""
    home = tmp_path_factory.mktemp("howto")
    with TestHub(home / "hub", tokens={"hf_write": {"user": "me", "can_write": True}}) as hub:
        actual = Machine(hub, home / "machine")
        env = actual.environment
        make_arc(actual.folder / "ds", 40)
        brim("build", actual.folder / "ds", "hf://datasets/me/arc", "--recipe", "arc", "--rows-per-shard", "8", env=env)
        texts = [f"Sentence number {n} of a corpus." * (1 + n % 3) for n in range(300)]
        table = pa.table({"text": texts, "lang": [("en", "de", "en", None)[n % 4] for n in range(300)]})
        pq.write_table(table, actual.folder / "corpus.parquet")
        brim("select", actual.folder / "corpus.parquet", "hf://datasets/me/corpus", env=env)
        tokenizer_file(actual.folder)
        yield actual


def run(machine: Machine, page: str, count: int) -> dict[str, str]:
    """Return the output of each command of a page; all must succeed."""
    messages = {}
    actual = commands(page)
    assert len(actual) == count
    for arguments in actual:
        command = [sys.executable, "-m", *arguments]
        result = subprocess.run(
            command,
            cwd=machine.folder,
            env=machine.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert result.returncode == 0, f"{shlex.join(arguments)}\n{result.stdout[-3000:]}\n{result.stderr[-2000:]}"
        messages[shlex.join(arguments)] = result.stdout
    return messages


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_subject(machine: Machine) -> None:
    """The guide gives the unchanged files of one person, and those of one column alone."""
    message = run(machine, "one-subject-from-the-hub.md", 6)
    existing = files(machine.folder / "ds")
    subset = files(machine.folder / "files")
    assert subset
    assert all("sub-M2002" in name and existing[name] == data for name, data in subset.items())
    assert {name for name in existing if "sub-M2002" in name and name.endswith(".nii.gz")} <= set(subset)
    some = files(machine.folder / "t1w")
    assert some
    assert all("T1w" in name for name in some)
    plan = next(text for command, text in message.items() if "--dry-run" in command)
    assert "of 40 rows" in plan
    assert "reads" in plan
    assert "hf://datasets/me/arc@" in (machine.folder / "one" / "README.md").read_text()


def test_split(machine: Machine) -> None:
    """No subject is in both splits."""
    run(machine, "split-without-leaks.md", 2)
    for name in ("parts", "seven"):
        subjects: dict[str, set[str]] = {}
        for path in (machine.folder / name / "data").iterdir():
            split = path.name.partition("-")[0]
            subjects.setdefault(split, set()).update(pq.read_table(path)["subject_id"].to_pylist())
        assert len(subjects) >= 2
        assert sum(map(len, subjects.values())) == len(set().union(*subjects.values()))


def test_tokenise(machine: Machine) -> None:
    """The guide gives the ids of all rows, and packed blocks of the selected rows."""
    run(machine, "tokenize-from-the-hub.md", 4)
    rows = [pq.read_table(path) for path in sorted((machine.folder / "tokens" / "data").iterdir())]
    assert sum(map(len, rows)) == 300
    (blocks, *_) = [pq.read_table(path) for path in sorted((machine.folder / "english" / "data").iterdir())]
    assert {len(ids) for ids in blocks["input_ids"].to_pylist()} == {128}
