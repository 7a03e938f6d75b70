"""Destinations that would overwrite their source: refused for every job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.compute.outputs.output import RowsOutput
from brim.compute.outputs.vector_output import VectorOutput
from brim.compute.rows.open_rows import open_rows
from brim.compute.steps.map_options import MapStepOptions
from brim.compute.steps.map_step import MapStep
from brim.errors import BrimError, DestinationError, InputError
from brim.file_set import FileSetBuilder
from brim.jobs.destination_paths import dataset_paths, file_paths
from brim.jobs.job import Job
from brim.jobs.preflight import ComputePlan, JobSettings
from brim.jobs.publish_options import PublishOptions
from brim.jobs.saved_plans import SavedBuild, SavedSettings
from brim.plans.source_checks import refuse_source
from brim.storage.destination_address import parse_destination
from brim.storage.location import Access, parse_location
from brim.storage.storage import FileInfo
from tests.conftest import tree_digest

STEP = MapStep(len, MapStepOptions())


def dataset_job(verb: str, rows: Any, destination: Any, settings: JobSettings) -> Job:
    plan = ComputePlan(verb, rows, STEP, RowsOutput(), settings.on_error)
    return Job(plan, dataset_paths(parse_destination(destination), None, settings.hub), settings)


def vector_job(rows: Any, destination: Any, settings: JobSettings) -> Job:
    paths = file_paths(destination, None, settings.access)
    plan = ComputePlan("embed", rows, STEP, VectorOutput(paths.file_names[0], 1000), settings.on_error)
    return Job(plan, paths, settings)


def test_another_store_is_another_place() -> None:
    """The same name in another object store is a different destination."""
    local, existing = Access("http://127.0.0.1:1"), Access("http://127.0.0.1:2")
    destination = parse_destination("s3://lab/scans", local)
    refuse_source(destination, "s3://lab/scans", existing)
    refuse_source(destination, "s3://lab/scans/raw", local)
    with pytest.raises(DestinationError, match="source itself"):
        refuse_source(destination, "s3://lab/scans/", local)


@pytest.mark.parametrize("source", ["", "data", "data/*.jsonl", "data/a.jsonl"])
def test_nothing_is_computed_from_itself(tmp_path: Path, source: str) -> None:
    """A job whose shards would replace its own rows is refused, also with --fresh. A separate folder is allowed."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"n": 1}\n')
    rows = open_rows(str(tmp_path / source))
    with pytest.raises(DestinationError, match="source itself"):
        dataset_job("map", rows, tmp_path, JobSettings(fresh=True))
    dataset_job("map", rows, tmp_path / "out", JobSettings())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Return a file of rows, with links to it."""
    source = tmp_path / "in" / "rows.parquet"
    source.parent.mkdir()
    pq.write_table(pa.table({"text": ["a", "b"]}), source)
    (tmp_path / "in" / "deep").mkdir()
    (tmp_path / "link.parquet").symlink_to(source)
    (tmp_path / "hard.parquet").hardlink_to(source)
    (tmp_path / "folder").symlink_to(source.parent)
    return source


SPELLINGS = [
    "in/rows.parquet", "in/deep/../rows.parquet", "./in//rows.parquet", "in/rows.parquet/", "link.parquet",
    "hard.parquet", "folder/rows.parquet",
]  # fmt: skip


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_vector_file_is_not_its_source(
    tmp_path: Path, rows: Path, monkeypatch: pytest.MonkeyPatch, spelling: str, absolute: bool
) -> None:
    """A vector file cannot replace its source, also with --fresh. Links are recognized by device and inode."""
    monkeypatch.chdir(tmp_path)
    destination = f"{tmp_path}/{spelling}" if absolute else spelling
    for source in ("in/rows.parquet", str(rows), "in", "in/*.parquet", "link.parquet", "folder"):
        with pytest.raises(DestinationError, match="source itself"):
            vector_job(open_rows(source), destination, JobSettings(fresh=True))
    vector_job(open_rows("in"), "in/other.parquet", JobSettings())


@pytest.mark.parametrize("name", ["v.npy.rows.parquet", "v.npy.quarantine.parquet", ".v.npy.brim/units/a.parquet"])
def test_what_lies_beside_vectors_is_not_the_source(tmp_path: Path, rows: Path, name: str) -> None:
    """The kept columns, quarantined rows and ledgers of a vector file cannot replace its source."""
    source = tmp_path / "in" / name
    source.parent.mkdir(parents=True, exist_ok=True)
    rows.rename(source)
    with pytest.raises(DestinationError, match="source itself"):
        vector_job(open_rows(str(source)), tmp_path / "folder" / "v.npy", JobSettings())


@pytest.mark.parametrize("inside", ["out/data", "out/data/deep", "out/.brim/units"])
@pytest.mark.parametrize("linked", ["", "symbolic", "hard"])
def test_a_dataset_takes_no_place_of_its_source(tmp_path: Path, rows: Path, inside: str, linked: str) -> None:
    """Rows in the folder of shards, or linked into it, are refused as a source. Another folder is allowed."""
    (tmp_path / inside).mkdir(parents=True)
    existing, source = tmp_path / inside / "train-00000-of-00001.parquet", str(rows)
    if linked == "symbolic":
        existing.symlink_to(rows)
    elif linked == "hard":
        existing.hardlink_to(rows)
    else:
        rows.rename(existing)
        source = str(existing)
    for verb in ("map", "tokenize", "embed"):
        with pytest.raises(DestinationError, match="source itself"):
            dataset_job(verb, open_rows(source), tmp_path / "out", JobSettings(fresh=True))
    second = JobSettings(hub=PublishOptions(data_dir="elsewhere"))
    if not inside.startswith("out/.brim"):
        dataset_job("map", open_rows(source), tmp_path / "out", second)


def test_build_takes_no_place_of_its_source(tmp_path: Path) -> None:
    """A source folder among the shards of the destination is refused, also by a link and with a saved plan."""
    source = tmp_path / "out" / "data" / "scans"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (tmp_path / "link").symlink_to(source)
    for location, destination in ((source, tmp_path / "out"), (tmp_path / "link", source), (source, tmp_path / "link")):
        with pytest.raises(DestinationError, match="source itself"):
            brim.build(location, destination)
        with pytest.raises(DestinationError, match="source itself"):
            brim.plan(location, destination).save(tmp_path / "job.plan")
    shutil.copytree(source, tmp_path / "copy")
    brim.plan(tmp_path / "copy", tmp_path / "out").save(tmp_path / "job.plan")
    with pytest.raises(DestinationError, match="source itself"):
        SavedBuild(tmp_path / "job.plan", SavedSettings(root=str(source))).run()
    assert (source / "a.txt").read_text() == "a"


def test_a_map_is_not_kept_in_its_source(tmp_path: Path, rows: Path) -> None:
    """The cache folder cannot be the folder of rows, because its results would become rows of the next job."""
    with pytest.raises(DestinationError, match="source itself"):
        brim.map(str(rows.parent), lambda row: row, cache_dir=tmp_path / "folder")
    assert sorted(path.name for path in rows.parent.iterdir()) == ["deep", "rows.parquet"]


def test_nothing_is_unpacked_into_its_dataset(tmp_path: Path) -> None:
    """A dataset cannot be unpacked into its own folder by any path, or among its shards."""
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.txt").write_text("a")
    brim.build(source, tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    before = tree_digest(tmp_path / "out")
    for destination in ("out", "link", "out/../out/", "out/data", "link/data/new/deeper"):
        with pytest.raises(BrimError, match=r"source itself|folder of the shards"):
            brim.unpack(tmp_path / "out", tmp_path / destination)
    assert tree_digest(tmp_path / "out") == before
    brim.unpack(tmp_path / "out", tmp_path / "out" / "beside")


@pytest.mark.parametrize("key", ["lab/v.npy.rows.parquet", "lab/data/a.parquet", "lab/data/deep/a.parquet"])
def test_keys_of_a_source_are_not_written(key: str) -> None:
    """A job cannot write to a key of its source in a bucket or to its prefix. Keys with a common start are allowed."""
    local = Access("http://127.0.0.1:1")
    names = FileSetBuilder("s3://scans", parse_location("s3://scans", local))
    names.add(key, FileInfo(3, "e"))
    files = names.finish()
    subset = [
        parse_destination(f"s3://scans/{position}", local) for position in ("lab/v.npy.rows.parquet/", "lab/data")
    ]
    destination = parse_destination("s3://scans/lab", local)
    with pytest.raises(DestinationError, match=f"s3://scans/{key}"):
        refuse_source(destination, "s3://scans/", None, files, subset)
    alike = [parse_destination(f"s3://scans/{location}", local) for location in ("lab/v.npy", "lab/dat", "data")]
    refuse_source(destination, "s3://scans/", None, files, alike)
    elsewhere = [parse_destination(f"s3://scans/{key}", Access("http://127.0.0.1:2"))]
    refuse_source(destination, "s3://scans/", None, files, elsewhere)


def test_a_repository_is_not_its_own_source() -> None:
    """A repository on the Hub is the same with or without a trailing slash."""
    with pytest.raises(DestinationError, match="source itself"):
        refuse_source(parse_destination("hf://datasets/ada/scans"), "hf://datasets/ada/scans/")
    refuse_source(parse_destination("hf://datasets/ada/scans"), "hf://datasets/ada/other")


def test_unpack_to_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking to a bucket is refused instead of creating a local folder called s3:."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="to a local folder"):
        brim.unpack(tmp_path, "s3://lab/scans")
