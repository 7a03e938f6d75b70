"""HTTP for the test Hub: requests read as streams, answers, and faults of the connection."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from .faults import Fault
from .store import HubError

if TYPE_CHECKING:
    from .server import TestHub

BLOCK_BYTES = 1 << 18
REPO = r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)"
FILES = r"/(?:(?P<kind>datasets|spaces)/)?(?P<name>[^/]+/[^/]+)"
REVISION = r"/(?P<revision>[^/]+)"


class Cut(ConnectionError):
    """Raised to close the connection without an answer."""


@dataclass(slots=True)
class Answer:
    json: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    file: tuple[Path, int, int] | None = None
    """Instead of a body: this many bytes of a file, as (path, start, length)."""

    def __post_init__(self) -> None:
        if self.json is not None:
            self.body = json.dumps(self.json).encode()
            self.headers.setdefault("Content-Type", "application/json; charset=utf-8")

    @property
    def length(self) -> int:
        return len(self.body) if self.file is None else self.file[2]

    def blocks(self) -> Iterator[bytes]:
        if self.file is None:
            yield self.body
            return
        path, start, remaining = self.file
        with open(path, "rb") as file:
            file.seek(start)
            while remaining and (block := file.read(min(remaining, BLOCK_BYTES))):
                remaining -= len(block)
                yield block


class Body:
    """The body of a request as a stream; faults of type cut and stall are applied while it is read."""

    def __init__(self, source: BufferedIOBase, length: int, fault: Fault | None, stopping: threading.Event) -> None:
        self.length, self.received = length, 0
        self.on_bytes: Callable[[int], None] = lambda count: None
        self._source, self._stopping = source, stopping
        self._fault = fault if fault is not None and fault.action in ("cut", "stall") and length else None
        self._at = min(fault.after_bytes, length) if fault is not None else 0

    def readinto(self, view: memoryview) -> int:
        """Read the next bytes; return 0 at the end and raise if the client disconnected."""
        self._happen()
        expected = min(len(view), self.length - self.received)
        if self._fault is not None:
            expected = min(expected, self._at - self.received)
        if not expected:
            return 0
        count = self._source.readinto(view[:expected])
        self.received += count
        self.on_bytes(count)
        if count < expected:
            raise Cut(f"client left after {self.received} of {self.length} bytes")
        self._happen()
        return count

    def _happen(self) -> None:
        if self._fault is None or self.received < self._at:
            return
        fault, self._fault = self._fault, None
        if fault.action == "cut":
            raise Cut("cut by a fault")
        self._stopping.wait(fault.seconds)

    def blocks(self) -> Iterator[memoryview]:
        view = memoryview(bytearray(min(BLOCK_BYTES, self.length)))
        while count := self.readinto(view):
            yield view[:count]

    def read(self) -> bytes:
        return b"".join(bytes(block) for block in self.blocks())

    def lines(self) -> Iterator[bytes]:
        remainder = b""
        for block in self.blocks():
            *whole, remainder = (remainder + block).split(b"\n")
            yield from whole
        yield remainder

    def drain(self) -> None:
        for _ in self.blocks():
            pass


@dataclass(slots=True)
class Request:
    hub: TestHub
    method: str
    path: str
    groups: dict[str, str]
    query: dict[str, list[str]]
    headers: Message
    body: Body

    def json(self) -> Any:
        return json.loads(self.body.read() or b"{}")

    def flag(self, name: str) -> bool:
        return self.query.get(name, ["0"])[0].lower() in ("1", "true")

    def first(self, name: str, default: str = "") -> str:
        return self.query.get(name, [default])[0]

    def range(self, size: int) -> tuple[int, int] | None:
        """Return the first byte and the length that the Range header requests."""
        actual = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if actual is None or actual.groups() == ("", ""):
            return None
        first, last = actual.groups()
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last), size - 1) if first and last else size - 1
        if start > end:
            raise HubError(416, f"Range {self.headers['Range']} of {size} bytes")
        return start, end - start + 1


@dataclass(frozen=True, slots=True)
class Route:
    name: str
    methods: tuple[str, ...]
    pattern: re.Pattern[str]
    function: Callable[[Request], Answer]


def route(name: str, methods: str, pattern: str, function: Callable[[Request], Answer]) -> Route:
    return Route(name, tuple(methods.split()), re.compile(pattern), function)


def error_answer(error: HubError) -> Answer:
    headers = {"X-Error-Message": error.message.encode("ascii", "backslashreplace").decode()}
    if error.code:
        headers["X-Error-Code"] = error.code
    headers |= error.fields.pop("headers", {})
    return Answer({"error": error.message, **error.fields}, error.status, headers)


class Handler(BaseHTTPRequestHandler):
    """Handles one connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        hub = self.server.hub
        url = urlsplit(self.path)
        route, groups = self.server.find(self.command, url.path)
        with hub.lock:
            hub.counters.requests[route.name] += 1
            hub.log.append(f"{self.command} {self.path.partition('?expires=')[0]}")
        fault = hub.faults.take(route.name, unquote(url.path))
        length = int(self.headers.get("Content-Length", 0))
        body = Body(self.rfile, length, fault, hub.stopping)
        request = Request(hub, self.command, url.path, groups, parse_qs(url.query), self.headers, body)
        try:
            with hub.intake(route.name, request):
                answer = self._answer(route, request, fault)
                body.drain()
            self._send(answer, fault if not length else None)
        except ConnectionError:
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _answer(self, route: Route, request: Request, fault: Fault | None) -> Answer:
        action = fault.action if fault is not None else None
        try:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                self.close_connection = True
                raise HubError(501, "A body needs a Content-Length")
            if fault is not None and action == "status":
                request.body.drain()
                retry = {} if fault.retry_after is None else {"Retry-After": f"{fault.retry_after:g}"}
                if fault.code and route.name in ("put", "part", "object"):
                    xml = f"<?xml version='1.0'?><Error><Code>{fault.code}</Code><Message>x</Message></Error>"
                    return Answer(None, fault.status, {"Content-Type": "application/xml", **retry}, xml.encode())
                raise HubError(fault.status, fault.said or "Injected fault", fault.code or None, headers=retry)
            if fault is not None and action == "answer":
                request.body.drain()
                return Answer(None, fault.status, {"Content-Type": "application/json"}, fault.said.encode())
            if action == "conflict":
                request.body.drain()
                request.hub.commit_as_someone_else(request.groups)
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            if (now := request.hub.moved.get(request.groups.get("name") or "")) is not None:
                request.body.drain()
                target = self.path.replace(request.groups["name"], now, 1)
                return Answer({"error": "Temporary Redirect"}, 307, {"Location": f"{request.hub.endpoint}{target}"})
            answer = route.function(request)
        except HubError as error:
            return error_answer(error)
        if fault is not None and action == "garble":
            request.body.drain()
            return Answer(None, fault.status, {"Content-Type": "application/json"}, fault.said.encode())
        if action == "lose":
            request.body.drain()
            raise Cut("answer lost by a fault")
        return answer

    def _send(self, answer: Answer, fault: Fault | None) -> None:
        remaining = fault.after_bytes if fault is not None and fault.action == "cut" else None
        if remaining == 0:
            raise Cut("cut by a fault")
        if fault is not None and fault.action == "stall":
            self.server.hub.stopping.wait(fault.seconds)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in answer.headers:
            self.send_header("Content-Length", str(answer.length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD":
            return
        for block in answer.blocks():
            self.wfile.write(block if remaining is None else block[:remaining])
            with self.server.hub.lock:
                self.server.hub.counters.bytes_sent += len(block)
            if remaining is not None:
                remaining -= len(block)
                if remaining <= 0:
                    raise Cut("cut by a fault")


class Listener(ThreadingHTTPServer):
    """One address. Closing it also closes the open connections, as a restart of a server does."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], hub: TestHub, routes: list[Route]) -> None:
        self.hub, self._routes = hub, routes
        self._connections: set[socket.socket] = set()
        super().__init__(address, Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        for known_values in self._routes:
            if method in known_values.methods and (match := known_values.pattern.fullmatch(path)):
                return known_values, {name: unquote(value or "") for name, value in match.groupdict().items()}
        return Route("unknown", (), re.compile(""), _unknown), {}

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if error is not None and not isinstance(error, ConnectionError):
            self.hub.errors.append(error)

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


def _unknown(request: Request) -> Answer:
    raise HubError(404, "Not found")
