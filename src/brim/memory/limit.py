"""Determine the memory limit of a job: the number that the user set, or half of the available memory.

The available memory is the smallest headroom of everything above this process: the machine (MemAvailable), each cgroup
up to the root (limit − usage + reclaimable pages), and the allocation by Slurm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from brim.memory.meter import meminfo, read_counters, read_number, tree_bytes
from brim.records import dataclass
from brim.sizes import format_size, parse_size

UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for an unlimited group


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory limit and its origin."""

    bytes: int
    reason: str
    asked_for: bool = False
    above: str = ""  # the cgroup or scheduler that allows less than the user set, and how much
    asked_bytes: int = 0  # of a watch: the number that the user set, if a cgroup above leaves less

    def __str__(self) -> str:
        return f"{format_size(self.bytes)} ({self.origin})"

    @property
    def origin(self) -> str:
        """Return the reason with everything that makes the limit lower than the user set."""
        size = f" {format_size(self.asked_bytes)}" if self.asked_bytes not in (0, self.bytes) else ""
        return f"{self.reason}{size}{f'; but {self.above}' if self.above else ''}"

    @property
    def warning(self) -> str:
        """Return the warning, to print before any work, that a cgroup or scheduler allows less; empty if none does."""
        if not self.above:
            return ""
        return f"{self.reason} is {format_size(self.bytes)}, but {self.above}: the kernel kills a job that uses more"


def effective_limit(
    memory: str | int | float | None = None, environment: Mapping[str, str] | None = None, root: Path = Path("/")
) -> Limit:
    """Return the limit of a job: `memory`, else $BRIM_MEMORY, else half of the headroom."""
    environment = os.environ if environment is None else environment
    text, name = (memory, "--memory") if memory is not None else (environment.get("BRIM_MEMORY"), "BRIM_MEMORY")
    if text:
        size = parse_size(text)
        return Limit(size, name, asked_for=True, above=gives_less(size, environment, root))
    smallest = min(headrooms(environment, root), key=lambda limit: limit.bytes, default=None)
    if smallest is None:
        return Limit(_physical_bytes() // 2, "half of the machine's memory")
    return Limit(max(smallest.bytes // 2, 1), f"half of {smallest.reason}")


def gives_less(requested: int, environment: Mapping[str, str] | None = None, root: Path = Path("/")) -> str:
    """Return the lowest limit below `requested`, which is reached first, and its owner; empty if there is none."""
    environment = os.environ if environment is None else environment
    limits = [(limit, group) for group, limit, _, _ in cgroups(root)]
    slurm = _slurm_bytes(environment)
    if slurm is not None:
        limits.append((slurm, "slurm"))
    least, group = min(limits, default=(requested, ""))
    if least >= requested:
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
    """Return the limit of a watched process: as above, but all of the headroom, which brim need not divide.

    `held_bytes` is the memory of `pid` if that process already runs.
    """
    environment = os.environ if environment is None else environment
    if memory is not None or environment.get("BRIM_MEMORY"):
        requested = effective_limit(memory, environment, root)
        headroom = min(cgroup_headrooms(held_bytes, pid, root), default=requested.bytes)
        above = requested.above
        if not above and (total := meminfo(root / "proc/meminfo").get("MemTotal", requested.bytes)) < requested.bytes:
            above = f"this machine has {format_size(total)}"
        if not above and headroom < requested.bytes:
            above = f"the cgroups above leave {format_size(headroom)}"
        size = min(requested.bytes, max(headroom, 1))
        return replace(requested, bytes=size, above=above, asked_bytes=requested.bytes)
    available = headrooms(environment, root, held_bytes=held_bytes, pid=pid)
    smallest = min(available, key=lambda limit: limit.bytes, default=None)
    return smallest or Limit(_physical_bytes(), "the machine's memory")


def cgroup_headrooms(held_bytes: int | None = None, pid: int | str = "self", root: Path = Path("/")) -> Iterator[int]:
    """Yield how much a process may use within each limited cgroup above it; `held_bytes` is its present memory."""
    used = tree_bytes() if held_bytes is None else held_bytes
    for _, limit, usage, reclaimable in cgroups(root, pid):
        yield max(limit - usage + reclaimable + used, 0)


def headrooms(
    environment: Mapping[str, str],
    root: Path = Path("/"),
    *,
    held_bytes: int | None = None,
    pid: int | str = "self",
) -> Iterator[Limit]:
    """Yield the memory that the machine, each cgroup and Slurm leave to a process, with its present `held_bytes`."""
    used, prefix = (0, "") if held_bytes is None else (held_bytes, "its memory and ")
    available = meminfo(root / "proc/meminfo").get("MemAvailable")
    if available is not None:
        yield Limit(available + used, f"{prefix}the {format_size(available)} available on this machine")
    own = tree_bytes() if held_bytes is None else 0
    for group, limit, usage, reclaimable in cgroups(root, pid):
        headroom = max(limit - usage + reclaimable + own, 0)
        reason = f"the {format_size(headroom)} that the cgroup {group} (limit {format_size(limit)}) leaves"
        yield Limit(headroom + used, prefix + reason)
    slurm = _slurm_bytes(environment)
    if slurm is not None:
        yield Limit(slurm, f"the {format_size(slurm)} allocated by Slurm")


def cgroups(root: Path = Path("/"), pid: int | str = "self") -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, limit, usage, reclaimable) of every limited cgroup above a process, v2 or v1."""
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
            limit, usage = read_number(folder / names[0]), read_number(folder / names[1])
            if limit is None or usage is None or limit >= UNLIMITED:
                continue
            stat = read_counters(folder / "memory.stat")
            cache = stat.get(names[2] + "inactive_file", 0) + stat.get(names[2] + "active_file", 0)
            yield "/" + "/".join(parts[:depth]), limit, usage, cache


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
