"""Buckets of the Hub: bytes by Xet, then one request that gives them a name, takes names away, or copies.

The Hub names content by its hash, so a copy or a move inside of a bucket costs no bytes. It knows no condition ("only
if nothing is there").
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from brim.extras import missing
from brim.storage.http_files import HttpStorage
from brim.storage.hub_api import ask, checked, hub_endpoint, hub_headers, next_page, readable_answer
from brim.storage.storage import ObjectStat
from brim.storage.storage_error import StorageError, classify
from brim.storage.upload_content import Buffers, UploadContent
from brim.storage.xet import NoXet, XetFailed, XetLine, XetToken, token_of

_OPERATIONS = _PATHS = 1000  # that one request may hold, and that may be asked about at once
_MOST_CODE = 60
_LINES: dict[tuple[str, ...], XetLine] = {}
_LOCK = threading.Lock()


class _Bytes:
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


class HubBucket(HttpStorage):
    """A place in a bucket of the Hub. Its ETags are the hashes by which Xet knows content."""

    heads_at_once = _PATHS  # the Hub counts requests
    version_is_told = True

    def url(self, key: str, etag: str | None) -> str:
        return f"{hub_endpoint()}/{self.location.bucket}/resolve/{quote(key, safe='')}"

    def version_of(self, answer: Any, etag: str | None, told: str | None) -> str | None:
        return told

    def _request(
        self,
        method: str,
        what: str,
        body: bytes | None = None,
        *,
        kind: str = "application/json",
        also: tuple[int, ...] = (),
    ) -> Any:
        """Return what the Hub answers about the bucket; `also` are refusals that the caller reads."""
        url = f"{hub_endpoint()}/api/{self.location.bucket}{what}"
        answer, _, _ = ask(method, url, {} if body is None else {"UploadContent-Type": kind}, body)
        found = answer if answer.status_code in also else checked(answer)
        with readable_answer():
            return found.json() if found.content else {}

    def heads(self, keys: Sequence[str]) -> dict[str, ObjectStat]:
        found = {}
        for start in range(0, len(keys), _PATHS):
            body = json.dumps({"paths": list(keys[start : start + _PATHS])}).encode()
            with readable_answer():
                for entry in self._request("POST", "/paths-info", body):
                    if entry.get("type") == "file":
                        found[str(entry["path"])] = ObjectStat(int(entry["size"]), str(entry["xetHash"]))
        return found

    def head(self, key: str) -> ObjectStat | None:
        return self.heads([key]).get(key)

    def list(self, page_done: Callable[[], None]) -> Iterator[tuple[str, ObjectStat]]:
        yield from list(self._tree())

    def _tree(self) -> Iterator[tuple[str, ObjectStat]]:
        """The Hub goes by the first letters."""
        prefix = self.location.prefix
        below = f"/{quote(prefix, safe='')}" if prefix else ""
        url: str | None = f"{hub_endpoint()}/api/{self.location.bucket}/tree{below}?recursive=true"
        while url:
            answer, _, _ = ask("GET", url, {})
            if answer.status_code == 404 and answer.headers.get("X-Error-Code") == "EntryNotFound":
                return
            with readable_answer():
                for entry in checked(answer).json():
                    path = str(entry["path"])
                    if entry.get("type") == "file" and (not prefix or f"{path}/".startswith(f"{prefix}/")):
                        yield path, ObjectStat(int(entry["size"]), str(entry["xetHash"]))
            url = next_page(answer)

    def exists(self) -> bool:
        try:
            self._request("GET", "")
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
            self._request("POST", "", json.dumps({"visibility": "private"}).encode())
        except StorageError as error:
            if error.status != 409:  # somebody was faster
                raise
        return True

    def put(
        self, key: str, content: UploadContent, in_flight: int, takes_parts: bool, advance: Callable[[int], None]
    ) -> tuple[str, str]:
        try:
            done = self._line().send(key, content, None, lambda sent, _: advance(sent))
        except XetFailed as error:
            raise classify(error.status) from None
        self._rename([{"type": "addFile", "path": key, "xetHash": done.hash, "mtime": int(time.time() * 1000)}])
        return done.hash, done.sha256

    def put_bytes(self, key: str, data: bytes | memoryview) -> str:
        return self.put(key, _Bytes(data), 1, True, lambda size: None)[0]

    def delete(self, keys: Sequence[str]) -> None:
        """What is missing is no operation: the Hub would say that it failed."""
        found = self.heads(keys)
        self._rename([{"type": "deleteFile", "path": key} for key in keys if key in found])

    def copy(self, source: str, target: str) -> None:
        found = self.head(source)
        if found is None:
            raise StorageError("missing", 404)
        origin = {"sourceRepoType": "bucket", "sourceRepoId": self.location.bucket.removeprefix("buckets/")}
        operation = {"type": "copyFile", "path": target, "xetHash": found.etag, "mtime": int(time.time() * 1000)}
        self._rename([{**operation, **origin}])

    def _rename(self, operations: Sequence[dict[str, object]]) -> None:
        for start in range(0, len(operations), _OPERATIONS):
            lines = [json.dumps(operation) for operation in operations[start : start + _OPERATIONS]]
            body = "".join(f"{line}\n" for line in lines).encode()
            answer = self._request("POST", "/batch", body, kind="application/x-ndjson", also=(422,))
            failed = answer.get("failed") or [] if isinstance(answer, dict) else []
            if failed:
                code = f"{failed[0].get('error') or 'failed'}: {failed[0].get('path')}"
                raise classify(422, code if len(code) <= _MOST_CODE else "")

    def _line(self) -> XetLine:
        endpoint = hub_endpoint()
        key = (endpoint, hub_headers(endpoint).get("authorization", ""), self.location.bucket)
        with _LOCK:
            if key not in _LINES:
                try:
                    _LINES[key] = XetLine(self._token)
                except NoXet as error:
                    raise missing(
                        "hf-xet>=1.5", f"Buckets of the Hub take objects by Xet alone, and {error}."
                    ) from error
            return _LINES[key]

    def _token(self) -> XetToken:
        url = f"{hub_endpoint()}/api/{self.location.bucket}/xet-write-token"
        answer = self._request("GET", "/xet-write-token")
        try:
            return token_of(answer, url, hub_headers(url))
        except ValueError as error:
            raise StorageError("transient", detail="no store") from error
