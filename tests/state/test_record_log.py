"""An append-only log of records: complete records are kept, and a torn record is ignored."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from brim.errors import DestinationError
from brim.state.lock import locked
from brim.state.record_log import RecordLog, broken_line, records_of

RECORDS = st.lists(st.dictionaries(st.text(), st.integers() | st.text() | st.none()), max_size=5)


def test_records_come_back(tmp_path: Path) -> None:
    """Records are read in the order of writing, also by another reader, whether written together or separately."""
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
    """A log that is cut at any byte keeps the records before the cut, and the next record starts on a separate line."""
    path = tmp_path_factory.mktemp("log") / "log"
    log = RecordLog(path)
    log.append(*records)
    log.close()
    os.truncate(path, min(cut, path.stat().st_size))
    whole = list(RecordLog(path).replay())
    assert whole == records[: len(whole)]
    reopened = RecordLog(path)
    reopened.append({"next": 1})
    reopened.close()
    assert list(reopened.replay()) == [*whole, {"next": 1}]


def test_a_damaged_line_is_none() -> None:
    """Lines with a flipped bit, another format, or a checksum over a non-object are ignored."""
    assert list(records_of([b"00000000 {}\n", b"\n", b"{}\n", b"garbage", b"\xff\xfe\n"])) == []


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    """Only one writer can hold the lock of a log, and closing the log releases it."""
    first, second = RecordLog(tmp_path / "log"), RecordLog(tmp_path / "log")
    first.lock("the log", "Busy.")
    with pytest.raises(DestinationError, match="Busy"):
        second.lock("the log", "Busy.")
    first.close()
    second.lock("the log", "Busy.")
    second.clear()
    second.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of all files and folders in the order in which they were synced to disk."""
    actual: list[str] = []
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        actual.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return actual


def test_a_record_is_on_disk_when_it_is_written(tmp_path: Path, synced: list[str]) -> None:
    """Each call syncs the log once for all its records. `sync` also syncs the folder, which makes the name durable."""
    log = RecordLog(tmp_path / "log")
    log.append({"a": 1}, {"b": 2})
    assert synced == ["log"]
    log.append({"c": 3})
    assert synced == ["log"] * 2
    log.sync()
    assert synced[2:] == [tmp_path.name]
    log.close()


def test_a_name_lasts_that_nothing_was_written_to(tmp_path: Path, synced: list[str]) -> None:
    log = RecordLog(tmp_path / "log")
    log.sync()
    assert (tmp_path / "log").read_bytes() == b""
    assert synced == [tmp_path.name]
    log.close()


def test_a_log_can_be_begun_again(tmp_path: Path) -> None:
    """A log can be cleared, closed twice, and reopened by the next record."""
    log = RecordLog(tmp_path / "log", 0o600)
    log.append({"a": 1})
    log.clear()
    log.append({"b": 2})
    before = len(os.listdir("/proc/self/fd"))
    log.close()
    log.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    log.append({"c": 3})
    log.close()
    assert list(log.replay()) == [{"b": 2}, {"c": 3}]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert RecordLog(tmp_path / "log")._mode == 0o644


def test_nobody_inherits_a_log(tmp_path: Path) -> None:
    """Child processes do not inherit the descriptor of a log, so they cannot hold its lock."""
    log = RecordLog(tmp_path / "log")
    log.append({"a": 1})
    assert not os.get_inheritable(log._open())
    log.close()


def test_a_torn_line_is_ended_before_the_next(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"torn")
    log = RecordLog(tmp_path / "log")
    log.append({"a": 1})
    log.close()
    assert (tmp_path / "log").read_bytes().startswith(b"torn\n")
    assert list(log.replay()) == [{"a": 1}]


def test_the_lock_says_whose_it_is(tmp_path: Path) -> None:
    """The error for a locked log has a hint about the process that holds the lock."""
    first, second = RecordLog(tmp_path / "log"), RecordLog(tmp_path / "log")
    first.lock("the log", "Busy.")
    with pytest.raises(DestinationError) as caught:
        second.lock("the log", "Busy.")
    assert caught.value.hint == "Wait for it to end, or close it."
    first.close()
    second.close()


def test_a_disk_that_cannot_lock_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    log = RecordLog(tmp_path / "log")
    with pytest.raises(DestinationError, match="the log") as caught:
        log.lock("the log", "Busy.")
    assert "Write to another disk" in caught.value.hint
    log.close()


def test_a_line_without_its_newline_counts() -> None:
    """A line without its newline counts, because its checksum shows that it is complete."""
    from brim.state.record_log import record_line

    line = record_line({"a": 1})
    assert list(records_of([line, line.removesuffix(b"\n"), line])) == [{"a": 1}] * 3


def test_a_checksum_over_what_is_no_json_is_no_record() -> None:
    import zlib

    wrong = [f"{zlib.crc32(body):08x} ".encode() + body + b"\n" for body in (b"{", b"[1]", b"")]
    assert list(records_of(wrong)) == []


def test_the_first_broken_line_has_a_number(tmp_path: Path) -> None:
    """`broken` is the number of the first broken line, from 1, or 0 without broken lines. Empty lines do not count."""
    log = RecordLog(tmp_path / "log")
    log.append({"a": 1}, {"b": 2})
    log.close()
    assert log.broken == 0
    whole = (tmp_path / "log").read_bytes().splitlines(keepends=True)
    assert broken_line([]) == 0
    assert broken_line([whole[0], b"\n", whole[1]]) == 0
    assert broken_line([b"torn\n", whole[0]]) == 1
    assert broken_line([whole[0], b"\n", b"torn"]) == 3
    (tmp_path / "log").write_bytes(whole[0] + whole[1][:-3])
    assert log.broken == 2


def test_a_forked_process_does_not_keep_a_lock(tmp_path: Path) -> None:
    """A forked process that outlives the owner of a lock does not keep it, although it inherits the descriptor."""
    with locked(tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
