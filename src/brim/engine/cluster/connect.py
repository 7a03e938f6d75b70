"""A running Ray, as brim uses it: found quickly or not at all, quiet, and left as it was."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from brim.errors import InputError, MissingExtra, SinkFailed, Stopped

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
            raise SinkFailed(
                "No node of the Ray cluster offers a CPU.", hint="Start nodes, then run the same command to continue."
            )
        return nodes

    def _need_head(self) -> None:
        until = time.monotonic() + _HEAD_S
        while (error := _unreachable(self._head)) is not None:
            if time.monotonic() > until:
                self.lost = True
                raise SinkFailed(
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
        raise MissingExtra(
            "--engine=ray needs Ray.", hint="Install it on every node: pip install 'brim[ray]'", extra="ray"
        ) from error
    return ray


@contextmanager
def connected(address: str | None) -> Iterator[Cluster]:
    """Whoever has connected before (a program that uses Ray itself) keeps its connection."""
    ray = need_ray()
    if ray.is_initialized():
        yield Cluster(ray)
        return
    _need_reachable(ray, address or "auto")
    handlers = _handlers()
    try:
        try:
            ray.init(address=address or "auto", namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM, which brim stops cleanly on
                signal.signal(number, handler)
    except (ConnectionError, RuntimeError, ValueError, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code == signal.SIGTERM:  # Ray's own handler
            raise Stopped("Stopped by SIGTERM.", hint="Run the same command to continue.") from error
        said = str(error).strip().split("\n")[0] or "none of its nodes is on this machine"
        raise InputError(
            f"The Ray cluster at {address or 'auto'} cannot be used from here: {said.rstrip('.')}.",
            hint="Run brim on one of its nodes, with the same versions of Ray and Python as there.",
        ) from error
    _be_quiet(ray)
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}


def _need_reachable(ray: Any, address: str) -> None:
    """Ray itself tries for minutes, and then ends the process."""
    if address == "auto":
        try:
            address = ray._private.services.get_ray_address_from_environment("auto", None) or ""
        except (ConnectionError, ValueError) as error:
            raise InputError("There is no running Ray cluster on this machine.", hint=_HINT) from error
        except (AttributeError, TypeError):
            return  # another version of Ray finds it in another way
    if not address.rpartition(":")[2].isdigit():
        return
    if (failure := _unreachable(address)) is not None:
        raise InputError(
            f"There is no Ray cluster at {address}: {failure.strerror or failure}.", hint=f"Check --address. {_HINT}"
        ) from failure


def _be_quiet(ray: Any) -> None:
    """Ray's driver prints what raylets report to stdout, which is for results. What matters becomes brim's errors."""
    worker = ray._private.worker
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None
