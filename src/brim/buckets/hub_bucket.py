"""Objects to a bucket of the Hub: bytes by Xet, then one request that gives them a name, takes names away, or copies.

The Hub names content by its hash, so a copy or a move inside of a bucket costs no bytes. It knows no condition ("only
if nothing is there").
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from brim.buckets import web_objects
from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import WebFailed, is_missing
from brim.buckets.xet import NoXet, XetContent, XetFailed, XetLine, XetToken, token_of
from brim.extras import missing

_OPERATIONS = 1000  # that one request may hold
_LINES: dict[tuple[str, ...], XetLine] = {}
_LOCK = threading.Lock()


class _Bytes:
    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self.size = memoryview(data), len(data)

    def chunks(self, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        if self.size:
            yield self._data[start:stop]


def is_there(address: BucketAddress) -> bool:
    """Whether there is such a bucket, for whoever asks."""
    try:
        web_objects.hub_request(address, "GET", "")
    except WebFailed as error:
        if not is_missing(error):
            raise
        return False
    return True


def need_bucket(address: BucketAddress) -> bool:
    """Make the bucket, private, unless it is there; whether it was made."""
    if is_there(address):
        return False
    try:
        web_objects.hub_request(address, "POST", "", json.dumps({"visibility": "private"}).encode())
    except WebFailed as error:
        if not str(error).startswith("status code: 409"):  # somebody was faster
            raise
    return True


def send(address: BucketAddress, key: str, content: XetContent, told: Callable[[int, int], None]) -> tuple[str, str]:
    """Send an object, and return its hash there and its SHA-256."""
    try:
        done = _line(address).send(key, content, None, told)
    except XetFailed as error:
        raise WebFailed(f"status code: {error.status}" if error.status else "the storage does not answer") from None
    _name(address, [{"type": "addFile", "path": key, "xetHash": done.hash, "mtime": int(time.time() * 1000)}])
    return done.hash, done.sha256


def send_data(address: BucketAddress, key: str, data: bytes | memoryview) -> str:
    return send(address, key, _Bytes(data), lambda sent, hashed: None)[0]


def delete(address: BucketAddress, keys: Sequence[str]) -> None:
    """What is not there is no operation: the Hub would say that it failed."""
    there = web_objects.hub_heads(address, list(keys))
    _name(address, [{"type": "deleteFile", "path": key} for key in keys if key in there])


def copy(address: BucketAddress, source: str, target: str) -> None:
    found = web_objects.hub_heads(address, [source]).get(source)
    if found is None:
        raise WebFailed("status code: 404 Not Found")
    of = {"sourceRepoType": "bucket", "sourceRepoId": address.bucket.removeprefix("buckets/")}
    _name(address, [{"type": "copyFile", "path": target, "xetHash": found[1], "mtime": int(time.time() * 1000), **of}])


def _name(address: BucketAddress, operations: list[dict[str, object]]) -> None:
    for start in range(0, len(operations), _OPERATIONS):
        lines = [json.dumps(operation) for operation in operations[start : start + _OPERATIONS]]
        body = "".join(f"{line}\n" for line in lines).encode()
        answer = web_objects.hub_request(address, "POST", "/batch", body, kind="application/x-ndjson", also=(422,))
        failed = answer.get("failed") or [] if isinstance(answer, dict) else []
        if failed:
            first = failed[0]
            raise WebFailed(f"status code: 422 <Code>{first.get('error') or 'failed'}: {first.get('path')}</Code>")


def _line(address: BucketAddress) -> XetLine:
    key = (*web_objects.who(), address.bucket)
    with _LOCK:
        if key not in _LINES:
            try:
                _LINES[key] = XetLine(partial(_token, address))
            except NoXet as error:
                raise missing("hf-xet>=1.5", f"Buckets of the Hub take objects by Xet alone, and {error}.") from error
        return _LINES[key]


def _token(address: BucketAddress) -> XetToken:
    url, headers = web_objects.hub_address(address, "/xet-write-token")
    answer = web_objects.hub_request(address, "GET", "/xet-write-token")
    try:
        return token_of(answer, url, headers)
    except ValueError as error:
        raise WebFailed(f"Got invalid JSON ({error})") from error
