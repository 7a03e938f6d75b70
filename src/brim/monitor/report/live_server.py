"""The live page: the report of a running command on loopback, for the holder of the key.

A separate process reads the run log and serves two things: the page, which contains nothing secret, and `/stream`,
which sends the parts of the page as they change, one JSON line each. No request changes anything. The stream needs the
key (128 bits, in the address after the #, which browsers do not send; the script sends it as a header), a Host that is
loopback (any port, for `ssh -L`) and, if there is an Origin, one that is loopback too.
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
from brim.monitor.report.page import live_parts, live_shell
from brim.monitor.run_log import read_run

_LOOPBACK = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?")
_EVERY_S, _KEEPALIVE_S = 1.0, 5.0
_CPU_SHARE = 20  # reading the log and making the page takes at most a twentieth of the time
_AFTER_END_S = 3.0
_MOST_STREAMS = 16
_KEY_HEADER = "X-Brim-Key"
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


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
            return self._refuse(403, "this origin is not allowed")
        if self.path.partition("?")[0] == "/":
            body, policy = live_shell()
            return self._send(200, "text/html; charset=utf-8", body.encode(), policy)
        if self.path != "/stream":
            return self._refuse(404, "no such page")
        if not hmac.compare_digest(self.headers.get(_KEY_HEADER, "").encode(), self.server.key.encode()):
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
        self._send_head(200, "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent: dict[str, Any] = {}
        version = 0
        while not self.server.closing:
            version, parts = self.server.wait_for_change(version, _KEEPALIVE_S)
            changed = {name: value for name, value in parts.items() if sent.get(name) != value}
            sent = parts
            line = json.dumps(changed).encode() + b"\n" if changed else b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
            if parts.get("over"):
                break
        self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, status: int, reason: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{reason}\n".encode(), "default-src 'none'")

    def _send(self, status: int, kind: str, body: bytes, policy: str) -> None:
        self._send_head(status, kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_head(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal is the command's."""


class LiveServer(ThreadingHTTPServer):
    """Serves the page of a log. The parts are renewed while the log grows, for any number of readers."""

    daemon_threads = True

    def __init__(self, log: Path, key: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.key, self.closing = key, False
        self.slots = threading.BoundedSemaphore(_MOST_STREAMS)
        self._log, self._changed = log, threading.Condition()
        self._parts: dict[str, Any] = {}
        self._version = 0
        threading.Thread(target=self.serve_forever, name="brim-live", daemon=True).start()

    def _renew(self) -> float:
        """Read the log again; return the pause before the next time."""
        start = time.perf_counter()
        try:
            parts = live_parts(read_run(self._log), time.time())
        except (BrimError, OSError):
            return _EVERY_S  # it does not exist yet, or is being replaced
        with self._changed:
            if parts != self._parts:
                self._parts, self._version = parts, self._version + 1
                self._changed.notify_all()
        return max(_EVERY_S, _CPU_SHARE * (time.perf_counter() - start))

    def wait_for_change(self, version: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Return version and parts of the page when they differ from a version, or after a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._version != version, timeout_s)
            return self._version, self._parts

    def follow(self, has_ended: Callable[[], bool]) -> None:
        """Renew the page until the run is over, and a little longer for its readers, or until `has_ended()`."""
        while not has_ended():
            deadline = time.monotonic() + self._renew()
            if self._parts.get("over"):
                break
            while time.monotonic() < deadline and not has_ended():
                time.sleep(0.1)
        self._renew()
        time.sleep(_AFTER_END_S if self._version else 0.0)
        self.closing = True
        self.shutdown()


def open_server(log: Path, port: int) -> tuple[LiveServer, str]:
    """Return a server and the address of its page; an InputError if the port is in use."""
    try:
        server = LiveServer(log, secrets.token_hex(16), port)
    except OSError as error:
        raise InputError(
            f"Port {port} of this machine cannot be used: {error.strerror}.", hint="Choose another: --live-port N."
        ) from error
    return server, f"http://127.0.0.1:{server.server_address[1]}/#key={server.key}"


@contextmanager
def shown_live(
    log: Path, port: int | None, open_page: bool, report: Callable[[str], object]
) -> Iterator[tuple[int, ...]]:
    """Serve the page of a run in a separate process unless `port` is None, and report its address.

    Yields the process numbers of the server.
    """
    if port is None:
        yield ()
        return
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _START, str(Path(__file__).parents[3])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={name: os.environ[name] for name in ("PATH", "LANG", "TZ", "HOME") if name in os.environ},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps({"log": str(log), "port": port}).encode() + b"\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or b'{"error": "The live page could not be started."}')
    if "error" in answer:
        process.wait()
        raise InputError(answer["error"], hint="Choose another port: --live-port N.")
    report(f"brim: live page {answer['address']}")
    if open_page:
        import webbrowser

        webbrowser.open(answer["address"])
    try:
        yield (process.pid,)
    finally:
        process.stdin.close()  # the server informs its readers and exits
        process.returncode = 0  # it outlives this process by seconds, and needs no wait


_START = "import sys; sys.path.insert(0, sys.argv[1]); from brim.monitor.report.live_server import main; main()"


def main() -> None:
    orders = json.loads(sys.stdin.buffer.readline())
    try:
        server, address = open_server(Path(orders["log"]), orders["port"])
    except InputError as error:
        os.write(1, json.dumps({"error": error.message}).encode() + b"\n")
        return
    os.write(1, json.dumps({"address": address}).encode() + b"\n")
    ended = threading.Event()

    def wait_for_parent() -> None:
        sys.stdin.buffer.read()  # until the parent closes it or has ended
        ended.set()

    threading.Thread(target=wait_for_parent, daemon=True).start()
    server.follow(ended.is_set)
