"""Read the unreclaimable memory of processes, and the memory of the machine.

The unreclaimable memory of a process is its anonymous, shared and swapped pages. /proc/PID/status takes 0.02 ms per
process, and a sum over a process tree is an upper bound: pages that forked processes share count for each of them.
/proc/PID/smaps_rollup counts every page once, but takes milliseconds per gigabyte, and page faults of the process wait
during that time: `brim.memory.tree_meter` decides when it is read. File-backed pages (page cache, memory maps) are
reported separately and never counted, because the kernel reclaims them when it needs memory. Without /proc, only
resident sizes are known.

Values that a system does not have (pressure on an old kernel, /proc on macOS) are None or absent, never an error.
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
_ENDED = (FileNotFoundError, ProcessLookupError)


def read_number(path: Path) -> int | None:
    """Return the number in a file of the kernel; None if the file is missing or contains no number."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def read_counters(path: Path) -> dict[str, int]:
    """Return the lines "name number" of a file of the kernel; empty if the file is missing."""
    try:
        fields = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in fields if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory of the machine. None: this system does not report it."""

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
        """Return the total memory without what is available; 0 if the system does not report both."""
        if self.total_bytes is None or self.available_bytes is None:
            return 0
        return self.total_bytes - self.available_bytes

    @property
    def swap_used_bytes(self) -> int:
        return (self.swap_bytes or 0) - (self.swap_free_bytes or 0)


def machine_now(proc: Path = PROC) -> Machine:
    info = meminfo(proc / "meminfo")
    if not info:
        import psutil

        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
        return Machine(memory.total, memory.available, swap.total, swap.free)
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


def meminfo(path: Path = PROC / "meminfo") -> dict[str, int]:
    """Return /proc/meminfo in bytes; empty without that file."""
    try:
        fields = (line.split() for line in path.read_bytes().splitlines())
        return {parts[0][:-1].decode(): int(parts[1]) * 1024 for parts in fields if len(parts) > 1}
    except OSError:
        return {}


def pressure(path: Path = PROC / "pressure/memory") -> float | None:
    """Return the percentage of the last 10 s in which some task waited for memory."""
    try:
        text = path.read_text()
    except OSError:
        return None
    _, label, values = text.partition("some avg10=")
    return float(values.split()[0]) if label else None


def oom_kills(proc: Path = PROC) -> int | None:
    """Return how many processes of the whole machine the kernel has killed for memory since boot."""
    return read_counters(proc / "vmstat").get("oom_kill")


@functools.cache
def boot_id(proc: Path = PROC) -> str | None:
    """Return the identifier of this boot. A log without an end and with an earlier one was cut by a reboot."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def machine_facts() -> dict[str, Any]:
    """Return the properties of the machine that do not change while it is up."""
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
    """Return sentences about measurements that this system does not offer; empty on a Linux that has all of them."""
    if sys.platform != "linux":
        return [
            "this is not Linux: only resident sizes are known (memory maps count too, pages shared by processes "
            "count for each), and no limit can be enforced by the kernel"
        ]
    missing = []
    if pressure() is None:
        missing.append("no /proc/pressure: the time that tasks wait for memory is unknown")
    if oom_kills() is None:
        missing.append("/proc/vmstat has no oom_kill: kills by the kernel are not counted")
    return missing


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory by kind. `total_bytes` is the unreclaimable memory: all but the file pages."""

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
    """A process and its memory, in which shared pages count in full."""

    pid: int
    name: str
    usage: Usage
    most_resident_bytes: int = 0  # since it was started, file pages included (VmHWM)


def proven_bytes(resident_bytes: int, file_bytes: int) -> int:
    """Return the memory without file pages that a peak of resident memory proves; 0 if nothing.

    File pages may have grown between a sample and the peak: if they are a large part of it, it proves nothing.
    """
    return resident_bytes - file_bytes if 2 * file_bytes < resident_bytes else 0


def largest_first(processes: Iterable[Process]) -> list[Process]:
    return sorted(processes, key=lambda process: -process.usage.total_bytes)


def tree_bytes(pid: int | None = None) -> int:
    """Return the unreclaimable memory of a process (default: this one) and its descendants."""
    pid = os.getpid() if pid is None else pid
    if sys.platform != "linux":
        return sum(process.usage.total_bytes for process in resident_tree([pid]))
    return sum(process_bytes(member) for member in tree([pid]))


def process_bytes(pid: int) -> int:
    """Return the unreclaimable memory of a process; 0 if it has ended."""
    process = read_process(pid)
    return process.usage.total_bytes if process else 0


def read_process(pid: int) -> Process | None:
    """Read a process from /proc/PID/status; None if it has ended, is a zombie or a kernel thread."""
    text = _read(f"/proc/{pid}/status")
    if b"RssAnon:" not in text:
        return None
    labels = (b"\nRssAnon:", b"\nRssShmem:", b"\nVmSwap:", b"\nRssFile:")
    name = text[len(b"Name:") : text.index(b"\n")].strip().decode(errors="replace")
    return Process(pid, name, Usage(*(_kilobytes(text, label) for label in labels)), _kilobytes(text, b"\nVmHWM:"))


def proportional_usage(pid: int) -> Usage | None:
    """Read the memory of a process, with every shared page divided by the number of its users.

    Reading takes milliseconds per gigabyte, and page faults of the process wait during that time. None if this user
    may not read it.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            text = file.read()
    except _ENDED:
        return Usage()
    except OSError:
        return None
    swap, pss = _kilobytes(text, b"\nSwapPss:"), _kilobytes(text, b"\nPss:")
    if b"\nPss_Anon:" in text:
        anon, shmem = _kilobytes(text, b"\nPss_Anon:"), _kilobytes(text, b"\nPss_Shmem:")
        return Usage(anon, shmem, swap, max(pss - anon - shmem, 0))
    # Kernels before 5.4 do not split the sum, which may contain file pages: this is an upper bound.
    return Usage(min(_kilobytes(text, b"\nAnonymous:"), pss), 0, swap, 0) if pss else None


def tree(roots: Iterable[int]) -> list[int]:
    """Return the roots and all their descendants."""
    members = list(dict.fromkeys(roots))
    included = set(members)
    for member in members:  # grows while it is iterated
        try:
            for thread in os.listdir(f"/proc/{member}/task"):
                # Not one os.read: the kernel returns the list of children one page at a time.
                with open(f"/proc/{member}/task/{thread}/children", "rb", buffering=0) as file:
                    children = file.read()
                for child in map(int, children.split()):
                    if child not in included:
                        included.add(child)
                        members.append(child)
        except OSError:
            continue
    return members


def all_pids() -> list[int]:
    """Return every process of the machine that this user can list."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it has ended.

    Together with the process number it identifies a process for good.
    """
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if the process has ended."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def minor_faults(pid: int) -> int:
    """Return how often a process got a page without reading a disk; copies of shared pages are among them."""
    fields = _stat_fields(pid)
    return int(fields[7]) if fields else 0


def _stat_fields(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the name, which may contain blanks and parentheses."""
    _, _, fields = _read(f"/proc/{pid}/stat").rpartition(b")")
    return fields.split()


def _read(path: str) -> bytes:
    """Read a small file below /proc with few system calls; empty if its process has ended or is not readable."""
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


def _kilobytes(text: bytes, label: bytes) -> int:
    start = text.find(label)
    return 0 if start < 0 else int(text[start + len(label) : text.index(b"kB", start)]) * 1024


def resident_tree(roots: Iterable[int]) -> list[Process]:
    """Return a process tree without /proc, with resident sizes that include memory maps and shared pages."""
    import psutil

    processes: dict[int, Process] = {}
    for root in roots:
        try:
            process = psutil.Process(root)
            members = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for member in members:
            try:
                processes[member.pid] = Process(member.pid, member.name(), Usage(anon_bytes=member.memory_info().rss))
            except psutil.Error:
                continue
    return list(processes.values())
