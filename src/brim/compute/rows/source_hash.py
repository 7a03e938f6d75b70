"""Hash the source bytes that a unit reads, to find out whether a file with a new date has new content.

Workers feed it while they read (read_unit.py). `hash_unit` computes the same hash later, without parsing a row:

- text: the bytes of the spans, and the column names of CSV; documents: their text
- Parquet: the column chunks of the row groups, of the columns that are read
- Arrow: the buffers of the columns that are read

Not covered: Parquet in object storage, where the chunks would have to be downloaded a second time. There another ETag
always counts as other content. Spooled units have the hash of their content in their key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from brim.compute.rows.arrow_rows import ArrowFile
from brim.compute.rows.cut_text import blocks, csv_header
from brim.compute.rows.open_files import AnyFile, as_arrow_file, head_of, located, looked_into
from brim.compute.rows.parquet_rows import ParquetRows, column_ranges, parquet_file
from brim.compute.rows.schemas import contains_type
from brim.compute.rows.unit import Reading, Span, Unit
from brim.storage.reading import RemoteFile

_BLOCK_BYTES = 1 << 20


class SourceHash:
    """The hash of one unit. The schema is part of it, because it may be inferred from bytes of other units."""

    def __init__(self, reading: Reading) -> None:
        self._digest = hashlib.sha256(reading.schema)
        self._is_computable = True

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def add_names(self, names: list[str]) -> None:
        self.update(json.dumps(names).encode())

    def add_row_group(self, file: AnyFile, parquet: ParquetRows, number: int, columns: list[str] | None) -> None:
        if isinstance(file, RemoteFile):
            self._is_computable = False
            return
        with looked_into(file) as content:
            for start, stop in column_ranges(parquet.metadata.row_group(number), columns):
                for offset in range(start, stop, _BLOCK_BYTES):
                    self.update(content.read_at(offset, min(_BLOCK_BYTES, stop - offset)))

    def add_batch(self, batch: pa.RecordBatch, columns: list[str] | None) -> None:
        names = batch.schema.names if columns is None else [name for name in columns if name in batch.schema.names]
        self.update(f"{batch.num_rows}\0".encode())
        for name in names:
            column = batch.column(name)
            if contains_type(column.type, pa.types.is_dictionary):
                with pa.BufferOutputStream() as sink:
                    with pa.ipc.new_stream(sink, pa.schema([batch.schema.field(name)])) as stream:
                        stream.write_batch(batch.select([name]))
                    self.update(memoryview(sink.getvalue()))
                continue
            for buffer in column.buffers():
                self.update(f"{-1 if buffer is None else buffer.size}\0".encode())
                if buffer is not None:
                    self.update(memoryview(buffer))

    def hexdigest(self) -> str:
        """Return the hash, or an empty text if it could not be computed."""
        return self._digest.hexdigest() if self._is_computable else ""


def stored_columns(reading: Reading) -> list[str] | None:
    """Return the columns to read, under their names in the files."""
    stored = reading.options.get("stored", {})
    if reading.columns is None:
        return list(stored.values()) or None
    return [stored.get(name, name) for name in reading.columns]


def hash_unit(reading: Reading, unit: Unit, names: Callable[[int], str], read: Callable[[int], None]) -> str:
    """Compute the hash of a unit from its files as they are now.

    Args:
        reading: As the workers have it, with the columns of the step.
        unit: A unit whose spans are files of the source.
        names: Returns the name of a span for messages, by its number.
        read: Called with the number of bytes after each read; may raise to stop.
    """
    source_hash = SourceHash(reading)
    for number, span in enumerate(unit.spans):
        shown = names(number)
        file = located(span, shown, reading.options)
        if span.kind == "parquet":
            _hash_parquet(source_hash, file, span, stored_columns(reading), read)
        elif span.kind == "arrow":
            arrow_file = ArrowFile(file, shown)
            try:
                for _, batch in arrow_file.read(span.start, span.end, span.batches):
                    source_hash.add_batch(batch, stored_columns(reading))
                    read(batch.nbytes)
            finally:
                arrow_file.close()
        elif span.kind == "document":
            raw = read_document(file, reading)
            source_hash.update(raw)
            read(len(raw))
        else:
            start = span.start
            if span.kind == "csv":
                with looked_into(file) as content:
                    columns, end = csv_header(
                        head_of(content, span.end), str(reading.options.get("delimiter", ",")), shown
                    )
                source_hash.add_names(columns)
                start = max(start, end)
            for block in blocks(file, start, span.end):
                source_hash.update(block)
                read(len(block))
    return source_hash.hexdigest()


def _hash_parquet(
    source_hash: SourceHash, file: AnyFile, span: Span, columns: list[str] | None, read: Callable[[int], None]
) -> None:
    with parquet_file(file) as parquet:
        columns = columns if columns is None else [n for n in columns if n in parquet.schema.names]
        first = 0
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            if first + group.num_rows > span.start and first < span.end and group.num_rows:
                source_hash.add_row_group(file, parquet, number, columns)
                read(group.total_byte_size)
            first += group.num_rows


def read_document(file: AnyFile, reading: Reading, prefetched: Any = None) -> bytes:
    codec = reading.options.get("codec")
    with as_arrow_file(file, prefetched) as source:
        return bytes((pa.CompressedInputStream(source, codec) if codec else source).read())
