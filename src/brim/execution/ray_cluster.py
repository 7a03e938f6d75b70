"""Before the first task, on every node: the same brim, a source that can be read, a destination that can be reached.

What is wrong is said with the node's name, minutes before a task would fail there.
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
    SourceChangedError,
    SourceError,
    StoppedError,
)
from brim.execution.ray_private import address_here, be_quiet
from brim.extras import missing
from brim.file_set import FileSet
from brim.formats.source_reader import open_source
from brim.records import dataclass
from brim.storage.listing import list_files, stat_files
from brim.storage.location import Access, Location, is_remote, parse_location
from brim.stores.store import Carrier

Loss = Literal["lost", "memory"]
# The task did nothing wrong: its worker or its node went away, or what it was given did.
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
    """How a task was lost. What it raised itself is raised here: brim's errors as they are."""
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
    said = str(cause or error).strip().split("\n")[0]
    raise DestinationUnavailableError(
        f"A task failed on a node of the cluster: {said.rstrip('.')}.",
        hint="Look at the cluster with `ray status`, then run the same command to continue.",
    ) from error


NAMESPACE = "brim"
_CONNECT_S = 5.0
_HEAD_S = 20.0  # how long the head may be silent: Ray ends the process after a minute, without a word of brim's
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # of HTTP/2, with no settings
_HINT = "Start one with `ray start --head`, then `ray start --address HOST:PORT` on every other node."


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster, and what it offers."""

    id: str
    name: str
    cpus: float
    memory_bytes: int
    gpus: float = 0.0


class Cluster:
    """A connection. Once the head is `lost`, nothing is asked any more: Ray would wait, and then end the process."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray
        self.lost = False
        self._head = str(ray.get_runtime_context().gcs_address)

    def nodes(self) -> list[Node]:
        """Those that are alive and offer something to work with."""
        self._need_head()
        alive = [node for node in self.ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
        addresses = Counter(node["NodeManagerAddress"] for node in alive)
        return [_node(node, alone=addresses[node["NodeManagerAddress"]] == 1) for node in alive]

    def need_nodes(self) -> list[Node]:
        nodes = self.nodes()
        if not nodes:
            raise DestinationUnavailableError(
                "No node of the Ray cluster offers a CPU.", hint="Start nodes, then run the same command to continue."
            )
        return nodes

    def _need_head(self) -> None:
        until = time.monotonic() + _HEAD_S
        while (error := _unreachable(self._head)) is not None:
            if time.monotonic() > until:
                self.lost = True
                raise DestinationUnavailableError(
                    f"The head of the Ray cluster ({self._head}) is gone: {error.strerror or error}.",
                    hint="Start the cluster, then run the same command to continue. Finished work is kept.",
                ) from error
            time.sleep(0.5)


def _unreachable(address: str) -> OSError | None:
    """Why there is no gRPC server, which Ray's head is. It tells its settings to whoever connects."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                connection.sendall(_HELLO)
                if connection.recv(4)[3:] != b"\x04":
                    return OSError("what answers there is not Ray's head")
    except OSError as error:
        return error
    return None


def _node(node: dict[str, Any], alone: bool) -> Node:
    resources = node["Resources"]
    name = str(node["NodeManagerAddress"]) + ("" if alone else f" ({node['NodeID'][:6]})")
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
    """Whoever has connected before (a program that uses Ray itself) keeps its connection."""
    ray = need_ray()
    if ray.is_initialized():
        yield Cluster(ray)
        return
    head = _need_reachable(ray, address or "auto")
    handlers = _handlers()
    try:
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM, which brim stops cleanly on
                signal.signal(number, handler)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # Ray's own handler
            raise StoppedError("Stopped by SIGTERM.", hint="Run the same command to continue.") from error
        said = str(error).strip().split("\n")[0] or "none of its nodes is on this machine"
        if head is not None and _unreachable(head) is not None:
            raise DestinationUnavailableError(
                f"The Ray cluster at {head} ended while brim connected to it.",
                hint="Start it again, then run the same command to continue.",
            ) from error
        raise InputError(
            f"The Ray cluster at {address or 'auto'} cannot be used from here: {said.rstrip('.')}.",
            hint="Run brim on one of its nodes, with the same versions of Ray and Python as there.",
        ) from error
    be_quiet(ray)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _need_reachable(ray: Any, address: str) -> str | None:
    """Check that the head answers, and return its HOST:PORT, if the address names one.

    Ray itself tries for minutes, and then ends the process.
    """
    if address == "auto":
        try:
            address = address_here(ray)
        except (ConnectionError, ValueError) as error:
            raise InputError("There is no running Ray cluster on this machine.", hint=_HINT) from error
    if not address.rpartition(":")[2].isdigit():
        return None
    if (failure := _unreachable(address)) is not None:
        raise InputError(
            f"There is no Ray cluster at {address}: {failure.strerror or failure}.", hint=f"Check --address. {_HINT}"
        ) from failure
    return address


_ANSWER_S = 60.0
_SAMPLE = 5
_SHARED = "Keep it on a disk that every node sees under the same path."


@dataclass(frozen=True, slots=True)
class Sight:
    """What a node has to see: some source files, paths that must exist, and where output goes."""

    files: FileSet | None = None
    paths: tuple[str, ...] = ()
    carrier: Carrier | None = None
    mark: str = ""  # a file in the folder of units
    access: Access = field(default_factory=Access)  # to the bucket that `paths` are in

    def check(self) -> None:
        """On a node; a BrimError says what it does not see."""
        if self.files is not None and self.files.bucket is None:
            for number in range(len(self.files)):
                _open(self.files, number)
        elif self.files is not None and self.files.bucket is not None:
            _see(self.files.bucket, [self.files.path(number) for number in range(len(self.files))])
        for path in self.paths:
            if is_remote(path):
                _see(parse_location(path, self.access), [])
            elif not os.access(path, os.R_OK):
                raise SourceError(
                    f"The source {path!r} is not there, or may not be read.",
                    hint=_SHARED,
                )
        if self.mark and not os.path.exists(self.mark):
            raise DestinationError(
                f"The folder {os.path.dirname(self.mark)!r} is not the one that the driver writes to.",
                hint="Choose a destination, or a --state-dir folder, on a disk that every node shares.",
            )
        if self.carrier is not None:
            self.carrier.check_access()


def _open(files: FileSet, number: int) -> None:
    try:
        os.close(open_source(files, number))
    except SourceChangedError as error:
        what = "is not there, may not be read, or is not what the driver sees"
        raise SourceError(f"The source file {files.full_path(number)!r} {what}.", hint=_SHARED) from error


def _see(bucket: Location, names: list[str]) -> None:
    """Whether these objects can be read from here; without any, whether the place can be listed."""
    if not names:
        next(list_files(bucket), None)
    for name, stat in zip(names, stat_files(bucket, names), strict=True):
        if stat is None:
            raise SourceError(f"{bucket.child(name)} is not there.", hint="Do all nodes reach the same store?")


def sample_of(files: FileSet) -> FileSet:
    """A few of the files that will be opened."""
    on_disk = files.on_disk
    real = np.setdiff1d(np.arange(len(on_disk), dtype=np.int64), np.array(list(on_disk.bundles), np.int64))
    if not len(real):
        return on_disk.take(real)
    return on_disk.take(np.unique(real[np.linspace(0, len(real) - 1, _SAMPLE).astype(np.int64)])).anywhere()


def check_nodes(cluster: Cluster, nodes: Sequence[Node], sight: Sight) -> None:
    """Raises the first thing that is wrong, with the name of the node where it is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = cluster.ray
    probe = ray.remote(_probe())
    payload = pickle.dumps(sight)
    asked = {
        probe.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
        ).remote(payload): node
        for node in nodes
    }
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)
    if silent:
        raise InputError(
            f"The Ray node {asked[silent[0]].name} does not answer within {_ANSWER_S:.0f} s.",
            hint="Look at it with `ray status`, or take it out of the cluster.",
        )
    for ref in ready:
        _need(ray, ref, asked[ref])


def _need(ray: Any, ref: Any, node: Node) -> None:
    try:
        there, answer = ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        raise InputError(f"The Ray node {node.name} cannot run brim: {error.cause}.") from error
    except ray.exceptions.RayError:
        return  # the node has gone since; nothing will run there
    here = versions()
    for name, version in here.items():
        if there.get(name) != version:
            found = there.get(name) or "none"
            raise InputError(
                f"The Ray node {node.name} has {found} as {name}, and this machine has {version}.",
                hint=f"Install the same on every node: brim {here['brim']}."
                + (f" (There: {there['error']})" if there.get("error") else ""),
            )
    failure = pickle.loads(answer)
    if isinstance(failure, BrimError):
        raise type(failure)(f"On the Ray node {node.name}: {failure.words[0]}", hint=failure.words[1], **failure.facts)


def versions() -> dict[str, str]:
    import pyarrow

    import brim

    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"brim": brim.__version__, "pyarrow": pyarrow.__version__, "Python": python}


def _probe() -> Callable[[bytes], tuple[dict[str, str], bytes]]:
    """A function inside of another travels by value: it runs where there is no brim, or another one."""

    def probe(payload: bytes) -> tuple[dict[str, str], bytes]:
        import pickle
        import platform

        there = {"Python": ".".join(platform.python_version_tuple()[:2])}
        try:
            import pyarrow

            import brim

            there |= {"brim": brim.__version__, "pyarrow": pyarrow.__version__}
            from brim.errors import BrimError

            sight = pickle.loads(payload)
        except (ImportError, AttributeError) as error:
            return {**there, "error": f"{type(error).__name__}: {error}"}, b"N."
        try:
            sight.check()
        except BrimError as error:
            return there, pickle.dumps(error)
        return there, pickle.dumps(None)

    return probe
