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

from brim.memory.limit import UNLIMITED
from brim.memory.meter import oom_kills, read_counters, read_number
from brim.monitor.oom.kills import Bound, Evidence, Kill, Source
from brim.monitor.oom.log_lines import BLOCK_BYTES, Clock
from brim.monitor.oom.scan_log import LogFindings, Scan, reading_problem, scan_file, scan_lines

_MOST_GROUPS = 20_000
_LOG_FILE = re.compile(r"(?:kern\.log|messages|syslog)(?:[.-].*)?")
_KMSG = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")
_JOURNAL_SERVICES = (
    *("systemd-oomd", "earlyoom", "nohang", "nohang-desktop", "oomd", "systemd", "slurmstepd", "kubelet", "dockerd"),
    "containerd",
)
# Folder below /sys/fs, files with the counter, the limit and the peak; separate mounts below that count on their own.
_CGROUP_MOUNTS = (
    ("cgroup/memory", "memory.oom_control", "memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    ("cgroup", "memory.events.local", "memory.max", "memory.peak"),
    ("cgroup/unified", "memory.events.local", "memory.max", "memory.peak"),
)


def counters(root: Path = Path("/")) -> tuple[list[Kill], list[Source], int | None]:
    """Return the kills that cgroups (v1 and v2) counted, the sources, and the kills of the machine since boot."""
    kills: list[Kill] = []
    groups = 0
    for name, events, limit, peak in _CGROUP_MOUNTS:
        mount = root / "sys/fs" / name
        for walked, (folder, children, files) in enumerate(os.walk(mount)):
            if name == "cgroup" and folder == str(mount):
                children[:] = [child for child in children if child not in ("memory", "unified")]
            if events in files:
                groups += 1
                path = Path(folder)
                if count := read_counters(path / events).get("oom_kill", 0):
                    group = "/" + os.path.relpath(folder, mount).removeprefix(".")
                    maximum = read_number(path / limit)
                    bound = Bound(
                        None if maximum is None or maximum >= UNLIMITED else maximum,
                        read_number(path / peak), "memory", group, group,
                    )  # fmt: skip
                    reason = "the counter of the cgroup shows kills without the processes and times"
                    quote = Evidence(str(path / events), None, f"oom_kill {count}")
                    kill = Kill("kernel", "cgroup", sure="likely", reason=reason, count=count, signal=9, boot=0)
                    kills.append(replace(kill, bound=bound, evidence=(quote,)))
            if walked >= _MOST_GROUPS:
                break
    total = oom_kills(root / "proc")
    missing = "" if total is not None else "no oom_kill counter (kernels before 4.13 have none)"
    problem = "" if groups else "no cgroup has memory counters"
    group_source = Source("cgroup counters", problem, sum(kill.count for kill in kills))
    return kills, [group_source, Source("/proc/vmstat", missing, total or 0)], total


def ring_buffer(root: Path = Path("/")) -> LogFindings:
    """Scan the kernel's messages of this boot: /dev/kmsg, or the dmesg command."""
    boot_time = None
    if hasattr(time, "CLOCK_MONOTONIC"):  # the kernel counts from boot, without the time of suspends
        uptime = time.clock_gettime(time.CLOCK_MONOTONIC)
        boot_time = datetime.now().astimezone() - timedelta(seconds=uptime)
    scan = Scan("dmesg", Clock(boot_time=boot_time))
    try:
        kills, restarts = scan_lines(scan, _kmsg(root / "dev/kmsg"))
    except OSError as error:
        try:
            process = subprocess.run(["dmesg"], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            process = None
        if process is None or process.returncode != 0:
            problem = f"{reading_problem(error)}; reading it requires root, or kernel.dmesg_restrict=0"
            return LogFindings(sources=[Source("dmesg", problem)])
        kills, restarts = scan_lines(scan, scan.lines([process.stdout + b"\n"]))
    return LogFindings([replace(kill, boot=0) for kill in kills], restarts, [Source("dmesg", found=len(kills))])


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
                if match := _KMSG.match(line):  # other lines are a record's dictionary
                    text = _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), match[4])
                    for part in text.split("\n"):
                        yield int(match[2]), f"[{int(match[3]) / 1e6:12.6f}] {part}"
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
    size = 0

    def blocks() -> Iterator[bytes]:
        nonlocal size
        assert process.stdout is not None
        while block := process.stdout.read(BLOCK_BYTES):
            size += len(block)
            yield block

    with process:
        scan = Scan("journal", Clock())
        kills, restarts = scan_lines(scan, scan.lines(blocks()))
        assert process.stderr is not None
        errors = process.stderr.read().decode("utf-8", "replace").strip()
    problem = errors.splitlines()[-1] if errors and process.returncode else ""
    note = ""
    if not problem and not size:
        folders = ("/var/log/journal", "/run/log/journal")
        may_read = os.geteuid() == 0 or any(os.access(path, os.R_OK) for path in folders)
        refused = "no entries that this user may read; the groups adm and systemd-journal may read all"
        note = "empty" if may_read else refused
    if boot is not None:
        kills = [replace(kill, boot=boot) for kill in kills]
    return LogFindings(kills, restarts, [Source("journal", problem, len(kills), note)])


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
