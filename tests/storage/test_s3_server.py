"""The test S3 server and its fault proxy with the real, unmodified obstore: the behavior that brim relies on.

If SeaweedFS is less strict than AWS, a test documents it: brim must not rely on a missing check.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, GenericError, PermissionDeniedError, PreconditionError
from obstore.store import S3Store

from tests.conftest import random_bytes
from tests.s3 import FaultProxy, S3Server
from tests.s3.server import remove_sockets
from tests.s3.signing import signed_headers

MIB = 1 << 20
PART = 5 * MIB
NOT_AN_ETAG = '"00000000000000000000000000000000"'
Open = Callable[..., S3Store]


@pytest.fixture
def open_store(s3: S3Server, s3_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a store for the prefix of this test from environment variables; `endpoint` inserts a proxy."""

    def make(bucket: str = "private", *, endpoint: str = s3.endpoint, **config: Any) -> S3Store:
        for name, value in s3.environment_at(endpoint).items():
            monkeypatch.setenv(name, value)
        # Many retries, because a busy machine restarts a server slowly, and short ones, because pauses grow to 15 s.
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2}
        retry: Any = {"max_retries": 100, "backoff": backoff}
        return S3Store(bucket, prefix=s3_prefix, config=config, retry_config=retry)

    return make


def multipart_etag(content: bytes, part_bytes: int) -> str:
    parts = [hashlib.md5(content[index : index + part_bytes]).digest() for index in range(0, len(content), part_bytes)]
    return f'"{hashlib.md5(b"".join(parts)).hexdigest()}-{len(parts)}"'


def get(store: S3Store, path: str) -> bytes:
    return bytes(obstore.get(store, path).bytes())


def test_environment_is_enough(s3: S3Server, s3_prefix: str, open_store: Open) -> None:
    """With environment variables alone, obstore writes, reads ranges and lists objects as the server does."""
    store, content = open_store(), random_bytes(2 * PART + 12_345)
    assert obstore.put(store, "small", b"abc")["e_tag"] == f'"{hashlib.md5(b"abc").hexdigest()}"'
    obstore.put(store, "empty", b"")
    assert obstore.put(store, "large", content, chunk_size=PART)["e_tag"] == multipart_etag(content, PART)
    assert bytes(obstore.get_range(store, "large", start=PART - 5, length=10)) == content[PART - 5 : PART + 5]
    actual = {name.removeprefix(s3_prefix): size for name, (size, _) in s3.objects("private", s3_prefix).items()}
    assert actual == {"small": 3, "empty": 0, "large": len(content)}
    assert s3.read("private", f"{s3_prefix}large") == content


def test_who_may_read(s3: S3Server, s3_prefix: str, open_store: Open) -> None:
    """Everyone can read and list `public`, and only the owner can write. `private` refuses wrong keys."""
    s3.write("public", f"{s3_prefix}a", b"open")
    s3.write("private", f"{s3_prefix}a", b"closed")
    anyone = open_store("public", skip_signature=True)
    assert get(anyone, "a") == b"open"
    assert [item["path"] for page in obstore.list(anyone) for item in page] == ["a"]
    with pytest.raises(PermissionDeniedError):
        obstore.put(anyone, "b", b"")
    for store in (open_store(skip_signature=True), open_store(secret_access_key="wrong")):
        with pytest.raises(PermissionDeniedError):
            obstore.get(store, "a")
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        obstore.put(open_store("nobody-made-this"), "a", b"")


def test_conditional_puts(open_store: Open) -> None:
    """Conditional writes are refused if the object has changed. Of several concurrent ones, one succeeds."""
    store = open_store()
    with ThreadPoolExecutor(4) as threads:

        def wins(mode: Any, error: type[Exception], number: int) -> bool:
            try:
                obstore.put(store, "a", b"%d" % number, mode=mode)
            except error:
                return False
            return True

        assert sum(threads.map(lambda n: wins("create", AlreadyExistsError, n), range(8))) == 1
        observed = {"e_tag": obstore.head(store, "a")["e_tag"]}
        assert sum(threads.map(lambda n: wins(observed, PreconditionError, 100 + n), range(8))) == 1
    with pytest.raises(PreconditionError):
        obstore.put(store, "missing", b"", mode=observed)  # type: ignore[arg-type]


def test_conditional_get(open_store: Open) -> None:
    """Conditional reads, complete or by range, are refused if the object was replaced."""
    store = open_store()
    observed = obstore.put(store, "a", b"before")["e_tag"]
    assert bytes(obstore.get(store, "a", options={"if_match": observed, "range": (1, 3)}).bytes()) == b"ef"
    obstore.put(store, "a", b"after!")
    for options in ({"if_match": observed}, {"if_match": observed, "range": (1, 3)}):
        with pytest.raises(PreconditionError):
            obstore.get(store, "a", options=options)  # type: ignore[arg-type]


def test_what_is_checked_on_arrival(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy, open_store: Open) -> None:
    """A flipped bit is refused by the checksum header. Unlike AWS, the server does not check the signed SHA-256."""
    content = random_bytes(PART + 10)
    lax = open_store(endpoint=s3_proxy.endpoint)
    s3_proxy.corrupt(7, method="PUT")
    obstore.put(lax, "lax", b"hello world")
    assert s3.read("private", f"{s3_prefix}lax") == b"hello wnrld"

    strict = open_store(endpoint=s3_proxy.endpoint, checksum_algorithm="sha256")
    s3_proxy.corrupt(7, method="PUT")
    with pytest.raises(GenericError, match="BadDigest"):
        obstore.put(strict, "strict", b"hello world")
    s3_proxy.corrupt(100_000, method="PUT", contains="partNumber=1")
    with pytest.raises(GenericError, match="BadDigest"):
        obstore.put(strict, "parts", content, chunk_size=PART)
    assert list(s3.objects("private", s3_prefix)) == [f"{s3_prefix}lax"]
    assert s3.uploads("private", s3_prefix) == []


def test_stored_checksums(s3: S3Server, s3_prefix: str, open_store: Open) -> None:
    """The server returns the SHA-256 of an object, or for a multipart upload the hash of the hashes of its parts."""
    store, content = open_store(checksum_algorithm="sha256"), random_bytes(PART + 10)
    obstore.put(store, "one", content, use_multipart=False)
    obstore.put(store, "parts", content, chunk_size=PART)
    sums = {}
    for name in ("one", "parts"):
        answer = s3.request("HEAD", "private", s3_prefix + name, headers={"x-amz-checksum-mode": "ENABLED"})
        sums[name] = answer.headers["x-amz-checksum-sha256"]
    halves = hashlib.sha256(content[:PART]).digest() + hashlib.sha256(content[PART:]).digest()
    assert sums["one"] == base64.b64encode(hashlib.sha256(content).digest()).decode()
    assert sums["parts"] == base64.b64encode(hashlib.sha256(halves).digest()).decode() + "-2"


def test_listing_goes_over_pages(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy, open_store: Open) -> None:
    """More than a thousand keys are listed completely in several sorted pages."""
    names = [f"{number:05d}" for number in range(1_010)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: s3.write("private", s3_prefix + name, b"x"), names))
    store = open_store(endpoint=s3_proxy.endpoint)
    assert [item["path"] for page in obstore.list(store) for item in page] == names
    assert s3_proxy.count("GET", "list-type=2") == 2
    assert list(s3.objects("private", s3_prefix)) == [s3_prefix + name for name in names]


def test_unfinished_uploads(s3: S3Server, s3_prefix: str) -> None:
    """An unfinished upload is listed by prefix, is not an object, and disappears when it is aborted."""
    for name in ("a", "b", "b"):
        assert s3.request("POST", "private", s3_prefix + name, query={"uploads": ""}).status == 200
    actual = s3.uploads("private", s3_prefix)
    assert sorted(upload.key for upload in actual) == [s3_prefix + name for name in ("a", "b", "b")]
    assert len({upload.id for upload in actual}) == 3
    assert s3.objects("private", s3_prefix) == {}
    assert len(s3.uploads("private", f"{s3_prefix}b")) == 2
    for upload in actual:
        s3.abort("private", upload)
    assert s3.uploads("private", s3_prefix) == []


def test_conditional_completion(s3: S3Server, s3_prefix: str) -> None:
    """A multipart upload can be completed only if the object does not exist yet. obstore does not support this."""
    key = f"{s3_prefix}a"
    upload = s3.request("POST", "private", key, {"uploads": ""}).xml().findtext("UploadId") or ""
    part = s3.request("PUT", "private", key, {"partNumber": "1", "uploadId": upload}, b"mine")
    s3.write("private", key, b"theirs")
    parts = f"<Part><PartNumber>1</PartNumber><ETag>{part.headers['etag']}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
    answer = s3.request("POST", "private", key, {"uploadId": upload}, body, {"if-none-match": "*"})
    assert answer.status == 412
    assert s3.read("private", key) == b"theirs"
    assert s3.request("POST", "private", key, {"uploadId": upload}, body).status == 200
    assert s3.read("private", key) == b"mine"


def test_what_obstore_leaves_behind(s3: S3Server, s3_prefix: str, open_store: Open) -> None:
    """obstore aborts the upload if its iterator raises, but not if the task is cancelled."""
    store, block = open_store(), random_bytes(PART)

    def breaks() -> Iterator[bytes]:
        yield block
        yield block
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        obstore.put(store, "raised", breaks(), chunk_size=PART)
    assert s3.uploads("private", s3_prefix) == []

    async def cancelled() -> None:
        started_at = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            for _ in range(2):
                yield block
            started_at.set()
            await asyncio.sleep(60)

        task = asyncio.ensure_future(obstore.put_async(store, "cancelled", endless(), chunk_size=PART))
        await started_at.wait()
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    time.sleep(0.3)
    remaining = s3.uploads("private", s3_prefix)
    assert [upload.key for upload in remaining] == [f"{s3_prefix}cancelled"]
    s3.abort("private", remaining[0])
    assert s3.objects("private", s3_prefix) == {}


def test_kill_and_restart(s3: S3Server, s3_prefix: str, open_store: Open) -> None:
    """A server that is killed during an upload restarts with all its objects, and the retries of obstore succeed."""
    s3.write("private", f"{s3_prefix}kept", b"kept")
    started_at = s3.request("POST", "private", f"{s3_prefix}begun", query={"uploads": ""})
    store, endpoint, block = open_store(), s3.endpoint, random_bytes(PART)
    half, killed = threading.Event(), threading.Event()

    def blocks() -> Iterator[bytes]:
        yield from (block, block, block)
        half.set()
        assert killed.wait(20)
        yield from (block, block)

    with ThreadPoolExecutor(1) as threads:
        putting = threads.submit(obstore.put, store, "large", blocks(), chunk_size=PART, max_concurrency=2)
        assert half.wait(20)
        s3.kill()
        assert not s3.alive
        killed.set()
        time.sleep(0.2)
        s3.restart()
        putting.result(90)
    assert s3.endpoint == endpoint
    assert s3.read("private", f"{s3_prefix}large") == block * 5
    assert s3.read("private", f"{s3_prefix}kept") == b"kept"
    assert [upload.id for upload in s3.uploads("private", s3_prefix)] == [started_at.xml().findtext("UploadId")]


def test_server_ends_with_the_tests(tmp_path: Path) -> None:
    """The server exits with a killed test process, and starts even if that process has other keys."""
    code = f"""
import time
from tests.s3 import S3Server
server = S3Server({str(tmp_path)!r})
server.start()
print(server.process.pid, *server.ports.values(), flush=True)
time.sleep(60)
"""
    environment = os.environ | {"AWS_ACCESS_KEY_ID": "brim-test", "AWS_SECRET_ACCESS_KEY": "another"}
    tests = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    with tests:
        assert tests.stdout is not None
        server, *ports = map(int, tests.stdout.readline().split())
        os.kill(server, 0)
        tests.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while _runs(server) and time.monotonic() < until:
        time.sleep(0.05)
    remove_sockets(ports)
    assert not _runs(server)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_proxy_fails_and_logs(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy, open_store: Open) -> None:
    """obstore retries two parts that are refused as by a busy S3 and one cut connection, and succeeds."""
    store, content = open_store(endpoint=s3_proxy.endpoint), random_bytes(3 * PART)
    busy = s3_proxy.fail(503, times=2, method="PUT", contains="partNumber=2")
    broken = s3_proxy.cut(MIB, method="PUT", contains="partNumber=3")
    obstore.put(store, "a", content, chunk_size=PART, max_concurrency=3)
    assert s3.read("private", f"{s3_prefix}a") == content
    assert (busy.fired, broken.fired) == (2, 1)
    # A client of an earlier test may still write to a port that is used again.
    path = f"/private/{s3_prefix}a"
    parts = [request for request in s3_proxy.requests if request.method == "PUT" and request.path == path]
    assert sorted(part.status for part in parts) == [0, 200, 200, 200, 503, 503]
    assert [one.sent_bytes for one in parts if one.status == 0] == [MIB]
    assert [one.sent_bytes for one in parts if one.status == 200] == [PART] * 3
    assert s3_proxy.count("POST") == 2
    assert 1 <= s3_proxy.most_at_once <= 3


def test_proxy_cuts_and_loses_answers(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy, open_store: Open) -> None:
    """A cut read resumes at its position. A create with a lost answer looks like an object of another user."""
    store, content = open_store(endpoint=s3_proxy.endpoint), random_bytes(3 * MIB)
    s3.write("private", f"{s3_prefix}a", content)
    s3_proxy.cut(MIB, method="GET")
    assert get(store, "a") == content
    until = time.monotonic() + 10  # the proxy counts bytes shortly after they are received
    while sum(request.received_bytes for request in s3_proxy.requests) < 3 * MIB and time.monotonic() < until:
        time.sleep(0.01)
    assert [(one.status, one.received_bytes) for one in s3_proxy.requests] == [(200, MIB), (206, 2 * MIB)]
    s3_proxy.lose(method="PUT")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "b", b"mine", mode="create")
    assert s3.read("private", f"{s3_prefix}b") == b"mine"


def test_proxy_slows_and_stalls(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy, open_store: Open) -> None:
    """A rate applies to bodies in both directions, and a stall lasts for the specified time."""
    store, content = open_store(endpoint=s3_proxy.endpoint), random_bytes(MIB // 2)
    for switch in (lambda: s3_proxy.slow(2 * MIB), lambda: s3_proxy.stall(0.25, 1000, times=2)):
        s3_proxy.clear()
        switch()
        for work in (lambda: obstore.put(store, "a", content), lambda: get(store, "a")):
            start = time.monotonic()
            work()
            assert time.monotonic() - start >= 0.22
    assert s3.read("private", f"{s3_prefix}a") == content


def test_proxy_speaks_http(s3: S3Server, s3_prefix: str, s3_proxy: FaultProxy) -> None:
    """HEAD, `Expect: 100-continue`, chunked bodies and a refusal all work over one open connection."""
    address = urlsplit(s3_proxy.endpoint)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=20) as connection:
        answers = connection.makefile("rb")

        def send(method: str, path: str, body: bytes = b"", **headers: str) -> None:
            signed = signed_headers(s3.credentials, method, address.netloc, path, {}, {}, body)
            lines = [f"{name.replace('_', '-')}: {value}" for name, value in (signed | headers).items()]
            connection.sendall("\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode())

        def answer(body: bool = True) -> tuple[int, bytes]:
            status, length = int(answers.readline().split()[1]), 0
            while (line := answers.readline()) != b"\r\n":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            return status, answers.read(length) if body else b""

        path = f"/private/{s3_prefix}a"
        send("PUT", path, b"abcde", content_length="5", expect="100-continue")
        assert answer() == (100, b"")
        connection.sendall(b"abcde")
        assert answer() == (200, b"")
        send("HEAD", path)
        assert answer(body=False) == (200, b"")
        send("PUT", path, b"fghij", transfer_encoding="chunked")
        connection.sendall(b"3\r\nfgh\r\n2;x=y\r\nij\r\n0\r\n\r\n")
        assert answer() == (200, b"")
        s3_proxy.fail(503, method="GET")
        send("GET", path)
        status, body = answer()
        assert (status, b"<Code>SlowDown</Code>" in body) == (503, True)
        send("GET", path)
        assert answer() == (200, b"fghij")
    assert [(request.method, request.status) for request in s3_proxy.requests] == [
        ("PUT", 200),
        ("HEAD", 200),
        ("PUT", 200),
        ("GET", 503),
        ("GET", 200),
    ]
