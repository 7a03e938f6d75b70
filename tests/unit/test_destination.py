"""Places that a dataset cannot be built at, or unpacked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from brim.buckets.bucket_address import Access
from brim.errors import DestinationError, InputError
from brim.jobs.computed_job import ComputedJob, JobOptions
from brim.jobs.unpack import unpack
from brim.rows.open_rows import open_rows
from brim.stores.destination import parse_destination, refuse_source


def test_another_store_is_another_place() -> None:
    """The same name in another store is no reason to refuse; in the same one it is."""
    here, there = Access("http://127.0.0.1:1"), Access("http://127.0.0.1:2")
    destination = parse_destination("s3://lab/scans", here)
    refuse_source(destination, "s3://lab/scans", there)
    refuse_source(destination, "s3://lab/scans/raw", here)
    with pytest.raises(DestinationError, match="source itself"):
        refuse_source(destination, "s3://lab/scans/", here)


@pytest.mark.parametrize("source", ["", "data", "data/*.jsonl", "data/a.jsonl"])
def test_nothing_is_computed_from_itself(tmp_path: Path, source: str) -> None:
    """A job whose shards would take the place of its own rows, with --fresh too; beside them they may be."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"n": 1}\n')
    rows = open_rows(str(tmp_path / source))
    with pytest.raises(DestinationError, match="source itself"):
        ComputedJob("map", rows, None, None, tmp_path, JobOptions(fresh=True))  # type: ignore[arg-type]
    ComputedJob("map", rows, None, None, tmp_path / "out", JobOptions())  # type: ignore[arg-type]


def test_unpack_to_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder called s3: is made."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="to a folder"):
        unpack(tmp_path, "s3://lab/scans")
