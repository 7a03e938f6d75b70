"""Data types of an out-of-memory kill, and the owner of a control group.

Every field but the killer may be missing: logs are cut, records are rate-limited, and some killers write little.
The names of fields are the keys of `brim why --json`.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Literal

from brim.records import dataclass

Killer = Literal[
    "kernel",
    "systemd-oomd",
    "earlyoom",
    "nohang",
    "oomd",
    "macos",
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
# The memory that ran out: the machine's; that of a cgroup; the process's own (ulimit, heap); that of a GPU.
Scope = Literal["machine", "cgroup", "process", "gpu", "unknown"]
# refused: an allocation failed and no process was killed; restarted: the machine went down during a run.
Effect = Literal["killed", "asked to end", "evicted", "refused", "restarted"]
# certain: a record names the victim and the killer; likely: a kill for memory is recorded without its victim;
# possible: a process was killed or vanished, and memory is only the usual reason.
Sure = Literal["certain", "likely", "possible"]
SURENESS: tuple[Sure, ...] = ("certain", "likely", "possible")
# Work that brim has a command for.
Job = Literal["map", "tokenize", "embed", "build"]

ASKED_FOR = "A user requested this kill (SysRq f, order=-1): the machine may have had free memory."
LEAK = "Its memory grew during the whole run and did not level off: the program keeps memory that it no longer needs."

UNKNOWN_TREND = "The run was too short to distinguish a leak from loading."


@dataclass(frozen=True, slots=True)
class Sizes:
    """Memory of a process; `rss_bytes` if the log has only the sum."""

    anon_bytes: int | None = None
    shmem_bytes: int | None = None
    file_bytes: int | None = None
    swap_bytes: int | None = None
    total_vm_bytes: int | None = None
    rss_bytes: int | None = None

    @property
    def held_bytes(self) -> int | None:
        """Memory that the kernel could not reclaim, as far as the log shows."""
        if self.anon_bytes is None:
            return None if self.rss_bytes is None else self.rss_bytes + (self.swap_bytes or 0)
        return self.anon_bytes + (self.shmem_bytes or 0) + (self.swap_bytes or 0)


@dataclass(frozen=True, slots=True)
class ListedTask:
    """A row of the kernel's process table."""

    pid: int
    name: str
    uid: int
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Bound:
    """The limit that was reached.

    `kind` is "memory", "memory+swap", "swap", "kmem", "RLIMIT_DATA", "allocation", "heap" or a kind of pressure;
    `requested_bytes` is the size of an allocation that failed.
    """

    bytes: int | None = None
    usage_bytes: int | None = None
    kind: str = ""
    group: str | None = None
    task_group: str | None = None
    text: str = ""
    requested_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Memory of a cgroup by kind."""

    anon_bytes: int | None = None
    shmem_bytes: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MachineRoom:
    """Memory of the machine."""

    ram_bytes: int | None = None
    swap_bytes: int | None = None
    swap_free_bytes: int | None = None
    available_bytes: int | None = None
    shmem_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """A quoted line without secrets, and its position."""

    source: str
    line: int | None
    text: str


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """A sample of brim's run log."""

    t: float
    total_bytes: int
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Kill:
    """One out-of-memory kill, or a similar event (see Effect)."""

    killer: Killer
    scope: Scope = "unknown"
    effect: Effect = "killed"
    sure: Sure = "certain"
    reason: str = ""  # for the confidence
    pid: int | None = None
    name: str | None = None
    uid: int | None = None
    command: str | None = None
    job: Job | None = None  # the kind of work that its output or command line shows
    unit: str | None = None  # a systemd unit, a Slurm step, a container, a pod
    count: int = 1  # processes killed, if the log has only their number
    signal: int | None = None
    when: datetime | None = None
    boot_s: float | None = None
    host: str | None = None
    boot: int | None = None  # 0 is the last boot of its source, −1 the previous one
    sizes: Sizes = Sizes()
    bound: Bound = Bound()
    contents: GroupMemory = GroupMemory()
    room: MachineRoom = MachineRoom()
    tasks: tuple[ListedTask, ...] = ()  # the largest processes, in descending order
    invoked_by: str | None = None
    chosen_pid: int | None = None  # the selected process, if the kernel killed one of its children instead
    curve: tuple[CurvePoint, ...] = ()
    notes: tuple[str, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """A boot that no shutdown preceded."""

    source: str
    last_sign: datetime | None
    first_sign: datetime | None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A source, the number of its findings, and the problem if it could not be read."""

    name: str
    problem: str = ""
    found: int = 0
    note: str = ""


OwnerKind = Literal["pod", "docker", "ecs", "slurm", "lxc", "vm", "session", "service", "group"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a control group, as far as the path of the group shows."""

    kind: OwnerKind
    text: str
    shared: bool = False  # by several containers, jobs or sessions


_POD = re.compile(r"[/-]pod([0-9a-z][\w-]*)")
_HEX = re.compile(r"([0-9a-f]{12,64})")


def owner_of(group: str) -> Owner:
    """Return the owner of a control group."""
    last = group.rstrip("/").rsplit("/", 1)[-1]
    if "kubepods" in group:
        pod = _POD.search(group)
        if pod is None:
            return Owner("pod", "all pods of this node (the limit of the node's pod pool, not of one pod)", shared=True)
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


def same_group(first: str, second: str) -> bool:
    """Return whether two paths may name the same group. Inside a container, paths lose their beginning."""
    first, second = first.rstrip("/"), second.rstrip("/")
    return bool(first and second) and (first.endswith(second) or second.endswith(first))
