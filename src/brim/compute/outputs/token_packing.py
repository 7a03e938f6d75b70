"""Assign documents of unit files to splits, shuffle them, and pack them into rows.

A document's split and its position in the shuffled order come from a hash of a seed and the document's number, so they
do not depend on units, memory or workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.compute.rows.schemas import cast
from brim.compute.steps.tokenize_step import IDS, NOTE, OVERLONG
from brim.records import dataclass

KEY, SPLIT = "_brim_key", "_brim_split"
SEQ_LENGTHS = "seq_lengths"  # of a packed row: how many tokens each of its documents has in it
_ROWS = 4096
_TOKENS = 1 << 20  # of a piece that is worked on


@dataclass(frozen=True, slots=True)
class TokenSplit:
    """A part of the documents: its name, and its share between 0 and 1."""

    name: str
    share: float


def open_unit(path: Path) -> pa.ipc.RecordBatchStreamReader:
    """Open a unit file as a memory map, whose pages the kernel can reclaim."""
    return pa.ipc.open_stream(pa.memory_map(str(path)))


def unit_batches(units: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the units with the types of `schema`, in batches of a few megabytes if rows allow."""
    for path in units:
        with open_unit(path) as reader:
            same = reader.schema.equals(schema)
            for batch in reader:
                for part in small_batches(batch):
                    if not same:
                        part = cast(pa.Table.from_batches([part]), schema).combine_chunks().to_batches()[0]
                    yield part


def small_batches(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    start = 0
    ends = ends_of(batch)
    while start < batch.num_rows:
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + _TOKENS, side="right"))
        stop = min(max(stop, start + 1), start + _ROWS, batch.num_rows)
        yield batch.slice(start, stop - start)
        start = stop


def ends_of(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return after how many tokens of this batch each of its documents ends."""
    offsets = batch.column(IDS).offsets.to_numpy()
    return np.asarray(offsets[1:], np.int64) - int(offsets[0])


def tokens_of(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return all tokens of a batch in the order of the documents; no copy."""
    values: np.ndarray[tuple[int], np.dtype[np.int32]] = batch.column(IDS).flatten().to_numpy()
    return values


def with_places(
    batches: Iterator[pa.RecordBatch], splits: Sequence[TokenSplit], seed: int, shuffled: bool
) -> Iterator[pa.RecordBatch]:
    """Add the split, and with `shuffled` the sort key; drop the note, and rows that are left out.

    Rows that are left out have numbers too, so the number of a row depends on the source alone.
    """
    edges = np.cumsum([split.share for split in splits])[:-1]
    first = 0
    for batch in batches:
        numbers = np.arange(first, first + batch.num_rows, dtype=np.uint64)
        first += batch.num_rows
        names = [name for name in batch.schema.names if name != NOTE]
        columns = {name: batch.column(name) for name in names}
        drawn = (hashed(numbers, seed, 1) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        columns[SPLIT] = pa.array(np.searchsorted(edges, drawn, side="right").astype(np.uint8))
        if shuffled:
            columns[KEY] = pa.array(hashed(numbers, seed, 2))
        placed = pa.RecordBatch.from_pydict(columns)
        if NOTE in batch.schema.names:
            keeps = batch.column(NOTE).to_numpy() != OVERLONG
            placed = placed if keeps.all() else placed.filter(pa.array(keeps))
        yield placed


def hashed(
    numbers: np.ndarray[tuple[int], np.dtype[np.uint64]], seed: int, use: int
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Apply SplitMix64 twice, so that neighboring seeds are unrelated. Injective for a seed."""
    start = _mix(np.array([(seed * 4 + use) % (1 << 64)], np.uint64))
    return _mix(_mix(numbers + start))


def _mix(value: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Packer:
    """Pack the documents of one split, one after the other, into rows of exactly `length` tokens.

    SEQ_LENGTHS counts the tokens of each document in a row: a document that continues in the next row counts in both.
    """

    def __init__(self, length: int, kind: pa.DataType) -> None:
        self._length, self._kind = length, kind
        self._tokens: list[np.ndarray[Any, Any]] = []  # copies, since the source may be unmapped
        self._ends: list[np.ndarray[Any, Any]] = []  # ends of documents, counted from the first pending token
        self._count = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        tokens = tokens_of(batch)
        self._ends.append(ends_of(batch) + self._count)
        if self._count + len(tokens) < self._length:
            self._keep(tokens)
            return
        use = len(tokens) - (self._count + len(tokens)) % self._length
        values = np.concatenate([*self._tokens, tokens[:use]])
        ends = np.concatenate(self._ends)
        self._tokens, self._ends, self._count = [], [ends[ends > len(values)] - len(values)], 0
        self._keep(tokens[use:])
        yield self._rows(values, np.arange(0, len(values) + 1, self._length), ends[ends <= len(values)])

    def tail(self) -> pa.RecordBatch | None:
        """Return the tokens that did not fill a row, as a shorter row."""
        if not self._count:
            return None
        values = np.concatenate(self._tokens)
        return self._rows(values, np.array([0, len(values)]), np.concatenate(self._ends))

    @property
    def tail_tokens(self) -> int:
        return self._count

    def _keep(self, tokens: np.ndarray[Any, Any]) -> None:
        if len(tokens):
            self._tokens.append(tokens.copy())
            self._count += len(tokens)

    def _rows(
        self, values: np.ndarray[Any, Any], edges: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]
    ) -> pa.RecordBatch:
        """Make rows between `edges`, with the lengths of the documents that end at `ends` or at the end of a row."""
        rows = pa.ListArray.from_arrays(pa.array(edges.astype(np.int32)), pa.array(values, self._kind))
        cuts = np.union1d(edges, ends)  # an empty document ends where the one before does
        positions = np.searchsorted(cuts, edges).astype(np.int32)
        lengths = pa.ListArray.from_arrays(pa.array(positions), pa.array(np.diff(cuts).astype(np.int32)))
        return pa.RecordBatch.from_arrays([rows, lengths], names=[IDS, SEQ_LENGTHS])


_MOST_BUCKETS = 128
_LEAST_BUCKET, _MOST_BUCKET = 4_000_000, 512_000_000  # a list array holds less than 2**31 tokens
_KEYS = 1 << 64


def in_key_order(
    batches: Iterator[pa.RecordBatch], total_bytes: int, folder: Path, limit_bytes: int
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows sorted by KEY. `folder` is for bucket files, which are removed after reading."""
    bucket_bytes = min(max(limit_bytes // 12, _LEAST_BUCKET), _MOST_BUCKET)  # sorting needs two copies
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
            buckets = np.searchsorted(inner, batch.column(KEY).to_numpy(), side="right")
            order = np.argsort(buckets, kind="stable")
            sorted_rows = batch.take(pa.array(order))
            ends = np.searchsorted(buckets[order], np.arange(count + 1), side="left")
            for number in np.flatnonzero(np.diff(ends)).tolist():
                if number not in writers:
                    file = pa.OSFile(str(paths[number]), "wb")
                    writers[number] = (file, pa.ipc.new_stream(file, batch.schema))
                part = sorted_rows.slice(int(ends[number]), int(ends[number + 1] - ends[number]))
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
