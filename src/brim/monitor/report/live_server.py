"""The live page: the report of a running command on loopback, for the holder of the key.

A separate process reads the run log and serves two things: the page, in which nothing is secret, and
`/stream`, which sends the parts of the page as they change, one JSON line each. It shows and does nothing: there is
no request that changes anything. The stream needs the key (128 bits, in the address after the #, which browsers do
not send; the script sends it as a header), a Host that is loopback (any port, for `ssh -L`) and, if there is an
Origin, one that is loopback too.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from brim.errors import BrimError, InputError
from brim.monitor.report.log_series import read_run
from brim.monitor.report.page import live_parts, live_shell

_LOOPBACK = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
_EVERY_S, _BEAT_S = 1.0, 5.0
_SHARE = 20  # reading the log and making the page takes at most a twentieth of the time
_LAST_WORD_S = 3.0
_MOST_STREAMS = 16
HEADER = "X-Brim-Key"


class _News:
    """The parts of the page, updated while the log grows, for any number of readers."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._changed = threading.Condition()
        self._parts: dict[str, Any] = {}
        self.version = 0
        self.over = False

    def renew(self) -> float:
        """Read the log again; how long to wait before the next time."""
        begin = time.perf_counter()
        try:
            parts = live_parts(read_run(self._log), time.time())
        except (BrimError, OSError):
            return _EVERY_S  # not there yet, or being replaced
        with self._changed:
            if parts != self._parts:
                self._parts, self.version = parts, self.version + 1
                self.over = bool(parts["over"])
                self._changed.notify_all()
        return max(_EVERY_S, _SHARE * (time.perf_counter() - begin))

    def wait(self, seen: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        with self._changed:
            self._changed.wait_for(lambda: self.version != seen, timeout_s)
            return self.version, self._parts


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "brim", ""
    timeout = 60
    server: LiveServer

    def do_GET(self) -> None:
        if not _LOOPBACK.fullmatch(self.headers.get("Host", "")):
            return self._refuse(421, "this page is for localhost only")
        origin = self.headers.get("Origin")
        if origin is not None and not _LOOPBACK.fullmatch(origin.removeprefix("http://")):
            return self._refuse(403, "this origin may not ask")
        if self.path.partition("?")[0] == "/":
            body, policy = live_shell()
            return self._send(200, "text/html; charset=utf-8", body.encode(), policy)
        if self.path != "/stream":
            return self._refuse(404, "there is nothing here")
        if not hmac.compare_digest(self.headers.get(HEADER, "").encode(), self.server.key.encode()):
            return self._refuse(403, "the key is missing or wrong")
        if not self.server.slots.acquire(blocking=False):
            return self._refuse(503, "too many readers")
        try:
            self._stream()
        except OSError:
            pass  # the reader has gone
        finally:
            self.server.slots.release()
        self.close_connection = True
        return None

    def _stream(self) -> None:
        self._head(200, "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent: dict[str, Any] = {}
        seen = 0
        while not self.server.closing:
            seen, parts = self.server.news.wait(seen, _BEAT_S)
            news = {name: value for name, value in parts.items() if sent.get(name) != value}
            sent = parts
            line = json.dumps(news).encode() + b"\n" if news else b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
            if parts.get("over"):
                break
        self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, why: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{why}\n".encode(), "default-src 'none'")

    def _send(self, status: int, kind: str, body: bytes, policy: str) -> None:
        self._head(status, kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in (
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal is the command's."""


class LiveServer(ThreadingHTTPServer):
    """Serves until `close`."""

    daemon_threads = True

    def __init__(self, log: Path, key: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.key, self.news, self.closing = key, _News(log), False
        self.slots = threading.BoundedSemaphore(_MOST_STREAMS)
        threading.Thread(target=self.serve_forever, name="brim-live", daemon=True).start()

    def follow(self, ended: Callable[[], bool]) -> None:
        """Update the page until the run is over, and a little longer for its readers, or until `ended()`."""
        while not ended():
            pause_s = self.news.renew()
            if self.news.over:
                break
            deadline = time.monotonic() + pause_s
            while time.monotonic() < deadline and not ended():
                time.sleep(0.1)
        self.news.renew()
        time.sleep(_LAST_WORD_S if self.news.version else 0.0)
        self.closing = True
        self.shutdown()


def new_key() -> str:
    return secrets.token_hex(16)


def open_port(log: Path, key: str, port: int) -> LiveServer:
    """A server; an InputError if the port is taken."""
    try:
        return LiveServer(log, key, port)
    except OSError as error:
        raise InputError(
            f"Port {port} of this machine cannot be used: {error.strerror}.", hint="Choose another: --live-port N."
        ) from error


class LivePage:
    """The server in a separate process; `address` is the URL to open."""

    def __init__(self, log: Path, port: int = 0) -> None:
        key = new_key()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, str(Path(__file__).parents[3])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={name: os.environ[name] for name in ("PATH", "LANG", "TZ", "HOME") if name in os.environ},
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"log": str(log), "key": key, "port": port}).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or b'{"error": "The live page could not be started."}')
        if "error" in answer:
            self._process.wait()
            raise InputError(answer["error"], hint="Choose another port: --live-port N.")
        self.address = f"http://127.0.0.1:{answer['port']}/#key={key}"

    def show(self) -> None:
        """In the user's browser."""
        import webbrowser

        webbrowser.open(self.address)

    def close(self) -> None:
        """Signal that the run is over. The server informs its readers and exits."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.returncode = 0  # it outlives this process by seconds, and needs no wait


@contextmanager
def shown_live(log: Path, port: int | None, open_page: bool, tell: Callable[[str], None]) -> Iterator[tuple[int, ...]]:
    """Serve the page of a run unless `port` is None, and pass its address to `tell`.

    Yields the pids of the processes that this takes.
    """
    if port is None:
        yield ()
        return
    page = LivePage(log, port)
    tell(f"brim: live page {page.address}")
    if open_page:
        page.show()
    try:
        yield (page.pid,)
    finally:
        page.close()


_START = "import sys; sys.path.insert(0, sys.argv[1]); from brim.monitor.report.live_server import main; main()"


def main() -> None:
    orders = json.loads(sys.stdin.buffer.readline())
    try:
        server = open_port(Path(orders["log"]), orders["key"], orders["port"])
    except InputError as error:
        os.write(1, json.dumps({"error": error.message}).encode() + b"\n")
        return
    os.write(1, json.dumps({"port": server.server_address[1]}).encode() + b"\n")
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.buffer.read()  # until the parent closes it or has ended
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    server.follow(ended.is_set)
