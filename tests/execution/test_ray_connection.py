"""Connecting to a Ray cluster whose head exits during the connection. A plain server replaces the head, without Ray."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from brim.errors import BrimError, DestinationUnavailableError, InputError
from brim.execution import ray_cluster


class Head:
    """Answer connections with the settings frame of a gRPC server until closed."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                connection, _ = self._server.accept()
                with connection:
                    connection.sendall(b"\0\0\0\4\0\0\0\0\0")
        except OSError:
            return

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()


@pytest.mark.parametrize(
    ("killed", "expected", "exit_code"),
    [(True, DestinationUnavailableError, 5), (False, InputError, 2)],
    ids=["killed", "unusable"],
)
def test_head_that_is_killed_while_connecting_is_worth_another_run(
    monkeypatch: pytest.MonkeyPatch, killed: bool, expected: type[BrimError], exit_code: int
) -> None:
    """A lost head is a transient error (exit code 5). A head that answers but cannot be used is an input error (2)."""
    head = Head()

    def init(**_: object) -> None:
        if killed:
            head.close()
        raise ConnectionError("Could not read the node information from GCS")

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setattr(ray_cluster, "need_ray", lambda: ray)
    with pytest.raises(expected) as caught, ray_cluster.connected(head.address):
        pass
    assert caught.value.exit_code == exit_code
    if not killed:
        head.close()
