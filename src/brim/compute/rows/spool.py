"""Make units of sources that can only be read in order: each unit is written to separate files on demand.

The rows of a finished unit are read but not written, because the next units follow them, and its key is computed, so
that it can be compared.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.rows.cut_text import RowScanner, csv_header
from brim.compute.rows.open_files import decompressed
from brim.compute.rows.row_files import RowFiles, Skip
from brim.compute.rows.schemas import TypesDiffer, cast, merged
from brim.compute.rows.unit import Kind, Span, Unit, UnreadableRow
from brim.errors import InputError
from brim.file_set import Ints
from brim.partition import arrow_bytes
from brim.state.atomic_files import failures


class _Spool:
    """Writes one unit after the other; counts its rows and bytes and computes its digest."""

    def __init__(
        self, folder: Path | None, skip: Skip, kind: Kind, unreadable: list[UnreadableRow] | None = None
    ) -> None:
        if folder is None:
            raise InputError(
                "This source can only be read from its start (compressed text, an iterator, a dataset in memory), so "
                "it cannot be divided into parts.",
                hint="Decompress it, or write it as Parquet; or use --engine=ray to distribute the work.",
            )
        self.folder, self.kind, self._skip = folder, kind, skip
        self._unreadable = [] if unreadable is None else unreadable
        self.number = 0
        self.first_row = 0
        self._start_unit()

    def _start_unit(self) -> None:
        self.rows = self.bytes = 0
        self._digest = hashlib.sha256()
        self._spans: list[Span] = []
        self._origins: list[tuple[str, int, int]] = []
        self._file: Any = None
        self._part = 0  # bytes, or rows of Arrow, in the open part
        self._is_skipped = self._skip(self.number)

    def open(self, shown: str, before: int, lines_before: int = 0) -> None:
        """Start a part: rows of one file after its first `before` rows. See `Unit.origins`."""
        self._origins.append((shown, before, lines_before))
        self._digest.update(f"{shown}\0".encode("utf-8", "surrogateescape"))
        self._part = 0
        if not self._is_skipped:
            with failures(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = open(self._path(), "wb")  # noqa: SIM115 - closed by close()

    def _path(self) -> Path:
        return self.folder / f"{self.number:08d}-{len(self._origins):04d}.{self.kind}"

    def write(self, content: Any) -> int:
        self._digest.update(content)
        if self._file is not None:
            with failures(self.folder):
                self._file.write(content)
        self._part += len(content)
        return len(content)

    def close(self, rows: int | None = None) -> None:
        """End the part. `rows` is for Arrow, whose spans count rows."""
        if self._file is not None:
            with failures(self.folder):
                self._file.close()
            self._file = None
        end = self._part if rows is None else rows
        self._spans.append(Span(str(self._path()), self.kind, 0, end))

    def abandon(self) -> None:
        if self._file is not None:
            self._file.close()

    def unit(self) -> Unit:
        """Return the written unit, and start the next one."""
        unit = Unit(
            number=self.number,
            spans=tuple(self._spans),
            bytes=self.bytes,
            key=self._digest.hexdigest(),
            first_row=self.first_row,
            rows=self.rows,
            spooled=True,
            origins=tuple(self._origins),
            unreadable=tuple(self._unreadable),
        )
        self._unreadable.clear()
        self.first_row += self.rows
        self.number += 1
        self._start_unit()
        return unit


def text_spool(
    row_files: RowFiles, unit_bytes: int, align: int, limit: int | None, folder: Path | None, skip: Skip
) -> Iterator[Unit]:
    """Yield the units of compressed text files."""
    spool = _Spool(folder, skip, row_files.kind)
    try:
        for number in range(len(row_files.files)):
            yield from _spool_file(row_files, number, spool, unit_bytes, align, limit)
            if limit is not None and spool.first_row + spool.rows >= limit:
                break
        if spool.rows:
            yield spool.unit()
    finally:
        spool.abandon()


def _spool_file(
    row_files: RowFiles, number: int, spool: _Spool, unit_bytes: int, align: int, limit: int | None
) -> Iterator[Unit]:
    file, shown = row_files.file(number), row_files.shown(number)
    scanner = RowScanner(row_files.kind, row_files.delimiter)
    header, content = _header(row_files, decompressed(file, str(row_files.codec), shown), shown, scanner)
    file_rows = lines = 0
    is_open = False
    for block, ends in content:
        start = used = 0  # bytes and row ends of the block that are in a unit
        while start < len(block):
            if not is_open:
                spool.open(shown, file_rows, lines)
                spool.write(header)
                is_open = True
            cut = _cut(ends, start, used, spool, unit_bytes, align, limit)
            stop, last = (len(block), len(ends)) if cut is None else (int(ends[cut]), cut + 1)
            spool.bytes += spool.write(block[start:stop])
            spool.rows += last - used
            file_rows += last - used
            lines += block.count(b"\n", start, stop)
            start, used = stop, last
            if cut is None:
                break
            spool.close()
            is_open = False
            yield spool.unit()
            if limit is not None and spool.first_row >= limit:
                return
    if is_open:
        spool.rows += scanner.rest()
        spool.close()
    if isinstance(file, str):
        row_files.files.check(number, os.stat(file))
    if spool.rows and spool.rows % align == 0 and spool.bytes >= unit_bytes:
        yield spool.unit()


def _cut(
    ends: Ints, start: int, used: int, spool: _Spool, unit_bytes: int, align: int, limit: int | None
) -> int | None:
    """Return the number of the row end at which the unit ends; None if that is not in this block."""
    index = max(int(ends.searchsorted(start + unit_bytes - spool.bytes)), used)
    index += -(spool.rows + index + 1 - used) % align
    if limit is not None:
        index = min(index, limit - spool.first_row - spool.rows + used - 1)
    return index if index < len(ends) else None


def _header(
    row_files: RowFiles, content: Iterator[bytes], shown: str, scanner: RowScanner
) -> tuple[bytes, Iterator[tuple[bytes, Ints]]]:
    """Return the header of CSV, which every part repeats, and the blocks after it with their row ends."""
    if row_files.kind != "csv":
        return b"", ((block, scanner.feed(block)) for block in content)
    head = b""
    for block in content:
        ends = scanner.feed(block)
        head += block
        if len(ends):
            break
    else:
        ends = scanner.feed(b"")
    _, end = csv_header([head], row_files.delimiter, shown)
    remaining_ends = ends[1:] + (len(head) - len(block)) - end if head else ends

    def following() -> Iterator[tuple[bytes, Ints]]:
        yield head[end:], remaining_ends
        for block in content:
            yield block, scanner.feed(block)

    return head[:end], following()


def table_spool(
    tables: Iterable[pa.Table],
    name: str,
    unit_bytes: int,
    align: int,
    limit: int | None,
    folder: Path | None,
    skip: Skip,
    schema: pa.Schema,
    unreadable: list[UnreadableRow] | None = None,
) -> Iterator[Unit]:
    """Yield the units of a stream of tables. A wider type starts a new part of a unit.

    The stream adds the rows that it skips to `unreadable`; they are reported with the next unit.
    """
    spool = _Spool(folder, skip, "arrow", unreadable)
    part = _Part(spool, name)
    try:
        for table in tables:
            schema = _wider(schema, table, name, spool.first_row + spool.rows)
            table = cast(table, schema)
            while table.num_rows:
                if limit is not None:
                    table = table.slice(0, limit - spool.first_row - spool.rows)
                weight = max(arrow_bytes(table) / table.num_rows, 1)
                needed_rows = max(math.ceil((unit_bytes - spool.bytes) / weight), 1)
                needed_rows += -(spool.rows + needed_rows) % align
                part.write(table.slice(0, needed_rows), round(weight * min(needed_rows, table.num_rows)))
                full = needed_rows <= table.num_rows
                table = table.slice(needed_rows)
                if full:
                    part.close()
                    yield spool.unit()
            if limit is not None and spool.first_row + spool.rows >= limit:
                break
        part.close()
        if spool.rows or unreadable:
            yield spool.unit()
    finally:
        spool.abandon()


def _wider(schema: pa.Schema, table: pa.Table, name: str, row: int) -> pa.Schema:
    try:
        return merged(schema, table.schema.with_metadata(schema.metadata))
    except TypesDiffer as error:
        raise InputError(
            f"{name}, rows {row:,} to {row + table.num_rows - 1:,}: the column {error.column!r} is {error.second} "
            f"here and {error.first} before.",
            hint="Use one type for the column in all rows.",
            column=error.column,
        ) from error


class _Part:
    """Writes tables to the spool as Arrow streams, one per schema."""

    def __init__(self, spool: _Spool, name: str) -> None:
        self._spool, self._name = spool, name
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._rows = 0

    def write(self, table: pa.Table, weight: int) -> None:
        spool = self._spool
        if self._writer is not None and not table.schema.equals(self._schema):
            self.close()
        if self._writer is None:
            spool.open(self._name, spool.first_row + spool.rows)
            self._schema, self._rows = table.schema, 0
            self._writer = pa.ipc.new_stream(pa.PythonFile(_Sink(spool.write), "w"), table.schema)
        self._writer.write_table(table)
        self._rows += table.num_rows
        spool.rows += table.num_rows
        spool.bytes += weight

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._spool.close(self._rows)


class _Sink:
    """The methods of a file that pyarrow needs to write to it."""

    closed = False

    def __init__(self, write: Callable[[Any], int]) -> None:
        self.write = write

    def flush(self) -> None:
        return None

    def close(self) -> None:
        return None
