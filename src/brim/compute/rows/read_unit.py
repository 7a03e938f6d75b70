"""Read the rows of a unit as a stream of small tables, and cut the stream into batches. Workers call this.

The tables have the schema of the plan. If a unit has more (a column that the plan's sample did not have, a float
among integers), its tables have wider types from there on: cast them with `schemas.unify`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from brim.compute.rows.arrow_rows import ArrowFile, rows_between
from brim.compute.rows.cut_text import count_rows, end_of_row
from brim.compute.rows.open_files import AnyFile, Spans, located, streamed
from brim.compute.rows.parquet_rows import ParquetRows, parquet_file
from brim.compute.rows.read_text import TextReader, too_far
from brim.compute.rows.schemas import TypesDiffer, cast, merged
from brim.compute.rows.source_hash import SourceHash, read_document, stored_columns
from brim.compute.rows.unit import OnUnreadable, Reading, Span, Unit, UnreadableRow, check_unchanged
from brim.errors import BrimError, InputError
from brim.formats.encrypted import encrypted, is_encrypted
from brim.partition import row_bytes as sizes_of_rows
from brim.sources.hive_partitions import partition_array
from brim.state.atomic_files import reason
from brim.storage.location import is_remote
from brim.storage.reading import RemoteFile

_MOST_ROWS = 8192


def read_arrow(
    file: AnyFile, span: Span, shown: str, columns: list[str] | None, hashed: SourceHash | None = None
) -> Iterator[pa.Table]:
    arrow_file = ArrowFile(file, shown)
    try:
        for first, batch in arrow_file.read(span.start, span.end, span.batches):
            if hashed is not None:
                hashed.add_batch(batch, columns)
            table = pa.Table.from_batches([rows_between(batch, first, span.start, span.end)])
            yield table if columns is None else table.select([name for name in columns if name in table.column_names])
    finally:
        arrow_file.close()


def read_parquet(
    file: AnyFile,
    span: Span,
    shown: str,
    columns: list[str] | None,
    block_bytes: int,
    hashed: SourceHash | None = None,
) -> Iterator[pa.Table]:
    try:
        with parquet_file(file) as parquet:
            columns = columns if columns is None else [n for n in columns if n in parquet.schema.names]
            groups, first = list[tuple[int, int, int]](), 0  # group, its first row, rows in a batch
            for number in range(parquet.metadata.num_row_groups):
                group = parquet.metadata.row_group(number)
                if first + group.num_rows > span.start and first < span.end and group.num_rows:
                    row_bytes = max(1, group.total_byte_size // group.num_rows)
                    groups.append((number, first, min(max(block_bytes // row_bytes, 1), _MOST_ROWS)))
                first += group.num_rows
            parquet.expect([number for number, _, _ in groups], columns)
            for number, first, batch_rows in groups:
                yield from _group(parquet, number, first, span, batch_rows, columns)
                if hashed is not None:  # its bytes are in the page cache now
                    hashed.add_row_group(file, parquet, number, columns)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        if is_encrypted(error):
            raise encrypted(f"A column of {shown!r}") from error
        raise InputError(
            f"{shown!r} cannot be read as Parquet (rows {span.start:,} to {span.end - 1:,}): {reason}.",
            hint="Write it again.",
        ) from error


def _group(
    file: ParquetRows, number: int, first: int, span: Span, batch_rows: int, columns: list[str] | None
) -> Iterator[pa.Table]:
    for batch in file.batches(number, batch_rows, columns):
        if first >= span.end:
            return
        low, high = max(span.start - first, 0), min(span.end - first, len(batch))
        first += len(batch)
        if low < high:
            yield pa.Table.from_batches([batch if high - low == len(batch) else batch.slice(low, high - low)])


BLOCK_BYTES = 1 << 20


def read_unit(
    reading: Reading,
    unit: Unit,
    block_bytes: int = BLOCK_BYTES,
    on_unreadable: OnUnreadable | None = None,
    hashed: SourceHash | None = None,
) -> Iterator[pa.Table]:
    """Yield the rows of a unit in order. Raise SourceChangedError if a file changed before or while it was read.

    With `on_unreadable`, unreadable rows of text are skipped and reported. `hashed` gets all source bytes of the unit,
    once all rows are read.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(reading.schema))
    if reading.columns is not None:
        schema = pa.schema([schema.field(name) for name in reading.columns], schema.metadata)
    partition_names = reading.options.get("partitions", ())
    if reading.columns is not None:
        reading = replace(reading, columns=tuple(name for name in reading.columns if name not in partition_names))
    partitions = [field for field in schema if field.name in partition_names]  # columns encoded in folder names
    own = pa.schema([field for field in schema if field not in partitions], schema.metadata)
    delimiter, json_columns = str(reading.options.get("delimiter", ",")), reading.options.get("json_columns", ())
    text = TextReader(own, reading.columns, delimiter, on_unreadable, json_columns)
    prefetched = _prefetch(reading, unit)
    try:
        for number, span in enumerate(unit.spans):
            shown = name_of_span(unit, reading, number)
            check_unchanged(unit, number, shown)
            try:
                lines_before = unit.origins[number][2] if unit.origins else None
                tables = _tables(
                    span, shown, reading, text, block_bytes, prefetched, lines_before, on_unreadable, hashed
                )
                for table in tables:
                    for field in partitions:
                        table = table.append_column(field, partition_array(shown, field, table.num_rows))
                    schema = _wide(schema, table, shown)
                    if table.num_rows:
                        yield cast(table, schema)
            except OSError as error:
                raise InputError(f"{shown!r} cannot be read: {reason(error)}.", path=shown) from error
            check_unchanged(unit, number, shown)
    finally:
        if prefetched is not None:
            prefetched.close()


def _prefetch(reading: Reading, unit: Unit) -> Spans | None:
    """Start reading the text objects of a unit; None if it has other files."""
    parts = []
    for number, span in enumerate(unit.spans):
        file = located(span, name_of_span(unit, reading, number), reading.options)
        if not isinstance(file, RemoteFile) or span.kind in ("parquet", "arrow"):
            return None
        parts.append((file, span.start, span.end))
    return Spans(parts) if parts else None


def _tables(
    span: Span,
    shown: str,
    reading: Reading,
    text: TextReader,
    block_bytes: int,
    prefetched: Spans | None,
    lines_before: int | None,
    on_unreadable: OnUnreadable | None,
    hashed: SourceHash | None,
) -> Iterator[pa.Table]:
    file = located(span, shown, reading.options)
    if span.kind == "document":
        table = _document(file, shown, reading, prefetched, text.rows, on_unreadable, hashed)
        text.rows += 1
        if table is not None:
            yield table
    elif span.kind == "parquet":
        yield from read_parquet(file, span, shown, stored_columns(reading), block_bytes, hashed)
    elif span.kind == "arrow":
        renamed = {old: new for new, old in reading.options.get("stored", {}).items()}
        for table in read_arrow(file, span, shown, stored_columns(reading), hashed):
            yield table.rename_columns([renamed.get(n, n) for n in table.column_names]) if renamed else table
    else:
        with streamed(file, span.start, span.end, prefetched) as content:
            yield from text.read(file, content, span, shown, block_bytes, lines_before, hashed)


def _wide(schema: pa.Schema, table: pa.Table, shown: str) -> pa.Schema:
    try:
        return merged(schema, table.schema.with_metadata(schema.metadata))
    except TypesDiffer as error:
        raise InputError(f"{shown!r}: {error}.", hint="Use one type for the column.", column=error.column) from error


def _document(
    file: AnyFile,
    shown: str,
    reading: Reading,
    prefetched: Spans | None,
    offset: int,
    on_unreadable: OnUnreadable | None,
    hashed: SourceHash | None,
) -> pa.Table | None:
    """Return a file as one row; None if it is skipped."""
    columns = ("text", "path") if reading.columns is None else reading.columns
    try:
        raw = read_document(file, reading, prefetched)
        if hashed is not None:
            hashed.update(raw)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{shown!r} cannot be read: {error}.", hint="Check that the file is complete.") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"{shown!r} is not UTF-8 text (byte {error.start:,})"
        if on_unreadable is None:
            raise InputError(f"{message}.", hint="Save it as UTF-8.") from error
        on_unreadable(UnreadableRow(offset, shown, None, None, raw, message))
        return None
    if len(raw) >= 2**31:
        raise InputError(f"{shown!r} is a document of more than 2 GiB.", hint="Read it with --text=lines, or split it.")
    table = pa.table({"text": pa.array([text], pa.string()), "path": pa.array([shown], pa.string())})
    return table.select(list(columns))


def name_of_span(unit: Unit, reading: Reading, number: int) -> str:
    if unit.origins:
        return unit.origins[number][0]
    root = reading.options.get("root")
    path = unit.spans[number].path
    if is_remote(path):
        return path.removeprefix(f"{root}/")
    return os.path.relpath(path, root) if root else os.path.basename(path)


def cut_batches(tables: Iterable[pa.Table], rows: int | None, bytes: int) -> Iterator[pa.Table]:
    """Yield the same rows in tables of `rows` rows or `bytes` bytes, whichever comes first.

    None and 0 set no limit. Rows are copied only if types widen. A table ends before the row that would exceed `bytes`.
    """
    pending: list[pa.Table] = []
    cutter = _Cutter(rows or 2**62, bytes or 2**62)
    for table in tables:
        start = 0
        for edge in cutter.weighed_edges(table) if bytes else cutter.edges(table.num_rows):
            if edge > start:
                pending.append(table.slice(start, edge - start))
            start = edge
            if pending:
                yield _concatenate(pending)
            pending = []
        if start < table.num_rows:
            pending.append(table.slice(start))
    if pending:
        yield _concatenate(pending)


class _Cutter:
    """Compute where batches end in a stream of tables; counts the rows and bytes of an unfinished batch."""

    def __init__(self, rows: int, bytes: int) -> None:
        self._rows, self._bytes = rows, bytes
        self._count = self._size = 0

    def edges(self, rows: int) -> Sequence[int]:
        """Return the positions in the next `rows` rows at which a batch ends; at position n it ends before row n."""
        edges = range(self._rows - self._count, rows + 1, self._rows)
        self._count = rows - edges[-1] if edges else self._count + rows
        return edges

    def weighed_edges(self, table: pa.Table) -> Sequence[int]:
        """Return the row numbers of a table before which a batch ends, limited by bytes too."""
        ends = np.cumsum(sizes_of_rows(table))
        edges: list[int] = []
        start = base = 0
        while True:
            fits = int(np.searchsorted(ends, base + self._bytes - self._size, side="right"))
            if fits == start and self._count == 0:
                fits += 1  # a row that is too large stands alone
            edge = min(start + self._rows - self._count, fits)
            if edge > table.num_rows or (edge == table.num_rows and edge - start + self._count < self._rows):
                break
            edges.append(edge)
            start, base = edge, int(ends[edge - 1]) if edge else 0
            self._count = self._size = 0
        self._count += table.num_rows - start
        self._size += (int(ends[-1]) if len(ends) else 0) - base
        return edges


def _concatenate(tables: list[pa.Table]) -> pa.Table:
    if len(tables) == 1:
        return tables[0]
    wide = tables[0].schema
    for table in tables[1:]:
        wide = merged(wide, table.schema)
    return pa.concat_tables([cast(table, wide) for table in tables])


def describe_row(unit: Unit, reading: Reading, offset: int) -> str:
    """Describe a row of a unit for messages: its file, its row and byte in the file, as far as they are known.

    Rows count from 0, as they do in Python and in quarantine.parquet.
    """
    try:
        return _describe_row(unit, reading, offset)
    except (OSError, BrimError):  # the file is unreachable: report the original error
        return f"row {offset:,} of unit {unit.number:,}"


def _describe_row(unit: Unit, reading: Reading, offset: int) -> str:
    remaining = offset
    delimiter = str(reading.options.get("delimiter", ","))
    for number, span in enumerate(unit.spans):
        shown = name_of_span(unit, reading, number)
        file = located(span, shown, reading.options)
        if span.kind == "document":
            own = 1
        elif span.kind in ("parquet", "arrow"):
            own = span.end - span.start
        else:
            try:
                own = count_rows(file, span.kind, span.start, span.end, delimiter)
            except (OSError, BrimError):
                return f"{shown}, row {offset:,} of unit {unit.number:,}"
        if remaining >= own and number + 1 < len(unit.spans):
            remaining -= own
            continue
        if span.kind == "document":
            return shown
        if unit.origins:
            return f"{shown}, row {unit.origins[number][1] + remaining:,}"
        if span.kind in ("parquet", "arrow"):
            return f"{shown}, row {span.start + remaining:,}"
        byte = end_of_row(file, span.kind, span.start, span.end, remaining, delimiter) if remaining else span.start
        if too_far(file, span.start):
            return f"{shown}, byte {byte:,}"
        before = count_rows(file, span.kind, 0, span.start, delimiter) if span.start else 0
        return f"{shown}, row {before + remaining:,} (byte {byte:,})"
    return f"row {offset:,} of unit {unit.number:,}"
