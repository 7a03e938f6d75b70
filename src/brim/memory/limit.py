"""How much memory a job may take: the user's word, or half of what is really there.

What is there is the smallest headroom of all that stand above this process: the machine (MemAvailable),
each cgroup up to the root (limit − usage + pages the kernel can take back), and Slurm's allocation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from brim.memory.meter import meminfo, tree_bytes
from brim.records import dataclass
from brim.sizes import format_size, parse_size


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number where there is no limit


@dataclass(frozen=True, slots=True)
class Limit:
    """A number of bytes, and who decides it."""

    bytes: int
    reason: str
    asked_for: bool = False
    above: str = ""  # who gives less than was asked for, and how much
    asked_bytes: int = 0  # of a watch: what was asked for, where a cgroup above leaves less

    def __str__(self) -> str:
        asked = f" {format_size(self.asked_bytes)}" if self.asked_bytes not in (0, self.bytes) else ""
        return f"{format_size(self.bytes)} ({self.reason}{asked}{f'; but {self.above}' if self.above else ''})"

    @property
    def warning(self) -> str:
        """To be said before any work; empty if nobody gives less than was asked for."""
        if not self.above:
            return ""
        return f"{self.reason} is {format_size(self.bytes)}, but {self.above}: the kernel ends what takes more"


def effective_limit(
    memory: str | int | float | None = None, environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Limit:
    """The limit of a job: `memory`, else $BRIM_MEMORY, else half of the headroom."""
    environment = os.environ if environment is None else environment
    given, name = (memory, "--memory") if memory is not None else (environment.get("BRIM_MEMORY"), "BRIM_MEMORY")
    if given:
        asked = parse_size(given)
        return Limit(asked, name, asked_for=True, above=gives_less(asked, environment, root))
    smallest = min(headrooms(environment, root), key=lambda limit: limit.bytes, default=None)
    if smallest is None:
        return Limit(_physical_bytes() // 2, "half of the machine's memory")
    return Limit(max(smallest.bytes // 2, 1), f"half of {smallest.reason}")


def gives_less(asked: int, environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> str:
    """Whoever set a limit below what was asked for: that one strikes first. Empty if nobody did."""
    environment = os.environ if environment is None else environment
    limits = [(limit, group) for group, limit, _, _ in cgroups(root)]
    slurm = _slurm_bytes(environment)
    if slurm is not None:
        limits.append((slurm, "slurm"))
    least, group = min(limits, default=(asked, ""))
    if least >= asked:
        return ""
    if "slurm" in group or (environment.get("SLURM_JOB_ID") and "job_" in group):
        return f"Slurm gives this job {format_size(least)}"
    if "kubepods" in group:
        return f"Kubernetes gives this container {format_size(least)}"
    if "docker" in group or "libpod" in group or group == "/":
        return f"the container has {format_size(least)}"
    return f"the cgroup {group} gives {format_size(least)}"


def watch_limit(
    memory: str | int | float | None = None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    *,
    held_bytes: int | None = None,
    pid: int | str = "self",
) -> Limit:
    """The limit of what is only watched: as above, but all of the headroom, for it is not brim's to halve.

    `held_bytes` is what `pid`, which runs already, has of it.
    """
    environment = os.environ if environment is None else environment
    if memory is not None or environment.get("BRIM_MEMORY"):
        asked = effective_limit(memory, environment, root)
        room = min(cgroup_rooms(held_bytes, pid, root), default=asked.bytes)
        above = asked.above
        if not above and (total := meminfo(root / "proc/meminfo").get("MemTotal", asked.bytes)) < asked.bytes:
            above = f"this machine has {format_size(total)}"
        return replace(asked, bytes=min(asked.bytes, max(room, 1)), above=above, asked_bytes=asked.bytes)
    smallest = min(
        headrooms(environment, root, held_bytes=held_bytes, pid=pid), key=lambda limit: limit.bytes, default=None
    )
    return smallest or Limit(_physical_bytes(), "the machine's memory")


def cgroup_rooms(held_bytes: int | None = None, pid: int | str = "self", root: Path = Path("/")) -> Iterator[int]:
    """What each limited cgroup above a process leaves it, with what it holds: `held_bytes`, or that of this tree."""
    held = tree_bytes() if held_bytes is None else held_bytes
    for _, limit, usage, reclaimable in cgroups(root, pid):
        yield max(limit - usage + reclaimable + held, 0)


def headrooms(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    *,
    held_bytes: int | None = None,
    pid: int | str = "self",
) -> Iterator[Limit]:
    """What each thing above a process leaves it; with `held_bytes`, that and what it holds: the most it may."""
    held, also = (0, "") if held_bytes is None else (held_bytes, "what it holds and ")
    available = meminfo(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield Limit(available + held, f"{also}the {format_size(available)} available on this machine")
    own = tree_bytes() if held_bytes is None else 0
    for group, limit, usage, reclaimable in cgroups(root, pid):
        left = max(limit - usage + reclaimable + own, 0)
        yield Limit(
            left + held, f"{also}the {format_size(left)} that the cgroup {group} (limit {format_size(limit)}) leaves"
        )
    slurm = _slurm_bytes(environment)
    if slurm is not None:
        yield Limit(slurm, f"the {format_size(slurm)} allocated by Slurm")


def cgroups(root: Path = Path("/"), pid: int | str = "self") -> Iterator[tuple[str, int, int, int]]:
    """(name, limit, usage, reclaimable) of every limited cgroup above a process, v2 or v1."""
    try:
        lines = (root / f"proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        parts = [part for part in group.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = mount.joinpath(*parts[:depth])
            limit, usage = _number(folder / names[0]), _number(folder / names[1])
            if limit is None or usage is None or limit >= _UNLIMITED:
                continue
            stat = _stat(folder / "memory.stat")
            cache = stat.get(names[2] + "inactive_file", 0) + stat.get(names[2] + "active_file", 0)
            yield "/" + "/".join(parts[:depth]), limit, usage, cache


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except OSError:
        return {}


def _slurm_bytes(environment: Mapping[str, str]) -> int | None:
    per_node = environment.get("SLURM_MEM_PER_NODE", "")
    per_cpu, cpus = environment.get("SLURM_MEM_PER_CPU", ""), environment.get("SLURM_CPUS_ON_NODE", "")
    if per_node.isdigit() and int(per_node):
        return int(per_node) << 20
    if per_cpu.isdigit() and cpus.isdigit() and int(per_cpu):
        return int(per_cpu) * int(cpus) << 20
    return None


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
