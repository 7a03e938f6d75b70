"""Programs above the memory limit are killed, others are not, and the watcher survives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from brim.memory.cgroup import Cgroup, open_group
from brim.monitor.log_writer import read_log
from tests.conftest import brim

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
PYTHON = sys.executable
MB = 1_000_000


def _no_group() -> str | None:
    """Return the reason why a cgroup with a hard limit is not available, or None."""
    group = open_group(10**9) if sys.platform == "linux" else "not Linux"
    if isinstance(group, Cgroup):
        group.remove()
        return None
    return group


NO_GROUP = _no_group()
hard = pytest.mark.skipif(NO_GROUP is not None, reason=f"no cgroup of our own here: {NO_GROUP}")
both_ways = pytest.mark.parametrize("options", [pytest.param([], marks=hard, id="cgroup"), ["--no-cgroup"]])

# Writes its memory at the start and the number of bytes filled since into a file, which survives its kill.
GREEDY = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    count = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
    count[1] = int(open("/proc/self/status").read().partition("RssAnon:")[2].split()[0]) * 1024
    block = mmap.mmap(-1, 4_000_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"x" * 1_000_000
    for at in range(0, len(block) - len(page), len(page)):
        block[at : at + len(page)] = page
        count[0] = at + len(page)
"""


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def run(*arguments: str | Path, check: int) -> dict[str, Any]:
    """Run `brim run --json` and return its final object."""
    result = brim("run", "--json", *arguments, check=check)
    return json.loads(result.stderr.splitlines()[-1])  # type: ignore[no-any-return]


def greedy(tmp_path: Path, *options: str) -> tuple[dict[str, Any], int]:
    count = tmp_path / "count"
    count.write_bytes(bytes(16))
    facts = run("--memory", "300MB", *options, "--", PYTHON, "-c", GREEDY, count, check=4)
    numbers = count.read_bytes()
    return facts, int.from_bytes(numbers[:8], "little") + int.from_bytes(numbers[8:], "little")


@hard
def test_with_a_cgroup_not_a_byte_over(tmp_path: Path) -> None:
    """A child that allocates as fast as it can never exceeds the limit, by its own count and by brim's."""
    for _ in range(3):
        facts, retained = greedy(tmp_path)
        assert 200 * MB < retained <= 300 * MB
        assert facts["overshoot_bytes"] == 0
        assert facts["limit"]["enforced"].startswith("cgroup v")
        assert facts["stopped"] in ("stop", "kill", "oom")


def test_without_a_cgroup_it_is_ended_and_the_overshoot_said(tmp_path: Path) -> None:
    """Without a cgroup, the process is killed far below the 4 GB it requests, and the report states the excess.

    This is best effort (see benchmarks/watch.py); the exit code is 4.
    """
    facts, retained = greedy(tmp_path, "--no-cgroup")
    assert 200 * MB < retained < 2_000 * MB
    assert facts["limit"]["enforced"] == "best effort"
    assert facts["stopped"] in ("stop", "kill")
    assert facts["overshoot_bytes"] == max(facts["peak_bytes"] - 300 * MB, 0)


@both_ways
def test_a_mapped_file_is_never_stopped(tmp_path: Path, options: list[str]) -> None:
    """Reading all of a 2 GB file through a memory map under a 200 MB limit causes no action."""
    with open(tmp_path / "big", "wb") as file:
        file.truncate(2 << 30)
    script = (
        "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print(sum(m[i] for i in range(0, len(m), 4096)))"
    )
    facts = run("--memory", "200MB", *options, "--", PYTHON, "-c", script, tmp_path / "big", check=0)
    assert facts["alerts"] == []
    assert facts["peak_bytes"] < 50 * MB


@both_ways
def test_forked_readers_are_never_stopped(options: list[str]) -> None:
    """A 200 MB parent and eight forks that read it hold 200 MB, not 1.8 GB, and run under a 400 MB limit."""
    script = """
import os, time
block = bytearray(b"x") * 200_000_000
for _ in range(8):
    if os.fork() == 0:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            sum(memoryview(block)[::65536])
            time.sleep(0.02)
        os._exit(0)
for _ in range(8):
    os.wait()
"""
    facts = run("--memory", "400MB", *options, "--alert-after", "0.5", "--", PYTHON, "-c", script, check=0)
    assert facts["alerts"] == []
    assert 200 * MB < facts["peak_bytes"] < 300 * MB


@both_ways
def test_files_in_tmpfs_are_counted(options: list[str], folder_in_memory: Path) -> None:
    """300 MB in a tmpfs file that no process holds exceed a 200 MB limit."""
    script = """
import sys, time
with open(sys.argv[1], "wb") as file:
    for _ in range(300):
        file.write(b"x" * 1_000_000)
        time.sleep(0.002)
time.sleep(20)
"""
    facts = run("--memory", "200MB", *options, "--", PYTHON, "-c", script, folder_in_memory / "file", check=4)
    assert facts["peak_bytes"] > 165 * MB


def test_files_that_stay_behind_are_named(folder_in_memory: Path) -> None:
    """Many files of 10 MB that are closed at once are counted, and those that remain after the kill are listed."""
    script = """
import pathlib, sys, time
for number in range(60):
    pathlib.Path(sys.argv[1], str(number)).write_bytes(b"x" * 10_000_000)
time.sleep(20)
"""
    facts = run("--memory", "300MB", "--no-cgroup", "--", PYTHON, "-c", script, folder_in_memory, check=4)
    assert sum(size for _, size in facts["left_files"]) > 90 * MB
    assert facts["left_files"][0][0].startswith(str(folder_in_memory))


def test_a_peak_between_two_samples_is_seen() -> None:
    """The kernel's high-water mark includes a short peak of 400 MB in a child that ends between two samples."""
    script = """
import subprocess, sys, time
time.sleep(2.5)
subprocess.run([sys.executable, "-c", "b = bytearray(b'x') * 400_000_000"])
"""
    facts = run("--no-cgroup", "--", PYTHON, "-c", script, check=0)
    assert facts["peak_bytes"] > 350 * MB  # the high-water mark includes file pages, which are subtracted
    assert facts["usage"]["user_s"] + facts["usage"]["system_s"] > 0.01


@hard
def test_a_killed_worker_takes_its_tree_along(tmp_path: Path) -> None:
    """If the kernel kills one process at the limit, its parent is killed too, with exit code 4 and the reason."""
    script = """
import os, sys, time
if os.fork() == 0:
    block = bytearray(b"x") * 2_000_000_000
time.sleep(60)
"""
    started_at = time.monotonic()
    facts = run("--memory", "150MB", "--kill-at", "off", "--stop-at", "off", "--", PYTHON, "-c", script, check=4)
    assert time.monotonic() - started_at < 20
    assert facts["stopped"] == "oom"
    assert facts["oom_kills"] >= 1


def eventually(true: Callable[[], Any], seconds: float = 10.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (match := true()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return match


@both_ways
@pytest.mark.parametrize("pause_s", [0.0, 0.5], ids=["before a sample", "after samples"])
def test_killing_brim_does_not_end_the_watch(tmp_path: Path, options: list[str], pause_s: float) -> None:
    """After kill -9 of `brim run`, the command continues, and the watcher still enforces its limit and ends the log."""
    log = tmp_path / "l.jsonl"
    script = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
block = bytearray(b"x") * 400_000_000
time.sleep(60)
"""
    command = [PYTHON, "-m", "brim", "run", "-q", "--memory", "200MB", *options, "--log", str(log)]
    process = subprocess.Popen([*command, "--", PYTHON, "-c", script, str(tmp_path / "go")], stderr=subprocess.DEVNULL)
    pid = eventually(lambda: log.exists() and [e["pid"] for e in read_log(log) if e["type"] == "head"])[0]
    try:
        time.sleep(pause_s)
        process.kill()
        process.wait()
        time.sleep(0.3)
        os.kill(pid, 0)
        (tmp_path / "go").touch()
        end = eventually(lambda: [e for e in read_log(log) if e["type"] == "end"])[0]
        assert end["stopped"] in ("stop", "kill", "oom")
        assert end["exit_code"] is None
        eventually(lambda: not Path(f"/proc/{pid}").exists() or _zombie(pid))
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def _zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_killed_watcher_is_said_and_the_command_goes_on(tmp_path: Path) -> None:
    """After kill -9 of the watcher, the command ends normally, and brim reports that it was unwatched."""
    process = subprocess.Popen(
        [PYTHON, "-m", "brim", "run", "--no-cgroup", "--", "sh", "-c", "sleep 1.5; exit 5"],
        stderr=subprocess.PIPE,
        text=True,
    )

    def watcher() -> list[int]:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        actual = [int(c) for c in children if "brim.monitor.watching.watcher" in Path(f"/proc/{c}/cmdline").read_text()]
        return actual if len(children) > 1 else []

    os.kill(eventually(watcher)[0], signal.SIGKILL)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 5
    assert "unwatched" in stderr
    assert "Traceback" not in stderr


@hard
def test_no_group_is_left_behind(tmp_path: Path) -> None:
    """After a run, a kill and a command that never started, their cgroups are removed."""
    group = open_group(None)
    assert isinstance(group, Cgroup)
    home = group.folder.parent
    assert group.remove()
    before = set(home.iterdir())
    brim("run", "-q", "--memory", "100MB", "--", "true")
    brim("run", "-q", "--memory", "100MB", "--", "no-such-command", check=127)
    greedy(tmp_path)
    eventually(lambda: {path for path in home.iterdir() if path.name.startswith("brim-")} <= before)
