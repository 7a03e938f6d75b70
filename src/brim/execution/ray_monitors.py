"""Progress and memory of Ray tasks: each node has an actor that tasks report to, and that the driver polls.

Only the display depends on it: a node without its monitor works as well.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
import uuid
from dataclasses import field
from pathlib import Path
from typing import Any

from brim.execution.ray_cluster import NAMESPACE, Cluster, Node
from brim.memory.meter import process_bytes, tree
from brim.records import dataclass

_POLL_S = 0.5
_REPORT_S = 0.2
_MOST_NOTES = 200
_LATE_S = 10.0
_STALE_S = 3600.0
_PREFIX = "brim-ray"


@dataclass(slots=True)
class NodeReport:
    """Bytes sent and hashed per task, lines that tasks printed, and the memory of their processes."""

    sent: dict[str, int] = field(default_factory=dict)
    hashed: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    held_bytes: int = 0


class NodeMonitor:
    """The actor of a node."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._report = NodeReport()
        self._pids: set[int] = set()

    def report(self, task: str, pid: int, sent: int, hashed: int, notes: list[str]) -> None:
        self._pids.add(pid)
        self._report.sent[task], self._report.hashed[task] = sent, hashed
        self._report.notes = [*self._report.notes, *notes][-_MOST_NOTES:]

    def read(self) -> NodeReport:
        report, self._report = self._report, NodeReport()
        self._pids = {pid for pid in self._pids if os.path.exists(f"/proc/{pid}")}
        report.held_bytes = sum(process_bytes(pid) for pid in tree(sorted(self._pids)))
        return report

    def end(self) -> None:
        """Remove what this job left on the node: processes that its tasks started, and their folders."""
        for pid in self._pids:
            for child in tree([pid])[1:]:
                try:
                    # A number may have been reused by a process that is not a worker of brim.
                    if b"brim.execution.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                        os.kill(child, signal.SIGKILL)
                except OSError:
                    continue
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}-{self._run}-*"):
            shutil.rmtree(folder, ignore_errors=True)


def private_folder(run: str) -> Path:
    """Make a folder of this node for this job. Folders of killed jobs are removed."""
    home = Path(tempfile.gettempdir())
    for folder in home.glob(f"{_PREFIX}-*"):
        pid = folder.name.split("-")[3:4]
        try:
            is_old = time.time() - folder.stat().st_mtime > _STALE_S
        except OSError:
            continue
        if is_old and pid and pid[0].isdigit() and not os.path.exists(f"/proc/{pid[0]}"):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}-{run}-{os.getpid()}-"))


# In a task

_MONITORS: dict[str, Any] = {}
_REPORTED_AT = [0.0]  # of this process: tasks may be too short to report each


class TaskReporter:
    """Reports bytes and notes of a task to the monitor of its node, at most five times per second."""

    def __init__(self, run: str, task: str) -> None:
        self.run, self._task = run, task
        self._monitor = _find_monitor(run)
        self._sent = self._hashed = 0
        self._notes: list[str] = []

    def hashed(self, size: int) -> None:
        self._hashed += size
        self.report()

    def sent(self, size: int) -> None:
        self._sent += size
        self.report()

    def set_sent(self, size: int) -> None:
        """Report the total so far."""
        self._sent = size
        self.report()

    def note(self, text: str) -> None:
        self._notes.append(text)
        self.report()

    def take_notes(self) -> tuple[str, ...]:
        """Return notes that were not reported yet: they travel with the answer."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def report(self) -> None:
        if self._monitor is not None and time.monotonic() - _REPORTED_AT[0] >= _REPORT_S:
            _REPORTED_AT[0] = time.monotonic()
            self._monitor.report.remote(self._task, os.getpid(), self._sent, self._hashed, self._notes)
            self._notes = []


def _find_monitor(run: str) -> Any:
    if run not in _MONITORS:
        import ray

        _MONITORS.clear()
        node = ray.get_runtime_context().get_node_id()
        try:
            _MONITORS[run] = ray.get_actor(_actor_name(run, node), namespace=NAMESPACE)
        except ValueError:
            return None  # a node that has just joined
    return _MONITORS[run]


def _actor_name(run: str, node: str) -> str:
    return f"gauge-{run}-{node}"


# In the driver


class NodeMonitors:
    """The monitors of all nodes. `run` is a unique name of this run."""

    def __init__(self, cluster: Cluster) -> None:
        self.run = uuid.uuid4().hex[:12]
        self._cluster = cluster
        self._actors: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        self._requests: dict[Any, str] = {}
        self._polled_at = 0.0
        self._is_started = False
        self._submitted_at: float | None = None  # the first task
        self.held_bytes: dict[str, int] = {}  # by the name of the node
        self.peak_bytes = 0

    def task_submitted(self) -> None:
        if self._submitted_at is None and not self._is_started:
            self._submitted_at = time.monotonic()

    def task_begun(self) -> None:
        self._is_started, self._submitted_at = True, None

    def late_note(self) -> str | None:
        """Return a note, once, if no task begins although some were submitted: other jobs use the cluster."""
        if self._submitted_at is None or time.monotonic() - self._submitted_at < _LATE_S:
            return None
        self.task_begun()
        return "no task has begun yet: waiting for CPUs and memory of the cluster (`ray status` shows who has them)"

    def watch(self, nodes: list[Node]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        actor = self._cluster.ray.remote(NodeMonitor)
        for node in nodes:
            if node.id not in self._actors:
                self._names[node.id] = node.name
                self._actors[node.id] = actor.options(
                    name=_actor_name(self.run, node.id),
                    namespace=NAMESPACE,
                    num_cpus=0,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
                ).remote(self.run)

    def poll(self) -> list[NodeReport]:
        """Return new reports. May be called often: nodes are asked twice per second."""
        ray, reports = self._cluster.ray, []
        if self._requests:
            ready, _ = ray.wait(list(self._requests), num_returns=len(self._requests), timeout=0)
            for ref in ready:
                node = self._requests.pop(ref)
                try:
                    report: NodeReport = ray.get(ref)
                except ray.exceptions.RayError:
                    self.held_bytes.pop(self._names[node], None)
                    self._actors.pop(node, None)  # the node is lost
                    continue
                self.held_bytes[self._names[node]] = report.held_bytes
                self.peak_bytes = max(self.peak_bytes, report.held_bytes)
                reports.append(report)
                if report.sent:
                    self.task_begun()
        if not self._requests and time.monotonic() - self._polled_at >= _POLL_S:
            self._polled_at = time.monotonic()
            self._requests = {actor.read.remote(): node for node, actor in self._actors.items()}
        return reports

    def poll_last(self) -> list[NodeReport]:
        """Return the reports that were not polled yet."""
        reports, self._polled_at = self.poll(), 0.0
        until = time.monotonic() + 1.0
        reports += self.poll()
        while self._requests and time.monotonic() < until:
            reports += self.poll()
            time.sleep(0.005)
        return reports

    def end(self) -> None:
        if self._cluster.is_lost:
            return
        ray = self._cluster.ray
        refs = [actor.end.remote() for actor in self._actors.values()]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=3.0)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
