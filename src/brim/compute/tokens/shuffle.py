"""Put documents into the order of their keys, out of core.

The keys are hashes, so that the order is as good as random. Documents are scattered to bucket files by ranges of the
key, and each bucket is sorted in memory. A bucket that is too large is scattered again. How many buckets there are
follows from the memory, and the order does not depend on it: it is that of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from brim.compute.tokens.documents import KEY, open_unit, small_batches

_MOST_BUCKETS = 128
_LEAST_BUCKET, _MOST_BUCKET = 4_000_000, 512_000_000  # a list array holds less than 2**31 tokens
_KEYS = 1 << 64


def in_key_order(
    batches: Iterator[pa.RecordBatch], total_bytes: int, folder: Path, limit_bytes: int
) -> Iterator[pa.RecordBatch]:
    """The same rows, sorted by KEY. `folder` is for bucket files, which are removed as they are read."""
    bucket_bytes = min(max(limit_bytes // 12, _LEAST_BUCKET), _MOST_BUCKET)  # it is there twice while it is sorted
    yield from _ordered(batches, total_bytes, folder, bucket_bytes, 0, _KEYS)


def _ordered(
    batches: Iterator[pa.RecordBatch], total_bytes: int, folder: Path, bucket_bytes: int, low: int, high: int
) -> Iterator[pa.RecordBatch]:
    count = min(_MOST_BUCKETS, max(1, -(-total_bytes * 5 // (4 * bucket_bytes))))
    folder.mkdir(parents=True, exist_ok=True)
    edges = [low + (high - low) * number // count for number in range(count + 1)]
    buckets = _scatter(batches, folder, edges)
    for number, (path, rows) in enumerate(buckets):
        size = path.stat().st_size if rows else 0
        if rows > 1 and size > 2 * bucket_bytes and edges[number + 1] - edges[number] > 1:
            deeper = _ordered(_read(path), size, folder / f"{number}", bucket_bytes, edges[number], edges[number + 1])
            yield from deeper
        elif rows:
            with open_unit(path) as reader:
                table = reader.read_all()
            yield from _sorted(table)
        path.unlink(missing_ok=True)
    folder.rmdir()


def _scatter(batches: Iterator[pa.RecordBatch], folder: Path, edges: list[int]) -> list[tuple[Path, int]]:
    count = len(edges) - 1
    inner = np.array(edges[1:-1], np.uint64)
    paths = [folder / f"{number:03d}.arrow" for number in range(count)]
    writers: dict[int, tuple[pa.NativeFile, pa.ipc.RecordBatchStreamWriter]] = {}
    rows = [0] * count
    try:
        for batch in batches:
            places = np.searchsorted(inner, batch.column(KEY).to_numpy(), side="right")
            order = np.argsort(places, kind="stable")
            there = batch.take(pa.array(order))
            ends = np.searchsorted(places[order], np.arange(count + 1), side="left")
            for number in np.flatnonzero(np.diff(ends)).tolist():
                if number not in writers:
                    file = pa.OSFile(str(paths[number]), "wb")
                    writers[number] = (file, pa.ipc.new_stream(file, batch.schema))
                part = there.slice(int(ends[number]), int(ends[number + 1] - ends[number]))
                writers[number][1].write_batch(part)
                rows[number] += part.num_rows
    finally:
        for file, writer in writers.values():
            writer.close()
            file.close()
    return list(zip(paths, rows, strict=True))


def _read(path: Path) -> Iterator[pa.RecordBatch]:
    with open_unit(path) as reader:
        yield from reader


def _sorted(table: pa.Table) -> Iterator[pa.RecordBatch]:
    table = table.combine_chunks()
    order = pa.array(np.argsort(table.column(KEY).to_numpy(), kind="stable"))
    for start in range(0, len(order), 1024):
        for batch in table.take(order.slice(start, 1024)).combine_chunks().to_batches():
            yield from small_batches(batch)
