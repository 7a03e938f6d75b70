"""Transfer the same bytes with plain obstore, for objects.py: upload files, or copy objects through this machine.

    python benchmarks/objects_peers.py upload FOLDER BUCKET PREFIX [PART_BYTES]
    python benchmarks/objects_peers.py copy BUCKET/PREFIX BUCKET PREFIX
    python benchmarks/objects_peers.py put-small FOLDER BUCKET PREFIX
    python benchmarks/objects_peers.py get-small BUCKET/PREFIX FOLDER -

Three at a time, on two cores, and with obstore's own part sizes and concurrency; small ones 64 at a time.
It computes no hashes, writes no receipts and verifies nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
from obstore.store import S3Store

AT_A_TIME = 3
SMALL_AT_A_TIME = 64
PART_BYTES = 5 << 20


async def copy(origin: S3Store, target: S3Store, keys: list[str], prefix: str) -> None:
    several = asyncio.Semaphore(AT_A_TIME)

    async def one(key: str) -> None:
        async with several:
            actual = await obstore.get_async(origin, key)
            await obstore.put_async(target, f"{prefix}/{Path(key).name}", actual.stream(min_chunk_size=PART_BYTES))

    await asyncio.gather(*map(one, keys))


async def put_small(target: S3Store, folder: Path, prefix: str) -> None:
    several = asyncio.Semaphore(SMALL_AT_A_TIME)

    async def one(path: Path) -> None:
        async with several:
            await obstore.put_async(target, f"{prefix}/{path.name}", path.read_bytes(), use_multipart=False)

    await asyncio.gather(*map(one, sorted(folder.iterdir())))


async def get_small(origin: S3Store, keys: list[str], folder: Path) -> None:
    several = asyncio.Semaphore(SMALL_AT_A_TIME)

    async def one(key: str) -> None:
        async with several:
            actual = await obstore.get_async(origin, key)
            (folder / Path(key).name).write_bytes(await actual.bytes_async())

    folder.mkdir(parents=True, exist_ok=True)
    await asyncio.gather(*map(one, keys))


def main() -> None:
    label, source, bucket, prefix = sys.argv[1:5]
    target = S3Store(bucket if label != "get-small" else "unused")
    if label == "upload":
        files = sorted(Path(source).iterdir())
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            part = int(sys.argv[5]) if len(sys.argv) > 5 else PART_BYTES
            list(pool.map(lambda path: obstore.put(target, f"{prefix}/{path.name}", path, chunk_size=part), files))
        return
    if label == "put-small":
        asyncio.run(put_small(target, Path(source), prefix))
        return
    start, _, below = source.partition("/")
    origin = S3Store(start)
    keys = [match["path"] for page in obstore.list(origin, below) for match in page]
    if label == "get-small":
        asyncio.run(get_small(origin, keys, Path(bucket)))
        return
    asyncio.run(copy(origin, target, keys, prefix))


if __name__ == "__main__":
    main()
    os._exit(0)  # obstore's threads sometimes abort Python at exit
