"""How much memory processes hold that the kernel cannot take back, and what the machine says about itself.

Counted are anonymous + shared + swapped pages. From /proc/PID/status that takes 0.02 ms a process, and a sum over a
tree is an upper bound: pages that forked processes share are counted once for each. /proc/PID/smaps_rollup counts every
page once, takes milliseconds a gigabyte and holds the process up meanwhile: brim.memory.tree_meter says when it is
worth it. File-backed pages (page cache, memory maps) stand beside and are not counted: the kernel takes them back when
it needs them. Where there is no /proc, the resident size is all that can be seen.

Of the machine: memory left, swap, pressure, kills, boot, versions. Each is a small file below /proc. What a system does
not have (pressure on an old kernel, /proc on macOS) is None or absent, never an error.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from brim.records import dataclass

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at one moment. None: this system does not say."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    psi_some_avg10: float | None = None
    anon_bytes: int = 0
    shmem_bytes: int = 0
    file_bytes: int = 0

    @property
    def used_bytes(self) -> int:
        """What cannot be had any more: everything that is not available."""
        if self.total_bytes is None or self.available_bytes is None:
            return 0
        return self.total_bytes - self.available_bytes

    @property
    def swap_used_bytes(self) -> int:
        return (self.swap_bytes or 0) - (self.swap_free_bytes or 0)


def machine_now(proc: Path = PROC) -> Machine:
    info = meminfo(proc / "meminfo")
    if not info:
        return _machine_elsewhere()
    shmem = info.get("Shmem", 0)
    return Machine(
        total_bytes=info.get("MemTotal"),
        available_bytes=info.get("MemAvailable"),
        swap_bytes=info.get("SwapTotal"),
        swap_free_bytes=info.get("SwapFree"),
        psi_some_avg10=pressure(proc / "pressure/memory"),
        anon_bytes=info.get("AnonPages", 0),
        shmem_bytes=shmem,
        file_bytes=max(info.get("Cached", 0) + info.get("Buffers", 0) - shmem, 0),
    )


def _machine_elsewhere() -> Machine:
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return Machine(memory.total, memory.available, swap.total, swap.free)


def meminfo(path: Path = PROC / "meminfo") -> dict[str, int]:
    """/proc/meminfo in bytes; empty where there is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {parts[0][:-1].decode(): int(parts[1]) * 1024 for parts in fields if len(parts) > 1}


def pressure(path: Path = PROC / "pressure/memory") -> float | None:
    """The share of the last 10 s, in percent, in which some task waited for memory."""
    try:
        text = path.read_text()
    except OSError:
        return None
    _, found, rest = text.partition("some avg10=")
    return float(rest.split()[0]) if found else None


def oom_kills(proc: Path = PROC) -> int | None:
    """How many processes the kernel has killed for memory since it booted, anywhere on the machine."""
    try:
        for line in (proc / "vmstat").read_bytes().splitlines():
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    except OSError:
        return None
    return None


@functools.cache
def boot_id(proc: Path = PROC) -> str | None:
    """Another one after every boot: a log that ends under an old one was cut by a reboot."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def machine_facts() -> dict[str, Any]:
    """What does not change while a machine is up."""
    now = machine_now()
    return {
        "ram_bytes": now.total_bytes,
        "swap_bytes": now.swap_bytes,
        "cpus": os.cpu_count(),
        "kernel": os.uname().release,
        "system": os.uname().sysname,
    }


def versions() -> dict[str, str]:
    from brim import __version__

    return {"brim": __version__, "python": sys.version.split()[0]}


def blind_spots() -> list[str]:
    """What cannot be seen on this system, in words for its user; empty on Linux with all it has."""
    if sys.platform != "linux":
        return [
            "this is not Linux: only resident sizes are seen (memory maps count too, pages shared by processes "
            "count for each), and there is no hard limit"
        ]
    missing = []
    if pressure() is None:
        missing.append("no /proc/pressure: how long tasks wait for memory is not seen")
    if oom_kills() is None:
        missing.append("/proc/vmstat has no oom_kill: kills by the kernel are not counted")
    return missing


_GONE = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory by kind. `total_bytes` is what counts: all but the file pages."""

    anon_bytes: int = 0
    shmem_bytes: int = 0
    swap_bytes: int = 0
    file_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.anon_bytes + self.shmem_bytes + self.swap_bytes

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.anon_bytes + other.anon_bytes,
            self.shmem_bytes + other.shmem_bytes,
            self.swap_bytes + other.swap_bytes,
            self.file_bytes + other.file_bytes,
        )


@dataclass(frozen=True, slots=True)
class Process:
    """One process and what it holds, counted as if it shared nothing."""

    pid: int
    name: str
    usage: Usage
    most_resident_bytes: int = 0  # file pages included, since it was started (VmHWM)


def tree_bytes(pid: int | None = None) -> int:
    """Unreclaimable bytes of a process and everything it started."""
    pid = os.getpid() if pid is None else pid
    if sys.platform != "linux":
        return sum(process.usage.total_bytes for process in resident_tree([pid]))
    return sum(process_bytes(member) for member in tree([pid]))


def process_bytes(pid: int) -> int:
    """Unreclaimable bytes of one process; 0 if it is gone."""
    process = read_process(pid)
    return process.usage.total_bytes if process else 0


def read_process(pid: int) -> Process | None:
    """A process from its /proc/PID/status; None if it has ended, be it reaped or not."""
    text = _read(f"/proc/{pid}/status")
    if b"RssAnon:" not in text:
        return None  # gone, a zombie or a kernel thread: no memory of its own
    usage = Usage(
        _kilobytes(text, b"\nRssAnon:"),
        _kilobytes(text, b"\nRssShmem:"),
        _kilobytes(text, b"\nVmSwap:"),
        _kilobytes(text, b"\nRssFile:"),
    )
    name = text[len(b"Name:") : text.index(b"\n")].strip().decode(errors="replace")
    return Process(pid, name, usage, _kilobytes(text, b"\nVmHWM:"))


def proportional_usage(pid: int) -> Usage | None:
    """A process with every shared page divided by those who share it; None if this user may not look.

    Reading takes milliseconds for every gigabyte, and page faults of the process wait meanwhile.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            text = file.read()
    except _GONE:
        return Usage()
    except OSError:
        return None
    swap, pss = _kilobytes(text, b"\nSwapPss:"), _kilobytes(text, b"\nPss:")
    if b"\nPss_Anon:" in text:
        anon, shmem = _kilobytes(text, b"\nPss_Anon:"), _kilobytes(text, b"\nPss_Shmem:")
        return Usage(anon, shmem, swap, max(pss - anon - shmem, 0))
    # Kernels before 5.4 do not split it: what is not anonymous may be a file, so this may be too much.
    return Usage(min(_kilobytes(text, b"\nAnonymous:"), pss), 0, swap, 0) if pss else None


def tree(roots: Iterable[int]) -> list[int]:
    """The roots and all their descendants."""
    members = list(dict.fromkeys(roots))
    seen = set(members)
    for member in members:  # grows while it is walked
        try:
            for thread in os.listdir(f"/proc/{member}/task"):
                for child in map(int, _read_pages(f"/proc/{member}/task/{thread}/children").split()):
                    if child not in seen:
                        seen.add(child)
                        members.append(child)
        except OSError:
            continue
    return members


def started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot: with its number, a name that is never used again."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def minor_faults(pid: int) -> int:
    """How often a process got a page without reading a disk; copies of shared pages are among them."""
    fields = _stat_fields(pid)
    return int(fields[7]) if fields else 0


def _stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat behind the name, which may hold blanks and parentheses."""
    _, _, rest = _read(f"/proc/{pid}/stat").rpartition(b")")
    return rest.split()


def _read(path: str) -> bytes:
    """A whole small file below /proc; empty if its process is gone or not ours to look at."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _read_pages(path: str) -> bytes:
    """Read a file below /proc that the kernel returns a page at a time, such as the list of a thread's children."""
    try:
        with open(path, "rb", buffering=0) as file:
            return b"".join(iter(lambda: file.read(1 << 16), b""))
    except OSError:
        return b""


def _kilobytes(text: bytes, label: bytes) -> int:
    at = text.find(label)
    if at < 0:
        return 0
    return int(text[at + len(label) : text.index(b"kB", at)]) * 1024


def resident_tree(roots: Iterable[int]) -> list[Process]:
    """Where there is no /proc: resident sizes, memory maps and shared pages included."""
    import psutil

    found: dict[int, Process] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            members = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in members:
            try:
                found[member.pid] = Process(member.pid, member.name(), Usage(anon_bytes=member.memory_info().rss))
            except psutil.Error:
                continue
    return list(found.values())
