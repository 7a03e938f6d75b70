"""Buckets of the Hub: bytes by Xet, then one request that names, deletes or copies them.

The Hub identifies content by its hash, so a copy or a move inside of a bucket costs no bytes. It has no conditional
writes.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from brim.extras import missing
from brim.storage.bucket_storage import BucketStorage
from brim.storage.http_files import HttpStorage
from brim.storage.hub_api import ask, checked, hub_endpoint, hub_headers, read_pages, readable_answer
from brim.storage.storage import ANY_VERSION, FileInfo
from brim.storage.storage_error import StorageError, classify
from brim.storage.upload_content import Buffers, UploadContent
from brim.storage.xet import XetError, XetToken, XetUnavailableError, XetUploader, token_of

_BATCH = 1000  # operations of one request, and names that are asked about at once: the Hub counts requests
_MOST_CODE = 60
_UPLOADERS: dict[tuple[str, ...], XetUploader] = {}
_LOCK = threading.Lock()


class _Bytes:
    path: Path | None = None

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self.size = memoryview(data), len(data)

    def chunks(
        self,
        start: int = 0,
        stop: int | None = None,
        buffer_bytes: int = 0,
        *,
        keep: Buffers | None = None,
        as_they_come: bool = False,
    ) -> Iterator[memoryview]:
        if self.size:
            yield self._data[start:stop]


class HubBucketStorage(BucketStorage, HttpStorage):
    """A prefix in a bucket of the Hub. Its ETags are the hashes by which Xet identifies content."""

    can_list = is_redirect_versioned = True

    def _url(self, name: str, version: str | None) -> str:
        return f"{hub_endpoint()}/{self.location.container}/resolve/{quote(self.location.key(name), safe='')}"

    def _version(self, answer: Any, requested: str | None, xet_hash: str) -> str | None:
        return xet_hash or None

    def _request_api(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        accepted: tuple[int, ...] = (),
    ) -> Any:
        """Return what the Hub answers about the bucket; `accepted` are refusals that the caller reads."""
        url = f"{hub_endpoint()}/api/{self.location.container}{path}"
        answer, _, _ = ask(method, url, {} if body is None else {"Content-Type": kind}, body, token=self._token)
        answer = answer if answer.status_code in accepted else checked(answer)
        with readable_answer():
            return answer.json() if answer.content else {}

    def stat(self, names: Iterable[str]) -> Iterator[FileInfo | None]:
        keys = [self.location.key(name) for name in names]
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            body = json.dumps({"paths": batch}).encode()
            try:
                entries = self.tries().call(lambda body=body: self._request_api("POST", "/paths-info", body))  # type: ignore[misc]
            except StorageError as error:
                if not error.is_missing:
                    raise
                entries = []
            infos = dict(_files(entries))
            yield from (infos.get(key) for key in batch)

    def _list(self, prefix: str, page_done: Callable[[], None]) -> Iterator[tuple[str, FileInfo]]:
        """List files. The Hub matches the first letters of names, not folders."""
        below = f"/{quote(prefix, safe='')}" if prefix else ""
        url = f"{hub_endpoint()}/api/{self.location.container}/tree{below}?recursive=true"
        entries = list(_files(read_pages(url, self._token, "EntryNotFound")))
        yield from (entry for entry in entries if not prefix or f"{entry[0]}/".startswith(f"{prefix}/"))

    def exists(self) -> bool:
        try:
            self._request_api("GET", "")
        except StorageError as error:
            if not error.is_missing:
                raise
            return False
        return True

    def create(self) -> bool:
        """Create the bucket, private, unless it exists."""
        if self.exists():
            return False
        try:
            self._request_api("POST", "", json.dumps({"visibility": "private"}).encode())
        except StorageError as error:
            if error.status != 409:  # another client was faster
                raise
        return True

    def _upload(self, name: str, content: UploadContent, advance: Callable[[int], None]) -> tuple[str, str]:
        try:
            sent = self._uploader().send(name, content, None, lambda size, _: advance(size))
        except XetError as error:
            raise classify(error.status) from None
        self._batch([{"type": "addFile", "path": self.location.key(name), "xetHash": sent.hash, "mtime": _now_ms()}])
        return sent.hash, sent.sha256

    def put_bytes(self, name: str, data: bytes | memoryview, expected: FileInfo | None = ANY_VERSION) -> FileInfo:
        if expected is not ANY_VERSION:
            raise StorageError("unsupported", 501)
        return FileInfo(len(data), self._upload(name, _Bytes(data), lambda size: None)[0])

    def delete(self, names: Sequence[str]) -> None:
        """Delete files. A missing file gets no operation, because the Hub would report it as failed."""
        existing = [name for name, info in zip(names, self.stat(names), strict=True) if info is not None]
        self._batch([{"type": "deleteFile", "path": self.location.key(name)} for name in existing])

    def _copy(self, source: str, target: str) -> None:
        info = next(iter(self.stat([source])))
        if info is None:
            raise StorageError("missing", 404)
        operation = {"type": "copyFile", "path": self.location.key(target), "xetHash": info.etag, "mtime": _now_ms()}
        repo = self.location.container.removeprefix("buckets/")
        self._batch([{**operation, "sourceRepoType": "bucket", "sourceRepoId": repo}])

    def _batch(self, operations: Sequence[dict[str, object]]) -> None:
        for start in range(0, len(operations), _BATCH):
            body = "".join(f"{json.dumps(operation)}\n" for operation in operations[start : start + _BATCH]).encode()
            answer = self._request_api("POST", "/batch", body, kind="application/x-ndjson", accepted=(422,))
            failed = answer.get("failed") or [] if isinstance(answer, dict) else []
            if failed:
                code = f"{failed[0].get('error') or 'failed'}: {failed[0].get('path')}"
                raise classify(422, code if len(code) <= _MOST_CODE else "")

    def _uploader(self) -> XetUploader:
        endpoint = hub_endpoint()
        key = (endpoint, hub_headers(endpoint, self._token).get("authorization", ""), self.location.container)
        with _LOCK:
            if key not in _UPLOADERS:
                try:
                    _UPLOADERS[key] = XetUploader(self._xet_token)
                except XetUnavailableError as error:
                    raise missing(
                        "hf-xet>=1.5", f"Buckets of the Hub take objects by Xet alone, and {error}."
                    ) from error
            return _UPLOADERS[key]

    def _xet_token(self) -> XetToken:
        answer = self._request_api("GET", "/xet-write-token")
        url = f"{hub_endpoint()}/api/{self.location.container}/xet-write-token"
        try:
            return token_of(answer, url, hub_headers(url, self._token))
        except ValueError as error:
            raise StorageError("transient", detail="no store") from error


def _files(entries: Iterable[dict[str, Any]]) -> Iterator[tuple[str, FileInfo]]:
    with readable_answer():
        for entry in entries:
            if entry.get("type") == "file":
                yield str(entry["path"]), FileInfo(int(entry["size"]), str(entry["xetHash"]))


def _now_ms() -> int:
    return int(time.time() * 1000)
