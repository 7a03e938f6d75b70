"""Checks before a job starts: refused for every destination, without creating any file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from brim.compute.outputs.output import Output, RowsOutput
from brim.compute.outputs.token_output import FinishOptions, TokenOutput
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.unit import RowSource
from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.map_step import MapStep
from brim.errors import BrimError, DestinationError, InputError, MemoryLimitError
from brim.jobs.destination_paths import DestinationPaths, cache_paths, dataset_paths, file_paths
from brim.jobs.job import Job
from brim.jobs.preflight import ComputePlan, JobSettings
from brim.jobs.publish_options import PublishOptions
from brim.storage.destination_address import parse_destination

HUB = {
    "config": "x",
    "commit_message": "x",
    "public": True,
    "commit_as_you_go": True,
    "create_pr": True,
    "upload_with": "xet",
}
LAYOUTS = ("folder", "bucket", "file", "object", "cache")


@pytest.fixture
def source(tmp_path: Path) -> RowSource:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return open_rows(str(tmp_path / "rows.jsonl"))


def paths_of(kind: str, home: Path, settings: JobSettings) -> DestinationPaths:
    if kind in ("folder", "bucket"):
        location = parse_destination(home / "out" if kind == "folder" else "s3://lab/out", settings.access)
        return dataset_paths(location, None, settings.hub)
    if kind == "cache":
        return cache_paths(home / "cache", "a-b", {})
    return file_paths(home / "out.npy" if kind == "file" else "s3://lab/out.npy", None, settings.access)


def job(
    verb: str, kind: str, source: RowSource, home: Path, settings: JobSettings, output: Output | None = None
) -> Job:
    plan = ComputePlan(verb, source, MapStep(len, MapStepOptions()), output or RowsOutput(), settings.on_error)
    return Job(plan, paths_of(kind, home, settings), settings)


@pytest.mark.parametrize("verb", ["map", "tokenize", "embed"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_options_that_do_not_apply(tmp_path: Path, source: RowSource, kind: str, verb: str) -> None:
    """Options of the Hub, of another command or of a function are refused where they do not apply."""
    before = sorted(tmp_path.iterdir())
    wrong = [JobSettings(hub=PublishOptions(**{name: value})) for name, value in HUB.items()]  # type: ignore[arg-type]
    wrong += [JobSettings(update=True), *([JobSettings(keep_done=True)] if verb != "map" else [])]
    for method in wrong:
        with pytest.raises(InputError, match="can only be used with"):
            job(verb, kind, source, tmp_path, method)
    job(verb, kind, source, tmp_path, JobSettings())
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"on_error": "raise"},
        {"workers": 0},
        {"workers": True},
        {"memory": "lots"},
        {"fresh": True, "update": True},
        {"fresh": True, "keep_done": True},
        {"stop_file": "/"},
    ],
    ids=str,
)
def test_values_that_nobody_knows(wrong: dict[str, Any]) -> None:
    """Job settings with invalid values or conflicting options are refused."""
    with pytest.raises(InputError):
        JobSettings(**wrong)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_what_cannot_fit(tmp_path: Path, source: RowSource, kind: str) -> None:
    """A result that cannot fit into the memory limit is refused before its first unit."""
    packed = TokenOutput(FinishOptions(pack=1 << 22), "tokenizer.json")
    with pytest.raises(MemoryLimitError, match="too long for a limit"):
        job("tokenize", kind, source, tmp_path, JobSettings(memory="20MB"), packed)
    job("tokenize", kind, source, tmp_path, JobSettings(memory="4GB"), packed)


def test_files_that_are_none(tmp_path: Path) -> None:
    """A vector file must have a known extension, and cannot be a folder or a repository."""
    (tmp_path / "out.npy").mkdir()
    for destination, says in ((tmp_path / "out.txt", "ending"), (tmp_path / "out.npy", "is a folder")):
        with pytest.raises(BrimError, match=says):
            file_paths(destination, None, JobSettings().access)
    with pytest.raises(DestinationError, match="repository"):
        file_paths("hf://datasets/ada/v.npy", None, JobSettings().access)


def test_the_same_facts(tmp_path: Path, source: RowSource) -> None:
    """The fingerprint of a job does not depend on its destination or workers, but on its handling of bad rows."""
    jobs = [job("map", kind, source, tmp_path, JobSettings(workers=n + 1)) for n, kind in enumerate(LAYOUTS)]
    assert len({item.plan.fingerprint for item in jobs}) == 1
    second = job("map", "folder", source, tmp_path, JobSettings(on_error="skip"))
    assert second.plan.fingerprint != jobs[0].plan.fingerprint
