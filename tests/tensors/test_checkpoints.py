"""The checkpoint log states which data of an unfinished tensor file is safely on disk."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from brim.errors import DestinationError
from brim.tensors.checkpoints import RECEIPTS, Checkpoint, CheckpointLog


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.npy.partial").mkdir()
    return tmp_path / "a.npy.partial"


def filled(folder: Path) -> CheckpointLog:
    log = CheckpointLog(folder)
    log.begin({"tensors": ["a"]})
    log.add(Checkpoint(10, {"a": (40, 1)}))
    log.add(Checkpoint(25, {"a": (100, 2), "b": (7, 3)}))
    return log


def test_checkpoints_are_read_back(folder: Path) -> None:
    """Checkpoints are read back as written, and the last one states the number of rows."""
    log = filled(folder)
    expected = [Checkpoint(10, {"a": (40, 1)}), Checkpoint(25, {"a": (100, 2), "b": (7, 3)})]
    assert log.checkpoints == expected
    log.close()
    reopened = CheckpointLog(folder)
    assert (reopened.job, reopened.checkpoints, reopened.moves, reopened.rows) == (
        {"tensors": ["a"]},
        expected,
        None,
        25,
    )
    reopened.finish({"b": "c"})
    reopened.close()
    last = CheckpointLog(folder)
    assert last.moves == {"b": "c"}
    last.close()


@pytest.mark.parametrize(("back", "rows"), [(25, [10, 25]), (24, [10]), (10, [10]), (9, []), (0, [])])
def test_rows_are_taken_back(folder: Path, back: int, rows: list[int]) -> None:
    """take_back removes the checkpoints of damaged rows, in this run and the next."""
    log = filled(folder)
    log.take_back(back)
    assert [checkpoint.rows for checkpoint in log.checkpoints] == rows
    log.close()
    reopened = CheckpointLog(folder)
    assert [checkpoint.rows for checkpoint in reopened.checkpoints] == rows
    assert reopened.rows == (rows[-1] if rows else 0)
    reopened.close()


def test_whether_starting_over_loses_anything(folder: Path) -> None:
    """The log is empty unless it has rows of a job, or files that only have to be renamed."""
    log = CheckpointLog(folder)
    assert log.is_empty
    log.add(Checkpoint(5, {}))
    assert log.is_empty, "rows of no job"
    log.begin({})
    assert not log.is_empty
    log.take_back(0)
    assert log.is_empty
    log.finish({})
    assert not log.is_empty
    log.clear()
    assert (log.is_empty, log.job, log.checkpoints, log.moves) == (True, None, [], None)
    log.close()
    assert CheckpointLog(folder).is_empty


def test_one_writer_at_a_time(folder: Path) -> None:
    """A second writer is refused with the name of the file, and leaves no descriptor open."""
    log = CheckpointLog(folder)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DestinationError, match=r"a\.npy is being written by another writer"):
        CheckpointLog(folder)
    assert len(os.listdir("/proc/self/fd")) == before
    log.close()
    CheckpointLog(folder).close()


def test_a_disk_without_locks_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, method: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(DestinationError) as caught:
        CheckpointLog(folder)
    assert caught.value.message.startswith(f"The file system of {str(folder)!r} cannot lock files")


def test_the_name_of_the_log_lasts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is synced before the first record, and the log after every record."""
    synced: list[str] = []
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    log = CheckpointLog(folder)
    assert synced == [folder.name]
    log.begin({})
    log.add(Checkpoint(1, {}))
    log.take_back(0)
    log.finish({})
    assert synced[1:] == [RECEIPTS] * 4
    log.close()


def test_others_may_go_on_with_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has the permissions that the user's umask allows."""
    before = os.umask(0)
    try:
        CheckpointLog(folder).close()
    finally:
        os.umask(before)
    assert (folder / RECEIPTS).stat().st_mode & 0o777 == 0o666
    assert RECEIPTS == "receipts.jsonl"


def test_lines_of_another_kind_are_passed_over(folder: Path) -> None:
    from brim.state.record_log import record_line

    lines = [{"type": "rows", "rows": "many", "blocks": {}}, {"type": "new"}, {"type": "job", "job": 1}, {"rows": 1}]
    (folder / RECEIPTS).write_bytes(b"".join(map(record_line, lines)))
    log = CheckpointLog(folder)
    assert (log.job, log.rows, log.moves) == (None, 0, None)
    log.close()
