"""Writing files durably: partial writes of the operating system, and files that are flushed while they are written."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brim
from brim.compute.outputs.rows_file import HashedFile
from brim.state import atomic_files as durable
from brim.state.atomic_files import Outflow, file_system, write_all
from brim.state.record_log import append_line


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limit each system call to three bytes, and return a counter of the calls."""
    calls = [0]

    def shortened(name: str) -> Callable[..., int]:
        plain = getattr(os, name)

        def call(descriptor: int, data: Any, *position: int) -> int:
            calls[0] += 1
            return int(plain(descriptor, memoryview(data)[:3], *position))

        return call

    for name in ("write", "pwrite"):
        monkeypatch.setattr(os, name, shortened(name))
    return calls


@pytest.mark.parametrize("size", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("position", [None, 0, 2])
def test_a_short_write_is_completed(tmp_path: Path, short: list[int], size: int, position: int | None) -> None:
    """A partial write is repeated until every byte is at its position."""
    data = bytes(range(1, size + 1))
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    write_all(descriptor, data, position)
    os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == (b"\0" * (position or 0) if size else b"") + data
    assert short[0] == -(-size // 3)


def test_a_short_line_is_completed_or_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a ledger is written completely, or removed again if the disk becomes full in the middle of it."""
    descriptor = os.open(tmp_path / "lines", os.O_RDWR | os.O_CREAT | os.O_APPEND)
    plain, budget = os.write, [100]

    def write(descriptor: int, data: Any) -> int:
        subset = min(4, budget[0])
        if not subset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        budget[0] -= subset
        return plain(descriptor, memoryview(data)[:subset])

    monkeypatch.setattr(os, "write", write)
    append_line(descriptor, b"first line\n")
    budget[0] = 6
    with pytest.raises(OSError, match="No space"):
        append_line(descriptor, b"second line\n")
    budget[0] = 100
    append_line(descriptor, b"third line\n")
    os.close(descriptor)
    assert (tmp_path / "lines").read_bytes() == b"first line\nthird line\n"


def test_files_of_short_writes_are_whole(tmp_path: Path, short: list[int]) -> None:
    """Partial writes do not change the contents of tensor files and unit files."""
    rows = np.arange(40, dtype="float32").reshape(10, 4)
    with brim.TensorWriter(tmp_path / "a.npy", 10, x=(4, "float32")) as writer:
        writer.append(x=rows)
    # the number of rows is unknown until it is closed
    with brim.TensorWriter(tmp_path / "b.npy", x=(4, "float32")) as writer:
        writer.append(x=rows)
    for name in ("a.npy", "b.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / name), rows)
    file = HashedFile(tmp_path / "unit", hashed=True)
    file.write(b"0123456789")
    file.close()
    assert (file.size, file.sha256) == (10, hashlib.sha256(b"0123456789").hexdigest())
    assert (tmp_path / "unit").read_bytes() == b"0123456789"
    assert short[0] > 20


@pytest.mark.parametrize("has_call", [True, False])
def test_a_file_is_on_its_way_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    """A file that is flushed while it is written has the same bytes, and errors of the disk are raised early.

    The flush uses the system call `sync_file_range`; one parameter runs without it.
    """
    if not has_call:
        monkeypatch.setattr(durable, "_sync_file_range", lambda: None)
    data = np.random.default_rng(0).bytes((5 << 20) + 1)
    file = HashedFile(tmp_path / "unit", hashed=True)
    for _ in range(13):
        file.write(data)
        for index in range(0, 300_000, 1000):  # small writes are buffered but keep their position
            file.write(data[index : index + 1000])
    assert file.tell() == 13 * (len(data) + 300_000)
    file.close()
    whole = (data + data[:300_000]) * 13
    assert (tmp_path / "unit").stat().st_size == file.size == len(whole)
    assert file.sha256 == hashlib.sha256(whole).hexdigest() == durable.sha256_of(tmp_path / "unit", lambda _: None)
    removed = os.open(tmp_path / "unit", os.O_RDWR)
    outflow = Outflow(removed)
    os.close(removed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        outflow.wrote(64 << 20)


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts"), reason="needs /proc")
def test_mounts_are_those_that_psutil_finds() -> None:
    """The parsed mount table is the same as that of psutil."""
    psutil = pytest.importorskip("psutil")
    expected = {disk.mountpoint.rstrip("/"): disk.fstype for disk in psutil.disk_partitions(all=True)}
    assert durable._mounted_types("/proc/self/mounts") == expected


def test_the_file_system_of_a_folder(tmp_path: Path) -> None:
    """The deepest mount point determines the file system of a folder. Of several mounts at a path, the last counts."""
    actual = [("/home/me/shared", "nfs4"), ("/", "ext4"), ("/home", "xfs"), ("/data set", "lustre"), ("/twice", "ext4")]
    actual += [("/twice", "nfs4"), ("/homes", "fuse.sshfs")]
    mounts = tmp_path / "mounts"
    lines = [f"/dev/x {position} {kind} rw 0 0".replace("data set", r"data\040set") for position, kind in actual]
    mounts.write_text("\n".join(lines))
    expected = {"/a": "ext4", "/home/me": "xfs", "/homeless": "ext4", "/home/me/shared2": "xfs", "/twice/a": "nfs4"}
    expected |= {"/home/me/shared/x": "nfs4", "/data set/a": "lustre", "/homes": "fuse.sshfs", "/": "ext4"}
    assert {location: file_system(location, str(mounts)) for location in expected} == expected
    mounts.write_text("")
    assert file_system("/a", str(mounts)) == ""
