"""An HTTP/1.1 proxy on loopback between a client and the S3 server, which injects faults by rules.

    with FaultProxy(s3.endpoint) as proxy:
        proxy.fail(503, times=2, method="PUT")
        subprocess.run(..., env=os.environ | s3.environment_at(proxy.endpoint))
        [exchange.status for exchange in proxy.requests]

Headers pass unchanged, including Host, because signatures cover them. Bodies are streamed, with one buffer per
connection. Each client connection has its own connection to the server, and closes with it.
"""

from __future__ import annotations

import io
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from .rules import Rule, Rules

_BLOCK_BYTES = 1 << 18
_REFUSAL = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>%s</Code><Message>Please reduce your request rate.</Message></Error>"
)
_CODES = {
    400: b"RequestTimeout",
    401: b"InvalidToken",
    403: b"AccessDenied",
    404: b"NoSuchKey",
    412: b"PreconditionFailed",
    500: b"InternalError",
    503: b"SlowDown",
}


class _Cut(ConnectionError):
    """Raised when the connection closes."""


@dataclass(slots=True)
class Exchange:
    """A request and its result; `status` is 0 until the answer, and stays 0 without one."""

    method: str
    path: str
    query: str
    status: int = 0
    sent_bytes: int = 0
    """Of the request's body, to the server."""
    received_bytes: int = 0
    """Of the answer's body, to the client."""
    fault: str = ""
    seconds: float = 0.0
    """From the request's head to the end of the answer."""


@dataclass(slots=True)
class _Head:
    lines: list[bytes]

    @classmethod
    def read(cls, source: io.BufferedReader[Any]) -> _Head | None:
        """Return the next header block with its empty line, or None at a clean end."""
        lines = []
        while line := source.readline(1 << 16):
            lines.append(line)
            if line in (b"\r\n", b"\n"):
                return cls(lines)
        if lines:
            raise _Cut("ended in a head")
        return None

    @property
    def first(self) -> list[str]:
        return self.lines[0].decode("latin-1").split(None, 2)

    @property
    def bytes(self) -> bytes:
        return b"".join(self.lines)

    def get(self, name: str) -> str:
        for line in self.lines[1:]:
            key, _, value = line.decode("latin-1").partition(":")
            if key.lower() == name:
                return value.strip().lower()
        return ""

    @property
    def chunked(self) -> bool:
        return "chunked" in self.get("transfer-encoding")


class FaultProxy(Rules):
    """A proxy with the faults of `Rules`; `requests` is the log. With `tls`, clients connect with https."""

    def __init__(self, target: str, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self._tls = tls
        parts = urlsplit(target)
        self.target = (parts.hostname or "", parts.port or 80)
        self.requests: list[Exchange] = []
        self.delay_s = 0.0
        """Seconds that every request waits before it is passed on."""
        self.at_once = self.most_at_once = 0
        """Requests under way: now, and the most there ever were."""
        self._stopping = threading.Event()
        self._lock_counters = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.endpoint = f"{'https' if tls else 'http'}://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        _shut(self._listener)  # otherwise the thread would wait in accept() forever
        self._listener.close()
        with self._lock_counters:
            still = list(self._open)
        for connection in still:
            _shut(connection)

    def count(self, method: str = "", contains: str = "") -> int:
        """Return the number of matching requests."""
        return sum(
            method in ("", item.method) and contains in f"{item.path}?{item.query}" for item in list(self.requests)
        )

    @property
    def sent_bytes(self) -> int:
        return sum(entry.sent_bytes for entry in list(self.requests))

    @property
    def received_bytes(self) -> int:
        return sum(element.received_bytes for element in list(self.requests))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        ends = [client]
        try:
            if self._tls is not None:
                client = ends[0] = self._tls.wrap_socket(client, server_side=True)
            ends.append(socket.create_connection(self.target, timeout=60))
            with self._lock_counters:
                self._open.update(ends)
            for end in ends:
                end.settimeout(None)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Connection(self, *ends).run()
        except OSError:
            pass  # A closed peer, an absent server, an injected cut: the client sees a closed connection.
        finally:
            with self._lock_counters:
                self._open.difference_update(ends)
            for end in ends:
                _shut(end)
                end.close()

    def _begin(self, exchange: Exchange) -> None:
        with self._lock_counters:
            self.requests.append(exchange)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)

    def _end(self) -> None:
        with self._lock_counters:
            self.at_once -= 1


class _Connection:
    """A client's connection and its connection to the server."""

    def __init__(self, proxy: FaultProxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy, self.client, self.server = proxy, client, server
        self.from_client = io.BufferedReader(socket.SocketIO(client, "r"), _BLOCK_BYTES)
        self.from_server = io.BufferedReader(socket.SocketIO(server, "r"), _BLOCK_BYTES)
        self.block = memoryview(bytearray(_BLOCK_BYTES))

    def run(self) -> None:
        with self.from_client, self.from_server:
            self._take_turns()

    def _take_turns(self) -> None:
        idle = select.poll()
        idle.register(self.client, select.POLLIN)
        idle.register(self.server, select.POLLIN)
        while True:
            # An idle connection whose server has closed must close too, or the client would send without an answer.
            if self.server.fileno() in dict(idle.poll()):
                return
            head = _Head.read(self.from_client)
            if head is None:
                return
            method, target, _ = head.first
            rule = self.proxy.take(method, target)
            path, _, query = target.partition("?")
            exchange = Exchange(method, path, query, fault=rule.action if rule else "")
            self.proxy._begin(exchange)
            start = time.monotonic()
            time.sleep(self.proxy.delay_s)
            try:
                if not self._exchange(head, exchange, rule):
                    return
            finally:
                exchange.seconds = time.monotonic() - start
                self.proxy._end()

    def _exchange(self, head: _Head, exchange: Exchange, rule: Rule | None) -> bool:
        """Handle one request; return whether another may follow on this connection."""
        has_body = head.chunked or int(head.get("content-length") or 0) > 0
        if rule is not None and rule.action == "fail":
            return self._refuse(head, exchange, rule)
        upward = rule if has_body and rule is not None and not rule.answer else None
        downward = None if upward else rule
        if rule is not None and rule.action == "lose":
            upward, downward = None, rule
        self.server.sendall(head.bytes)
        answer = None
        if "100-continue" in head.get("expect"):
            answer = self._next_answer()
            if answer.first[1] == "100":
                self.client.sendall(answer.bytes)
                answer = None
        if answer is None:
            whole = self._send_body(head, exchange, upward)
            answer = self._next_answer()
            while answer.first[1] == "100":
                answer = self._next_answer()
        else:
            whole = False
        if downward is not None and downward.action == "lose":
            raise _Cut("the answer is lost")
        exchange.status = int(answer.first[1])
        self.client.sendall(answer.bytes)
        framed = self._answer_body(exchange, answer, downward)
        return whole and framed and "close" not in (head.get("connection"), answer.get("connection"))

    def _next_answer(self) -> _Head:
        answer = _Head.read(self.from_server)
        if answer is None:
            raise _Cut("the server left without an answer")
        return answer

    def _send_body(self, head: _Head, exchange: Exchange, rule: Rule | None) -> bool:
        """Return whether the server read the whole body; the answer of a server that closes early is still read."""

        def count(size: int) -> None:
            exchange.sent_bytes += size

        try:
            self._body(head, self.from_client, self.server, rule, count)
        except _Cut:
            raise
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _answer_body(self, exchange: Exchange, answer: _Head, rule: Rule | None) -> bool:
        """Return whether the answer has an end other than the close of the connection."""

        def count(size: int) -> None:
            exchange.received_bytes += size

        if exchange.method == "HEAD" or exchange.status in (204, 304):
            return True
        if answer.chunked or answer.get("content-length"):
            self._body(answer, self.from_server, self.client, rule, count)
            return True
        _Passage(self, self.client, rule, count).copy(self.from_server, None)
        return False

    def _body(
        self,
        head: _Head,
        source: io.BufferedReader[Any],
        goal: socket.socket | None,
        rule: Rule | None,
        count: Callable[[int], None],
    ) -> None:
        passage = _Passage(self, goal, rule, count)
        if not head.chunked:
            passage.copy(source, int(head.get("content-length") or 0))
            return
        while True:
            line = source.readline(1 << 16)
            size = int(line.split(b";")[0], 16)
            passage.frame(line)
            passage.copy(source, size)
            if not size:
                while (trailer := source.readline(1 << 16)) not in (b"\r\n", b""):
                    passage.frame(trailer)
                passage.frame(b"\r\n")
                return
            passage.frame(source.readline(2))

    def _refuse(self, head: _Head, exchange: Exchange, rule: Rule) -> bool:
        expects = "100-continue" in head.get("expect")
        if not expects:
            self._body(head, self.from_client, None, None, lambda size: None)
        body = b"" if exchange.method == "HEAD" else _REFUSAL % _CODES.get(rule.status, b"InternalError")
        lines = [f"HTTP/1.1 {rule.status} Spoilt", "Content-Type: application/xml", f"Content-Length: {len(body)}"]
        if rule.retry_after_s is not None:
            lines.append(f"Retry-After: {rule.retry_after_s}")
        self.client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        exchange.status = rule.status
        return not expects


class _Passage:
    """A body on its way to `goal` (None: discarded), and the fault that is injected into it."""

    def __init__(
        self, connection: _Connection, goal: socket.socket | None, rule: Rule | None, count: Callable[[int], None]
    ) -> None:
        self.block, self.stopping = connection.block, connection.proxy._stopping
        self.goal, self.rule, self.count = goal, rule, count
        self.passed, self.started = 0, time.monotonic()

    def frame(self, line: bytes) -> None:
        if self.goal is not None:
            self.goal.sendall(line)

    def copy(self, source: io.BufferedReader[Any], remaining: int | None) -> None:
        """Forward `left` bytes, or all until the connection closes."""
        while remaining != 0:
            expected = len(self.block) if remaining is None else min(remaining, len(self.block))
            view = self.block[: self._allowed(expected)]
            size = source.readinto1(view)
            if not size:
                if remaining is None:
                    return
                raise _Cut("an end left in a body")
            self._pass(view[:size])
            remaining = None if remaining is None else remaining - size

    def _allowed(self, required: int) -> int:
        """Return how many bytes to forward next, so that the fault occurs at the exact position."""
        rule = self.rule
        if rule is None:
            return required
        if rule.action == "slow":
            return min(required, max(1, int(rule.bytes_per_s / 20)))
        if self.passed < rule.after_bytes:
            return min(required, rule.after_bytes - self.passed)
        self.rule = None
        if rule.action == "cut":
            raise _Cut("cut by a rule")
        if rule.action == "stall":
            self.stopping.wait(rule.seconds)
        if rule.action == "corrupt":
            self.rule = rule
            return 1
        return required

    def _pass(self, view: memoryview) -> None:
        rule = self.rule
        if rule is not None and rule.action == "corrupt" and self.passed == rule.after_bytes:
            view[0] ^= 1
            self.rule = None
        self.passed += len(view)
        if rule is not None and rule.action == "slow":  # before the last bytes are passed on
            self.stopping.wait(max(0.0, self.started + self.passed / rule.bytes_per_s - time.monotonic()))
        if self.goal is not None:
            self.goal.sendall(view)
        self.count(len(view))


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
