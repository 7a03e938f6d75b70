"""The memory of a process tree, measured on real processes; shared memory is counted once."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from brim.memory.meter import proportional_usage, read_process, started, tree
from brim.memory.tmpfs_files import TmpfsFiles
from brim.memory.tree_meter import TreeMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
MB = 1_000_000


@contextmanager
def child(code: str, *arguments: str) -> Iterator[int]:
    """Start a Python process that prints "ready" after it has run its code, and then waits."""
    code += "\nimport sys; print('ready', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


FORKS = """
import os, time
block = bytearray(b"x") * 60_000_000
for _ in range(6):
    if os.fork() == 0:
        time.sleep(60)
"""


def test_forked_readers_count_once() -> None:
    """A 60 MB parent and six forks have an RSS sum of 420 MB and hold 60 MB."""
    with child(FORKS) as pid:
        meter = TreeMeter(lambda: [pid])
        reading = meter.read(threshold_bytes=100 * MB)
        assert len(reading.processes) == 7
        assert sum(p.usage.total_bytes for p in reading.processes) > 400 * MB
        assert 60 * MB < reading.usage.total_bytes < 90 * MB


def test_copies_are_noticed_although_no_sum_grows() -> None:
    """A fork that writes to shared pages changes page faults and not RSS; the tree is then measured again."""
    code = """
import os, signal, time
block = bytearray(b"x") * 60_000_000
read, write = os.pipe()
if os.fork() == 0:
    os.read(read, 1)
    for i in range(0, len(block), 4096):
        block[i] = 1
    time.sleep(60)
signal.signal(signal.SIGUSR1, lambda *_: os.write(write, b"1"))
"""
    with child(code) as pid:
        meter = TreeMeter(lambda: [pid])
        assert meter.read(threshold_bytes=70 * MB).usage.total_bytes < 90 * MB
        os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while meter.read(threshold_bytes=70 * MB).usage.total_bytes < 115 * MB:
            assert time.monotonic() < deadline, "the copies were not seen"
            time.sleep(0.05)


def test_orphans_stay_in_the_tree() -> None:
    """A process whose parent has ended is still counted, and removed when it ends."""
    code = """
import os, time
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(0.4)
    os._exit(0)
os.wait
"""
    with child(code) as pid:
        meter = TreeMeter(lambda: [pid])
        deadline = time.monotonic() + 5
        while len(meter.members()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        grandchild = meter.members()[2]
        while grandchild in tree([pid]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert grandchild in meter.members()
        os.kill(grandchild, signal.SIGKILL)
        while grandchild in meter.members():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_shared_memory_counts_once() -> None:
    """A 50 MB shared map that three processes touch counts as 50 MB."""
    code = """
import mmap, os, time
shared = mmap.mmap(-1, 50_000_000)
for _ in range(2):
    if os.fork() == 0:
        shared[:] = b"y" * len(shared)
        time.sleep(60)
shared[:] = b"x" * len(shared)
time.sleep(0.5)
"""
    with child(code) as pid:
        reading = TreeMeter(lambda: [pid]).read(threshold_bytes=10 * MB)
        assert sum(p.usage.shmem_bytes for p in reading.processes) > 140 * MB
        assert 45 * MB < reading.usage.shmem_bytes < 60 * MB


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    """50 MB of a mapped file are listed separately and not included."""
    (tmp_path / "file").write_bytes(b"x" * 50_000_000)
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "s = sum(m[i] for i in range(0, len(m), 4096))"
    )
    with child(code, str(tmp_path / "file")) as pid:
        usage = TreeMeter(lambda: [pid]).read().usage
        assert usage.file_bytes > 45 * MB
        assert usage.total_bytes < 20 * MB


def test_files_in_tmpfs_count(folder_in_memory: Path) -> None:
    """30 MB in a tmpfs file belong to the tree until the file is deleted, although no process holds them."""
    file = folder_in_memory / "file"
    growth = TmpfsFiles()
    code = "import sys; open(sys.argv[1], 'wb').write(b'x' * 30_000_000)"
    with child(code, str(file)) as pid:
        meter = TreeMeter(lambda: [pid], tmpfs=growth)
        assert 28 * MB < meter.read(threshold_bytes=MB).usage.shmem_bytes < 33 * MB
        file.unlink()
        deadline = time.monotonic() + 10
        while TreeMeter(lambda: [pid], tmpfs=growth).read(threshold_bytes=MB).usage.shmem_bytes > 5 * MB:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_strangers_tmpfs_file_does_not_count(folder_in_memory: Path) -> None:
    """A file that a process outside the tree has open belongs to that process, even if both have the same user."""
    growth = TmpfsFiles()
    code = "import sys; f = open(sys.argv[1], 'wb'); f.write(b'x' * 30_000_000); f.flush()"
    with child(code, str(folder_in_memory / "other")), child("") as pid:
        assert TreeMeter(lambda: [pid], tmpfs=growth).read(threshold_bytes=MB).usage.shmem_bytes < 5 * MB


def test_files_count_while_another_is_written(folder_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample counts the files that a busy process had closed by then, even while another one is written.

    Other processes of this machine are hidden: a file is not attributed while one of them writes as much.
    """
    monkeypatch.setattr("brim.memory.tmpfs_files.all_pids", list)
    code = """
import pathlib, sys, threading
def write():
    for number in range(60):
        pathlib.Path(sys.argv[1], f"{number:02d}").write_bytes(b"x" * 10_000_000)
threading.Thread(target=write).start()
"""
    growth = TmpfsFiles()
    with child(code, str(folder_in_memory)) as pid:
        existing: list[str] = []
        while len(existing) < 60:
            existing = sorted(map(str, folder_in_memory.iterdir()))
            growth._next_listing = 0.0
            growth.bytes_of([pid])
            # the last file may still be incomplete
            assert {path for path, _ in growth.left_behind()} >= {*existing[:-1]}


def test_what_a_bystander_wrote_and_closed_does_not_count(folder_in_memory: Path) -> None:
    """A file of the same user that no process has open does not belong to a tree that has written nothing."""
    growth = TmpfsFiles()
    with child("") as pid:
        (folder_in_memory / "closed").write_bytes(b"x" * 30_000_000)
        assert TreeMeter(lambda: [pid], tmpfs=growth).read(threshold_bytes=MB).usage.shmem_bytes < 5 * MB
        assert growth.left_behind() == []


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_a_memfd_that_is_not_mapped_counts(folder_in_memory: Path) -> None:
    """30 MB in an anonymous memfd belong to the tree; if it is mapped as well, they still count as 30 MB."""
    growth = TmpfsFiles()
    code = """
import mmap, os
file = os.memfd_create("held")
os.write(file, b"x" * 30_000_000)
"""
    with child(code) as pid:
        assert 28 * MB < TreeMeter(lambda: [pid], tmpfs=growth).read(MB).usage.shmem_bytes < 33 * MB
    growth = TmpfsFiles()
    with child(code + "map = mmap.mmap(file, 30_000_000); sum(map[::4096])") as pid:
        assert 28 * MB < TreeMeter(lambda: [pid], tmpfs=growth).read(MB).usage.shmem_bytes < 33 * MB


def test_the_ended_hold_nothing() -> None:
    """Reading a zombie or a process that never existed returns None and raises no error."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 5
    while started(process.pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert read_process(process.pid) is None  # a zombie, because it is not reaped yet
    process.wait()
    assert read_process(2**22 - 1) is None
    usage = proportional_usage(2**22 - 1)
    assert usage is not None
    assert usage.total_bytes == 0


def test_a_name_may_hold_anything() -> None:
    """Process names with blanks and parentheses are parsed completely, and so are the fields after them."""
    code = "import ctypes; ctypes.CDLL(None).prctl(15, b'a) (b c', 0, 0, 0)"
    with child(code) as pid:
        process = read_process(pid)
        assert process is not None
        assert process.name == "a) (b c"
        assert (started(pid) or 0) > (started(1) or 0)


def test_the_quick_look_is_the_careful_one_for_a_lone_process() -> None:
    """Without shared memory, status and smaps_rollup agree."""
    with mmap.mmap(-1, 4096), child("block = bytearray(b'x') * 40_000_000") as pid:
        quick, careful = read_process(pid), proportional_usage(pid)
        assert quick is not None
        assert careful is not None
        assert abs(quick.usage.total_bytes - careful.total_bytes) < MB


def test_a_number_that_was_given_away_is_nobody_we_know() -> None:
    """A root with another start time is not measured: with --enforce, an unrelated process could be killed."""
    from brim.memory.limit import Limit
    from brim.monitor.watching.launch import WatchConfig, WatchTarget
    from brim.monitor.watching.watcher import Watcher

    with child("") as pid:
        watcher = object.__new__(Watcher)
        watcher.config = WatchConfig(WatchTarget("process", pid=pid), "log", Limit(1, "why"))
        watcher._starts = {pid: started(pid)}
        assert watcher._roots() == [pid]
        watcher._starts = {pid: (started(pid) or 0) - 1}
        assert watcher._roots() == []


def test_tree_finds_more_children_than_one_page_of_proc_lists() -> None:
    """All children are found, although the kernel lists them in pages of about 600 numbers."""
    script = (
        "import os, sys, time\n"
        "for _ in range(900):\n"
        "    if os.fork() == 0: time.sleep(60); os._exit(0)\n"
        "print('ready', flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        assert len(tree([parent.pid])) == 901
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()
