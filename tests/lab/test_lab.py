"""Small versions of the experiments as a user runs them: real child processes, measured from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from brim.errors import BrimError, MemoryLimitError, MissingDependencyError
from brim.lab.measure import measure, require
from brim.lab.steps import ExperimentPart, ExperimentStep, LabSample, chart
from tests.conftest import brim

MB = 10**6


def lab(*arguments: str) -> dict[str, Any]:
    """Run an experiment with --json and check that each step was reported before the complete result."""
    events = [json.loads(line) for line in brim("lab", *arguments, "--json").stdout.splitlines()]
    *steps, whole = events
    assert whole["event"] == "lab"
    assert all(step["event"] == "step" for step in steps)
    assert [step["step"] for step in steps] == [step["step"] for part in whole["parts"] for step in part["steps"]]
    assert len(whole["seen"]) == 2
    return whole


def rise(part: dict[str, Any], kind: str, step: int = -1) -> int:
    return int(part["steps"][step][kind] - part["steps"][0][kind])


def test_a_leak_and_what_only_looks_like_one() -> None:
    """Both parts raise RSS; only the list raises anonymous memory, and the mapped file returns its pages."""
    observed = lab("leak", "--size", "60MB", "--pieces", "2")
    grown, mapped = observed["parts"]
    assert rise(grown, "rss_bytes", -2) == pytest.approx(60 * MB, rel=0.1)
    assert rise(mapped, "rss_bytes", -2) == pytest.approx(60 * MB, rel=0.1)
    assert rise(grown, "anon_bytes", -2) > 55 * MB
    assert rise(mapped, "anon_bytes", -2) < 5 * MB
    assert rise(grown, "rss_bytes") > 55 * MB
    assert rise(mapped, "rss_bytes") < 10 * MB
    assert observed["verdicts"] == {"a list that grows": "leak", "a mapped file": "mapping"}


def test_joining_holds_everything_twice() -> None:
    """Concatenation holds all vectors twice, as forecast; writing in batches holds one batch and gives equal files."""
    observed = lab("embed-list", "--rows", "10000", "--dims", "1024", "--batch-size", "500")
    combined, streamed = observed["parts"]
    data = 10000 * 1024 * 4
    assert observed["forecast_bytes"] == 2 * data
    assert combined["peak_bytes"] - combined["base_bytes"] == pytest.approx(2 * data, rel=0.15)
    assert streamed["peak_bytes"] - streamed["base_bytes"] < data / 2
    assert observed["same_bytes"] is True
    assert "twice the vectors" in observed["seen"][0]


def test_peak_between_two_samples_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The high-water mark of the kernel shows that both copies existed, although no sample was taken at that time."""
    monkeypatch.setattr("brim.lab.measure._EVERY_S", 60.0)
    options = {"path": str(tmp_path / "joined.npy"), "rows": 10_000, "dims": 1024, "batch_size": 500}
    part = measure("x", "append_and_join", options, tmp_path, lambda name, step: None)
    data = 10_000 * 1024 * 4
    assert max(sample.memory_bytes for sample in part.samples) - part.base_bytes < 1.2 * data
    assert part.work_bytes == pytest.approx(2 * data, rel=0.15)
    assert [step.name for step in part.steps if step.peak_bytes == part.peak_bytes] == ["joined"]


def test_embedding_against_splices() -> None:
    """Embedding stays within its forecast and holds the files several times in memory; brim does not hold them."""
    observed = lab("push", "--files", "20", "--file-size", "4MB")
    embedded, spliced = observed["parts"]
    assert observed["file_bytes"] == 80 * MB
    assert embedded["peak_bytes"] - embedded["base_bytes"] > 2 * observed["file_bytes"]
    assert observed["forecast_low_bytes"] * 0.8 < embedded["peak_bytes"] < observed["forecast_high_bytes"] * 1.2
    assert spliced["peak_bytes"] < embedded["peak_bytes"] / 2
    assert set(observed["versions"]) == {"Python", "brim", "datasets", "pyarrow"}


SMALL = ("--num-files", "4", "--rows", "20", "--text-size", "50KB", "--batch-size", "10")


def test_a_map_that_is_interrupted_shows_cached_and_fresh_shards() -> None:
    """After a map is killed with two shards finished, the rerun reads two from the cache and computes two."""
    observed = lab("map", *SMALL, "--interrupt-after", "2")
    first, repeated = observed["parts"]
    assert first["interrupted"]
    assert [step["step"] for step in repeated["steps"]][1:] == [
        "shard 1 of 4, cached",
        "shard 2 of 4, cached",
        "shard 3 of 4, fresh",
        "shard 4 of 4, fresh",
    ]
    assert observed["rows_computed"] == {"interrupted after 2": 40, "run again": 40}


def test_a_map_in_one_call_keeps_nothing_when_it_is_interrupted() -> None:
    """An interrupted map without workers keeps nothing, because it writes its only cache file at the end."""
    observed = lab("map", *SMALL, "--mode", "basic", "--interrupt-after", "1")
    assert observed["parts"][1]["steps"][-1]["step"] == "all files, fresh"
    assert observed["rows_computed"]["run again"] == 80
    assert "nothing of it was kept" in observed["seen"][0]


def test_what_is_printed() -> None:
    """The output has a table of steps, a chart for each part, two sentences and the versions."""
    text = brim("lab", "leak", "--size", "20MB", "--pieces", "1").stdout
    lines = text.splitlines()
    assert lines[0].split() == [
        "a",
        "list",
        "that",
        "grows",
        "RSS",
        "anonymous",
        "file-backed",
        "of",
        "machine",
        "peak",
    ]
    assert sum(" ┤" in line for line in lines) == 12
    assert "█ memory" in text
    assert "only looks like one." in text
    assert lines[-1].startswith("Python 3")


def test_help_has_examples() -> None:
    """The help of the command and of each experiment shows examples."""
    assert "brim lab leak" in brim("lab", "--help").stdout
    for name in ("leak", "embed-list", "push", "map"):
        assert f"brim lab {name} " in brim("lab", name, "--help").stdout


def test_data_is_removed_or_kept(tmp_path: Path) -> None:
    """Nothing stays in the temporary folder; with --keep all data stays in a folder that was empty before."""
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    brim("lab", "leak", "--size", "1MB", env=environment)
    assert not list((tmp_path / "temporary").iterdir())
    brim("lab", "leak", "--size", "1MB", "--keep", tmp_path / "kept")
    assert (tmp_path / "kept/mapped.bin").stat().st_size == MB
    assert "is not empty" in brim("lab", "leak", "--keep", tmp_path / "kept", check=2).stderr


@pytest.mark.parametrize(
    ("arguments", "args"),
    [
        (("map", "--mode", "other"), "basic or shard"),
        (("map", "--num-files", "2", "--interrupt-after", "2"), "after the last of 2"),
        (("leak", "--size", "much"), "500MB"),
        (("nothing",), "nothing"),
    ],
)
def test_wrong_input_exits_2(arguments: tuple[str, ...], args: str) -> None:
    """An experiment that cannot run exits with code 2 and states the reason."""
    assert args in brim("lab", *arguments, check=2).stderr


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    """Interrupting an experiment terminates its child process and deletes its data."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "brim", "lab", "embed-list", "--rows", "60000"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 6
    assert "Traceback" not in errors
    assert children
    assert not any(child.is_running() for child in children)
    assert not list(tmp_path.iterdir())


def test_a_child_that_fails_is_told(tmp_path: Path) -> None:
    """The error shows the last output of the child. If the child was killed, the error is a memory error."""

    def ignore(part: str, step: ExperimentStep) -> None:
        pass

    other_items = set(psutil.Process().children())  # children of this process: servers of other tests

    def kill(part: str, step: ExperimentStep) -> None:
        for child in set(psutil.Process().children()) - other_items:
            child.kill()

    with pytest.raises(BrimError, match="nowhere"):
        measure("x", "touch", {"path": "nowhere", "pieces": 1}, tmp_path, ignore)
    with pytest.raises(MemoryLimitError, match="killed"):
        measure("x", "grow", {"size_bytes": 10, "pieces": 1}, tmp_path, kill)


def test_a_missing_library_is_named() -> None:
    """The error names the missing library and the command that installs it."""
    require("json")
    with pytest.raises(MissingDependencyError, match="pip install no_such_library"):
        require("no_such_library")


def test_the_chart_stacks_file_pages_on_what_is_held() -> None:
    """A measurement with equal amounts of anonymous memory and file pages fills a column half and half."""
    lines = chart(ExperimentPart("x", (), (LabSample(0.0, 50, 50), LabSample(1.0, 0, 0))), 100)
    assert [line.split("┤")[1][0] for line in lines[1:7]] == ["░", "░", "░", "█", "█", "█"]
    assert lines[1].split("┤")[1][-1] == " "


@pytest.mark.parametrize(
    "options",
    [
        ("leak", "--size", "900PB"),
        ("embed-list", "--rows", "10000000000", "--dims", "100000"),
        ("push", "--files", "100000", "--file-size", "1TB"),
        ("map", "--num-files", "100000", "--text-size", "1TB"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_first(options: tuple[str, ...]) -> None:
    """Sizes that exceed the disk or the machine's memory are refused before anything is allocated."""
    assert "This takes" in brim("lab", *options, check=4).stderr
