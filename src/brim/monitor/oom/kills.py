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
# Path, kind of the owner, and its name with the groups of the pattern.
_OWNERS: list[tuple[str, OwnerKind, str]] = [
    (r"/slurm[^/]*?(?:/.*)?/job_(\d+)/step_(\w+)", "slurm", "Slurm job {0}, step {1}"),
    (r"/slurm[^/]*?(?:/.*)?/job_(\d+)", "slurm", "Slurm job {0}"),
    (r"/ecs/", "ecs", "a container or task of Amazon ECS"),
    (
        r"(?:docker|libpod|cri-containerd|buildkit).*?([0-9a-f]{12})[0-9a-f]{0,52}[^/]*/*$",
        "docker",
        "the container {0}",
    ),
    (r"docker|libpod|cri-containerd|buildkit", "docker", "a container"),
    (r"/(?:lxc(?:\.payload)?|LXC)[./]?([\w-]+)", "lxc", "the LXC container {0}"),
    (r"/(?:qemu|machine)\.slice/([^/]+)", "vm", "the virtual machine or container {0}"),
    (r"/user-(\d+)\.slice(?:/user@\d+\.service)?/*$", "session", "everything that user {0} runs"),
    (r"/user-(\d+)\.slice(?:/user@\d+\.service)?/(?:.*/)?([^/]+)/*$", "session", "{1} of user {0}"),
    (r"/?([^/]+\.(?:service|scope|slice))/*$", "service", "the systemd unit {0}"),
]


def owner_of(group: str) -> Owner:
    """Return the owner of a control group."""
    if "kubepods" in group:
        pod = _POD.search(group)
        if pod is None:
            return Owner("pod", "all pods of this node (the limit of the node's pod pool, not of one pod)", shared=True)
        tail = group[pod.end() :].removeprefix(".slice").strip("/")
        name = pod[1].replace("_", "-")
        return Owner("pod", f"a container of the Kubernetes pod {name}" if tail else f"the whole Kubernetes pod {name}")
    for pattern, kind, text in _OWNERS:
        if match := re.search(pattern, group):
            name = text.format(*match.groups())
            is_slice = kind == "service" and name.endswith(".slice")
            return Owner(kind, name, is_slice or name == "a container" or name.startswith("everything"))
    return Owner("group", f"the cgroup {group}")


def same_group(first: str, second: str) -> bool:
    """Return whether two paths may name the same group. Inside a container, paths lose their beginning."""
    first, second = first.rstrip("/"), second.rstrip("/")
    return bool(first and second) and (first.endswith(second) or second.endswith(first))
