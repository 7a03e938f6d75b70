"""Object stores (s3, gs, az): the one place that knows obstore, its stores, its errors and its requests."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from brim.errors import DestinationError, InputError
from brim.extras import missing
from brim.memory.release import keep_heap_small
from brim.sizes import format_size
from brim.state.retry import look
from brim.storage.credentials import aws_options, azure_options, google_options
from brim.storage.location import Access, Location
from brim.storage.requests import call_soon, patience_s, result_of, submit, wait
from brim.storage.storage import DATED, PART_BYTES, PROBE, ObjectStat, Storage, Version, part_bytes
from brim.storage.storage_error import Kind, StorageError, classify
from brim.storage.upload_content import Buffers, UploadContent

_ANSWER_S = 60.0  # without a byte of an answer
_REQUEST_S = 3600.0  # for all of it: on a slow line, pieces that come together take minutes
_CONNECT_S = 10.0
_RETRIES = 100  # patience ends first
_PAUSE_S = 5.0  # at most, between tries
_PAGE = 1000
_REQUESTS = 64  # at a time, of those that have no body
_LOOK_S = 0.2
_REFUSED = (400, 404, 405, 501)  # by which stores say that they do not know a kind of request

_STORES: dict[tuple[str, str, Access, str], Any] = {}
_LOCK = threading.Lock()
# What decides who we are and where requests go: another environment is another store.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "IDENTITY_")


def store_of(address: Location) -> Any:
    """Return obstore's store of the whole bucket: the same one for the same bucket and access."""
    mark = "\0".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_ENVIRONMENT))
    key = (address.scheme, address.bucket, address.access, mark)
    with _LOCK:
        if key not in _STORES:
            _STORES[key] = _open(address)
        return _STORES[key]


def _open(address: Location) -> Any:
    try:
        import obstore.exceptions
        import obstore.store as stores
    except ImportError as error:
        raise missing("s3", f"{address.scheme}:// needs obstore.") from error
    keep_heap_small(large_bytes=None)  # before obstore's threads have heaps of their own, which would each grow
    waits = patience_s()
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=_REQUEST_S),
        "read_timeout": timedelta(seconds=min(_ANSWER_S, waits)),
        "connect_timeout": timedelta(seconds=min(_CONNECT_S, waits)),
    }
    retry: dict[str, Any] = {
        "max_retries": _RETRIES,
        "retry_timeout": timedelta(seconds=waits),
        "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=_PAUSE_S), "base": 2},
    }
    store, options = {
        "s3": (stores.S3Store, aws_options),
        "gs": (stores.GCSStore, google_options),
        "az": (stores.AzureStore, azure_options),
    }[address.scheme]
    settings = options(address.access, client)
    try:
        return store(address.bucket, client_options=client, retry_config=retry, **settings)
    except obstore.exceptions.BaseError as error:
        raise InputError(
            f"obstore refuses the settings for {address.scheme}://: {str(error).splitlines()[0]}",
            hint="They come from the environment.",
        ) from None


_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z ]*)")
_CODE = re.compile(r"<Code>([^<]{1,60})</Code>")
_BAD_KEY = re.compile(r'object with invalid path: (?:Error parsing )?Path "(.*?)"(?:: | contained )', re.DOTALL)
_ROLES = ("169.254.169.254", "metadata.google.internal")  # where the role of a machine is asked for
_CLASSES: dict[str, Kind] = {
    "PermissionDeniedError": "denied",
    "UnauthenticatedError": "denied",
    "PreconditionError": "changed",
    "AlreadyExistsError": "changed",
    "NotModifiedError": "changed",
    "NotSupportedError": "unsupported",
}
_PHRASES: dict[str, tuple[Kind, str]] = {
    "redirect without LOCATION": ("other_region", ""),  # what obstore says of Amazon's answer to that
    "NotPartial": ("no_ranges", ""),
    "InvalidCertificate": ("certificate", ""),
    "Got invalid ": ("transient", "no store"),  # of answers that no store gives
    "Unable to extract metadata": ("transient", "no store"),
    "InvalidContentType": ("transient", "http only"),
}


def translate(error: BaseException) -> StorageError | None:
    """Return what an error of obstore means; None for any other error. Only its text has the status and the code."""
    text, name = str(error), type(error).__name__
    is_missing = isinstance(error, FileNotFoundError) and "Object at location" in text
    if not is_missing and not type(error).__module__.startswith("obstore"):
        return None
    status, code = _STATUS.search(text), _CODE.search(text)
    number = int(status[1]) if status else (404 if is_missing or name == "NotFoundError" else None)
    found = classify(number, code[1] if code else "", text, detail=name)
    if number is None and name != "GenericError":
        found.kind, found.is_transient = "refused", False
    if found.kind != "no_container" and any(host in text for host in _ROLES):
        found.kind = "no_credentials"
    elif (bad := _BAD_KEY.search(text)) is not None:
        found.kind, found.detail, found.is_transient = "bad_name", bad[1], False
    elif name in _CLASSES and found.kind in ("transient", "refused"):
        found.kind, found.is_transient = _CLASSES[name], False
    elif found.kind == "transient":
        found.kind, found.detail = next(
            (kind for words, kind in _PHRASES.items() if words in text), ("transient", name)
        )
        found.is_transient = found.kind != "other_region"
    return found


@contextmanager
def translated() -> Iterator[None]:
    """Raise obstore's errors as StorageError."""
    try:
        yield
    except Exception as error:
        found = translate(error)
        if found is None:
            raise
        raise found from None  # the original holds addresses and answers


def quoted(etag: str | None) -> str:
    """Return an ETag as the header has it: Azure lists them without their quotes, and answers with them."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def _stat(found: Any) -> ObjectStat:
    etag = quoted(found["e_tag"]) or f"{DATED}{found['last_modified']}"
    return ObjectStat(int(found["size"]), etag)


class ObjectStorage(Storage):
    """A place in a bucket."""

    async def _ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        store = store_of(self.location)
        import obstore

        with translated():
            return await getattr(obstore, f"{operation}_async")(store, *arguments, **options)

    def list(self, page_done: Callable[[], None]) -> Iterator[tuple[str, ObjectStat]]:
        store, prefix = store_of(self.location), self.location.prefix
        import obstore

        pages = obstore.list(store, f"{prefix}/" if prefix else None, chunk_size=_PAGE)

        async def next_page() -> Any:
            with translated():
                return await anext(pages, None)

        while (page := wait(next_page())) is not None:
            for found in page:
                if not (found["path"].endswith("/") and not found["size"]):  # the mark of a folder
                    yield found["path"], _stat(found)
            page_done()

    def stat(self, keys: Iterable[str]) -> Iterator[ObjectStat | None]:
        waiting: deque[futures.Future[ObjectStat | None]] = deque()
        try:
            for key in keys:
                waiting.append(submit(self._stat(key)))
                if len(waiting) == _REQUESTS:
                    yield result_of(waiting.popleft())
            while waiting:
                yield result_of(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    async def _stat(self, key: str) -> ObjectStat | None:
        try:
            return _stat(await self._ask("head", key))
        except StorageError as error:
            if error.is_missing:
                return None
            raise

    async def fetch(self, key: str, start: int, stop: int | None, etag: str | None) -> Any:
        if start == stop:  # a range of nothing cannot be asked for
            found = await self._ask("head", key)
            if found["size"] or (found["e_tag"] and quoted(found["e_tag"]) != etag):
                raise StorageError("changed")
            return b""
        options: Any = {} if stop is None else {"range": (start, stop)}
        if etag and not etag.startswith(DATED):
            options["if_match"] = etag
        try:
            result = await self._ask("get", key, options=options)
        except StorageError as error:
            if error.kind != "no_ranges":
                raise
            del options["range"]  # such a store gives an object from its start
            result = await self._ask("get", key, options=options)
        # Not every store heeds a condition.
        if options.get("if_match") and quoted(result.meta["e_tag"]) not in ("", etag):
            raise StorageError("changed")
        with translated():
            if stop is None or "range" in options:
                return await result.bytes_async()
            at, data = 0, bytearray()  # without holding more than the range
            async for chunk in result.stream():
                view = memoryview(chunk)
                data += view[max(start - at, 0) : max(stop - at, 0)]
                at += len(view)
                if at >= stop:
                    break
            return bytes(data)

    def put(
        self, key: str, content: UploadContent, in_flight: int, takes_parts: bool, advance: Callable[[int], None]
    ) -> tuple[str, str]:
        digest, size = hashlib.sha256(), part_bytes(content.size)
        is_small = content.size <= size

        def parts() -> Iterator[memoryview]:
            """Each its own memory: a part may be sent again while the next ones are made."""
            for part in content.chunks(buffer_bytes=size, keep=Buffers(size), as_they_come=not is_small):
                digest.update(part)
                yield part
                advance(len(part))

        if is_small:
            etag = self.put_bytes(key, next(iter(list(parts())), memoryview(b"")))
        elif not takes_parts:
            name = key.removeprefix(f"{self.location.prefix}/")
            raise DestinationError(
                f"{name} has {format_size(content.size)}, and the store at {self.location} takes no uploads in parts.",
                hint=f"Give --shard-size={PART_BYTES >> 20}MB, or use another store.",
            )
        else:
            in_flight = max(1, in_flight * PART_BYTES // size)
            etag = self.put_parts(key, parts(), size, in_flight, lambda: advance(0))
        return etag, digest.hexdigest()

    def put_parts(
        self, key: str, parts: Iterable[memoryview], size: int, in_flight: int, check: Callable[[], None]
    ) -> str:
        """Send bytes in order as one object of parts of `size` bytes, and return its ETag. They may be of any size.

        Parts are handed over by the thread that makes them. obstore could also pull them from an iterator, but it would
        do so on its own threads, and a part that itself comes from a bucket needs those. `check` may raise to drop it.
        """
        import asyncio

        queue: asyncio.Queue[memoryview | None] = asyncio.Queue()
        wanted = threading.Semaphore(0)  # parts that are asked for: none waits here beside the one that is made

        async def given() -> AsyncIterator[memoryview]:
            while True:
                wanted.release()
                part = await queue.get()
                if part is None:
                    return
                yield part

        # obstore cuts what it is given into parts of chunk_size: another size here would send another number of them.
        upload = submit(self._ask("put", key, given(), use_multipart=True, chunk_size=size, max_concurrency=in_flight))
        try:
            for part in itertools.chain(parts, [None]):
                while not wanted.acquire(timeout=_LOOK_S):
                    if upload.done():
                        break
                    check()
                if upload.done():
                    upload.result()  # it failed: that is raised here
                    raise AssertionError("an upload ended before its last part")
                call_soon(queue.put_nowait, part)
            while not futures.wait([upload], _LOOK_S).done:
                check()
            return quoted(upload.result()["e_tag"])
        except BaseException:
            upload.cancel()
            raise

    def put_bytes(self, key: str, data: bytes | memoryview) -> str:
        return quoted(wait(self._ask("put", key, data, use_multipart=False))["e_tag"])

    def put_instead(self, key: str, data: bytes, expected: Version | None) -> Version:
        known = {} if expected is None else asdict(expected)
        mode: Any = {name: value for name, value in known.items() if value is not None} if expected else "create"
        done = wait(self._ask("put", key, data, mode=mode, use_multipart=False))
        return Version(done["e_tag"], done["version"])

    def version(self, key: str) -> Version | None:
        try:
            found = wait(self._ask("head", key))
        except StorageError as error:
            if error.is_missing:
                return None
            raise
        return Version(found["e_tag"], found["version"])

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            wait(self._ask("delete", list(keys)))
        except StorageError as error:
            if not error.is_missing:
                raise
            if len(keys) > 1:  # S3 says nothing of one that is missing; others end the request there
                for key in keys:
                    self.delete([key])

    def copy(self, source: str, target: str) -> None:
        wait(self._ask("copy", source, target))

    def gives_ranges(self, key: str) -> bool:
        try:
            return bytes(wait(self._ask("get_range", key, start=1, end=3))) == PROBE[1:3]
        except StorageError as error:
            if error.kind != "no_ranges":
                raise
            return False

    def takes_parts(self, key: str) -> bool:
        try:
            self.put_parts(key, [memoryview(PROBE)], PART_BYTES, 1, look)
        except StorageError as error:
            if error.status not in _REFUSED:
                raise
            return False
        return True
