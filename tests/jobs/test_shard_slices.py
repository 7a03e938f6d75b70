"""Slices of a plan for another machine: the files and rows of one shard, and everything its bytes depend on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import brim
from brim.errors import DestinationError, SourceChangedError
from brim.file_set import Bundle, FileSet, FileSetBuilder, RangeSetBuilder
from brim.jobs.destination import Run
from brim.jobs.destination_paths import dataset_paths
from brim.jobs.files_destination import FilesDestination
from brim.jobs.hub_destination import HubUploader
from brim.jobs.job_lock import make_shard_folder
from brim.jobs.publish_options import PublishOptions
from brim.plans.plan import Plan
from brim.plans.shard_bytes import slice_of, splice_of
from brim.progress import Progress
from brim.state.ledger import Ledger
from brim.state.stop import Stop
from brim.storage.location import folder_location, parse_repository
from tests.conftest import write_files


def plan_of(source: Path, **options: object) -> Plan:
    rows = [{"file": f"f{n:03d}.bin", "label": f"label {n % 3}", "n": n} for n in range(12)]
    table = pa.concat_tables([pa.Table.from_pylist(rows[:5]), pa.Table.from_pylist(rows[5:])])  # two chunks
    labels = table.column("label").dictionary_encode()
    table = table.set_column(1, "label", labels)
    return brim.plan(brim.table(table, files="file", root=source), rows_per_shard=4, **options).plan  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_bytes(many_files: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """A pickled slice writes the same bytes, also in a process with another working folder."""
    plan = plan_of(many_files(12), format=format)
    for shard in plan.shards:
        with splice_of(plan, shard) as local:
            expected = local.sha256()
        travelled = pickle.dumps(slice_of(plan, shard))
        monkeypatch.chdir("/")
        with pickle.loads(travelled).splice() as existing:
            assert existing.sha256() == expected
        monkeypatch.chdir(tmp_path)
        assert len(pickle.loads(travelled).files) == 4


def test_changes_are_seen_elsewhere(many_files: Callable[..., Path]) -> None:
    """A slice contains the planned state of its files, so a change is detected on the other machine."""
    plan = plan_of(source := many_files(12))
    travelled = pickle.dumps(slice_of(plan, plan.shards[0]))
    (source / "f001.bin").write_bytes(b"other")
    with pytest.raises(SourceChangedError, match=r"f001\.bin"), pickle.loads(travelled).splice() as splice:
        splice.sha256()


def test_bundles_are_numbered_anew(tmp_path: Path) -> None:
    """Taking a bundled folder takes its files too, with new numbers."""
    write_files(tmp_path, {f"{name}": name.encode() for name in "abcd"})
    builder = FileSetBuilder(str(tmp_path))
    builder.add("a", os.stat(tmp_path / "a"))
    number = builder.add_bundle("x/", [(name, name, os.stat(tmp_path / name)) for name in "bc"])
    last = builder.add("d", os.stat(tmp_path / "d"))
    some: FileSet = builder.finish().take(np.array([number, last]))
    assert some.paths.to_pylist() == ["x/", "d", "b", "c"]
    assert some.bundles == {0: Bundle(("b", "c"), (2, 3))}


def test_containers_that_hold_nothing_stay_home(tmp_path: Path) -> None:
    """Taking values keeps only the containers that hold them."""
    write_files(tmp_path, dict.fromkeys("pqr", b"0123456789"))
    builder = RangeSetBuilder()
    for name in "pqr":
        builder.container(str(tmp_path / name), os.stat(tmp_path / name))
    holders, starts = np.array([0, 1, -1, 2]), np.array([0, 3, 0, 5])
    builder.add(pa.array(["v0", "v1", None, "v3"]), holders, starts, np.array([2, 2, 0, 2]))
    some = builder.finish().take(np.array([3, 2]))
    assert some.on_disk.paths.to_pylist() == [str(tmp_path / "r")]
    assert some.places(np.array([0, 1]))[1].tolist() == [0, -1]
    assert some.full_path(0) == str(tmp_path / "r")


def test_another_folder_of_the_same_name(tmp_path: Path) -> None:
    """A node that sees another folder at the path of the destination raises an error."""
    make_shard_folder(tmp_path / "out")
    paths = dataset_paths(folder_location(tmp_path / "out"), None, PublishOptions())
    destination = FilesDestination(paths, Run(Ledger(tmp_path), Stop(), Progress()))
    carrier = pickle.loads(pickle.dumps(destination.uploader()))
    carrier.check_access()
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    make_shard_folder(tmp_path / "out")
    with pytest.raises(DestinationError, match="is another folder of that name"):
        carrier.check_access()


def test_a_token_does_not_show() -> None:
    """A pickled uploader contains its token, but its text form does not."""
    carrier = HubUploader(parse_repository("hf://datasets/ada/data"), "https://hub", "hf_secret")
    assert pickle.loads(pickle.dumps(carrier)) == carrier
    assert "hf_secret" not in repr(carrier)
