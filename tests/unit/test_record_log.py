"""A log of records: what is written stays, what is torn was not written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brim.errors import DestinationError
from brim.state.record_log import RecordLog, records_of

RECORDS = st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), max_size=5)


def test_records_come_back(tmp_path: Path) -> None:
    """In their order, several at once as one by one, also to another reader."""
    log = RecordLog(tmp_path / "log")
    with pytest.raises(FileNotFoundError):
        list(log.replay())
    log.append({"a": 1})
    log.append({"b": "\n"}, {"c": None})
    log.close()
    assert list(RecordLog(tmp_path / "log").replay()) == [{"a": 1}, {"b": "\n"}, {"c": None}]


@given(RECORDS, st.integers(0, 10_000))
@example([{"a": 1}, {"b": 2}], 1)
def test_a_cut_loses_no_line_before_it(tmp_path_factory: pytest.TempPathFactory, records: list[dict], cut: int) -> None:
    """Cut anywhere, a log holds a beginning of what was written, and goes on with a line of its own."""
    path = tmp_path_factory.mktemp("log") / "log"
    log = RecordLog(path)
    log.append(*records)
    log.close()
    os.truncate(path, min(cut, path.stat().st_size))
    whole = list(RecordLog(path).replay())
    assert whole == records[: len(whole)]
    again = RecordLog(path)
    again.append({"next": 1})
    again.close()
    assert list(again.replay()) == [*whole, {"next": 1}]


def test_a_damaged_line_is_none() -> None:
    """A flipped bit, a line of another kind, a checksum over what is no object."""
    assert list(records_of([b"00000000 {}\n", b"\n", b"{}\n", b"garbage", b"\xff\xfe\n"])) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """The lock is gone with whoever closes."""
    first, second = RecordLog(tmp_path / "log"), RecordLog(tmp_path / "log")
    first.lock("the log", "Busy.")
    with pytest.raises(DestinationError, match="Busy"):
        second.lock("the log", "Busy.")
    first.close()
    second.lock("the log", "Busy.")
    second.clear()
    second.close()
