"""What is known about an out-of-memory kill. Everything may be missing but the killer: logs are cut, records
are rate-limited, and some killers say little.
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
