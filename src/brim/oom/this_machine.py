"""What this machine has written down: the kernel's ring buffer, the journal, log files, counters, brim's logs.

Each source says for itself why it could not be read; none of them is needed by another.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO

from brim.memory.meter import meminfo
from brim.oom.kills import Bound, Evidence, Kill, MachineRoom, Restart, Source
from brim.oom.log_lines import BLOCK_BYTES, Clock
from brim.oom.scan_log import LogFindings, Scan, scan_file, scan_lines, why_unreadable
from brim.records import dataclass

_MOST_GROUPS = 20_000
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupCount:
    """A cgroup in which something was killed since it was made."""

    group: str
    kills: int
    limit_bytes: int | None
    peak_bytes: int | None
    file: str


def group_counts(root: Path = Path("/")) -> tuple[list[GroupCount], str]:
    """Every cgroup with kills, v1 and v2; and why not, if none could be read."""
    mounts = [
        (root / "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        (root / "sys/fs/cgroup", "memory.events.local", "memory.max", "memory.peak"),
        (root / "sys/fs/cgroup/unified", "memory.events.local", "memory.max", "memory.peak"),
    ]
    found: list[GroupCount] = []
    seen = 0
    for mount, events, limit, peak in mounts:
        for folder in _folders(mount, events):
            seen += 1
            kills = _count(folder / events)
            if kills:
                group = "/" + os.path.relpath(folder, mount).removeprefix(".")
                found.append(
                    GroupCount(group, kills, _number(folder / limit), _number(folder / peak), str(folder / events))
                )
    return found, "" if seen else "no cgroup has counters for memory here"


def machine_count(root: Path = Path("/")) -> int | None:
    """Kills since boot, machine-wide; None where the kernel does not count them (before 4.13)."""
    try:
        for line in (root / "proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def _folders(mount: Path, events: str) -> Iterator[Path]:
    for count, (folder, children, files) in enumerate(os.walk(mount)):
        if mount.name == "cgroup" and folder == str(mount):
            children[:] = [child for child in children if child not in ("memory", "unified")]  # mounts of their own
        if events in files:
            yield Path(folder)
        if count >= _MOST_GROUPS:
            return


def _count(path: Path) -> int:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), 0)
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


_LOG_FILE = re.compile(r"(?:kern\.log|messages|syslog)(?:[.-].*)?")
_KMSG = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
_JOURNAL_VOICES = ("systemd-oomd", "earlyoom", "systemd", "slurmstepd", "kubelet", "dockerd", "containerd")


def ring_buffer(root: Path = Path("/")) -> LogFindings:
    """The kernel's messages of this boot, as long as they are kept: /dev/kmsg, or the dmesg command."""
    clock = Clock(boot_time=boot_time())
    scan = Scan("dmesg", clock)
    try:
        kills, restarts = scan_lines(scan, _kmsg(root / "dev/kmsg"))
        return _of_this_boot(kills, restarts, Source("dmesg", found=len(kills)))
    except OSError as error:
        problem = why_unreadable(error)
    try:
        done = subprocess.run(["dmesg"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode != 0:
        return LogFindings(sources=[Source("dmesg", f"{problem}; it needs root, or kernel.dmesg_restrict=0")])
    kills, restarts = scan_lines(scan, scan.lines([done.stdout + b"\n"]))
    return _of_this_boot(kills, restarts, Source("dmesg", found=len(kills)))


def _of_this_boot(kills: list[Kill], restarts: list[Restart], source: Source) -> LogFindings:
    return LogFindings([replace(kill, boot=0) for kill in kills], restarts, [source])


def _kmsg(path: Path) -> Iterator[tuple[int, str]]:
    """(sequence number, line) of all the records that are there; does not wait for more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, BLOCK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while it was read: the next one is whole again
                    continue
                raise
            if not record:
                return
            for line in record.decode("utf-8", "replace").split("\n"):
                match = _KMSG.match(line)
                if match is None:
                    continue  # a record's dictionary
                seconds = int(match[3]) / 1e6
                text = _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), match[4])
                for part in text.split("\n"):
                    yield int(match[2]), f"[{seconds:12.6f}] {part}"
    finally:
        os.close(descriptor)


def journal(since: datetime | None = None, boot: int | None = None) -> LogFindings:
    """The journal, of all boots that it holds or of one."""
    command = shutil.which("journalctl")
    if command is None:
        return LogFindings(sources=[Source("journal", "there is no journalctl on this machine")])
    arguments = [command, "--no-pager", "-q", "-o", "short-iso-precise"]
    if boot is not None:
        arguments += ["-b", str(boot)]
    if since is not None:
        arguments += ["--since", since.astimezone().strftime("%Y-%m-%d %H:%M:%S")]
    arguments.append("_TRANSPORT=kernel")
    for voice in _JOURNAL_VOICES:
        arguments += ["+", f"SYSLOG_IDENTIFIER={voice}"]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    except OSError as error:
        return LogFindings(sources=[Source("journal", why_unreadable(error))])
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        scan = Scan("journal", Clock())
        blocks = _counted_blocks(process.stdout)
        kills, restarts = scan_lines(scan, scan.lines(blocks))
        said = process.stderr.read().decode("utf-8", "replace").strip()
    problem = said.splitlines()[-1] if said and process.returncode else ""
    note = ""
    if not problem and not blocks.count:
        note = "empty"
        if not _journal_is_ours():
            note = "nothing in it that this user may read (the groups adm and systemd-journal may)"
    if boot is not None:
        kills = [replace(kill, boot=boot) for kill in kills]
    return LogFindings(kills, restarts, [Source("journal", problem, len(kills), note)])


class _counted_blocks:
    """The blocks of a pipe, counted: an empty journal is told apart from one without kills."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe, self.count = pipe, 0

    def __iter__(self) -> Iterator[bytes]:
        while block := self.pipe.read(BLOCK_BYTES):
            self.count += len(block)
            yield block


def _journal_is_ours() -> bool:
    return os.geteuid() == 0 or any(os.access(path, os.R_OK) for path in ("/var/log/journal", "/run/log/journal"))


def log_files(root: Path = Path("/"), since: datetime | None = None) -> LogFindings:
    """kern.log, messages and syslog with what was rotated from them, oldest first."""
    folder = root / "var/log"
    try:
        paths = [path for path in folder.iterdir() if _LOG_FILE.fullmatch(path.name) and path.is_file()]
        paths.sort(key=lambda path: path.stat().st_mtime)
    except OSError as error:
        return LogFindings(sources=[Source(str(folder), why_unreadable(error))])
    if since is not None:
        paths = [path for path in paths if path.stat().st_mtime >= since.timestamp()]
    if not paths:
        return LogFindings(sources=[Source(f"{folder}/{{kern.log,messages,syslog}}", "there are none")])
    found = LogFindings()
    later_boots: dict[str, int] = {}
    for path in reversed(paths):
        one = scan_file(path, str(path), terminals=False)
        family = re.split(r"[.-]", path.name)[0]
        behind = later_boots.get(family, 0)
        one.kills = [replace(kill, boot=(kill.boot or 0) - behind) for kill in one.kills]
        found.add(one)
        later_boots[family] = behind + one.boots
    found.sources.reverse()
    return found


def counters(root: Path = Path("/")) -> tuple[list[Kill], list[Source], int | None]:
    """Kills that cgroups counted, their sources, and the machine's own count since boot."""
    counts, problem = group_counts(root)
    kills = [
        Kill(
            "kernel",
            "cgroup",
            sure="likely",
            reason="the cgroup's counter says that something was killed in it, and not what or when",
            count=count.kills,
            signal=9,
            boot=0,
            bound=Bound(count.limit_bytes, count.peak_bytes, "memory", count.group, count.group),
            evidence=(Evidence(count.file, None, f"oom_kill {count.kills}"),),
        )
        for count in counts
    ]
    total = machine_count(root)
    vmstat = (
        Source("/proc/vmstat", found=total or 0, note="")
        if total is not None
        else Source("/proc/vmstat", "it has no oom_kill (kernels before 4.13 do not count)")
    )
    return kills, [Source("cgroup counters", problem, sum(kill.count for kill in kills)), vmstat], total


def room(root: Path = Path("/")) -> MachineRoom:
    """The machine's memory as it is now."""
    sizes = meminfo(root / "proc/meminfo")
    return MachineRoom(sizes.get("MemTotal"), sizes.get("SwapTotal"))


def boot_time() -> datetime | None:
    """When this machine booted, as the kernel's stamps count: without the time it slept."""
    try:
        uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    except (AttributeError, OSError):
        return None
    return datetime.now().astimezone() - timedelta(seconds=uptime)
