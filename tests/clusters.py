"""Start a Ray cluster of several nodes on this machine and run the brim command on it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brim.memory.meter import tree

_STORE_BYTES = 80 << 20
# Ray notices a lost node within two seconds instead of 30; a slow node on a busy machine is not taken for lost.
_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
_PATIENCE_S = 600.0  # timeout for steps that take seconds on an idle machine


class TestCluster:
    """A cluster whose head node runs no tasks, with worker nodes that do."""

    __test__ = False

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH | config}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head | {"object_store_memory": _STORE_BYTES})

    @property
    def options(self) -> tuple[str, ...]:
        return ("--engine", "ray", "--address", self._cluster.address)

    @contextmanager
    def node(self, cpus: int = 1, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
        """Add another worker node for the duration of the block."""
        node = self.add(cpus, environment)
        try:
            yield node
        finally:
            if node in self._cluster.worker_nodes:
                self._cluster.remove_node(node, allow_graceful=False)

    def add(self, cpus: int = 1, environment: Mapping[str, str] | None = None) -> Any:
        extra = {"HF_HUB_OFFLINE": "0", "ON_A_NODE": "1", **(environment or {})}
        return self._cluster.add_node(num_cpus=cpus, object_store_memory=_STORE_BYTES, env_vars=extra)

    @property
    def workers(self) -> list[Any]:
        """The nodes that run tasks."""
        return list(self._cluster.worker_nodes)

    def kill(self, node: Any) -> None:
        """Kill the raylet of a node and every process it started with SIGKILL."""
        for pid in tree([_raylet(node)]):
            _kill(pid)

    def kill_head(self) -> None:
        """Kill the head's control service (GCS) with SIGKILL."""
        _kill(int(self._cluster.head_node.all_processes["gcs_server"][0].process.pid))

    def kill_worker(self, node: Any, task: str) -> bool:
        """Kill the worker that runs a task of this name with SIGKILL, if one exists."""
        for pid in tree([_raylet(node)])[1:]:
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            if words.startswith(f"ray::{task}".encode()):
                _kill(pid)
                return True
        return False

    def maps(self, task: str) -> list[str]:
        """Return the mapped files (mainly libraries) of every worker that runs a task of this name."""
        actual = []
        for node in self._cluster.worker_nodes:
            for pid in tree([_raylet(node)])[1:]:
                try:
                    if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"ray::{task}".encode()):
                        actual.append(Path(f"/proc/{pid}/maps").read_text())
                except OSError:
                    continue
        return actual

    def holds(self, secret: str) -> list[str]:
        """Return the files of the cluster (logs, events) that contain a text."""
        result = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return [str(path) for path in result if secret.encode() in path.read_bytes()]

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def cluster_of(nodes: int, cpus: int = 1, **config: object) -> Iterator[TestCluster]:
    """Create the cluster in a folder with a short path, because the length of socket paths is limited."""
    folder = Path(tempfile.mkdtemp(prefix="r"))
    (folder / "ray").mkdir()
    extra = {"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    cluster = TestCluster(folder, config)
    try:
        for _ in range(nodes):
            cluster.add(cpus)
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


class Run:
    """The brim command with --json in a separate process; its events are read as they arrive."""

    def __init__(
        self,
        *arguments: object,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] = ("-m", "brim"),
    ) -> None:
        command = [sys.executable, *program, *map(str, arguments), "--json"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment
        )
        self.events: list[dict[str, Any]] = []

    def until_shards(self, count: int) -> None:
        """Wait until this many shards or units are done."""
        self.until(lambda: len(self.shards) >= count)

    def until(self, happened: Callable[[], bool]) -> None:
        """Read events until the condition holds."""
        assert self._process.stdout is not None
        while not happened():
            line = self._process.stdout.readline()
            assert line, self._process.communicate()[1]
            self.events.append(json.loads(line))

    @property
    def shards(self) -> list[str]:
        return [event["name"] for event in self.events if event["event"] == "shard"]

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.events if event["event"] == "note"]

    @property
    def nodes(self) -> dict[str, int]:
        """Return the largest value that was reported for each node."""
        messages = [event["nodes"] for event in self.events if "nodes" in event]
        return {name: max(item.get(name, 0) for item in messages) for entry in messages for name in entry}

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self, code: int = 0) -> dict[str, Any]:
        """Wait for the process to end and return its last event. stdout contains only JSON."""
        assert self._process.stdout is not None
        timer = threading.Timer(_PATIENCE_S, self._process.kill)
        timer.start()
        try:  # communicate() alone would lose lines that readline() has buffered
            self.events += [json.loads(line) for line in self._process.stdout]
        finally:
            timer.cancel()
        err = self._process.communicate(timeout=_PATIENCE_S)[1]
        assert self._process.returncode == code, f"exit {self._process.returncode}\n{self.events[-3:]}\n{err}"
        assert "Traceback" not in err, err
        return self.events[-1]


def run(*arguments: object, cwd: Path, environment: Mapping[str, str] | None = None, code: int = 0) -> Run:
    started = Run(*arguments, cwd=cwd, environment=environment)
    started.end(code)
    return started


def until(happens: Any, seconds: float = _PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
