"""The log is complete at every moment, bounded in size, and readable after any damage."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import brim.monitor.log_writer as watch_log
from brim.errors import InputError
from brim.monitor.log_writer import LogWriter, check_log, new_log_path, read_log


def sample(t: float, total: int) -> dict[str, object]:
    return {"t": t, "total_bytes": total, "file_bytes": 0, "filler": "x" * 100}


def test_a_line_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    """A line is in the file as soon as it is written, so a crash loses nothing in a buffer."""
    log = LogWriter(tmp_path / "log.jsonl")
    log.write("head", {"limit": {"bytes": 1}})
    log.write("sample", sample(1.0, 5))
    assert [entry["type"] for entry in read_log(log.path)] == ["head", "sample"]
    assert (tmp_path / "log.jsonl").stat().st_mode & 0o077 == 0
    log.close()


def test_a_log_does_not_outgrow_its_bound(tmp_path: Path) -> None:
    """The log stays below 1.5 times its bound and keeps every event, the peak, and recent samples unchanged."""
    bound = 200_000
    log = LogWriter(tmp_path / "log.jsonl", bound)
    log.write("head", {"limit": {"bytes": 1}})
    largest = 0
    for number in range(12_000):
        log.write("sample", sample(number * 1.0, 10**6 if number != 777 else 10**9))
        if number % 1000 == 0:
            log.write("event", {"t": number, "kind": "mark", "text": str(number)})
        largest = max(largest, log.path.stat().st_size)
    log.close()
    entries = list(read_log(log.path))
    assert largest <= 1.5 * bound + 1000  # up to half of the bound more during thinning, and one line
    assert [entry["text"] for entry in entries if entry["type"] == "event"] == [str(n * 1000) for n in range(12)]
    samples = [entry for entry in entries if entry["type"] == "sample"]
    assert max(entry["total_bytes"] for entry in samples) == 10**9
    assert [entry["t"] for entry in samples] == sorted(entry["t"] for entry in samples)
    assert [entry["t"] for entry in samples][-5:] == [11_995.0, 11_996.0, 11_997.0, 11_998.0, 11_999.0]
    assert list(tmp_path.iterdir()) == [log.path]


@given(cut=st.integers(0, 400), junk=st.binary(max_size=60))
def test_torn_lines_are_left_out(cut: int, junk: bytes) -> None:
    """A log that is cut at any byte, with arbitrary data after the cut, gives the complete lines before it."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        log = LogWriter(Path(folder) / "log.jsonl")
        for number in range(3):
            log.write("sample", sample(number, number))
        log.close()
        data = log.path.read_bytes()
        whole = data[:cut].count(b"\n")
        log.path.write_bytes(data[:cut] + b"\n" + junk)
        actual = list(read_log(log.path))
        assert [entry["t"] for entry in actual[:whole]] == list(range(whole))


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    """On a full disk the watch continues and counts the lost lines."""
    log = LogWriter(Path("/dev/full"))
    log.write("sample", sample(1.0, 5))
    assert log.lost_lines == 1


def test_old_logs_are_removed(tmp_path: Path) -> None:
    """The folder of logs keeps the newest hundred logs."""
    for number in range(105):
        path = tmp_path / f"{number:03d}.jsonl"
        path.touch()
        os.utime(path, (number, number))
    assert new_log_path("train it.py", tmp_path).name.endswith("-train_it.py.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "005.jsonl"


def test_a_slow_disk_does_not_hold_the_watch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are written without waiting for a slow sync; closing the log waits for it."""
    synced = []

    def slow(descriptor: int) -> None:
        time.sleep(0.5)
        synced.append(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    log = LogWriter(tmp_path / "log.jsonl")
    started_at = time.monotonic()
    for number in range(50):
        log.write("event", {"t": number, "kind": "alert", "text": ""})
    assert time.monotonic() - started_at < 0.4
    assert len(list(read_log(log.path))) == 50
    log.close()
    assert synced


def test_a_log_that_could_not_be_thinned_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk has no space for the thinned copy, the log keeps all its lines."""

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch_log, "thin", no_room)
    log = LogWriter(tmp_path / "log.jsonl", 20_000)
    log.write("head", {"limit": {"bytes": 1}})
    for number in range(500):
        log.write("sample", sample(number * 1.0, 5))
    log.close()
    assert [entry["type"] for entry in read_log(log.path)] == ["head"] + ["sample"] * 500


def test_a_log_takes_the_place_of_logs_alone(tmp_path: Path) -> None:
    """A missing file, an empty file and an older log may be replaced; a text file and a pipe may not."""
    old = LogWriter(tmp_path / "old.jsonl")
    old.write("head", {})
    old.close()
    (tmp_path / "empty").touch()
    for name in ("new", "empty", "old.jsonl"):
        check_log(tmp_path / name)
    (tmp_path / "thesis.txt").write_text("precious")
    os.mkfifo(tmp_path / "pipe")
    for name in ("thesis.txt", "pipe"):
        with pytest.raises(InputError, match="not a run log of brim"):
            check_log(tmp_path / name)
