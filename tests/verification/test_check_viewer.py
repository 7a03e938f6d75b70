"""`brim check` reports whether the Hub's dataset viewer would refuse a dataset."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import brim
from brim.verification import check_dataset
from brim.verification.check_files import Check

CARD = "---\nconfigs:\n- config_name: default\n  data_files: data/*.parquet\n---\n"


def viewer_note(folder: Path) -> Check | None:
    report = brim.check(folder, progress=False)
    assert report.ok
    return next((check for check in report.checks if "viewer" in check.name), None)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "README.md").write_text(CARD)
    return tmp_path


@pytest.mark.parametrize(
    ("row_group_rows", "page_index", "refused"), [(4000, False, True), (4000, True, False), (100, False, False)]
)
def test_check_notes_row_groups_that_the_viewer_refuses(
    row_group_rows: int, page_index: bool, refused: bool, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test lowers the limit to a thousandth, so that a small file exceeds it."""
    monkeypatch.setattr(check_dataset, "_VIEWER_BYTES", check_dataset._VIEWER_BYTES // 1000)
    table = pa.table({"text": [f"{n:08d}" * 20 for n in range(4000)]})
    path = dataset / "data" / "train-00000-of-00001.parquet"
    pq.write_table(table, path, row_group_size=row_group_rows, write_page_index=page_index, use_dictionary=False)
    note = viewer_note(dataset)
    assert (note is not None) == refused
    if note is not None:
        assert "smaller row groups, or a page index" in note.detail
        assert note.failed == ["data/train-00000-of-00001.parquet"]


def test_check_notes_more_columns_than_the_viewer_shows(dataset: Path) -> None:
    for count in (1000, 1001):
        table = pa.table({f"c{n}": [n] for n in range(count)})
        pq.write_table(table, dataset / "data" / "train-00000-of-00001.parquet")
        note = viewer_note(dataset)
        assert (note is None) == (count == 1000)
    assert note is not None
    assert "1,001 columns" in note.detail
