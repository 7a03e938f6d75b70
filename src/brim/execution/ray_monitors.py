"""What tasks are doing and holding: each node has an actor that tasks tell, and that the driver asks twice a second.

Nothing depends on it but what is shown: a node without its gauge works as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from brim.execution.ray_cluster import NAMESPACE, Cluster, Node
from brim.memory.meter import process_bytes, tree
from brim.records import dataclass

_EVERY_S = 0.5
_TELL_S = 0.2
_MOST_NOTES = 200
_LATE_S = 10.0
_STALE_S = 3600.0
_PREFIX = "brim-ray"


@dataclass(slots=True)
class TaskNews:
    """How far tasks are: bytes sent and hashed of each, what they print, and what the node holds."""

    sent: dict[str, int] = field(default_factory=dict)
    hashed: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    held_bytes: int = 0


class Gauge:
    """The actor of a node."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._told = TaskNews()
        self._pids: set[int] = set()

    def tell(self, task: str, pid: int, sent: int, hashed: int, notes: list[str]) -> None:
        self._pids.add(pid)
        self._told.sent[task], self._told.hashed[task] = sent, hashed
        self._told.notes = [*self._told.notes, *notes][-_MOST_NOTES:]

    def read(self) -> TaskNews:
        told, self._told = self._told, TaskNews()
        self._pids = {pid for pid in self._pids if os.path.exists(f"/proc/{pid}")}
        told.held_bytes = sum(process_bytes(pid) for pid in tree(sorted(self._pids)))
        return told

    def end(self) -> None:
        """Nothing of this job stays on the node: neither what its tasks have started nor their folders."""
        for pid in self._pids:
            for child in tree([pid])[1:]:
                if not _is_ours(child):
                    continue
                try:
                    os.kill(child, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{self._run}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _is_ours(pid: int) -> bool:
    """Whether it is a worker of brim's: a number may have become somebody else's."""
    try:
        return b"brim.execution.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def private_folder(run: str) -> Path:
    """A folder of this node and this job alone. What killed jobs have left goes."""
    home = Path(tempfile.gettempdir())
    for left in home.glob(f"{_PREFIX}-*"):
        pid = left.name.split("-")[3:4]
        try:
            old = time.time() - left.stat().st_mtime > _STALE_S
        except OSError:
            continue
        if old and pid and pid[0].isdigit() and not os.path.exists(f"/proc/{pid[0]}"):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{run}-{os.getpid()}-"))


# In a task

_FOUND: dict[str, Any] = {}
_TOLD = [0.0]  # when this process told something; tasks may be shorter than that is useful


class Telling:
    """A task's side. Bytes are told as they go by, but not more often than is useful."""

    def __init__(self, run: str, task: str) -> None:
        self._gauge, self._task = _gauge(run), task
        self._sent = self._hashed = 0
        self._notes: list[str] = []

    def hashed(self, size: int) -> None:
        self._hashed += size
        self.tell()

    def sent(self, size: int) -> None:
        self._sent += size
        self.tell()

    def seen(self, size: int) -> None:
        """So far, not since the last time."""
        self._sent = size
        self.tell()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self.tell()

    def untold(self) -> tuple[str, ...]:
        """Notes that go with the answer."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def tell(self, now: bool = False) -> None:
        if self._gauge is not None and (now or time.monotonic() - _TOLD[0] >= _TELL_S):
            _TOLD[0] = time.monotonic()
            self._gauge.tell.remote(self._task, os.getpid(), self._sent, self._hashed, self._notes)
            self._notes = []


def _gauge(run: str) -> Any:
    if run not in _FOUND:
        import ray

        _FOUND.clear()
        node = ray.get_runtime_context().get_node_id()
        try:
            _FOUND[run] = ray.get_actor(_name(run, node), namespace=NAMESPACE)
        except ValueError:
            return None  # a node that has just joined
    return _FOUND[run]


def _name(run: str, node: str) -> str:
    return f"gauge-{run}-{node}"


# In the driver


class Gauges:
    """All nodes' gauges. `run` is a name for this run alone. `poll` is called often and seldom does anything."""

    def __init__(self, cluster: Cluster) -> None:
        self.run = uuid.uuid4().hex[:12]
        self._cluster = cluster
        self._actors: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._asked: dict[Any, str] = {}
        self._held: dict[str, int] = {}
        self._at = 0.0
        self._begun = False
        self._asked_at: float | None = None  # when the first task was asked for
        self.peak_bytes = 0

    def submitted(self) -> None:
        """A task was asked for."""
        if self._asked_at is None and not self._begun:
            self._asked_at = time.monotonic()

    def begun(self) -> None:
        self._begun, self._asked_at = True, None

    def late(self) -> str | None:
        """Said once, if no task has begun although some were asked for: the cluster is somebody else's for now."""
        if self._asked_at is None or time.monotonic() - self._asked_at < _LATE_S:
            return None
        self.begun()
        return "no task has begun yet: waiting for CPUs and memory of the cluster (`ray status` shows who has them)"

    def watch(self, nodes: list[Node]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        made = self._cluster.ray.remote(Gauge)
        for node in nodes:
            if node.id not in self._actors:
                self._names[node.id] = node.name
                self._actors[node.id] = made.options(
                    name=_name(self.run, node.id),
                    namespace=NAMESPACE,
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                ).remote(self.run)

    @property
    def held(self) -> Mapping[str, int]:
        return self._held

    def poll(self) -> list[TaskNews]:
        """What was told since the last time; nothing if that was not long ago."""
        ray, told = self._cluster.ray, []
        if self._asked:
            ready, _ = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
            for ref in ready:
                node = self._asked.pop(ref)
                try:
                    one = ray.get(ref)
                except ray.exceptions.RayError:
                    self._held.pop(self._names[node], None)
                    self._actors.pop(node, None)  # the node is lost
                    continue
                self._held[self._names[node]] = one.held_bytes
                self.peak_bytes = max(self.peak_bytes, one.held_bytes)
                told.append(one)
                if one.sent:
                    self.begun()
        if not self._asked and time.monotonic() - self._at >= _EVERY_S:
            self._at = time.monotonic()
            self._asked = {actor.read.remote(): node for node, actor in self._actors.items()}
        return told

    def last(self) -> list[TaskNews]:
        """What was told and not asked for yet."""
        told, self._at = self.poll(), 0.0
        until = time.monotonic() + 1.0
        told += self.poll()
        while self._asked and time.monotonic() < until:
            told += self.poll()
            time.sleep(0.005)
        return told

    def end(self) -> None:
        if self._cluster.lost:
            return
        ray = self._cluster.ray
        refs = [actor.end.remote() for actor in self._actors.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=3.0)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
