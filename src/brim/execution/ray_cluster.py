"""Connect to a Ray cluster, and check every node before the first task: versions, source and destination.

Errors name the node, minutes before a task would fail there.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any, Literal

import numpy as np

from brim.errors import (
    BrimError,
    DestinationError,
    DestinationUnavailableError,
    InputError,
    MemoryLimitError,
    SourceChangedError,
    SourceError,
    StoppedError,
)
from brim.execution.ray_private import address_here, be_quiet
from brim.extras import missing
from brim.file_set import FileSet
from brim.formats.source_reader import open_source
from brim.records import dataclass
from brim.sizes import format_size
from brim.storage.destination_address import Uploader
from brim.storage.listing import list_files, stat_files
from brim.storage.location import Access, Location, is_remote, parse_location

Loss = Literal["lost", "memory"]
# Errors of tasks whose worker, node or argument was lost.
_LOST = (
    "WorkerCrashedError",
    "NodeDiedError",
    "ActorDiedError",
    "ActorUnavailableError",
    "ObjectLostError",
    "LocalRayletDiedError",
    "TaskUnschedulableError",
    "RpcError",
)


def loss_of(ray: Any, error: BaseException) -> Loss:
    """Return how a task was lost. An error that the task raised itself is raised."""
    exceptions = ray.exceptions
    memory: list[type[BaseException]] = [MemoryError]
    if hasattr(exceptions, "OutOfMemoryError"):
        memory.append(exceptions.OutOfMemoryError)
    cause = getattr(error, "cause", None) if isinstance(error, exceptions.RayTaskError) else None
    if isinstance(error, tuple(memory)) or isinstance(cause, tuple(memory)):
        return "memory"
    if isinstance(cause, BrimError):
        raise cause from error
    lost = tuple(getattr(exceptions, name) for name in _LOST if hasattr(exceptions, name))
    if cause is None and isinstance(error, lost):
        return "lost"
    if cause is not None and not isinstance(cause, OSError):
        raise cause from error  # a bug, here or in what the task calls
    text = str(cause or error).strip().split("\n")[0]
    raise DestinationUnavailableError(
        f"A task failed on a node of the cluster: {text.rstrip('.')}.",
        hint="Look at the cluster with `ray status`, then run the same command to continue.",
    ) from error


NAMESPACE = "brim"
INTERPRETER_BYTES = 130_000_000  # a Ray worker with brim and pyarrow, before any work
_CONNECT_S = 5.0
_HEAD_S = 20.0  # the head may be silent so long: Ray kills the process after a minute, without an error of brim
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of HTTP/2, with no settings
_HINT = "Start one with `ray start --head`, then `ray start --address HOST:PORT` on every other node."


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and its resources."""

    id: str
    name: str
    cpus: float
    memory_bytes: int
    gpus: float = 0.0


class Cluster:
    """A connection. Once the head `is_lost`, Ray is not called again: it would wait, and then kill the process."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.is_lost = False
        self._head = str(ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive and have a CPU."""
        self._need_head()
        alive = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        addresses = Counter(node["NodeManagerAddress"] for node in alive)
        return [_node(node, is_single=addresses[node["NodeManagerAddress"]] == 1) for node in alive]

    def need_nodes(self) -> list[Node]:
        nodes = self.nodes()
        if not nodes:
            raise DestinationUnavailableError(
                "No node of the Ray cluster offers a CPU.", hint="Start nodes, then run the same command to continue."
            )
        return nodes

    def check_memory(self, work_bytes: int, limit_bytes: int) -> None:
        """Refuse uploads whose tasks do not fit the limit of a node, before hours of work."""
        need_bytes = INTERPRETER_BYTES + work_bytes
        if need_bytes > limit_bytes:
            raise MemoryLimitError(
                f"A Ray task needs about {format_size(need_bytes)} of memory with its interpreter, and a node may use "
                f"{format_size(limit_bytes)} (--memory).",
                hint=f"Raise it with --memory={-(-need_bytes // 10**6)}MB, or leave out --engine=ray.",
                need_bytes=need_bytes,
                limit_bytes=limit_bytes,
            )

    def _need_head(self) -> None:
        until = time.monotonic() + _HEAD_S
        while (error := _unreachable(self._head)) is not None:
            if time.monotonic() > until:
                self.is_lost = True
                raise DestinationUnavailableError(
                    f"The head of the Ray cluster ({self._head}) is gone: {error.strerror or error}.",
                    hint="Start the cluster, then run the same command to continue. Finished work is kept.",
                ) from error
            time.sleep(0.5)


def _unreachable(address: str) -> OSError | None:
    """Return why no gRPC server, such as Ray's head, can be reached. It sends its settings to every client."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                connection.sendall(_HELLO)
                if connection.recv(4)[3:] != b"\x04":
                    return OSError("the server at this address is not the head of a Ray cluster")
    except OSError as error:
        return error
    return None


def _node(node: dict[str, Any], is_single: bool) -> Node:
    resources = node["Resources"]
    name = str(node["NodeManagerAddress"]) + ("" if is_single else f" ({node['NodeID'][:6]})")
    memory, gpus = int(resources.get("memory", 0)), float(resources.get("GPU", 0))
    return Node(str(node["NodeID"]), name, float(resources["CPU"]), memory, gpus)


def need_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise missing("ray", "--engine=ray needs Ray, on every node.") from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Connect to a cluster. A program that has connected to Ray before keeps its connection."""
    ray = need_ray()
    if ray.is_initialized():
        yield Cluster(ray)
        return
    head = _need_reachable(ray, address or "auto")
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        finally:
            for number, handler in handlers.items():  # Ray replaces that of SIGTERM, on which brim stops cleanly
                signal.signal(number, handler)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # Ray's own handler
            raise StoppedError("Stopped by SIGTERM.", hint="Run the same command to continue.") from error
        text = str(error).strip().split("\n")[0] or "none of its nodes is on this machine"
        if head is not None and _unreachable(head) is not None:
            raise DestinationUnavailableError(
                f"The Ray cluster at {head} ended while brim connected to it.",
                hint="Start it again, then run the same command to continue.",
            ) from error
        raise InputError(
            f"The Ray cluster at {address or 'auto'} cannot be used from this machine: {text.rstrip('.')}.",
            hint="Run brim on one of its nodes, with the same versions of Ray and Python as there.",
        ) from error
    be_quiet(ray)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _need_reachable(ray: Any, address: str) -> str | None:
    """Check that the head answers, and return its HOST:PORT, if the address names one.

    Ray itself retries for minutes, and then kills the process.
    """
    if address == "auto":
        try:
            address = address_here(ray)
        except (ConnectionError, ValueError) as error:
            raise InputError("No Ray cluster runs on this machine.", hint=_HINT) from error
    if not address.rpartition(":")[2].isdigit():
        return None
    if (failure := _unreachable(address)) is not None:
        message = f"No Ray cluster answers at {address}: {failure.strerror or failure}."
        raise InputError(message, hint=f"Check --address. {_HINT}") from failure
    return address


_ANSWER_S = 60.0
_SAMPLE = 5
_SHARED_HINT = "Keep it on a disk that every node mounts under the same path."


@dataclass(frozen=True, slots=True)
class NodeRequirements:
    """What a node must be able to read (a sample of source files, paths), and the destination that it writes to."""

    files: FileSet | None = None
    paths: tuple[str, ...] = ()
    uploader: Uploader | None = None
    marker: str = ""  # a file in the folder of units
    access: Access = field(default_factory=Access)  # to the bucket of `paths`

    def check(self) -> None:
        """Raise a BrimError on a node that lacks one of them."""
        if self.files is not None and self.files.bucket is None:
            for number in range(len(self.files)):
                try:
                    os.close(open_source(self.files, number))
                except SourceChangedError as error:
                    path = self.files.full_path(number)
                    raise SourceError(
                        f"The source file {path!r} is missing, unreadable, or not the one that the driver reads.",
                        hint=_SHARED_HINT,
                    ) from error
        elif self.files is not None and self.files.bucket is not None:
            _check_objects(self.files.bucket, [self.files.path(number) for number in range(len(self.files))])
        for path in self.paths:
            if is_remote(path):
                _check_objects(parse_location(path, self.access), [])
            elif not os.access(path, os.R_OK):
                raise SourceError(f"The source {path!r} is missing or unreadable.", hint=_SHARED_HINT)
        if self.marker and not os.path.exists(self.marker):
            raise DestinationError(
                f"The folder {os.path.dirname(self.marker)!r} is not the one that the driver writes to.",
                hint="Choose a destination, or a --state-dir folder, on a disk that every node shares.",
            )
        if self.uploader is not None:
            self.uploader.check_access()


def _check_objects(bucket: Location, names: list[str]) -> None:
    """Check that these objects can be read; without any, that the location can be listed."""
    if not names:
        next(list_files(bucket), None)
    for name, stat in zip(names, stat_files(bucket, names), strict=True):
        if stat is None:
            raise SourceError(f"{bucket.child(name)} is missing.", hint="Do all nodes reach the same object store?")


def sample_of(files: FileSet) -> FileSet:
    """Return a few of the files that will be opened."""
    on_disk = files.on_disk
    real = np.setdiff1d(np.arange(len(on_disk), dtype=np.int64), np.array(list(on_disk.bundles), np.int64))
    if not len(real):
        return on_disk.take(real)
    return on_disk.take(np.unique(real[np.linspace(0, len(real) - 1, _SAMPLE).astype(np.int64)])).anywhere()


def check_nodes(cluster: Cluster, nodes: Sequence[Node], requirements: NodeRequirements) -> None:
    """Raise the first problem of a node, with the name of the node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = cluster.ray
    probe = ray.remote(_make_probe())
    payload = pickle.dumps(requirements)
    requests = {
        probe.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(payload): node
        for node in nodes
    }
    ready, silent = ray.wait(list(requests), num_returns=len(requests), timeout=_ANSWER_S)
    if silent:
        raise InputError(
            f"The Ray node {requests[silent[0]].name} does not answer within {_ANSWER_S:.0f} s.",
            hint="Look at it with `ray status`, or take it out of the cluster.",
        )
    for ref in ready:
        node = requests[ref]
        try:
            installed, answer = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise InputError(f"The Ray node {node.name} cannot run brim: {error.cause}.") from error
        except ray.exceptions.RayError:
            continue  # the node has gone since; nothing will run on it
        local = versions()
        for name, version in local.items():
            if installed.get(name) != version:
                reason = f" (Its error: {installed['error']})" if installed.get("error") else ""
                raise InputError(
                    f"The Ray node {node.name} has {installed.get(name) or 'none'} as {name}, and this machine has "
                    f"{version}.",
                    hint=f"Install the same on every node: brim {local['brim']}.{reason}",
                )
        problem = pickle.loads(answer)
        if isinstance(problem, BrimError):
            message, hint = problem.words
            raise type(problem)(f"On the Ray node {node.name}: {message}", hint=hint, **problem.facts)


def versions() -> dict[str, str]:
    import pyarrow

    import brim

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"brim": brim.__version__, "pyarrow": pyarrow.__version__, "Python": python}


def _make_probe() -> Callable[[bytes], tuple[dict[str, str], bytes]]:
    """Return an inner function, which is pickled by value: it runs without brim, and with another version of it."""

    def probe(payload: bytes) -> tuple[dict[str, str], bytes]:
        import pickle
        import platform

        installed = {"Python": ".".join(platform.python_version_tuple()[:2])}
        try:
            import pyarrow

            import brim

            installed |= {"brim": brim.__version__, "pyarrow": pyarrow.__version__}
            from brim.errors import BrimError

            requirements = pickle.loads(payload)
        except (ImportError, AttributeError) as error:
            return {**installed, "error": f"{type(error).__name__}: {error}"}, b"N."
        try:
            requirements.check()
        except BrimError as error:
            return installed, pickle.dumps(error)
        return installed, pickle.dumps(None)

    return probe
