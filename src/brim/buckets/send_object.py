"""Send an object as a stream of parts. It appears whole, or not at all.

Parts are handed over by the thread that makes them; a few are on their way at a time. (obstore could also pull them
from an iterator, but it would do so on its own threads, and a part that itself comes from a bucket needs those.) Every
part carries a checksum (CRC-64/NVME), which the store compares with what arrives.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent import futures
from dataclasses import asdict
from typing import Any

from brim.buckets import hub_bucket, web_objects
from brim.buckets.bucket_address import BucketAddress
from brim.buckets.bucket_client import WebFailed, call_soon, is_missing, is_object_error, store_of, submit, wait
from brim.buckets.listing import quoted
from brim.records import dataclass

PART_BYTES = 8 << 20
_MOST_PARTS = 10_000
_LOOK_S = 0.2


def part_bytes(size: int) -> int:
    """How large the parts of an object are: depends on its size alone, so that its ETag does too."""
    least = -(-size // _MOST_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


def send_parts(
    address: BucketAddress, key: str, parts: Iterable[memoryview], size: int, in_flight: int, check: Callable[[], None]
) -> str:
    """Send bytes in order as one object of parts of `size` bytes, and return its ETag. They may come cut in any way.

    `check` may raise to drop it.
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

    upload = submit(_put(address, key, given(), size, in_flight))
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


async def _put(address: BucketAddress, key: str, parts: AsyncIterator[memoryview], size: int, in_flight: int) -> Any:
    import obstore

    # obstore cuts what it is given into parts of chunk_size: another size here would send another number of them.
    return await obstore.put_async(
        store_of(address), key, parts, use_multipart=True, chunk_size=size, max_concurrency=in_flight
    )


def send_small(address: BucketAddress, key: str, data: bytes | memoryview) -> str:
    """Send a small object in one request, and return its ETag."""
    if address.on_hub:
        return hub_bucket.send_data(address, key, data)
    store = store_of(address)
    import obstore

    async def put() -> Any:
        return await obstore.put_async(store, key, data, use_multipart=False)

    return quoted(wait(put())["e_tag"])


@dataclass(frozen=True, slots=True)
class Version:
    """What tells an object from all that had or will have its key. Some stores go by one, some by the other."""

    e_tag: str | None
    version: str | None


def send_instead(address: BucketAddress, key: str, data: bytes, of: Version | None) -> Version:
    """Send a small object if what is there is `of`, or if nothing is (None): else obstore's error."""
    if address.on_hub:
        raise WebFailed("status code: 501 (the Hub's buckets heed no conditions)")
    store = store_of(address)
    import obstore

    mode: Any = "create" if of is None else {name: value for name, value in asdict(of).items() if value is not None}

    async def put() -> Any:
        return await obstore.put_async(store, key, data, mode=mode, use_multipart=False)

    done = wait(put())
    return Version(done["e_tag"], done["version"])


def version_of(address: BucketAddress, key: str) -> Version | None:
    """What is there now; None if nothing is."""
    if address.on_hub:
        there = web_objects.head(address, key)
        return None if there is None else Version(there[1], None)
    store = store_of(address)
    import obstore

    async def ask() -> Any:
        return await obstore.head_async(store, key)

    try:
        found = wait(ask())
    except Exception as error:
        if is_object_error(error) and is_missing(error):
            return None
        raise
    return Version(found["e_tag"], found["version"])


def delete_objects(address: BucketAddress, keys: list[str]) -> None:
    """Nothing is at these keys afterwards; it does not matter whether something was before."""
    if address.on_hub:
        hub_bucket.delete(address, keys)
        return
    store = store_of(address)
    import obstore

    if not keys:
        return

    async def delete() -> None:
        await obstore.delete_async(store, keys)

    try:
        wait(delete())
    except Exception as error:
        if not (is_object_error(error) and is_missing(error)):
            raise
        if len(keys) > 1:  # S3 says nothing of one that is missing; others end the request there
            for key in keys:
                delete_objects(address, [key])


def copy_object(address: BucketAddress, source: str, target: str) -> None:
    """A copy inside the bucket, by the store itself."""
    if address.on_hub:
        hub_bucket.copy(address, source, target)
        return
    store = store_of(address)
    import obstore

    async def copy() -> None:
        await obstore.copy_async(store, source, target)

    wait(copy())
