"""Shards with large values in regular columns: written through a scratch file, in row groups of limited size."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from brim import partition as cuts
from brim.file_set import FILE_TYPE, FileSetBuilder
from brim.formats.parquet_writer import splice_parquet
from brim.state import scratch
from brim.state.scratch import Scratch
from tests.conftest import file_set, random_bytes

NO_FILES = FileSetBuilder("/").finish()


def text_table(rows: int, size: int) -> pa.Table:
    return pa.table({"n": range(rows), "text": [chr(97 + n % 26) * size for n in range(rows)]})


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_large_values_go_by_the_disk_and_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has the same bytes whether its values pass through a scratch file or through memory."""
    contents = {f"{n}.bin": random_bytes(1000, n) for n in range(40)}
    files = file_set(tmp_path / "files", contents)
    table = text_table(40, 5000)
    cells = pa.array([{"bytes": b"", "path": name} for name in contents], FILE_TYPE)
    table = table.append_column("file", cells)
    numbers = {"file": np.arange(40)}
    in_memory = splice_parquet(table, files, numbers)
    monkeypatch.setattr("brim.formats.parquet_writer.HELD_VALUE_BYTES", 1000)
    on_disk = splice_parquet(table, files, numbers, str(tmp_path))
    assert on_disk.read_at(0, on_disk.size) == in_memory.read_at(0, in_memory.size)
    with open(tmp_path / "copy", "w+b") as copy:
        on_disk.copy_to(copy.fileno())
    assert pq.read_table(tmp_path / "copy").column("text").equals(table.column("text"))
    assert on_disk.sha256() == in_memory.sha256()


def test_row_groups_hold_few_bytes_of_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group ends before its values exceed the limit, and a larger row gets a separate row group."""
    monkeypatch.setattr(cuts, "GROUP_VALUE_BYTES", 30_000)
    table = pa.concat_tables([text_table(10, 5000), text_table(1, 100_000), text_table(10, 5000)])
    splice = splice_parquet(table, NO_FILES, {})
    parquet = pq.ParquetFile(splice.open())
    rows = [parquet.metadata.row_group(n).num_rows for n in range(parquet.num_row_groups)]
    assert rows == [5, 5, 1, 5, 5]
    assert parquet.read().equals(table)
    # A value larger than a row group disables the statistics of its column: pyarrow would hold several copies of it.
    small, large = (parquet.metadata.row_group(2).column(n) for n in (0, 1))
    assert (small.is_stats_set, large.is_stats_set) == (True, False)
    assert (small.has_dictionary_page, large.has_dictionary_page) == (True, False)


def test_no_rows_are_a_shard() -> None:
    """A table without rows becomes a Parquet file with its schema."""
    table = text_table(0, 0)
    splice = splice_parquet(table, NO_FILES, {})
    assert pq.read_table(splice.open()).schema.equals(table.schema)


def test_the_scratch_file_goes_with_the_splice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scratch file has no name, and closing or garbage-collecting the splice closes it."""
    monkeypatch.setattr("brim.formats.parquet_writer.HELD_VALUE_BYTES", 0)
    before = open_descriptors()
    for close in (True, False):
        splice = splice_parquet(text_table(10, 100), NO_FILES, {}, str(tmp_path))
        assert open_descriptors() == before + 1
        assert list(tmp_path.iterdir()) == []
        if close:
            splice.close()
            splice.close()
        else:
            del splice
            gc.collect()
        assert open_descriptors() == before


@pytest.mark.skipif(
    not scratch.is_in_memory("/dev/shm") or scratch.is_in_memory("/var/tmp"),
    reason="needs a folder in memory and one on disk",
)
def test_scratch_files_avoid_file_systems_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch files are never written to a temporary folder in memory, where they would use up the limit."""
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    assert scratch.scratch_folder() == "/var/tmp"
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    assert scratch.scratch_folder() == "/var/tmp"


def test_a_scratch_file_that_lost_bytes_is_an_error(tmp_path: Path) -> None:
    """Reading past the end of a truncated scratch file raises an error instead of looping forever."""
    file = Scratch(str(tmp_path))
    os.write(file.descriptor, b"abc")
    assert file.read(1, 2) == b"bc"
    with pytest.raises(ValueError, match="shorter"):
        file.read(1, 3)
    file.close()
