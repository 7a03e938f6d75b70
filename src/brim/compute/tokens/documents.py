"""The documents of unit files in order, with the split and the place in the shuffled order that each one gets.

Both come from a hash of a seed and the document's number, so they depend on nothing else: not on how documents were
cut into units, not on memory, not on workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from brim.compute.tokens.step import IDS, NOTE
from brim.sources.rows.schemas import cast

KEY, SPLIT = "_brim_key", "_brim_split"
_ROWS = 4096
_TOKENS = 1 << 20  # of a piece that is worked on


@dataclass(frozen=True, slots=True)
class Split:
    """A part of the documents: its name, and its share between 0 and 1."""

    name: str
    share: float


def open_unit(path: Path) -> pa.ipc.RecordBatchStreamReader:
    """Mapped: its pages are the kernel's to take back."""
    return pa.ipc.open_stream(pa.memory_map(str(path)))


def unit_batches(units: Sequence[Path], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """What the units hold, in pieces of a few megabytes at most where rows allow, all with the types of `schema`."""
    for path in units:
        with open_unit(path) as reader:
            same = reader.schema.equals(schema)
            for batch in reader:
                for part in small_batches(batch):
                    yield part if same else _cast(part, schema)


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return cast(pa.Table.from_batches([batch]), schema).combine_chunks().to_batches()[0]


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
    """After how many tokens of this batch each of its documents ends."""
    offsets = batch.column(IDS).offsets.to_numpy()
    return np.asarray(offsets[1:], np.int64) - int(offsets[0])


def tokens_of(batch: pa.RecordBatch) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """All tokens of a batch, one document after the other; no copy."""
    values: np.ndarray[tuple[int], np.dtype[np.int32]] = batch.column(IDS).flatten().to_numpy()
    return values


def with_places(
    batches: Iterator[pa.RecordBatch], splits: Sequence[Split], seed: int, shuffled: bool
) -> Iterator[pa.RecordBatch]:
    """Adds the split, and the key where documents are to be shuffled; drops the note."""
    edges = np.cumsum([split.share for split in splits])[:-1]
    first = 0
    for batch in batches:
        numbers = np.arange(first, first + batch.num_rows, dtype=np.uint64)
        first += batch.num_rows
        kept = [name for name in batch.schema.names if name != NOTE]
        columns = {name: batch.column(name) for name in kept}
        drawn = (hashed(numbers, seed, 1) >> np.uint64(11)).astype(np.float64) / (1 << 53)
        columns[SPLIT] = pa.array(np.searchsorted(edges, drawn, side="right").astype(np.uint8))
        if shuffled:
            columns[KEY] = pa.array(hashed(numbers, seed, 2))
        yield pa.RecordBatch.from_pydict(columns)


def hashed(
    numbers: np.ndarray[tuple[int], np.dtype[np.uint64]], seed: int, use: int
) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """SplitMix64 of the number, twice, so that neighbouring seeds have nothing in common. One to one for a seed."""
    start = _mix(np.array([(seed * 4 + use) % (1 << 64)], np.uint64))
    return _mix(_mix(numbers + start))


def _mix(value: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
