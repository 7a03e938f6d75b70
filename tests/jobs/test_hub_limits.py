"""Limits of the Hub are checked when a job is planned."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from brim.errors import InputError
from brim.file_set import FileSetBuilder
from brim.jobs.build_job import BuildPlan, BuildSettings
from brim.jobs.publish_options import check_shards, hub_limits
from brim.sources.file_table import FileColumn, FileTable, Split

GB, TB = 10**9, 10**12


def test_more_shards_than_a_folder_takes_are_refused_at_plan_time(tmp_path: Path) -> None:
    """10,001 shards in one folder of the Hub are refused with a suggestion. Local folders have no such limit."""
    (tmp_path / "scan").write_bytes(b"x" * 100)
    files = FileSetBuilder(str(tmp_path))
    files.add("scan", (tmp_path / "scan").stat())
    rows = 10_001
    table = FileTable(
        pa.table({"scan": pa.array(np.zeros(rows, np.int64))}),
        {"scan": FileColumn("Image", False)},
        files.finish(),
        None,
        (Split("train", 0, rows),),
    )
    options = BuildSettings(rows_per_shard=1)
    with pytest.raises(InputError, match=r"10,001 shards are more than the 10,000 .* shard_size='500MB'"):
        BuildPlan(table, "hf://datasets/ada/scans", options)
    assert len(BuildPlan(table, tmp_path / "out", options).plan.shards) == rows
    BuildPlan(table, "hf://datasets/ada/scans", BuildSettings(num_shards=10_000))


@pytest.mark.parametrize(
    ("count", "largest", "total", "says"),
    [
        (200_000, GB, 100 * TB, "shard_size='20GB'"),
        (100, 501 * GB, 50 * TB, "A shard of 501 GB is larger .* Use smaller shards"),
        (5_000, 1000 * GB, 5_000 * TB, "A shard of 1.00 TB .* another config="),
        (10_001, 500 * GB, 5_000 * TB, "10,001 shards .* another config="),
    ],
)
def test_the_way_out_fits_the_size(count: int, largest: int, total: int, says: str) -> None:
    """The suggestion depends on the size: larger shards, smaller shards, or several configs."""
    with pytest.raises(InputError, match=says):
        check_shards(count, largest, total)


def test_what_the_hub_takes_passes() -> None:
    """Datasets exactly at the limits are allowed."""
    check_shards(10_000, 500 * GB, 5_000 * TB)


def test_what_the_hub_may_refuse_is_said(tmp_path: Path) -> None:
    """Warnings name limits that the Hub may apply: private storage, large files, full folders and many commits."""
    assert hub_limits(100, GB, 50 * GB, public=False) == []
    assert "hold about 100 GB in all, and this is 273 GB" in hub_limits(761, GB, 273 * GB, public=False)[0]
    assert hub_limits(761, GB, 273 * GB, public=True) == []
    assert "20.0 GB are discouraged" in hub_limits(2, 30 * GB, 60 * GB, public=True)[0]
    report = hub_limits(9_000, GB, 90 * GB, public=True)
    assert "9,000 of 10,000 files" in report[0]
    assert "91 commits" in report[1]
    (tmp_path / "scan").write_bytes(b"")
    os.truncate(tmp_path / "scan", 120 * GB)
    files = FileSetBuilder(str(tmp_path))
    files.add("scan", (tmp_path / "scan").stat())
    rows = pa.table({"scan": pa.array(np.zeros(1, np.int64))})
    table = FileTable(rows, {"scan": FileColumn("Image", False)}, files.finish(), None, (Split("train", 0, 1),))
    for to, message in (("hf://datasets/ada/scans", True), (tmp_path / "out", False)):
        build = BuildPlan(table, to, BuildSettings(format="webdataset"))
        assert ("Hub limits" in dict(build.lines)) == message
