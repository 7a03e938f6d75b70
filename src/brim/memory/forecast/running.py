"""The shape `pid`: what a running process holds, what its next step adds, and what others hold beside it.

What can be had is the machine's memory, or that of the tightest cgroup above the process, and all who hold
some of it count. With a limit of the user's own, only the process and what it started do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from brim.errors import InputError
from brim.memory.forecast.model import Component, Forecast, Reasons
from brim.memory.limit import Limit, cgroups
from brim.memory.meter import Process, Usage, proportional_usage, read_process, resident_tree, tree
from brim.memory.system import Machine, machine_now
from brim.sizes import format_size, parse_size

# Counting page by page holds the processes up: seconds at 200 GB.
_TOO_LARGE_TO_COUNT = 20 * 10**9


@dataclass(frozen=True, slots=True)
class Held:
    """What a process tree holds; a range where forked processes share pages that were not counted one by one."""

    pid: int
    name: str
    processes: int
    usage: Usage
    low_bytes: int

    @property
    def high_bytes(self) -> int:
        return self.usage.total_bytes

    def component(self) -> Component:
        usage = self.usage
        kinds = (("anonymous", usage.anon_bytes), ("shared", usage.shmem_bytes), ("swap", usage.swap_bytes))
        said = ", ".join(f"{kind} {format_size(size)}" for kind, size in kinds if size)
        beside = f"; {format_size(usage.file_bytes)} of file pages do not count" if usage.file_bytes else ""
        many = f" and {self.processes - 1} that it started" if self.processes > 1 else ""
        return Component(f"process {self.pid}", self.low_bytes, self.high_bytes, f"{self.name}{many}: {said}{beside}")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What stands around a process: the machine or a cgroup. `used_bytes` includes the process itself."""

    used_bytes: int
    limit: Limit


def pid(*, pid: int, adds: str | int | float | None = None, memory: str | int | float | None = None) -> Forecast:
    """A process that runs, and everything it started, now and after its next step."""
    held = tree_held(pid)
    machine = machine_now()
    added = 0 if adds is None else parse_size(adds)
    if memory is not None:
        return alone(held, added, Limit(parse_size(memory), "--memory, for this process and what it started"))
    return among_others(held, added, _tightest(surroundings(pid, machine), added), machine)


def alone(held: Held, added: int, limit: Limit) -> Forecast:
    """Judged by its own limit: what others hold does not matter."""
    parts = (held.component(), _next_step(added))
    reasons = Reasons(for_crash=_unknown_step(added))
    return Forecast("pid", parts, limit, reasons, "after its next step", details=_details(held, added))


def among_others(held: Held, added: int, around: Surroundings, machine: Machine) -> Forecast:
    """Judged by what all together hold of what there is: that sum is known, however the tree shares its pages."""
    own = held.component()
    counted = min(held.high_bytes, around.used_bytes)
    others = around.used_bytes - counted
    parts = (
        Component.exactly(own.name, counted, own.why),
        Component.exactly("others", others, "everything else that cannot be taken back"),
        _next_step(added),
    )
    swap_free = machine.swap_free_bytes or 0
    reasons = Reasons(
        for_crash=(*_unknown_step(added), "others may grow too, and so may it before its next step"),
        against=(f"{format_size(swap_free)} of swap are free: slower, but no crash",) if swap_free else (),
    )
    return Forecast(
        "pid",
        parts,
        around.limit,
        reasons,
        "after its next step",
        remark=("sum", addition(around.used_bytes, added, around.limit.bytes)),
        details={**_details(held, added), "others_bytes": others, "used_bytes": around.used_bytes},
    )


def addition(now: int, added: int, limit: int) -> str:
    """ "162 + 19 = 181 of 188 GB", rounded so that it adds up."""
    unit, name = (10**9, "GB") if limit >= 10**10 else (10**6, "MB")
    digits = 0 if limit >= 100 * unit else 1
    step, total = round(added / unit, digits), round((now + added) / unit, digits)
    first, second, third, fourth = (f"{x:.{digits}f}" for x in (total - step, step, total, limit / unit))
    return f"{first} + {second} = {third} of {fourth} {name}: in use now + the next step"


def tree_held(pid: int) -> Held:
    """What a process and everything it started hold now."""
    members = _members(pid)
    if not members:
        raise InputError(
            f"There is no process {pid}, or this user may not look at it.", hint="`brim watch --match NAME` finds one."
        )
    each = sum((member.usage for member in members), Usage())
    low = each.total_bytes
    if len(members) > 1:
        low = max(member.usage.total_bytes for member in members)
        if each.total_bytes <= _TOO_LARGE_TO_COUNT:
            counted = [proportional_usage(member.pid) for member in members]
            if all(usage is not None for usage in counted):
                true = sum((usage for usage in counted if usage is not None), Usage())
                each, low = Usage(true.anon_bytes, true.shmem_bytes, true.swap_bytes, each.file_bytes), true.total_bytes
    return Held(pid, members[0].name, len(members), each, low)


def _members(pid: int) -> list[Process]:
    if sys.platform != "linux":
        return resident_tree([pid])
    return [process for process in map(read_process, tree([pid])) if process is not None]


def surroundings(pid: int, machine: Machine, root: Path = Path("/")) -> list[Surroundings]:
    """The machine and every limited cgroup above the process, each with all that is used of it."""
    found = []
    if machine.total_bytes is not None:
        total = machine.total_bytes
        found.append(Surroundings(machine.used_bytes, Limit(total, "all of this machine's memory")))
    for group, limit, usage, reclaimable in cgroups(root, pid):
        if machine.total_bytes is None or limit < machine.total_bytes:
            found.append(Surroundings(max(usage - reclaimable, 0), Limit(limit, f"the limit of the cgroup {group}")))
    return found


def _tightest(around: list[Surroundings], added: int) -> Surroundings:
    if not around:
        raise InputError("This system does not say how much memory it has.", hint="Give the limit with --memory.")
    return max(around, key=lambda one: (one.used_bytes + added) / max(one.limit.bytes, 1))


def _next_step(added: int) -> Component:
    return Component.exactly("next step", added, "--adds" if added else "nothing was said about it")


def _unknown_step(added: int) -> tuple[str, ...]:
    return () if added else ("what its next step adds is not counted: give --adds, for instance 19GB",)


def _details(held: Held, added: int) -> dict[str, object]:
    return {
        "pid": held.pid,
        "process": held.name,
        "processes": held.processes,
        "anon_bytes": held.usage.anon_bytes,
        "shared_bytes": held.usage.shmem_bytes,
        "swap_bytes": held.usage.swap_bytes,
        "file_bytes": held.usage.file_bytes,
        "adds_bytes": added,
    }
