"""SHA-256 of the source bytes that a unit reads: to find out whether a file with another date has other content.

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
from brim.compute.rows.unit import Reading, Span, Unit
from brim.storage.reading import RemoteFile

_BLOCK_BYTES = 1 << 20


class SourceHash:
    """The hash of one unit. The schema is part of it, because it may be inferred from bytes of other units."""

    def __init__(self, reading: Reading) -> None:
        self._digest = hashlib.sha256(reading.schema)
        self._is_known = True

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def add_names(self, names: list[str]) -> None:
        self.update(json.dumps(names).encode())

    def add_row_group(self, file: AnyFile, opened: ParquetRows, number: int, columns: list[str] | None) -> None:
        if isinstance(file, RemoteFile):
            self._is_known = False
            return
        with looked_into(file) as content:
            for start, stop in column_ranges(opened.metadata.row_group(number), columns):
                for place in range(start, stop, _BLOCK_BYTES):
                    self.update(content.read_at(place, min(_BLOCK_BYTES, stop - place)))

    def add_batch(self, batch: pa.RecordBatch, columns: list[str] | None) -> None:
        names = batch.schema.names if columns is None else [name for name in columns if name in batch.schema.names]
        self.update(f"{batch.num_rows}\0".encode())
        for name in names:
            column = batch.column(name)
            if _has_dictionary(column.type):
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
        """The hash, or nothing where it could not be computed."""
        return self._digest.hexdigest() if self._is_known else ""


def _has_dictionary(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return True
    return any(_has_dictionary(kind.field(number).type) for number in range(kind.num_fields))


def stored_columns(reading: Reading) -> list[str] | None:
    """The columns to read, by the names that the files have for them."""
    stored = reading.options.get("stored", {})
    if reading.columns is None:
        return list(stored.values()) or None
    return [stored.get(name, name) for name in reading.columns]


def hash_unit(reading: Reading, unit: Unit, names: Callable[[int], str], read: Callable[[int], None]) -> str:
    """Compute the hash of a unit from its files as they are now.

    Args:
        reading: As the workers have it, with the columns of the step.
        unit: A unit whose spans are files of the source.
        names: The name of a span for people, by its number.
        read: Is called with the size of what was read; may raise to stop.
    """
    found = SourceHash(reading)
    for number, span in enumerate(unit.spans):
        shown = names(number)
        file = located(span, shown, reading.options)
        if span.kind == "parquet":
            _hash_parquet(found, file, span, stored_columns(reading), read)
        elif span.kind == "arrow":
            opened = ArrowFile(file, shown)
            try:
                for _, batch in opened.read(span.start, span.end, span.batches):
                    found.add_batch(batch, stored_columns(reading))
                    read(batch.nbytes)
            finally:
                opened.close()
        elif span.kind == "document":
            raw = read_document(file, reading)
            found.update(raw)
            read(len(raw))
        else:
            start = span.start
            if span.kind == "csv":
                with looked_into(file) as content:
                    columns, end = csv_header(
                        head_of(content, span.end), str(reading.options.get("delimiter", ",")), shown
                    )
                found.add_names(columns)
                start = max(start, end)
            for block in blocks(file, start, span.end):
                found.update(block)
                read(len(block))
    return found.hexdigest()


def _hash_parquet(
    found: SourceHash, file: AnyFile, span: Span, columns: list[str] | None, read: Callable[[int], None]
) -> None:
    with parquet_file(file) as opened:
        columns = columns if columns is None else [n for n in columns if n in opened.schema.names]
        first = 0
        for number in range(opened.metadata.num_row_groups):
            group = opened.metadata.row_group(number)
            if first + group.num_rows > span.start and first < span.end and group.num_rows:
                found.add_row_group(file, opened, number, columns)
                read(group.total_byte_size)
            first += group.num_rows


def read_document(file: AnyFile, reading: Reading, ahead: Any = None) -> bytes:
    codec = reading.options.get("codec")
    with as_arrow_file(file, ahead) as opened:
        return bytes((pa.CompressedInputStream(opened, codec) if codec else opened).read())
