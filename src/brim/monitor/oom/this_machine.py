"""Read the sources of this machine: the kernel's ring buffer, the journal, log files and the counters of cgroups.

Each source is optional, and reports the reason if it cannot be read.
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
from brim.monitor.oom.kills import Bound, Evidence, Kill, MachineRoom, Restart, Source
from brim.monitor.oom.log_lines import BLOCK_BYTES, Clock
from brim.monitor.oom.scan_log import LogFindings, Scan, reading_problem, scan_file, scan_lines

_MOST_GROUPS = 20_000
_UNLIMITED = 1 << 60


def group_counts(root: Path = Path("/")) -> tuple[list[Kill], str]:
    """Return the kills that cgroups (v1 and v2) counted, and the problem if no counter could be read."""
    mounts = [
        (root / "sys/fs/cgroup/memory", "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
        (root / "sys/fs/cgroup", "memory.events.local", "memory.max", "memory.peak"),
        (root / "sys/fs/cgroup/unified", "memory.events.local", "memory.max", "memory.peak"),
    ]
    kills: list[Kill] = []
    groups = 0
    for mount, events, limit, peak in mounts:
        for folder in _folders(mount, events):
            groups += 1
            count = _count(folder / events)
            group = "/" + os.path.relpath(folder, mount).removeprefix(".")
            if count:
                bound = Bound(_number(folder / limit), _number(folder / peak), "memory", group, group)
                kills.append(
                    Kill(
                        "kernel",
                        "cgroup",
                        sure="likely",
                        reason="the counter of the cgroup shows kills without the processes and times",
                        count=count,
                        signal=9,
                        boot=0,
                        bound=bound,
                        evidence=(Evidence(str(folder / events), None, f"oom_kill {count}"),),
                    )
                )
    return kills, "" if groups else "no cgroup has memory counters"


def machine_count(root: Path = Path("/")) -> int | None:
    """Return the kills since boot; None if the kernel does not count them (before 4.13)."""
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
            children[:] = [child for child in children if child not in ("memory", "unified")]  # separate mounts
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
_JOURNAL_SERVICES = (
    *("systemd-oomd", "earlyoom", "nohang", "nohang-desktop", "oomd", "systemd", "slurmstepd", "kubelet", "dockerd"),
    "containerd",
)


def ring_buffer(root: Path = Path("/")) -> LogFindings:
    """Scan the kernel's messages of this boot: /dev/kmsg, or the dmesg command."""
    clock = Clock(boot_time=boot_time())
    scan = Scan("dmesg", clock)
    try:
        kills, restarts = scan_lines(scan, _kmsg(root / "dev/kmsg"))
        return _of_this_boot(kills, restarts, Source("dmesg", found=len(kills)))
    except OSError as error:
        problem = reading_problem(error)
    try:
        process = subprocess.run(["dmesg"], capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        process = None
    if process is None or process.returncode != 0:
        return LogFindings(
            sources=[Source("dmesg", f"{problem}; reading it requires root, or kernel.dmesg_restrict=0")]
        )
    kills, restarts = scan_lines(scan, scan.lines([process.stdout + b"\n"]))
    return _of_this_boot(kills, restarts, Source("dmesg", found=len(kills)))


def _of_this_boot(kills: list[Kill], restarts: list[Restart], source: Source) -> LogFindings:
    return LogFindings([replace(kill, boot=0) for kill in kills], restarts, [source])


def _kmsg(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (sequence number, line) of the existing records, without waiting for more."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(descriptor, BLOCK_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.EPIPE:  # overwritten while it was read; the next one is complete
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
    """Scan the journal of all boots or of one."""
    command = shutil.which("journalctl")
    if command is None:
        return LogFindings(sources=[Source("journal", "this machine has no journalctl")])
    arguments = [command, "--no-pager", "-q", "-o", "short-iso-precise"]
    if boot is not None:
        arguments += ["-b", str(boot)]
    if since is not None:
        arguments += ["--since", since.astimezone().strftime("%Y-%m-%d %H:%M:%S")]
    arguments.append("_TRANSPORT=kernel")
    for service in _JOURNAL_SERVICES:
        arguments += ["+", f"SYSLOG_IDENTIFIER={service}"]
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    except OSError as error:
        return LogFindings(sources=[Source("journal", reading_problem(error))])
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        scan = Scan("journal", Clock())
        blocks = _counted_blocks(process.stdout)
        kills, restarts = scan_lines(scan, scan.lines(blocks))
        errors = process.stderr.read().decode("utf-8", "replace").strip()
    problem = errors.splitlines()[-1] if errors and process.returncode else ""
    note = ""
    if not problem and not blocks.count:
        note = "empty"
        if not _may_read_journal():
            note = "no entries that this user may read; the groups adm and systemd-journal may read all"
    if boot is not None:
        kills = [replace(kill, boot=boot) for kill in kills]
    return LogFindings(kills, restarts, [Source("journal", problem, len(kills), note)])


class _counted_blocks:
    """Counts the bytes of a pipe, to distinguish an empty journal from one without kills."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe, self.count = pipe, 0

    def __iter__(self) -> Iterator[bytes]:
        while block := self.pipe.read(BLOCK_BYTES):
            self.count += len(block)
            yield block


def _may_read_journal() -> bool:
    return os.geteuid() == 0 or any(os.access(path, os.R_OK) for path in ("/var/log/journal", "/run/log/journal"))


def log_files(root: Path = Path("/"), since: datetime | None = None) -> LogFindings:
    """Scan kern.log, messages and syslog with their rotated files, oldest first."""
    folder = root / "var/log"
    try:
        paths = [path for path in folder.iterdir() if _LOG_FILE.fullmatch(path.name) and path.is_file()]
        paths.sort(key=lambda path: path.stat().st_mtime)
    except OSError as error:
        return LogFindings(sources=[Source(str(folder), reading_problem(error))])
    if since is not None:
        paths = [path for path in paths if path.stat().st_mtime >= since.timestamp()]
    if not paths:
        return LogFindings(sources=[Source(f"{folder}/{{kern.log,messages,syslog}}", "no such files")])
    findings = LogFindings()
    later_boots: dict[str, int] = {}
    for path in reversed(paths):
        scanned = scan_file(path, str(path), terminals=False)
        family = re.split(r"[.-]", path.name)[0]
        boots_since = later_boots.get(family, 0)
        scanned.kills = [replace(kill, boot=(kill.boot or 0) - boots_since) for kill in scanned.kills]
        findings.add(scanned)
        later_boots[family] = boots_since + scanned.boots
    findings.sources.reverse()
    return findings


def counters(root: Path = Path("/")) -> tuple[list[Kill], list[Source], int | None]:
    """Return the kills that cgroups counted, the sources, and the kills of the machine since boot."""
    kills, problem = group_counts(root)
    total = machine_count(root)
    missing = "" if total is not None else "no oom_kill counter (kernels before 4.13 have none)"
    groups = Source("cgroup counters", problem, sum(kill.count for kill in kills))
    return kills, [groups, Source("/proc/vmstat", missing, total or 0)], total


def machine_memory(root: Path = Path("/")) -> MachineRoom:
    """Return the current memory of the machine."""
    sizes = meminfo(root / "proc/meminfo")
    return MachineRoom(sizes.get("MemTotal"), sizes.get("SwapTotal"))


def boot_time() -> datetime | None:
    """Return the time of boot as the kernel counts it, without the time of suspends."""
    try:
        uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
    except (AttributeError, OSError):
        return None
    return datetime.now().astimezone() - timedelta(seconds=uptime)
