"""What is known about an out-of-memory kill. Everything may be missing but the killer: logs are cut, records
are rate-limited, and some killers say little.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Killer = Literal[
    "kernel",
    "systemd-oomd",
    "earlyoom",
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
class Task:
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
class Room:
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
class Point:
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
    room: Room = Room()
    tasks: tuple[Task, ...] = ()  # the largest, largest first
    invoked_by: str | None = None
    chosen_pid: int | None = None  # the process that was chosen, if a child of it was killed in its place
    curve: tuple[Point, ...] = ()
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
