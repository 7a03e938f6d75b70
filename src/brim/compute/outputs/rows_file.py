"""The rows of a unit as a file: written in batches that depend on the rows alone, hashed on the way, on disk for good.

Types may widen inside a unit: a column of nulls turns out to hold text. Then the file so far stays as it is, a new
one is begun, and at the end all are written again as one, with the type that holds everything.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from brim.compute.rows.schemas import cast
from brim.compute.steps.row_features import unified
from brim.partition import arrow_bytes
from brim.records import dataclass
from brim.state.atomic_files import Outflow, rename, write_all


@dataclass(frozen=True, slots=True)
class Writing:
    """How the rows of a unit are written: batches (or row groups) end after so many rows or bytes.

    `hashed`: the file will be published, and its SHA-256 is part of the proof. A cache needs none.
    `flows`: it is on its way to disk while it is written, so that the sync at its end has little to wait for.
    """

    format: Literal["arrow", "parquet"]
    batch_rows: int = 1000
    batch_bytes: int = 32 << 20
    hashed: bool = True
    flows: bool = True


# Pages end where the content says, so that the Hub's storage (Xet) finds those that it has, wherever rows were
# inserted; an index says where they lie, for the Hub's viewer. Chunks are a quarter of pyarrow's, because the file of a
# unit has a few MB. A dictionary is not cut by content: one of values that hardly repeat is given up early.
PAGES: dict[str, Any] = {
    "write_page_index": True,
    "use_content_defined_chunking": {"min_chunk_size": 64 << 10, "max_chunk_size": 256 << 10},
    "dictionary_pagesize_limit": 64 << 10,
}
MOST_GROUP_BYTES = 100_000_000  # readers hold a row group, and the Hub's viewer refuses large ones

EXTENSIONS = {"arrow": ".arrow", "parquet": ".parquet"}
_SMALL_BYTES, _HELD_BYTES = 32 << 10, 256 << 10


class HashedFile:
    """A file that is only appended to, and knows its size and, if wanted, its hash.

    What is small is held until there is more: the headers, paddings and short buffers of a batch are one call.
    """

    def __init__(self, path: Path, hashed: bool, flows: bool = True) -> None:
        self.path, self.size = path, 0
        self._held = bytearray()
        self._digest = hashlib.sha256() if hashed else None
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._outflow = Outflow(self._file.fileno()) if flows else None
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._file.closed:  # given up: pyarrow's writers end what they have begun when they go
            return len(view)
        self.size += len(view)
        if len(view) < _SMALL_BYTES:
            self._held += view
            if len(self._held) >= _HELD_BYTES:
                self.flush()
        else:
            self.flush()
            self._append(view)
        return len(view)

    def _append(self, view: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(view)
        write_all(self._file.fileno(), view)
        if self._outflow is not None:
            self._outflow.wrote(self.size)

    def tell(self) -> int:
        return self.size

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False

    def flush(self) -> None:
        if self._held:
            held, self._held = self._held, bytearray()
            self._append(memoryview(held))

    def close(self, lasts: bool = True) -> None:
        if not self.closed:
            self.closed = True
            try:
                self.flush()
                if lasts:
                    os.fsync(self._file.fileno())
                elif self._outflow is not None:
                    self._outflow.end()
            finally:
                self._file.close()

    @property
    def sha256(self) -> str:
        """Of what is closed."""
        return "" if self._digest is None else self._digest.hexdigest()


class RowsFile:
    """A file of rows with one schema. Batches are cut by rows and bytes, whatever the tables that come."""

    def __init__(self, path: Path, schema: pa.Schema, writing: Writing) -> None:
        self.schema, self.rows = schema, 0
        self._writing = writing
        self._held: list[pa.Table] = []
        self._held_rows = self._held_bytes = 0
        self.file = HashedFile(path, writing.hashed, writing.flows)
        sink = pa.PythonFile(self.file, mode="w")
        if writing.format == "arrow":
            self._writer: Any = pa.ipc.new_stream(sink, schema)
        else:
            dictionary = sorted(path for path, is_ids in parquet_leaves(schema).items() if not is_ids)
            self._writer = pq.ParquetWriter(
                sink, schema, compression="zstd", compression_level=1, use_dictionary=dictionary or False, **PAGES
            )

    def write(self, table: pa.Table) -> None:
        """Rows that belong together: a cut may come after them, and inside them where they are many."""
        while table.num_rows:
            room = self._writing.batch_rows - self._held_rows
            part, table = table.slice(0, room), table.slice(room)
            self._held.append(part)
            self._held_rows += part.num_rows
            self._held_bytes += arrow_bytes(part)
            if self._held_rows >= self._writing.batch_rows or self._held_bytes >= self._writing.batch_bytes:
                self._flush()

    def _flush(self) -> None:
        if not self._held_rows:
            return
        table = pa.concat_tables(self._held).combine_chunks()
        self._held, self.rows = [], self.rows + table.num_rows
        rows = table.num_rows
        # A batch of few huge rows is cut again, by their mean size.
        parts = -(-self._held_bytes // (2 * self._writing.batch_bytes)) or 1
        step = -(-rows // parts)
        self._held_rows = self._held_bytes = 0
        for piece in _small_enough(table.slice(start, step) for start in range(0, rows, step)):
            if self._writing.format == "arrow":
                for batch in _no_empty(piece.to_batches()):
                    self._writer.write_batch(batch)
            else:
                self._writer.write_table(piece, row_group_size=max(piece.num_rows, 1))

    def close(self, lasts: bool = True) -> None:
        """`lasts`: it is on disk for good when this returns."""
        self._flush()
        self._writer.close()
        self.file.close(lasts)

    def abandon(self) -> None:
        """After an error: nothing more is written."""
        try:
            self.file.closed = True
            self.file._file.close()
        finally:
            self.file.path.unlink(missing_ok=True)


def _small_enough(pieces: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Halve what would be too large as a row group; one row is never cut."""
    for piece in pieces:
        if piece.num_rows > 1 and arrow_bytes(piece) > MOST_GROUP_BYTES:
            half = piece.num_rows // 2
            yield from _small_enough([piece.slice(0, half), piece.slice(half)])
        else:
            yield piece


def parquet_leaves(schema: pa.Schema) -> dict[str, bool]:
    """Columns as Parquet names them (`text.list.element`), and whether each is numbers in lists: ids or vectors.

    A dictionary of those takes time and makes them no smaller, and a dictionary changes with every inserted row.
    """
    return _parquet_leaves(schema.remove_metadata())  # with metadata, pyarrow before 22 cannot hash it


@functools.lru_cache(64)
def _parquet_leaves(schema: pa.Schema) -> dict[str, bool]:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    found = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    leaves = (found.column(number) for number in range(len(found.names)))
    return {leaf.path: leaf.max_repetition_level > 0 and leaf.physical_type in _NUMBERS for leaf in leaves}


_NUMBERS = ("INT32", "INT64", "FLOAT", "DOUBLE", "FIXED_LEN_BYTE_ARRAY")


def _no_empty(batches: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return (batch for batch in batches if batch.num_rows)


class UnitFile:
    """A file for the rows of one unit, whose types may widen while it grows."""

    def __init__(self, target: Path, writing: Writing) -> None:
        self._target, self._writing = target, writing
        self._parts: list[RowsFile] = []

    def write(self, table: pa.Table) -> None:
        if not self._parts or table.schema != self._parts[-1].schema:
            table = self._fitting(table)
        self._parts[-1].write(table)

    def _fitting(self, table: pa.Table) -> pa.Table:
        """The table as it goes to the last part, which is a new one if its types hold more than before."""
        if self._parts:
            schema = unified([self._parts[-1].schema, table.schema])
            if schema.equals(self._parts[-1].schema):
                return cast(table, schema)
            self._parts[-1].close(lasts=False)
        else:
            schema = table.schema
        path = self._target.with_name(f".{self._target.name}.{os.getpid()}.{len(self._parts)}.tmp")
        self._parts.append(RowsFile(path, schema, self._writing))
        return cast(table, schema)

    def finish(self, lasts: bool = True) -> tuple[int, int, str]:
        """Give the file its name: rows, size and SHA-256. Without any rows it has no columns: other units decide.

        Not `lasts`: whoever is told of it syncs it, and its folder, before it is relied on.
        """
        if not self._parts:
            self.write(pa.table({}))
        whole = self._parts[-1]
        whole.close(lasts and len(self._parts) == 1)
        if len(self._parts) > 1:
            whole = self._join(lasts)
        if lasts:
            rename(whole.file.path, self._target)
        else:
            whole.file.path.replace(self._target)
        return whole.rows, whole.file.size, whole.file.sha256

    def _join(self, lasts: bool) -> RowsFile:
        last = self._parts[-1]
        path = self._target.with_name(f".{self._target.name}.{os.getpid()}.join.tmp")
        joined = RowsFile(path, last.schema, self._writing)
        for part in self._parts:
            for table in read_rows(part.file.path, self._writing.format):
                joined.write(cast(table, last.schema))
        joined.close(lasts)
        for part in self._parts:
            part.file.path.unlink()
        return joined

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()


def joined(tables: list[pa.Table]) -> pa.Table:
    """Tables as one, with types that hold all of them."""
    if len(tables) == 1:
        return tables[0]
    schema = unified([table.schema for table in tables])
    return pa.concat_tables([cast(table, schema) for table in tables])


def read_rows(path: Path, format: str) -> Iterator[pa.Table]:
    """The batches of a file of rows, one at a time."""
    if format == "arrow":
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch], reader.schema)
        return
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, use_threads=False)


def read_schema(path: Path, format: str) -> pa.Schema:
    if format == "arrow":
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as reader:
            return reader.schema
    return pq.read_schema(path)


def write_rows(path: Path, tables: Iterable[pa.Table], schema: pa.Schema, writing: Writing) -> RowsFile:
    """A whole file of rows with this schema, under a temporary name until it is complete."""
    temporary = path.with_name(f".{path.name}.tmp")
    file = RowsFile(temporary, schema, writing)
    try:
        for table in tables:
            file.write(cast(table, schema))
        file.close()
    except BaseException:
        file.abandon()
        raise
    rename(temporary, path)
    return file
