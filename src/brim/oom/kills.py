"""What is known about an out-of-memory kill. Everything may be missing but the killer: logs are cut, records are
rate-limited, and some killers say little.

One kill is told by many: the same record in dmesg, the journal and kern.log; by the shell, Slurm and the kernel. What
the kernel wrote leads; the others add a command, a unit, a curve, and their lines as further evidence.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import datetime
from typing import Literal

from brim.records import dataclass

Killer = Literal[
    "kernel",
    "systemd-oomd",
    "earlyoom",
    "oomd",
    "slurm",
    "batch system",
    "kubelet",
    "container runtime",
    "ray",
    "dask",
    "rlimit",
    "brim",
    "program",
    "gpu",
    "unknown",
]
# The machine as a whole; a cgroup's limit; the process alone (ulimit, its own allocator); a GPU's memory.
Scope = Literal["machine", "cgroup", "process", "gpu", "unknown"]
# refused: an allocation failed and nobody was killed; restarted: the machine went down under a run.
Effect = Literal["killed", "asked to end", "evicted", "refused", "restarted"]
# certain: a record names victim and killer; likely: that something was killed for memory is recorded, not
# which; possible: something was killed, and memory is only the usual reason.
Sure = Literal["certain", "likely", "possible"]
# Work that brim has a command for.
Job = Literal["map", "tokenize", "embed", "build"]

ASKED_FOR = "Somebody asked the kernel for it (SysRq f, an order of −1): the machine need not have been out of memory."
LEAK = "Its memory grew over the whole run and did not level off: something keeps what it no longer needs."


@dataclass(frozen=True, slots=True)
class Sizes:
    """The memory of a process. `rss_bytes` where only the sum was written down."""

    anon_bytes: int | None = None
    shmem_bytes: int | None = None
    file_bytes: int | None = None
    swap_bytes: int | None = None
    total_vm_bytes: int | None = None
    rss_bytes: int | None = None

    @property
    def held_bytes(self) -> int | None:
        """What the kernel could not take back, as far as it is known."""
        if self.anon_bytes is None:
            return None if self.rss_bytes is None else self.rss_bytes + (self.swap_bytes or 0)
        return self.anon_bytes + (self.shmem_bytes or 0) + (self.swap_bytes or 0)


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A row of the kernel's table of processes."""

    pid: int
    name: str
    uid: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit that was hit. `kind`: "memory", "memory+swap", "swap", "kmem", "RLIMIT_DATA", a pressure."""

    bytes: int | None = None
    usage_bytes: int | None = None
    kind: str = ""
    group: str | None = None
    task_group: str | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What a cgroup's memory was made of."""

    anon_bytes: int | None = None
    shmem_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """The machine's memory."""

    ram_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    available_bytes: int | None = None
    shmem_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A quoted line, without secrets, and where it stands."""

    source: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A sample of brim's own log."""

    t: float
    total_bytes: int
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """One out-of-memory kill, or what comes close to one (see Effect)."""

    killer: Killer
    scope: Scope = "unknown"
    effect: Effect = "killed"
    sure: Sure = "certain"
    reason: str = ""  # why it is as sure as it is
    pid: int | None = None
    name: str | None = None
    uid: int | None = None
    command: str | None = None
    job: Job | None = None  # what it was doing, where its output or command line shows it
    unit: str | None = None  # a systemd unit, a Slurm step, a container, a pod
    count: int = 1  # processes killed, where only their number was written down
    signal: int | None = None
    when: datetime | None = None
    boot_s: float | None = None
    host: str | None = None
    boot: int | None = None  # 0 is the last boot of its source, −1 the one before
    sizes: Sizes = Sizes()
    bound: Bound = Bound()
    contents: GroupMemory = GroupMemory()
    room: MachineRoom = MachineRoom()
    tasks: tuple[ListedTask, ...] = ()  # the largest, largest first
    invoked_by: str | None = None
    chosen_pid: int | None = None  # the process that was chosen, if a child of it was killed in its place
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """A machine that came up again without having been shut down."""

    source: str
    last_sign: datetime | None
    first_sign: datetime | None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Something that was read, or why it could not be. `found` counts what it had to say."""

    name: str
    problem: str = ""
    found: int = 0
    note: str = ""


OwnerKind = Literal["pod", "docker", "ecs", "slurm", "lxc", "vm", "session", "service", "group"]


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose control group it was, as far as its name tells."""

    kind: OwnerKind
    text: str
    shared: bool = False  # it holds more than one container, job or session


_POD = re.compile(r"[/-]pod([0-9a-z][\w-]*)")
_HEX = re.compile(r"([0-9a-f]{12,64})")


def owner_of(group: str) -> Owner:
    """The owner of a group whose limit was hit."""
    last = group.rstrip("/").rsplit("/", 1)[-1]
    if "kubepods" in group:
        pod = _POD.search(group)
        if pod is None:
            return Owner("pod", "all pods of this node (its pool for pods, not one pod's limit)", shared=True)
        tail = group[pod.end() :].removeprefix(".slice").strip("/")
        name = pod[1].replace("_", "-")
        return Owner("pod", f"a container of the Kubernetes pod {name}" if tail else f"the whole Kubernetes pod {name}")
    if match := re.search(r"/slurm[^/]*?(?:/.*)?/job_(\d+)(?:/step_(\w+))?", group):
        return Owner("slurm", f"Slurm job {match[1]}" + (f", step {match[2]}" if match[2] else ""))
    if "/ecs/" in group:
        return Owner("ecs", "a container or task of Amazon ECS")
    if "docker" in group or "libpod" in group or "cri-containerd" in group or "buildkit" in group:
        ident = _HEX.search(last)
        return Owner("docker", f"the container {ident[1][:12]}" if ident else "a container", shared=ident is None)
    if match := re.search(r"/(?:lxc(?:\.payload)?|LXC)[./]?([\w-]+)", group):
        return Owner("lxc", f"the LXC container {match[1]}")
    if match := re.search(r"/(?:qemu|machine)\.slice/([^/]+)", group):
        return Owner("vm", f"the virtual machine or container {match[1]}")
    if match := re.search(r"/user-(\d+)\.slice(?:/user@\d+\.service)?(/.*)?$", group):
        unit = (match[2] or "").rstrip("/").rsplit("/", 1)[-1]
        shown = f"{unit} of user {match[1]}" if unit else f"everything that user {match[1]} runs"
        return Owner("session", shown, shared=not unit)
    if last.endswith((".service", ".scope", ".slice")):
        return Owner("service", f"the systemd unit {last}", shared=last.endswith(".slice"))
    return Owner("group", f"the cgroup {group}")


def same_group(one: str, other: str) -> bool:
    """Whether two paths may name one group: inside a container, paths lose their beginning."""
    one, other = one.rstrip("/"), other.rstrip("/")
    return bool(one and other) and (one == other or one.endswith(other) or other.endswith(one))


_SAME_S = 120.0  # one process cannot be killed twice; its number is not given out again that soon
_ECHO_S = 90.0
_SURENESS = ("certain", "likely", "possible")


def merged(kills: Iterable[Kill]) -> list[Kill]:
    """Kills without repetitions, oldest first; those without a date stay where their source put them."""
    firsts: list[Kill] = []
    by_pid: dict[int, list[int]] = {}
    echoes: list[Kill] = []
    for kill in kills:
        if kill.pid is None or not _is_record(kill):
            echoes.append(kill)
            continue
        places = by_pid.setdefault(kill.pid, [])
        twin = next((place for place in places if is_same(firsts[place], kill)), None)
        if twin is None:
            places.append(len(firsts))
            firsts.append(kill)
        else:
            firsts[twin] = joined(firsts[twin], kill)
    return in_order(_with_echoes(firsts, echoes))


def _with_echoes(firsts: list[Kill], echoes: list[Kill]) -> list[Kill]:
    """Records with what others say about the same kills; what is about none of them stands by itself."""
    found = list(firsts)
    dated = sorted((kill.when.timestamp(), place) for place, kill in enumerate(firsts) if kill.when is not None)
    undated = [place for place, kill in enumerate(firsts) if kill.when is None]
    for echo in echoes:
        places: Iterable[int] = range(len(found))
        if echo.when is not None:  # of thousands of kills, only those at about the same time
            at = echo.when.timestamp()
            begin = bisect_left(dated, (at - _ECHO_S, -1))
            end = bisect_left(dated, (at + _ECHO_S, len(found)))
            places = [*(place for _, place in dated[begin:end]), *undated, *range(len(firsts), len(found))]
        place = next((p for p in places if _is_echo(found[p], echo)), None)
        if place is not None:
            found[place] = _with_echo(found[place], echo)
        elif not any(_repeats(kill, echo) for kill in found[len(firsts) :]):
            found.append(echo)
    return found


def in_order(kills: list[Kill]) -> list[Kill]:
    """Oldest first; what has no date goes before what has one."""
    return sorted(kills, key=_order)


def _order(kill: Kill) -> tuple[bool, float, float, int]:
    seconds = kill.when.timestamp() if kill.when is not None else 0.0
    return kill.when is not None, seconds, kill.boot_s or 0.0, (kill.evidence[0].line or 0) if kill.evidence else 0


def _is_record(kill: Kill) -> bool:
    """Whether a kill stands by itself: it was written by the one who killed, and names its victim."""
    return kill.killer in ("kernel", "earlyoom", "rlimit") and kill.effect != "restarted"


def gap_s(one: Kill, other: Kill) -> float | None:
    """The time between two kills, if it can be told."""
    if one.when is not None and other.when is not None:
        return abs((one.when - other.when).total_seconds())
    if one.boot_s is not None and other.boot_s is not None:
        return abs(one.boot_s - other.boot_s)
    return None


def is_same(one: Kill, other: Kill) -> bool:
    """Whether two records tell of one kill."""
    if one.pid != other.pid or not _tell_of_one(one, other):
        return False
    if one.name is not None and other.name is not None and one.name != other.name:
        return False
    if one.host is not None and other.host is not None and one.host != other.host:
        return False
    gap = gap_s(one, other)
    if gap is not None:
        return gap <= _SAME_S
    return one.sizes == other.sizes or Sizes() in (_lines_of(one.sizes), _lines_of(other.sizes))


def _tell_of_one(one: Kill, other: Kill) -> bool:
    """The same killer, or earlyoom that asked and the kernel that did not wait for it."""
    if one.killer == other.killer:
        return True
    asked = [kill for kill in (one, other) if kill.killer == "earlyoom" and kill.effect == "asked to end"]
    return len(asked) == 1 and "kernel" in (one.killer, other.killer) and gap_s(one, other) is not None


def _lines_of(sizes: Sizes) -> Sizes:
    return replace(sizes, swap_bytes=None, rss_bytes=None)


def joined(one: Kill, other: Kill) -> Kill:
    """The fuller of two records, with what only the other one knows."""
    lead, more = (one, other) if _fullness(one) >= _fullness(other) else (other, one)
    if lead.killer != more.killer and more.killer == "kernel":
        lead, more = more, lead  # who really ended it
    found = {
        field.name: getattr(more, field.name)
        for field in fields(Kill)
        if getattr(lead, field.name) in (None, (), "", "unknown", Bound(), MachineRoom(), Sizes(), GroupMemory())
    }
    return replace(lead, **{**found, "evidence": _all_evidence(lead, more)})


def _fullness(kill: Kill) -> int:
    sizes = sum(getattr(kill.sizes, field.name) is not None for field in fields(Sizes))
    known = (kill.bound.bytes, kill.bound.group, kill.room.ram_bytes, kill.when, kill.name, kill.invoked_by)
    sure = 2 - _SURENESS.index(kill.sure)
    return sizes + len(kill.tasks) + sum(value is not None for value in known) + 4 * sure


def _is_echo(kill: Kill, echo: Kill) -> bool:
    """Whether somebody else's report is about this kill."""
    gap = gap_s(kill, echo)
    if gap is not None and gap > _ECHO_S:
        return False
    if kill.host and echo.host and kill.host != echo.host:
        return False
    if echo.pid is not None:
        return echo.pid == kill.pid and kill.effect != "refused" and (echo.signal == 9 or echo.curve != ())
    if kill.killer not in ("kernel", "slurm"):
        return False
    groups = [group for group in (kill.bound.task_group, kill.bound.group) if group]
    if kill.killer == "kernel" and echo.bound.group and not echo.unit and echo.when is None and not echo.curve:
        return any(same_group(group, echo.bound.group) for group in groups)  # a counter
    return echo.unit is not None and any(_names(group, echo.unit) for group in groups)


def _names(group: str, unit: str) -> bool:
    """Whether a unit, a Slurm step or a container is named in a cgroup's path."""
    kind, _, ident = unit.rpartition(" ")
    if kind in ("step", "job"):
        job = ident.partition(".")[0]
        return f"job_{job}" in group.split("/")
    if kind == "container":
        return ident in group
    return unit in group.split("/")


def _with_echo(kill: Kill, echo: Kill) -> Kill:
    counted = max(kill.count, echo.count) if echo.unit else kill.count
    return replace(
        kill,
        command=kill.command or echo.command,
        job=kill.job or echo.job,
        unit=kill.unit or echo.unit,
        curve=kill.curve or echo.curve,
        count=counted if kill.pid is None else kill.count,
        notes=tuple(dict.fromkeys((*kill.notes, *echo.notes))),
        evidence=_all_evidence(kill, echo),
    )


def _repeats(one: Kill, other: Kill) -> bool:
    """Whether two reports without a victim are the same line read twice."""
    gap = gap_s(one, other)
    near = gap is not None and gap <= 5 and (one.host is None or other.host is None or one.host == other.host)
    return (
        near
        and one.killer == other.killer
        and one.unit == other.unit
        and one.pid == other.pid
        and one.bound.group == other.bound.group
        and one.evidence[:1] != other.evidence[:1]
        and {quote.source for quote in one.evidence}.isdisjoint(quote.source for quote in other.evidence)
    )


def _all_evidence(one: Kill, other: Kill) -> tuple[Evidence, ...]:
    return tuple(dict.fromkeys((*one.evidence, *other.evidence)))


def less_counted(counted: list[Kill], kills: list[Kill]) -> list[Kill]:
    """Of what cgroups counted, only what no record explains."""
    left = []
    for count in counted:
        group = count.bound.group or ""
        known = sum(
            kill.boot in (0, None)
            and kill.scope == "cgroup"
            and any(g and same_group(g, group) for g in (kill.bound.task_group, kill.bound.group))
            for kill in kills
        )
        if known < count.count:
            left.append(replace(count, count=count.count - known))
    return left
