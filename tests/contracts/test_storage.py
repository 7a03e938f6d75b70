"""The guarantees of every storage: one suite of tests for seven backends.

Each remote backend is a real server on loopback. All requests pass through one proxy that fails, cuts or delays them.
For a silent server, the storage connects to a socket that accepts connections and never answers.
"""

from __future__ import annotations

import http.server
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from brim.errors import BrimError, DestinationError, InputError, SourceError, StoppedError
from brim.state.retry import interrupted_by
from brim.state.stop import stoppable
from brim.storage.explain_error import explain_errors
from brim.storage.hub_api import web_errors
from brim.storage.hub_repository import HubRepository
from brim.storage.location import Location, folder_location, is_remote, split_address
from brim.storage.objects import translate
from brim.storage.reading import FileReplacedError, RangeStream, RemoteFile
from brim.storage.storage import FileInfo, Storage, open_storage
from brim.storage.storage_error import StorageError
from brim.storage.upload_content import SilentWatcher
from tests.conftest import random_bytes
from tests.destinations import HubBucketDestination
from tests.hub import TestHub
from tests.hub.buckets import Bucket
from tests.hub.store import Entry
from tests.s3 import FaultProxy, S3Server
from tests.stores.servers import google

LATE_S = 8.0  # more on a busy machine; a request that is not dropped takes a minute
LARGE = 120_000_000
GROWTH = 90_000_000  # less than the file; the test servers run in this process too
FILE_COUNT = 2_500  # files: three pages of a listing
ODD_NAMES = ["plain.bin", "with blank.bin", "über/ü.bin", "100%25.bin", "a#b?c=d&e.bin", "deep/er/file.bin"]


class Content:
    """Blocks of bytes with the interface of a splice."""

    path: Path | None = None

    def __init__(self, blocks: Iterable[bytes], size: int | None = None) -> None:
        self._blocks = blocks if size is not None else list(blocks)
        self.size = sum(map(len, self._blocks)) if size is None else size

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = 1 << 20,
        *,
        keep: object = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]:
        position, stop = 0, self.size if stop is None else stop
        for block in self._blocks:
            view = memoryview(block)[max(start - position, 0) : max(stop - position, 0)]
            position += len(block)
            for first in range(0, len(view), buffer_bytes):
                yield view[first : first + buffer_bytes]


def location_of(address: str) -> Location:
    if address.startswith("http") and address.count("/") == 2:
        scheme, _, host = address.partition("://")
        return Location(scheme, host, "")
    return split_address(address) if is_remote(address) else folder_location(address)


def info_of(storage: Storage, name: str) -> FileInfo:
    (info,) = storage.stat([name])
    assert info is not None
    return info


def stream(storage: Storage, name: str, start: int, stop: int, version: str) -> RangeStream:
    return RangeStream(storage, RemoteFile(storage.location, name, stop, version).ranges(start, stop))


def read(storage: Storage, name: str, start: int, stop: int, version: str) -> bytes:
    return b"".join(view for _, view in stream(storage, name, start, stop, version))


def put(storage: Storage, name: str, blocks: Iterable[bytes], size: int | None = None) -> None:
    storage.put(name, Content(blocks, size), None, SilentWatcher())


class FileServer(http.server.BaseHTTPRequestHandler):
    """Serve the files of a dictionary with ETags, or complete files without ranges, as `python -m http.server`."""

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
        if self.has_ranges and (requested := self.headers.get("Range")):
            first, _, last = requested.removeprefix("bytes=").partition("-")
            part = memoryview(data)[int(first) : int(last) + 1]
            self._answer(206, part, etag, f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        else:
            self._answer(200, memoryview(data), etag)

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes | memoryview, etag: str = "", content_range: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        for name, value in (("ETag", etag), ("Content-Range", content_range)):
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            for start in range(0, len(data), 1 << 18):
                self.wfile.write(data[start : start + (1 << 18)])

    def log_message(self, *_: object) -> None:
        return None


class Backend:
    """A storage location under test: its files, the proxy that makes its requests fail, and its capabilities."""

    can_list = can_write = is_remote = has_conditions = True
    odd_names: tuple[str, ...] | list[str] = ODD_NAMES
    proxy: FaultProxy | None = None

    def __init__(self, address: str, plant: Callable[[str, bytes], None], use: Callable[[str], None]) -> None:
        self.address, self.plant, self._use = address, plant, use

    def storage(self) -> Storage:
        return open_storage(location_of(self.address))

    def silence(self, endpoint: str) -> Storage:
        """Return a storage whose server accepts connections and never answers."""
        self._use(endpoint)
        return open_storage(location_of(self.silent_address(endpoint)))

    def silent_address(self, endpoint: str) -> str:
        return self.address

    def plant_many(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: self.plant(name, b"1"), names))


class LocalBackend(Backend):
    is_remote = has_conditions = False


class HttpBackend(Backend):
    can_list = can_write = False
    odd_names = ("plain.bin",)

    def silent_address(self, endpoint: str) -> str:
        return endpoint


class RepositoryBackend(Backend):
    can_write = False

    def __init__(self, plant_all: Callable[[dict[str, bytes]], None], use: Callable[[str], None]) -> None:
        super().__init__("hf://datasets/ada/data/some", lambda name, data: plant_all({name: data}), use)
        self._plant_all = plant_all

    def plant_many(self, names: Iterable[str]) -> None:
        self._plant_all(dict.fromkeys(names, b"1"))


class HubBucketBackend(Backend):
    has_conditions = False


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
                open_storage(location_of(address)).put_bytes(name, data)
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
            destination = HubBucketDestination(hub, folder / "machine")
            hub.buckets[destination.bucket] = Bucket(destination.bucket)
            backend: Backend = HubBucketBackend(destination.address, destination.plant, use)
        else:
            repo = hub.create("ada/data")

            def plant_all(files: dict[str, bytes]) -> None:
                entries = {f"some/{name}": Entry.regular(data) for name, data in files.items()}
                repo.commit("main", lambda tree: tree.update(entries), title="files")

            backend = RepositoryBackend(plant_all, use)
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
    """Return the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def only(backend: Backend, **traits: bool) -> None:
    for trait, expected in traits.items():
        if getattr(backend, trait) is not expected:
            pytest.skip(f"{trait} is {not expected} here")


def grown_by(work: Callable[[], object]) -> int:
    """Return by how much the memory of this process grows while a function runs."""
    started, peak = anonymous_bytes(), 0
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        peak = max(peak, anonymous_bytes())
        time.sleep(0.01)
    return peak - started


class TestReading:
    def test_lists_every_name_with_its_size(self, backend: Backend) -> None:
        only(backend, can_list=True)
        for number, name in enumerate(backend.odd_names):
            backend.plant(name, bytes(number + 1))
        actual = dict(backend.storage().list())
        assert {name: info.st_size for name, info in actual.items()} == {
            name: number + 1 for number, name in enumerate(backend.odd_names)
        }

    def test_lists_a_folder_by_names_below_the_location(self, backend: Backend) -> None:
        """Listing a prefix returns only the files in that folder, not files whose names start like it."""
        only(backend, can_list=True)
        for name in ("data/a.bin", "data/deep/b.bin", "data-c.bin"):
            backend.plant(name, b"1")
        assert sorted(dict(backend.storage().list("data"))) == ["data/a.bin", "data/deep/b.bin"]

    def test_lists_more_names_than_a_page_holds(self, backend: Backend) -> None:
        only(backend, can_list=True)
        if isinstance(backend, HubBucketBackend):
            pytest.skip("each file there is planted by a process; the pages are those of a repository")
        names = [f"many/{number:05}" for number in range(FILE_COUNT)]
        backend.plant_many(names)
        assert sorted(dict(backend.storage().list())) == names

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
            version = info_of(storage, name).etag
            assert read(storage, name, 1000, 250_001, version) == data[1000:250_001]
            assert read(storage, name, 0, len(data), version) == data

    @pytest.mark.parametrize("subset", [0, 1, 3])
    def test_every_range_is_of_the_listed_version(self, backend: Backend, subset: int) -> None:
        """Reads never mix versions of a file, even if a server ignores conditional requests.

        The file is replaced before, between and after the first requests.
        """
        old, new = random_bytes(24_000_000, 1), random_bytes(24_000_000, 2)
        backend.plant("plain.bin", old)
        storage = backend.storage()
        ranges = stream(storage, "plain.bin", 0, len(old), info_of(storage, "plain.bin").etag)
        received_bytes = b"".join(bytes(next(ranges)[1]) for _ in range(subset))
        time.sleep(0.02)  # gives the replaced local file another modification time
        backend.plant("plain.bin", new)
        try:
            received_bytes += b"".join(view for _, view in ranges)
        except FileReplacedError:
            return
        assert received_bytes == old  # a commit keeps its bytes, and so does a copy-on-write file

    def test_missing_file_is_none_or_replaced(self, backend: Backend) -> None:
        storage = backend.storage()
        backend.plant("plain.bin", b"12345")
        assert storage.read("plain.bin") == b"12345"
        assert storage.read("missing.bin") is None
        with pytest.raises(FileReplacedError):
            read(storage, "missing.bin", 0, 5, info_of(storage, "plain.bin").etag)

    @pytest.mark.parametrize("files", [1, 4])
    def test_memory_stays_bounded_while_files_are_read(self, backend: Backend, files: int) -> None:
        if isinstance(backend, RepositoryBackend) and files == 4:
            pytest.skip("one request at a time reaches the storage of a repository")
        data, storage, observed = random_bytes(LARGE, 1), backend.storage(), [0] * files
        backend.plant("plain.bin", data)
        del data
        version = info_of(storage, "plain.bin").etag
        read(storage, "plain.bin", 0, 10, version)

        def read_all(number: int) -> None:
            for _, view in stream(storage, "plain.bin", 0, LARGE, version):
                observed[number] += len(view)

        def read_files() -> None:
            with ThreadPoolExecutor(files) as pool:
                list(pool.map(read_all, range(files)))

        assert grown_by(read_files) < GROWTH * files
        assert observed == [LARGE] * files


class TestFaults:
    @pytest.fixture(autouse=True)
    def _short_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The Hub gets as many tries as ever, with a tenth of the waits between them."""
        monkeypatch.setattr(HubRepository, "waits_s", tuple(wait_s / 10 for wait_s in HubRepository.waits_s))

    @pytest.mark.parametrize("status", [500, 503])
    def test_transient_answers_are_retried(self, backend: Backend, status: int) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        version = info_of(backend.storage(), "plain.bin").etag
        backend.proxy.fail(status, times=2)
        assert read(backend.storage(), "plain.bin", 2, 5, version) == b"234"
        backend.proxy.fail(status, times=2)
        assert info_of(backend.storage(), "plain.bin").st_size == 10
        backend.proxy.fail(status, times=2)
        assert backend.storage().read("plain.bin") == b"0123456789"

    def test_listing_that_breaks_is_complete(self, backend: Backend) -> None:
        only(backend, is_remote=True, can_list=True)
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        backend.proxy.fail(503, times=2)
        assert list(dict(backend.storage().list())) == ["plain.bin"]

    def test_cut_answers_are_retried(self, backend: Backend) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        data = random_bytes(500_000, 3)
        backend.plant("plain.bin", data)
        version = info_of(backend.storage(), "plain.bin").etag
        backend.proxy.cut(1000, times=1, method="GET", answer=True)
        assert read(backend.storage(), "plain.bin", 0, len(data), version) == data

    @pytest.mark.parametrize("status", [401, 403, 404, 412])
    def test_refusal_is_not_retried(self, backend: Backend, status: int) -> None:
        only(backend, is_remote=True)
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        version = info_of(backend.storage(), "plain.bin").etag
        rule = backend.proxy.fail(status, times=None)
        with pytest.raises(BrimError) as caught:
            read(backend.storage(), "plain.bin", 2, 5, version)
        assert caught.value.exit_code == (5 if status == 412 and not is_object_store(backend) else 2)
        if status != 412 or is_object_store(backend):
            assert rule.fired <= 2

    def test_retry_after_is_waited_for(self, backend: Backend) -> None:
        only(backend, is_remote=True)
        if is_object_store(backend):
            pytest.skip("obstore waits as it was configured")
        assert backend.proxy is not None
        backend.plant("plain.bin", b"0123456789")
        version = info_of(backend.storage(), "plain.bin").etag
        backend.proxy.fail(429, times=1, retry_after_s=2)
        began = time.monotonic()
        assert read(backend.storage(), "plain.bin", 2, 5, version) == b"234"
        assert time.monotonic() - began >= 2

    def test_silent_server_ends_with_an_error(
        self, backend: Backend, silent: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """BRIM_STALL_SECONDS limits how long brim waits for an object store."""
        only(backend, is_remote=True)
        if not is_object_store(backend):
            pytest.skip("plain requests have a limit of a minute each")
        monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
        storage = backend.silence(silent)
        with pytest.raises(BrimError, match="does not answer"), explain_errors(storage.location, "read"):
            list(storage.stat(["plain.bin"]))

    @pytest.mark.parametrize("operation", ["list", "stat", "fetch", "read", "put", "put_bytes", "move", "delete"])
    def test_stop_ends_a_silent_request(self, backend: Backend, silent: str, operation: str, tmp_path: Path) -> None:
        assert_stopped(backend, silent, operation, "request", tmp_path / "stop")

    @pytest.mark.parametrize("mode", ["signal", "file"])
    @pytest.mark.parametrize("operation", ["fetch", "put"])
    def test_every_way_to_stop_ends_a_silent_request(
        self, backend: Backend, silent: str, operation: str, mode: str, tmp_path: Path
    ) -> None:
        assert_stopped(backend, silent, operation, mode, tmp_path / "stop")


def is_object_store(backend: Backend) -> bool:
    return backend.address.startswith(("s3", "gs"))


def assert_stopped(backend: Backend, silent: str, operation: str, method: str, file: Path) -> None:
    only(backend, is_remote=True)
    if operation == "list" and not backend.can_list:
        pytest.skip("nothing is listed here")
    if operation in ("put", "put_bytes", "move", "delete") and not backend.can_write:
        pytest.skip("nothing is written here")
    storage = backend.silence(silent)
    calls: dict[str, Callable[[], object]] = {
        "list": lambda: list(storage.list()),
        "stat": lambda: list(storage.stat(["plain.bin"])),
        "fetch": lambda: read(storage, "plain.bin", 0, 10, '"1"'),
        "read": lambda: storage.read("plain.bin"),
        "put": lambda: put(storage, "plain.bin", [bytes(10_000_000)] * 2),
        "put_bytes": lambda: storage.put_bytes("plain.bin", b"1"),
        "move": lambda: storage.move("plain.bin", "moved.bin"),
        "delete": lambda: storage.delete(["plain.bin"]),
    }
    interrupted: AbstractContextManager[object] = pytest.raises(KeyboardInterrupt)
    with interrupted if method == "signal" else nullcontext(), stoppable(file) as stop:
        methods: dict[str, Callable[[], None]] = {
            "request": stop.request,
            "file": file.touch,
            "signal": lambda: os.kill(os.getpid(), signal.SIGINT),
        }
        threading.Timer(0.5, methods[method]).start()
        began = time.monotonic()
        with interrupted_by(stop.check), pytest.raises(StoppedError):
            calls[operation]()
        assert time.monotonic() - began - 0.5 < LATE_S


class TestWriting:
    def test_put_delete_move(self, backend: Backend) -> None:
        only(backend, can_write=True)
        storage, data = backend.storage(), random_bytes(100_000, 5)
        for name in backend.odd_names:
            assert storage.put_bytes(name, data).st_size == len(data)
        assert {name: info.st_size for name, info in storage.list()} == dict.fromkeys(backend.odd_names, len(data))
        moved_path = storage.move("plain.bin", "moved.bin")
        assert moved_path.etag == info_of(storage, "moved.bin").etag
        storage.delete([*backend.odd_names, "missing.bin"])
        assert [name for name, _ in storage.list()] == ["moved.bin"]
        assert storage.read("moved.bin") == data

    def test_put_of_a_large_file_is_read_back(self, backend: Backend) -> None:
        only(backend, can_write=True)
        storage, data = backend.storage(), random_bytes(20_000_000, 6)
        put(storage, "large.bin", [data[:9_000_000], data[9_000_000:]])
        assert read(storage, "large.bin", 0, len(data), info_of(storage, "large.bin").etag) == data

    def test_put_that_fails_leaves_the_old_file(self, backend: Backend) -> None:
        """A failed upload leaves the old file unchanged: a new file appears only when it is complete."""
        only(backend, can_write=True)
        storage = backend.storage()
        storage.put_bytes("large.bin", b"old")

        def broken() -> Iterator[bytes]:
            yield bytes(9_000_000)
            raise DestinationError("The source failed.")

        with pytest.raises(DestinationError, match="The source failed"):
            put(storage, "large.bin", broken(), size=20_000_000)
        assert {name: info.st_size for name, info in storage.list()} == {"large.bin": 3}

    def test_put_that_is_killed_leaves_the_old_file(self, backend: Backend) -> None:
        """kill -9 in the middle of an upload leaves the old file. The unfinished upload can be found and aborted."""
        only(backend, can_write=True)
        backend.storage().put_bytes("large.bin", b"old")
        code = f"""
import sys, time
from tests.contracts.test_storage import *
def blocks():
    yield bytes(9_000_000)
    yield bytes(9_000_000)
    print("under way", flush=True)
    time.sleep(60)
put(open_storage(location_of({backend.address!r})), "large.bin", blocks(), size=30_000_000)
"""
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "under way\n"
            time.sleep(0.3)
            process.kill()
        storage = backend.storage()
        assert {name: info.st_size for name, info in storage.list()} == {"large.bin": 3}
        if backend.address.startswith("gs"):
            with pytest.raises(StorageError, match="unsupported"):
                storage.abort_uploads("", lambda name: True)
            return
        is_listed = backend.address.startswith("s3") or not backend.is_remote
        assert storage.abort_uploads("", lambda name: name == "other.bin") == 0
        assert storage.abort_uploads("", lambda name: name.endswith("large.bin")) == is_listed
        assert storage.abort_uploads("", lambda name: True) == 0

    def test_memory_stays_bounded_while_a_file_is_put(self, backend: Backend) -> None:
        only(backend, can_write=True)
        if not backend.address.startswith(("s3", "/")):
            pytest.skip("the server keeps in this process what it receives")
        storage, block = backend.storage(), random_bytes(1 << 20, 1)
        put(storage, "warm.bin", [block] * 10)
        assert grown_by(lambda: put(storage, "large.bin", (block for _ in range(120)), size=120 << 20)) < GROWTH

    def test_conditional_write_keeps_the_first(self, backend: Backend) -> None:
        """A conditional write replaces only the expected version, or raises `unsupported` if the storage has none."""
        only(backend, can_write=True)
        storage = backend.storage()
        if not backend.has_conditions:
            with pytest.raises(StorageError, match="unsupported"):
                storage.put_bytes("lock", b"one", None)
            return
        first = storage.put_bytes("lock", b"one", None)
        for data, expected in ((b"two", None), (b"three", FileInfo(3, '"other"', condition=('"other"', "1")))):
            with pytest.raises(StorageError, match="changed"):
                storage.put_bytes("lock", data, expected)
        storage.put_bytes("lock", b"two", first)
        with pytest.raises(StorageError, match="changed"):
            storage.put_bytes("lock", b"three", first)
        assert storage.read("lock") == b"two"

    def test_access_is_checked_by_writing(self, backend: Backend) -> None:
        only(backend, can_write=True)
        storage = backend.storage()
        storage.put_bytes("data/a.bin", b"1")
        storage.check_access()
        assert [name for name, _ in storage.list()] == ["data/a.bin"]
        assert (storage.free_bytes() is None) is backend.is_remote
        if backend.proxy is not None:
            backend.proxy.fail(403, times=None)
            with pytest.raises(DestinationError, match="may not write"):
                storage.check_access()

    def test_read_only_locations_say_so(self, backend: Backend) -> None:
        only(backend, can_write=False)
        storage = backend.storage()
        for call in (
            lambda: put(storage, "a.bin", [b"1"]),
            lambda: storage.put_bytes("a.bin", b"1"),
            lambda: storage.delete(["a.bin"]),
            lambda: storage.move("a.bin", "b.bin"),
        ):
            with pytest.raises(StorageError, match="unsupported"):
                call()


@contextmanager
def servers(*handlers: tuple[str, Any]) -> Iterator[list[str]]:
    """Run a server for each (host, handler), and return their addresses."""
    with ExitStack() as stack:
        running = [stack.enter_context(http.server.ThreadingHTTPServer((host, 0), kind)) for host, kind in handlers]
        for server in running:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True).start()
            stack.callback(server.shutdown)
        yield [f"http://{server.server_address[0]}:{server.server_port}" for server in running]


class Redirecting(http.server.BaseHTTPRequestHandler):
    """Redirect every GET to another host, with a cookie. Answer HEAD directly, as the S3 gateway of the Hub does."""

    protocol_version = "HTTP/1.1"
    target = ""
    size, etag = 0, ""
    headers_seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.headers_seen.append({name.lower(): value for name, value in self.headers.items()})
        self.send_response(302)
        self.send_header("Location", f"{self.target}{self.path}")
        self.send_header("Set-Cookie", "session=secret")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.size))
        self.send_header("ETag", self.etag)
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return None


def handler(base: type, **own: Any) -> Any:
    return type("Handler", (base,), {"headers_seen": [], **own})


class TestSecrets:
    @pytest.fixture(autouse=True)
    def online(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def test_token_stays_with_its_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a redirect, the other host receives neither the token nor the cookie."""
        remote = handler(FileServer, files={"plain.bin": b"0123456789"}, versions={"plain.bin": 1})
        local = handler(Redirecting)
        with servers(("127.0.0.2", remote), ("127.0.0.1", local)) as (target, endpoint):
            local.target = target
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
            assert read(open_storage(location_of(endpoint)), "plain.bin", 2, 5, '"1"') == b"234"
        assert any(headers.get("authorization") == "Bearer hf_secret" for headers in local.headers_seen)
        assert remote.headers_seen
        assert not any({"authorization", "cookie"} & {n.lower() for n in headers} for headers in remote.headers_seen)

    def test_given_token_is_for_the_hub_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        far = handler(FileServer, files={"plain.bin": b"0123456789"}, versions={"plain.bin": 1})
        with servers(("127.0.0.2", far)) as (endpoint,):
            storage = open_storage(location_of(endpoint), "hf_other")
            assert storage.read("plain.bin") == b"0123456789"
        assert not any("hf_" in str(headers) for headers in far.headers_seen)
        assert "hf_other" not in repr(storage)
        assert pickle.loads(pickle.dumps(storage)).location == storage.location

    @pytest.mark.parametrize("target", ["http://127.0.0.2/x", "file:///etc/passwd", "ftp://127.0.0.1/x"])
    def test_unsafe_redirect_is_refused(
        self, s3_https: tuple[FaultProxy, Path], monkeypatch: pytest.MonkeyPatch, target: str
    ) -> None:
        """Redirects from https to http, or to another scheme, are refused."""
        near = handler(Redirecting, target=target)
        with servers(("127.0.0.1", near)) as (endpoint,):
            proxy, authority = s3_https
            host, _, port = endpoint.removeprefix("http://").partition(":")
            proxy.target = (host, int(port))
            monkeypatch.setenv("SSL_CERT_FILE", str(authority))
            huggingface_hub = importlib.import_module("huggingface_hub.utils")
            huggingface_hub.close_session()
            storage = open_storage(location_of(proxy.endpoint))
            (answer,) = storage.fetch(list(RemoteFile(storage.location, "x", 5, "").ranges(0, 5))).result(30)
            huggingface_hub.close_session()
        assert near.headers_seen
        assert isinstance(answer, StorageError)
        assert answer.kind == "denied"

    def test_s3_gateway_that_redirects_to_another_host(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Reads through a redirect to another host detect a replaced file without sending credentials there.

        The S3 gateway of the Hub redirects GET in this way (302), and the other host ignores If-Match.
        """
        pytest.importorskip("obstore")
        data = random_bytes(50_000, 1)
        far = handler(FileServer, files={"bucket/a.bin": data}, versions={"bucket/a.bin": 1})
        near = handler(Redirecting, size=len(data), etag='"1"')
        with servers(("127.0.0.2", far), ("127.0.0.1", near)) as (target, endpoint):
            near.target = target
            for name, value in (
                ("AWS_ACCESS_KEY_ID", "key"),
                ("AWS_SECRET_ACCESS_KEY", "the-secret"),
                ("AWS_ENDPOINT_URL", endpoint),
                ("BRIM_STALL_SECONDS", "2"),
            ):
                monkeypatch.setenv(name, value)
            storage = open_storage(location_of("s3://bucket"))
            assert info_of(storage, "a.bin").etag == '"1"'
            assert read(storage, "a.bin", 100, 40_000, '"1"') == data[100:40_000]
            far.versions["bucket/a.bin"] = 2
            with pytest.raises(FileReplacedError):
                read(storage, "a.bin", 100, 40_000, '"1"')
        assert all("authorization" in headers for headers in near.headers_seen)
        assert not any("uthorization" in str(headers) or "the-secret" in str(headers) for headers in far.headers_seen)

    def test_signed_request_is_not_redirected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Requests that brim signs itself (those for unfinished uploads) do not follow redirects."""
        far, near = handler(FileServer, files={}, versions={}), handler(Redirecting)
        with servers(("127.0.0.2", far), ("127.0.0.1", near)) as (target, endpoint):
            near.target = target
            for name, value in (
                ("AWS_ACCESS_KEY_ID", "key"),
                ("AWS_SECRET_ACCESS_KEY", "the-secret"),
                ("AWS_ENDPOINT_URL", endpoint),
            ):
                monkeypatch.setenv(name, value)
            with pytest.raises(StorageError, match="unsupported"):
                open_storage(location_of("s3://bucket")).abort_uploads("", lambda name: True)
        assert near.headers_seen
        assert not far.headers_seen

    def test_location_and_errors_hold_no_secret(self, backend: Backend) -> None:
        secrets = [value for name, value in os.environ.items() if "SECRET" in name or name == "HF_TOKEN"]
        storage = backend.storage()
        shown = [repr(storage), repr(storage.location), str(pickle.dumps(storage.location))]
        if backend.proxy is not None:
            backend.proxy.fail(403, times=None)
            with pytest.raises(SourceError) as caught:
                read(storage, "plain.bin", 0, 5, '"1"')
            shown += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
        assert not any(secret in text for secret in secrets for text in shown)


@pytest.mark.parametrize("status", [400, 401, 403, 500, 503])
def test_status_becomes_error_and_exit_code(backend: Backend, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    """Every storage raises the same error for a status: transient ones have exit code 5, all others 2."""
    only(backend, is_remote=True)
    assert backend.proxy is not None
    monkeypatch.setenv("BRIM_STALL_SECONDS", "1")
    backend.plant("plain.bin", b"0123456789")
    storage = backend.storage()
    version = info_of(storage, "plain.bin").etag
    storage.waits_s = (0.1,)
    backend.proxy.fail(status, times=None)
    with pytest.raises(BrimError) as caught:
        read(storage, "plain.bin", 0, 5, version)
    # the proxy sends 400 with the code RequestTimeout
    passes = status >= 500 or (status == 400 and is_object_store(backend))
    expected = ("DestinationUnavailableError", 5) if passes else ("SourceError", 2)
    assert (type(caught.value).__name__, caught.value.exit_code) == expected


def test_every_error_of_obstore_is_translated() -> None:
    """Each error class of obstore is translated and survives pickling. Errors of unknown classes are not retried."""
    exceptions = pytest.importorskip("obstore.exceptions")
    kinds = {}
    for name in dir(exceptions):
        if name.endswith("Error"):
            error = translate(getattr(exceptions, name)("something"))
            assert error is not None
            reread = pickle.loads(pickle.dumps(error))
            assert (str(reread), reread.kind, reread.is_transient) == (str(error), error.kind, error.is_transient)
            kinds[name] = error.kind
    assert kinds.pop("GenericError") == "transient"
    assert kinds.pop("NotFoundError") == "missing"
    assert {name for name, kind in kinds.items() if kind == "changed"} == {
        "AlreadyExistsError",
        "NotModifiedError",
        "PreconditionError",
    }
    assert "transient" not in kinds.values()


def test_every_error_of_httpx_is_translated() -> None:
    """Each error class of httpx becomes a transient connection error, except for an unsupported URL scheme."""
    errors = importlib.import_module("huggingface_hub.errors")
    http_client = importlib.import_module(errors.HfHubHTTPError.__bases__[0].__module__.partition(".")[0])
    classes = [item for item in vars(http_client).values() if isinstance(item, type) and issubclass(item, Exception)]
    assert len(classes) > 15
    for kind in classes:
        error = kind.__new__(kind)
        Exception.__init__(error, "something")
        expected = InputError if kind.__name__ == "UnsupportedProtocol" else StorageError
        with pytest.raises(expected) as caught, web_errors("https://host.example/signed?secret=1"):
            raise error
        assert "signed" not in str(caught.value)
        if isinstance(caught.value, StorageError):
            assert (caught.value.kind, caught.value.is_transient) == ("no_connection", True)
            assert caught.value.detail == "host.example something"
