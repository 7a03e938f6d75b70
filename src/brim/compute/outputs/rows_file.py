"""Write the rows of a unit to a file: in batches that depend on the rows alone, hashed while written, and synced.

Types may widen inside a unit, as when a column of nulls turns out to hold text. Then another file is started, and at
the end all are written again as one, with the merged types.
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
    """How the rows of a unit are written: batches (or row groups) end after a number of rows or bytes.

    `hashed`: compute the SHA-256, because the file will be published. A cache needs none.
    `flows`: start writing pages to disk early, so that the sync at the end takes less time.
    """

    format: Literal["arrow", "parquet"]
    batch_rows: int = 1000
    batch_bytes: int = 32 << 20
    hashed: bool = True
    flows: bool = True


# Page boundaries depend on the content, so that the Hub's storage (Xet) recognizes existing pages after rows were
# inserted; a page index is for the Hub's viewer. Chunks are a quarter of pyarrow's, because a unit's file has a few MB.
# A dictionary is not cut by content, so one of values that hardly repeat is abandoned early.
PAGES: dict[str, Any] = {
    "write_page_index": True,
    "use_content_defined_chunking": {"min_chunk_size": 64 << 10, "max_chunk_size": 256 << 10},
    "dictionary_pagesize_limit": 64 << 10,
}
MOST_GROUP_BYTES = 100_000_000  # readers keep a row group in memory, and the Hub's viewer refuses large ones

EXTENSIONS = {"arrow": ".arrow", "parquet": ".parquet"}
_SMALL_BYTES, _HELD_BYTES = 32 << 10, 256 << 10


class HashedFile:
    """An append-only file that counts its size and, if `hashed`, computes its hash.

    Small writes are buffered: the headers, paddings and short buffers of a batch become one call.
    """

    def __init__(self, path: Path, hashed: bool, flows: bool = True) -> None:
        self.path, self.size = path, 0
        self._buffer = bytearray()
        self._digest = hashlib.sha256() if hashed else None
        self._file: BinaryIO = open(path, "wb", buffering=0)  # noqa: SIM115
        self._outflow = Outflow(self._file.fileno()) if flows else None
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self._file.closed:  # abandoned: pyarrow's writers still write when they are collected
            return len(view)
        self.size += len(view)
        if len(view) < _SMALL_BYTES:
            self._buffer += view
            if len(self._buffer) >= _HELD_BYTES:
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
        if self._buffer:
            buffer, self._buffer = self._buffer, bytearray()
            self._append(memoryview(buffer))

    def close(self, sync: bool = True) -> None:
        if not self.closed:
            self.closed = True
            try:
                self.flush()
                if sync:
                    os.fsync(self._file.fileno())
                elif self._outflow is not None:
                    self._outflow.end()
            finally:
                self._file.close()

    @property
    def sha256(self) -> str:
        """The hash of the closed file."""
        return "" if self._digest is None else self._digest.hexdigest()


class RowsFile:
    """A file of rows with one schema. Batches end by rows and bytes, regardless of the incoming tables."""

    def __init__(self, path: Path, schema: pa.Schema, writing: Writing) -> None:
        self.schema, self.rows = schema, 0
        self._writing = writing
        self._pending: list[pa.Table] = []
        self._pending_rows = self._pending_bytes = 0
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
        """Append rows. A batch may end after them, or inside a large table."""
        while table.num_rows:
            remaining = self._writing.batch_rows - self._pending_rows
            part, table = table.slice(0, remaining), table.slice(remaining)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            self._pending_bytes += arrow_bytes(part)
            if self._pending_rows >= self._writing.batch_rows or self._pending_bytes >= self._writing.batch_bytes:
                self._flush()

    def _flush(self) -> None:
        if not self._pending_rows:
            return
        table = pa.concat_tables(self._pending).combine_chunks()
        self._pending, self.rows = [], self.rows + table.num_rows
        rows = table.num_rows
        # A batch of few huge rows is cut again, by their mean size.
        parts = -(-self._pending_bytes // (2 * self._writing.batch_bytes)) or 1
        step = -(-rows // parts)
        self._pending_rows = self._pending_bytes = 0
        for group in _small_enough(table.slice(start, step) for start in range(0, rows, step)):
            if self._writing.format == "arrow":
                for batch in filter(len, group.to_batches()):
                    self._writer.write_batch(batch)
            else:
                self._writer.write_table(group, row_group_size=max(group.num_rows, 1))

    def close(self, sync: bool = True) -> None:
        """Finish the file. With `sync`, it is durable when this returns."""
        self._flush()
        self._writer.close()
        self.file.close(sync)

    def abandon(self) -> None:
        """Remove the file after an error."""
        try:
            self.file.closed = True
            self.file._file.close()
        finally:
            self.file.path.unlink(missing_ok=True)


def _small_enough(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Halve tables that are too large for a row group; a row is never cut."""
    for table in tables:
        if table.num_rows > 1 and arrow_bytes(table) > MOST_GROUP_BYTES:
            half = table.num_rows // 2
            yield from _small_enough([table.slice(0, half), table.slice(half)])
        else:
            yield table


def parquet_leaves(schema: pa.Schema) -> dict[str, bool]:
    """Return columns by Parquet name (`text.list.element`), and whether each is numbers in lists: ids or vectors.

    Dictionaries do not make such columns smaller, and change with every inserted row.
    """
    return _parquet_leaves(schema.remove_metadata())  # with metadata, pyarrow before 22 cannot hash it


@functools.lru_cache(64)
def _parquet_leaves(schema: pa.Schema) -> dict[str, bool]:
    sink = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), sink)
    parquet_schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    leaves = (parquet_schema.column(number) for number in range(len(parquet_schema.names)))
    return {leaf.path: leaf.max_repetition_level > 0 and leaf.physical_type in _NUMBERS for leaf in leaves}


_NUMBERS = ("INT32", "INT64", "FLOAT", "DOUBLE", "FIXED_LEN_BYTE_ARRAY")


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
        """Cast the table to the schema of the last part; start a new part if the types widen."""
        if self._parts:
            schema = unified([self._parts[-1].schema, table.schema])
            if schema.equals(self._parts[-1].schema):
                return cast(table, schema)
            self._parts[-1].close(sync=False)
        else:
            schema = table.schema
        path = self._target.with_name(f".{self._target.name}.{os.getpid()}.{len(self._parts)}.tmp")
        self._parts.append(RowsFile(path, schema, self._writing))
        return cast(table, schema)

    def finish(self, sync: bool = True) -> tuple[int, int, str]:
        """Rename the complete file; return rows, size and SHA-256. Without rows it has no columns: other units decide.

        Without `sync`, the caller syncs the file and its folder before relying on it.
        """
        if not self._parts:
            self.write(pa.table({}))
        whole = self._parts[-1]
        whole.close(sync and len(self._parts) == 1)
        if len(self._parts) > 1:
            whole = self._join(sync)
        if sync:
            rename(whole.file.path, self._target)
        else:
            whole.file.path.replace(self._target)
        return whole.rows, whole.file.size, whole.file.sha256

    def _join(self, sync: bool) -> RowsFile:
        last = self._parts[-1]
        path = self._target.with_name(f".{self._target.name}.{os.getpid()}.join.tmp")
        merged_file = RowsFile(path, last.schema, self._writing)
        for part in self._parts:
            for table in read_rows(part.file.path, self._writing.format):
                merged_file.write(cast(table, last.schema))
        merged_file.close(sync)
        for part in self._parts:
            part.file.path.unlink()
        return merged_file

    def abandon(self) -> None:
        for part in self._parts:
            part.abandon()


def concatenate(tables: list[pa.Table]) -> pa.Table:
    """Concatenate tables with merged types."""
    if len(tables) == 1:
        return tables[0]
    schema = unified([table.schema for table in tables])
    return pa.concat_tables([cast(table, schema) for table in tables])


def read_rows(path: Path, format: str) -> Iterator[pa.Table]:
    """Yield the batches of a file of rows."""
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
    """Write a file of rows with this schema, under a temporary name until it is complete."""
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
