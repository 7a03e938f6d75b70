"""What every storage promises, whatever it talks to: one class of tests, seven backends.

Each backend is a real server on loopback behind one proxy that fails, cuts or delays what passes; a storage whose
server says nothing talks to a socket that accepts and is silent.
"""

from __future__ import annotations

import http.server
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from brim.errors import BrimError, DestinationError, SourceError, StoppedError
from brim.state.retry import interrupted_by
from brim.state.stop import Stop
from brim.storage.objects import translate
from tests.conftest import random_bytes
from tests.contracts.today import Changed, TodayStorage
from tests.hub import TestHub
from tests.hub.buckets import Bucket
from tests.hub.store import Entry
from tests.places import HubBucketPlace
from tests.s3 import FaultProxy, S3Server
from tests.stores.servers import google

LATE_S = 8.0  # a busy machine gets more; a request that is not dropped takes a minute
LARGE = 120_000_000
GROWTH = 90_000_000  # less than the file; the test servers run in this process too
ODD_NAMES = ["plain.bin", "with blank.bin", "über/ü.bin", "100%25.bin", "a#b?c=d&e.bin", "deep/er/file.bin"]


class FileServer(http.server.BaseHTTPRequestHandler):
    """Files of a dictionary, with ETags. Without ranges it sends everything, as `python -m http.server` does."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]
    versions: dict[str, int]
    has_ranges = True
    headers_seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.headers_seen.append(dict(self.headers.items()))
        name = self.path.lstrip("/")
        if name not in self.files:
            self._answer(404, b"")
            return
        data, etag = self.files[name], f'"{self.versions[name]}"'
        if self.has_ranges and (asked := self.headers.get("Range")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            self._answer(206, memoryview(data)[int(first) : int(last) + 1], etag)
        else:
            self._answer(200, memoryview(data), etag)

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes | memoryview, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(data), 1 << 18):
                self.wfile.write(data[start : start + (1 << 18)])

    def log_message(self, *_: object) -> None:
        return None


class Backend:
    """A place with files, how to spoil the way to it, and what it can do."""

    can_list = can_write = is_remote = True
    odd_names = ODD_NAMES
    proxy: FaultProxy | None = None

    def __init__(self, address: str, plant: Callable[[str, bytes], None], use: Callable[[str], None]) -> None:
        self.address, self.plant, self._use = address, plant, use

    def storage(self) -> TodayStorage:
        return TodayStorage(self.address)

    def silence(self, endpoint: str) -> TodayStorage:
        """A storage whose server accepts connections and never answers."""
        self._use(endpoint)
        return TodayStorage(self.silent_address(endpoint))

    def silent_address(self, endpoint: str) -> str:
        return self.address


class LocalBackend(Backend):
    is_remote = False


class HttpBackend(Backend):
    can_list = can_write = False
    odd_names = ("plain.bin",)

    def silent_address(self, endpoint: str) -> str:
        return endpoint


class RepositoryBackend(Backend):
    can_write = False


@contextmanager
def local_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    folder: Path = request.getfixturevalue("tmp_path") / "local"

    def plant(name: str, data: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)

    folder.mkdir()
    yield LocalBackend(str(folder), plant, lambda endpoint: None)


@contextmanager
def s3_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    server: S3Server = request.getfixturevalue("s3")
    prefix: str = request.getfixturevalue("s3_prefix").rstrip("/")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")

    def use(endpoint: str) -> None:
        for name, value in server.environment_at(endpoint).items():
            monkeypatch.setenv(name, value)

    def plant(name: str, data: bytes) -> None:
        server.write("private", f"{prefix}/{name}", data)

    with FaultProxy(server.endpoint) as proxy:
        use(proxy.endpoint)
        backend = Backend(f"s3://private/{prefix}", plant, use)
        backend.proxy = proxy
        yield backend


@contextmanager
def google_backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    with google(request.getfixturevalue("tmp_path")) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        with FaultProxy(running.environment["STORAGE_EMULATOR_HOST"]) as proxy:
            address = "gs://private/some/where"

            def use(endpoint: str) -> None:
                monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint)

            def plant(name: str, data: bytes) -> None:
                use(running.environment["STORAGE_EMULATOR_HOST"])
                TodayStorage(address).put_bytes(name, data)
                use(proxy.endpoint)

            use(proxy.endpoint)
            backend = Backend(address, plant, use)
            backend.proxy = proxy
            yield backend


@contextmanager
def hub_backend(request: pytest.FixtureRequest, kind: str) -> Iterator[Backend]:
    from huggingface_hub import constants

    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    folder: Path = request.getfixturevalue("tmp_path")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_write")

    def use(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)

    with TestHub(folder / "hub", xet=True) as hub, FaultProxy(hub.endpoint) as proxy:
        use(proxy.endpoint)
        if kind == "bucket":
            place = HubBucketPlace(hub, folder / "machine")
            hub.buckets[place.bucket] = Bucket(place.bucket)
            backend = Backend(place.address, place.plant, use)
        else:
            repo = hub.create("ada/data")

            def plant(name: str, data: bytes) -> None:
                entry = Entry.regular(data)
                repo.commit("main", lambda tree: tree.update({f"some/{name}": entry}), title="a file")

            backend = RepositoryBackend("hf://datasets/ada/data/some", plant, use)
        backend.proxy = proxy
        yield backend


@contextmanager
def http_backend(request: pytest.FixtureRequest, has_ranges: bool) -> Iterator[Backend]:
    own = {"files": {}, "versions": {}, "has_ranges": has_ranges, "headers_seen": []}
    handler: Any = type("Handler", (FileServer,), own)
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def plant(name: str, data: bytes) -> None:
        handler.files[name], handler.versions[name] = data, handler.versions.get(name, 0) + 1

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with FaultProxy(f"http://127.0.0.1:{server.server_port}") as proxy:
            backend = HttpBackend(proxy.endpoint, plant, lambda endpoint: None)
            backend.proxy = proxy
            yield backend
        server.shutdown()


BACKENDS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[Backend]]] = {
    "local": local_backend,
    "s3": s3_backend,
    "gs": google_backend,
    "hub-bucket": lambda request: hub_backend(request, "bucket"),
    "hub-repository": lambda request: hub_backend(request, "repository"),
    "http": lambda request: http_backend(request, has_ranges=True),
    "http-no-ranges": lambda request: http_backend(request, has_ranges=False),
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param.startswith(("s3", "gs")):
        pytest.importorskip("obstore")
    with ExitStack() as stack:
        yield stack.enter_context(BACKENDS[request.param](request))


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def only(backend: Backend, **traits: bool) -> None:
    for trait, wanted in traits.items():
        if getattr(backend, trait) is not wanted:
            pytest.skip(f"{trait} is {not wanted} here")


class TestReading:
    def test_lists_every_name_with_its_size(self, backend: Backend) -> None:
        only(backend, can_list=True)
        for number, name in enumerate(backend.odd_names):
            backend.plant(name, bytes(number + 1))
        found = dict(backend.storage().list())
        assert {name: info.st_size for name, info in found.items()} == {
            name: number + 1 for number, name in enumerate(backend.odd_names)
        }

    def test_stats_many_names_in_order(self, backend: Backend) -> None:
        for name in backend.odd_names:
            backend.plant(name, name.encode())
        names = [*backend.odd_names, "missing.bin"]
        infos = list(backend.storage().stat(names))
        assert [info and info.st_size for info in infos] == [*(len(n.encode()) for n in backend.odd_names), None]

    def test_reads_exactly_the_range(self, backend: Backend) -> None:
        data = random_bytes(300_000, 1)
        storage = backend.storage()
        for name in backend.odd_names[:4]:
            backend.plant(name, data)
        for name in backend.odd_names[:4]:
            (info,) = storage.stat([name])
            assert info is not None
            assert storage.read(name, 1000, 250_001, info.etag) == data[1000:250_001]
            assert storage.read(name, 0, len(data), info.etag) == data

    def test_replaced_file_is_an_error(self, backend: Backend) -> None:
        """Every range names the version that was listed, also where a server ignores conditions."""
        backend.plant("plain.bin", random_bytes(200_000, 1))
        storage = backend.storage()
        (info,) = storage.stat(["plain.bin"])
        assert info is not None
        storage.read("plain.bin", 0, 10, info.etag)
        time.sleep(0.02)  # local files: another modification time
        backend.plant("plain.bin", random_bytes(200_000, 2))
        try:
            data = storage.read("plain.bin", 100, 200, info.etag)
        except Changed:
            return
        assert data == random_bytes(200_000, 1)[100:200]  # a commit or a copy keeps its bytes

    def test_missing_file_is_none_or_changed(self, backend: Backend) -> None:
        storage = backend.storage()
        backend.plant("plain.bin", b"12345")
        (info,) = storage.stat(["plain.bin"])
        assert info is not None
        assert storage.read_small("missing.bin") is None
        if backend.is_remote:
            with pytest.raises(Changed):
                storage.read("missing.bin", 0, 5, info.etag)

    @pytest.mark.parametrize("files", [1, 4])
    def test_memory_stays_bounded(self, backend: Backend, files: int) -> None:
        if isinstance(backend, RepositoryBackend) and files == 4:
            pytest.skip("one request at a time reaches the storage of a repository")
        data, storage, seen = random_bytes(LARGE, 1), backend.storage(), [0] * files
        backend.plant("plain.bin", data)
        del data
        (info,) = storage.stat(["plain.bin"])
        assert info is not None
        storage.read("plain.bin", 0, 10, info.etag)
        started, peak = anonymous_bytes(), 0

        def read(number: int) -> None:
            for block in storage.stream("plain.bin", LARGE, info.etag):
                seen[number] += len(block)

        threads = [threading.Thread(target=read, args=[number]) for number in range(files)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, anonymous_bytes())
            time.sleep(0.01)
        assert seen == [LARGE] * files
        assert peak - started < GROWTH * files


class TestFaults:
    @pytest.mark.parametrize("status", [500, 503])
    def test_transient_answers_are_retried(self, backend: Backend, status: int) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        (info,) = backend.storage().stat(["plain.bin"])
        assert info is not None
        backend.proxy.fail(status, times=2)
        assert backend.storage().read("plain.bin", 2, 5, info.etag) == b"234"
        backend.proxy.fail(status, times=2)
        assert [found and found.st_size for found in backend.storage().stat(["plain.bin"])] == [10]

    def test_cut_answers_are_retried(self, backend: Backend) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        data = random_bytes(500_000, 3)
        backend.plant("plain.bin", data)
        (info,) = backend.storage().stat(["plain.bin"])
        assert info is not None
        backend.proxy.cut(1000, times=1, method="GET", answer=True)
        assert backend.storage().read("plain.bin", 0, len(data), info.etag) == data

    def test_refusal_is_not_retried(self, backend: Backend) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        (info,) = backend.storage().stat(["plain.bin"])
        assert info is not None
        rule = backend.proxy.fail(403, times=None)
        with pytest.raises(SourceError, match="may not read"):
            backend.storage().read("plain.bin", 2, 5, info.etag)
        assert rule.fired <= 2

    def test_silent_server_ends_with_an_error(
        self, backend: Backend, silent: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """BRIM_STALL_SECONDS bounds how long an object store is waited for."""
        only(backend, is_remote=True)
        if not backend.address.startswith(("s3", "gs")):
            pytest.skip("plain requests have a limit of a minute each")
        monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
        with pytest.raises(BrimError, match="does not answer"):
            list(backend.silence(silent).stat(["plain.bin"]))

    @pytest.mark.parametrize("operation", ["list", "stat", "read", "read_small", "put", "put_bytes", "delete"])
    def test_stop_ends_a_silent_request(self, backend: Backend, silent: str, operation: str) -> None:
        only(backend, is_remote=True)
        if operation == "list" and not backend.can_list:
            pytest.skip("nothing is listed here")
        if operation in ("put", "put_bytes", "delete") and not backend.can_write:
            pytest.skip("nothing is written here")
        storage, stop = backend.silence(silent), Stop()
        calls: dict[str, Callable[[], object]] = {
            "list": lambda: list(storage.list()),
            "stat": lambda: list(storage.stat(["plain.bin"])),
            "read": lambda: storage.read("plain.bin", 0, 10, '"1"'),
            "read_small": lambda: storage.read_small("plain.bin"),
            "put": lambda: storage.put("plain.bin", [bytes(10_000_000)] * 2),
            "put_bytes": lambda: storage.put_bytes("plain.bin", b"1"),
            "delete": lambda: storage.delete(["plain.bin"]),
        }
        timer = threading.Timer(0.5, stop.request)
        timer.start()
        began = time.monotonic()
        with interrupted_by(stop.check), pytest.raises(StoppedError):
            calls[operation]()
        assert time.monotonic() - began - 0.5 < LATE_S


class TestWriting:
    def test_put_delete_move(self, backend: Backend) -> None:
        only(backend, can_write=True)
        storage, data = backend.storage(), random_bytes(100_000, 5)
        for name in backend.odd_names:
            storage.put_bytes(name, data)
        assert {name: info.st_size for name, info in storage.list()} == dict.fromkeys(backend.odd_names, len(data))
        storage.move("plain.bin", "moved.bin")
        storage.delete([*backend.odd_names, "missing.bin"])
        assert [name for name, _ in storage.list()] == ["moved.bin"]
        assert storage.read_small("moved.bin") == data

    def test_put_of_a_large_file_is_read_back(self, backend: Backend) -> None:
        only(backend, can_write=True)
        storage, data = backend.storage(), random_bytes(20_000_000, 6)
        storage.put("large.bin", [data[:9_000_000], data[9_000_000:]])
        (info,) = storage.stat(["large.bin"])
        assert info is not None
        assert storage.read("large.bin", 0, len(data), info.etag) == data

    def test_put_that_fails_leaves_the_old_file(self, backend: Backend) -> None:
        """The whole file appears under its name, or nothing does."""
        only(backend, can_write=True)
        storage = backend.storage()
        storage.put_bytes("large.bin", b"old")

        def broken() -> Iterator[bytes]:
            yield bytes(9_000_000)
            raise DestinationError("The source failed.")

        with pytest.raises(DestinationError, match="The source failed"):
            storage.put("large.bin", broken(), size=20_000_000)
        assert {name: info.st_size for name, info in storage.list()} == {"large.bin": 3}

    def test_conditional_write_keeps_the_first(self, backend: Backend) -> None:
        """`expected` writes only over that version. A store without conditions says so."""
        only(backend, can_write=True)
        storage = backend.storage()
        first = storage.put_if("lock", b"one", None)
        if first is None:
            pytest.skip("this backend has no conditional writes")
        with pytest.raises(Changed):
            storage.put_if("lock", b"two", None)
        second = storage.put_if("lock", b"two", first)
        with pytest.raises(Changed):
            storage.put_if("lock", b"three", first)
        assert second is not None
        assert storage.read_small("lock") == b"two"


class TestSecrets:
    def test_token_stays_with_its_host(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """A redirect to another host takes neither token nor cookie along."""
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        own = {"files": {"plain.bin": b"0123456789"}, "versions": {"plain.bin": 1}, "headers_seen": []}
        far: Any = type("Far", (FileServer,), own)

        class Near(http.server.BaseHTTPRequestHandler):
            seen: list[str | None] = []  # noqa: RUF012 - shared by all requests of a test

            def do_GET(self) -> None:
                self.seen.append(self.headers.get("Authorization"))
                self.send_response(302)
                self.send_header("Location", f"http://127.0.0.2:{far_server.server_port}{self.path}")
                self.send_header("Set-Cookie", "session=secret")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                return None

        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with (
            http.server.ThreadingHTTPServer(("127.0.0.2", 0), far) as far_server,
            http.server.ThreadingHTTPServer(("127.0.0.1", 0), Near) as near_server,
        ):
            endpoint = f"http://127.0.0.1:{near_server.server_port}"
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
            for server in (far_server, near_server):
                threading.Thread(target=server.serve_forever, daemon=True).start()
            assert TodayStorage(endpoint).read("plain.bin", 2, 5, '"1"') == b"234"
            far_server.shutdown()
            near_server.shutdown()
        assert "Bearer hf_secret" in Near.seen
        assert far.headers_seen
        assert not any({"authorization", "cookie"} & {n.lower() for n in headers} for headers in far.headers_seen)

    def test_location_and_errors_hold_no_secret(self, backend: Backend) -> None:
        secrets = [value for name, value in os.environ.items() if "SECRET" in name or name == "HF_TOKEN"]
        assert not any(secret in repr(backend.storage().location) for secret in secrets)


TABLE = [
    (401, "SourceError", 2),
    (403, "SourceError", 2),
    (400, "DestinationUnavailableError", 5),  # the proxy calls it RequestTimeout
    (503, "DestinationUnavailableError", 5),
    (500, "DestinationUnavailableError", 5),
]


@pytest.mark.parametrize(("status", "error", "code"), TABLE)
def test_status_becomes_error_and_exit_code(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, status: int, error: str, code: int
) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
    with s3_backend(request) as backend:
        assert backend.proxy is not None
        backend.proxy.fail(status, times=None)
        with pytest.raises(BrimError) as caught:
            list(backend.storage().list())
        assert (type(caught.value).__name__, caught.value.exit_code) == (error, code)


def test_every_error_of_obstore_is_translated() -> None:
    """An error of a kind that is not known is neither retried nor lost; it survives pickling."""
    exceptions = pytest.importorskip("obstore.exceptions")
    kinds = {}
    for name in dir(exceptions):
        if name.endswith("Error"):
            error = translate(getattr(exceptions, name)("something"))
            assert error is not None
            again = pickle.loads(pickle.dumps(error))
            assert (str(again), again.kind, again.is_transient) == (str(error), error.kind, error.is_transient)
            kinds[name] = error.kind
    assert kinds.pop("GenericError") == "transient"
    assert kinds.pop("NotFoundError") == "missing"
    assert {name for name, kind in kinds.items() if kind == "changed"} == {
        "AlreadyExistsError",
        "NotModifiedError",
        "PreconditionError",
    }
    assert "transient" not in kinds.values()
