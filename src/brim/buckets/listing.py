"""What is in a bucket below a place: names, sizes, ETags."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from brim.buckets import web_objects
from brim.buckets.bucket_address import WEB_SCHEMES, BucketAddress
from brim.buckets.bucket_client import (
    WebFailed,
    beside,
    explain,
    explained,
    is_missing,
    is_object_error,
    result_of,
    store_of,
    submit,
    tries,
    wait,
)
from brim.records import dataclass
from brim.state.retry import Retry

_PAGE = 1000
_REQUESTS = 64  # at a time, of those that have no body
DATED = "modified "  # what stands before a date that takes the place of an ETag: some stores give none


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """What is known of an object; with the names that a file's stat has, so that both can be looked at alike.

    The ETag takes the place of the date: it changes when the content does, and a copy has the same.
    """

    st_size: int
    etag: str
    st_ino: int = 0
    sha256: str = ""  # where the store tells it

    @property
    def st_mtime_ns(self) -> int:
        return int.from_bytes(hashlib.sha256(self.etag.encode()).digest()[:7])


def list_objects(address: BucketAddress, *, reading: bool = True) -> Iterator[tuple[str, ObjectStat]]:
    """(name below the address, stat) of every object, in the order of the store (by key). Folder marks are left out.

    If the line breaks, it begins again: then some come twice. Stores sort in several ways, so none can be passed over.
    """
    retry = tries()
    while True:
        try:
            yield from _listed(address, retry) if address.scheme not in WEB_SCHEMES else _listed_web(address)
            return
        except Exception as error:
            if not is_object_error(error):
                raise
            _wait(retry, error, address, reading)


def _listed(address: BucketAddress, retry: Retry) -> Iterator[tuple[str, ObjectStat]]:
    store = store_of(address)
    import obstore

    skip = len(address.prefix) + 1 if address.prefix else 0
    prefix = f"{address.prefix}/" if address.prefix else None
    pages = obstore.list(store, prefix, chunk_size=_PAGE)

    async def next_page() -> Any:
        return await anext(pages, None)

    while (page := wait(next_page())) is not None:
        for found in page:
            name = found["path"][skip:]
            if name and not (name.endswith("/") and not found["size"]):
                yield name, _stat(found)
        retry.begin()


def _listed_web(address: BucketAddress) -> Iterator[tuple[str, ObjectStat]]:
    skip = len(address.prefix) + 1 if address.prefix else 0
    if address.on_hub:
        for path, size, etag in list(web_objects.hub_listing(address)):
            if path[skip:]:
                yield path[skip:], ObjectStat(size, etag)
        return
    commit = web_objects.commit_of(address)
    for path, size, sha256 in list(web_objects.listing(address)):
        if path[skip:]:
            yield path[skip:], ObjectStat(size, commit, sha256=sha256)


def _asked_web(address: BucketAddress, key: str) -> ObjectStat | None:
    retry = tries()
    while True:
        try:
            found = web_objects.head(address, key)
            return None if found is None else ObjectStat(*found)
        except WebFailed as error:
            if is_missing(error):
                return None
            _wait(retry, error, address, True)


def _asked_hub(address: BucketAddress, names: Iterable[str]) -> Iterator[ObjectStat | None]:
    """Many at a time: the Hub counts requests."""
    asked = list(names)
    for start in range(0, len(asked), _PAGE):
        some = asked[start : start + _PAGE]
        found = tries().call(partial(web_objects.hub_heads, address, [address.key(name) for name in some]))
        for name in some:
            told = found.get(address.key(name))
            yield None if told is None else ObjectStat(*told)


def _wait(retry: Retry, error: Exception, address: BucketAddress, reading: bool) -> None:
    """Before the same is asked again; or raise what ends it."""
    if not retry.again(error):
        raise explain(error, address, reading=reading) from None


def stat_object(address: BucketAddress, *, reading: bool = True) -> ObjectStat | None:
    """What is at the address itself; None if it is no object."""
    if not address.prefix:
        return None
    if address.scheme in WEB_SCHEMES:
        return _asked_web(address, address.prefix)
    store = store_of(address)
    with explained(address, reading=reading):
        return wait(_asked(store, address.prefix))


def stat_objects(address: BucketAddress, names: Iterable[str]) -> Iterator[ObjectStat | None]:
    """What is known of each of these objects below the address, in order; None for one that is not there."""
    if address.scheme in WEB_SCHEMES:
        yield from (
            _asked_hub(address, names) if address.on_hub else (_asked_web(address, address.key(n)) for n in names)
        )
        return
    store = store_of(address)
    waiting: deque[Future[ObjectStat | None]] = deque()
    try:
        with explained(address, reading=True):
            for name in names:
                waiting.append(submit(_asked(store, address.key(name))))
                if len(waiting) == _REQUESTS:
                    yield result_of(waiting.popleft())
            while waiting:
                yield result_of(waiting.popleft())
    finally:
        for future in waiting:
            future.cancel()


async def _asked(store: Any, key: str) -> ObjectStat | None:
    import obstore

    try:
        return _stat(await obstore.head_async(store, key))
    except Exception as error:
        if is_object_error(error) and is_missing(error):
            return None
        raise


def _stat(found: Any) -> ObjectStat:
    etag = quoted(found["e_tag"]) or f"{DATED}{found['last_modified']}"
    return ObjectStat(int(found["size"]), etag)


def quoted(etag: str | None) -> str:
    """An ETag as the header has it: Azure lists them without their quotes, and answers with them."""
    return f'"{etag}"' if etag and not etag.endswith('"') else etag or ""


def read_small(address: BucketAddress, name: str = "", *, reading: bool = True) -> bytes | None:
    """All of a small object; None if it is not there."""

    async def read() -> bytes:
        if address.scheme in WEB_SCHEMES:
            key = address.key(name) if name else address.prefix
            return (await beside(web_objects.get_range, address, key, 0, None, None))[0]
        store = store_of(address)
        import obstore

        found = await obstore.get_async(store, address.key(name) if name else address.prefix)
        return bytes(await found.bytes_async())

    retry = tries()
    while True:
        try:
            return wait(read())
        except Exception as error:
            if not is_object_error(error):
                raise
            if is_missing(error):
                return None
            _wait(retry, error, address, reading)
