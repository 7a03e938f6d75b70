"""What the machine says about itself: memory left, swap, pressure, kills, boot, versions.

Everything here is a small file below /proc, read in hundredths of a millisecond. What a system does not
have (pressure on an old kernel, /proc on macOS) is None or absent, never an error.
"""

from __future__ import annotations

import os
import sys
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
