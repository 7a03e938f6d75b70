"""Object stores (s3, gs, az): the only module that knows obstore, its stores, its errors and its requests."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from brim.errors import DestinationError, InputError
from brim.memory.release import keep_heap_small
from brim.sizes import format_size
from brim.state.retry import wait_for
from brim.storage.bucket_storage import BucketStorage
from brim.storage.credentials import aws_options, azure_options, google_options
from brim.storage.event_loop import call_soon, run, submit, submit_all
from brim.storage.location import Access, Location
from brim.storage.storage import (
    ANY_VERSION,
    PART_BYTES,
    TO_END,
    UNDATED,
    Answers,
    ByteRange,
    FileInfo,
    part_bytes,
    patience_s,
)
from brim.storage.storage_error import Kind, StorageError, classify
from brim.storage.upload_content import Buffers, UploadContent

_ANSWER_S = 60.0  # without a byte of an answer
_REQUEST_S = 3600.0  # for a complete answer: on a slow connection, ranges that come together take minutes
_CONNECT_S = 10.0
_RETRIES = 100  # their time ends first
_PAUSE_S = 5.0  # at most, between tries
_PAGE = 1000
_REQUESTS = 64  # at a time, of those without a body
_CHECK_S = 0.2

_STORES: dict[tuple[str, str, Access, str], Any] = {}
_LOCK = threading.Lock()
# These decide which account is used and where requests go: another environment is another store.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_", "CLOUDSDK_", "STORAGE_EMULATOR_HOST", "IDENTITY_")


def store_of(location: Location) -> Any:
    """Return obstore's store of the bucket: the same one for the same bucket and access."""
    account = "\0".join(f"{name}={os.environ[name]}" for name in sorted(os.environ) if name.startswith(_ENVIRONMENT))
    key = (location.scheme, location.container, location.access, account)
    with _LOCK:
        if key not in _STORES:
            keep_heap_small(large_bytes=None)  # before obstore's threads have heaps of their own, which would all grow
            limit_s = patience_s()
            client: dict[str, Any] = {
                "timeout": timedelta(seconds=_REQUEST_S),
                "read_timeout": timedelta(seconds=min(_ANSWER_S, limit_s)),
                "connect_timeout": timedelta(seconds=min(_CONNECT_S, limit_s)),
            }
            retry: dict[str, Any] = {
                "max_retries": _RETRIES,
                "retry_timeout": timedelta(seconds=limit_s),
                "backoff": {
                    "init_backoff": timedelta(seconds=0.1),
                    "max_backoff": timedelta(seconds=_PAUSE_S),
                    "base": 2,
                },
            }
            store, options = {
                "s3": (obstore.store.S3Store, aws_options),
                "gs": (obstore.store.GCSStore, google_options),
                "az": (obstore.store.AzureStore, azure_options),
            }[location.scheme]
            settings: Any = options(location.access, client)
            try:
                _STORES[key] = store(location.container, client_options=client, retry_config=retry, **settings)
            except obstore.exceptions.BaseError as error:
                raise InputError(
                    f"obstore refuses the settings for {location.scheme}://: {str(error).splitlines()[0]}",
                    hint="They come from the environment.",
                ) from None
        return _STORES[key]


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
    "redirect without LOCATION": ("other_region", ""),  # obstore's words for Amazon's answer to that
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
    translation = classify(number, code[1] if code else "", text, detail=name)
    if number is None and name != "GenericError":
        translation.kind, translation.is_transient = "refused", False
    if translation.kind != "no_container" and any(host in text for host in _ROLES):
        translation.kind = "no_credentials"
    elif (bad := _BAD_KEY.search(text)) is not None:
        translation.kind, translation.detail, translation.is_transient = "bad_name", bad[1], False
    elif name in _CLASSES and translation.kind in ("transient", "refused"):
        translation.kind, translation.is_transient = _CLASSES[name], False
    elif translation.kind == "transient":
        translation.kind, translation.detail = next(
            (kind for phrase, kind in _PHRASES.items() if phrase in text), ("transient", name)
        )
        translation.is_transient = translation.kind != "other_region"
    return translation


@contextmanager
def translated() -> Iterator[None]:
    """Raise obstore's errors as StorageError."""
    try:
        yield
    except Exception as error:
        translation = translate(error)
        if translation is None:
            raise
        raise translation from None  # the original holds addresses and answers


def _quoted(etag: str | None) -> str:
    """Return an ETag as the header has it: Azure lists them without their quotes, and answers with them."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def _info(meta: Any) -> FileInfo:
    etag = _quoted(meta["e_tag"]) or f"{UNDATED}{meta['last_modified']}"
    return FileInfo(int(meta["size"]), etag, condition=(meta["e_tag"] or "", meta["version"] or ""))


class ObjectStorage(BucketStorage):
    """A prefix in a bucket of an object store."""

    async def _ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        with translated():
            return await getattr(obstore, f"{operation}_async")(store_of(self.location), *arguments, **options)

    def _list(self, prefix: str, page_done: Callable[[], None]) -> Iterator[tuple[str, FileInfo]]:
        pages = obstore.list(store_of(self.location), f"{prefix}/" if prefix else None, chunk_size=_PAGE)

        async def next_page() -> Any:
            with translated():
                return await anext(pages, None)

        while (page := run(next_page())) is not None:
            for meta in page:
                if not (meta["path"].endswith("/") and not meta["size"]):  # the mark of a folder
                    yield meta["path"], _info(meta)
            page_done()

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        waiting: deque[futures.Future[FileInfo | None]] = deque()
        try:
            for name in names:
                waiting.append(submit(self._stat(name)))
                if len(waiting) == _REQUESTS:
                    yield wait_for(waiting.popleft())
            while waiting:
                yield wait_for(waiting.popleft())
        finally:
            for future in waiting:
                future.cancel()

    async def _stat(self, name: str) -> FileInfo | None:
        try:
            return _info(await self._ask("head", self.location.key(name)))
        except StorageError as error:
            if error.is_missing:
                return None
            raise

    def fetch(self, ranges: Sequence[ByteRange]) -> futures.Future[Answers]:
        return submit_all([self._fetch(entry) for entry in ranges])

    async def _fetch(self, byte_range: ByteRange) -> Any:
        key, start, stop, version = (
            self.location.key(byte_range.name),
            byte_range.start,
            byte_range.stop,
            byte_range.version,
        )
        if start == stop:  # an empty range cannot be requested
            info = _info(await self._ask("head", key)) if version else FileInfo(0)
            if info.st_size or (info.condition[0] and info.etag != version):
                raise StorageError("changed")
            return b""
        options: Any = {} if stop == TO_END else {"range": (start, stop)}
        if version and not version.startswith(UNDATED):
            options["if_match"] = version
        try:
            result = await self._ask("get", key, options=options)
        except StorageError as error:
            if error.kind != "no_ranges":
                raise
            del options["range"]  # such a store gives an object from its start
            result = await self._ask("get", key, options=options)
        # Some stores ignore a condition.
        if options.get("if_match") and _quoted(result.meta["e_tag"]) not in ("", version):
            raise StorageError("changed")
        with translated():
            if stop == TO_END or "range" in options:
                return await result.bytes_async()
            position, data = 0, bytearray()  # without holding more than the range
            async for chunk in result.stream():
                view = memoryview(chunk)
                data += view[max(start - position, 0) : max(stop - position, 0)]
                position += len(view)
                if position >= stop:
                    break
            return bytes(data)

    def _upload(self, name: str, content: UploadContent, advance: Callable[[int], None]) -> tuple[str, str]:
        digest, size = hashlib.sha256(), part_bytes(content.size)
        is_small = content.size <= size

        def parts() -> Iterator[memoryview]:
            """Yield each part in its own memory: it may be sent again while the next ones are made."""
            for part in content.chunks(buffer_bytes=size, keep=Buffers(size), as_they_come=not is_small):
                digest.update(part)
                yield part
                advance(len(part))

        if is_small:
            etag = self.put_bytes(name, next(iter(list(parts())), b"")).etag
        else:
            in_flight = max(1, self._parts_in_flight * PART_BYTES // size)
            try:
                etag = self.put_parts(name, parts(), size, in_flight, lambda: advance(0))
            except StorageError as error:
                is_refused = error.kind in ("refused", "missing") and not error.code
                if error.status not in (405, 501) and not (is_refused and error.status in (400, 404)):
                    raise
                raise DestinationError(
                    f"{name} has {format_size(content.size)}, and the store at {self.location} takes no uploads in "
                    "parts.",
                    hint=f"Give --shard-size={PART_BYTES >> 20}MB, or use another store.",
                ) from None
        return etag, digest.hexdigest()

    def put_parts(
        self, name: str, parts: Iterable[memoryview], size: int, in_flight: int, check: Callable[[], None]
    ) -> str:
        """Send bytes in order as one object of parts of `size` bytes, and return its ETag. They may be of any size.

        Parts are handed over by the thread that makes them. obstore could also pull them from an iterator, but it would
        do so on its own threads, and a part that itself comes from a bucket needs those. `check` may raise to drop it.
        """
        queue: asyncio.Queue[memoryview | None] = asyncio.Queue()
        requested = threading.Semaphore(0)  # parts: none waits here in addition to the one that is made

        async def queued() -> AsyncIterator[memoryview]:
            while True:
                requested.release()
                part = await queue.get()
                if part is None:
                    return
                yield part

        # obstore cuts its input into parts of chunk_size: another size here would send another number of them.
        key, options = self.location.key(name), {"chunk_size": size, "max_concurrency": in_flight}
        upload = submit(self._ask("put", key, queued(), use_multipart=True, **options))
        try:
            for part in itertools.chain(parts, [None]):
                while not requested.acquire(timeout=_CHECK_S):
                    if upload.done():
                        break
                    check()
                if upload.done():
                    upload.result()  # raise its failure
                    raise AssertionError("an upload ended before its last part")
                call_soon(queue.put_nowait, part)
            while not futures.wait([upload], _CHECK_S).done:
                check()
            return _quoted(upload.result()["e_tag"])
        except BaseException:
            upload.cancel()
            raise

    def put_bytes(self, name: str, data: bytes | memoryview, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        mode: Any = "create"
        if expected is ANY_VERSION:
            mode = "overwrite"
        elif expected is not None:
            mode = {
                field: value for field, value in zip(("e_tag", "version"), expected.condition, strict=True) if value
            }
        result = run(self._ask("put", self.location.key(name), data, mode=mode, use_multipart=False))
        condition = (result["e_tag"] or "", result["version"] or "")
        return FileInfo(len(data), _quoted(result["e_tag"]), condition=condition)

    def delete(self, names: Sequence[str]) -> None:
        if not names:
            return
        try:
            run(self._ask("delete", [self.location.key(name) for name in names]))
        except StorageError as error:
            if not error.is_missing:
                raise
            if len(names) > 1:  # S3 does not report a missing one; others end the request there
                for name in names:
                    self.delete([name])

    def _copy(self, source: str, target: str) -> None:
        run(self._ask("copy", self.location.key(source), self.location.key(target)))

    def abort_uploads(self, prefix: str, is_own: Callable[[str], bool]) -> int:
        from brim.storage.stale_uploads import abort_uploads  # it imports HTTP and XML

        start = self.location.key(prefix)
        return abort_uploads(self.location, start, lambda key: is_own(self.location.name_of(key)))
