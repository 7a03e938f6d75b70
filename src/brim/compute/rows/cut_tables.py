"""Cut Parquet and Arrow files into units: row ranges whose ends are multiples of the batch size.

Finding a row of an Arrow file is cheap. The rows of a Parquet row group are decoded from its start, so units end just
after the edges of row groups, and only a large group is cut, into at most four parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import field

import numpy as np
import pyarrow as pa

from brim.compute.rows.arrow_rows import ArrowFile
from brim.compute.rows.open_files import AnyFile
from brim.compute.rows.parquet_rows import footers, parquet_file
from brim.compute.rows.row_files import RowFiles
from brim.compute.rows.schemas import TypesDiffer, merged
from brim.compute.rows.unit import SPANS_PER_UNIT, Kind, Span, SpanInfo, Unit, make_unit
from brim.errors import InputError
from brim.file_set import Ints
from brim.formats.encrypted import encrypted, is_encrypted
from brim.partition import running
from brim.records import dataclass

_PIECES_OF_GROUP, _LEAST_PIECE_BYTES = 4, 64 << 20


@dataclass
class TableLayout:
    """The groups of rows (row groups, record batches) of all files in order, in columns."""

    kind: Kind
    schema: pa.Schema
    names: list[tuple[str, str, int, int]] = field(default_factory=list)  # path, shown, size, mtime of each file
    starts: list[int] = field(default_factory=list)  # of each file: the first row in it that belongs to the source
    file_rows: list[int] = field(default_factory=list)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    bytes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    versions: list[tuple[int, str] | None] = field(default_factory=list)  # of each file, where files are objects
    batch_offsets: Ints | None = None  # of each Arrow batch: its first row, first byte and end in its file

    @property
    def total_rows(self) -> int:
        return sum(self.file_rows)

    @property
    def total_bytes(self) -> int:
        return int(self.bytes.sum())


def lay_out(row_files: RowFiles) -> TableLayout:
    """Read the schema and the groups of rows from the footers and headers of the files."""
    layout: TableLayout | None = None
    rows: list[Ints] = []
    sizes: list[Ints] = []
    batch_offsets: list[Ints] = []
    files = (row_files.file(number) for number in range(len(row_files.files)))
    with_footers = footers(files) if row_files.kind == "parquet" else ((file, b"") for file in files)
    for number, (file, footer) in enumerate(with_footers):
        shown = row_files.shown(number)
        if row_files.kind == "parquet":
            schema, own_rows, own_bytes = _of_parquet(file, shown, footer)
        else:
            schema, own_rows, own_places = of_arrow(file, shown)
            own_bytes = own_places[:, 2] - own_places[:, 1]
            batch_offsets.append(own_places)
        if layout is None:
            layout, first = TableLayout(row_files.kind, schema), shown
        try:
            layout.schema = merged(layout.schema, schema)
        except TypesDiffer as error:
            raise InputError(
                f"The column {error.column!r} is {error.first} in {first!r} and {error.second} in {shown!r}.",
                hint="Use one type for the column in all files, or read the files separately.",
            ) from error
        layout.names.append(
            (row_files.full(number), shown, int(row_files.files.sizes[number]), int(row_files.files.mtimes_ns[number]))
        )
        layout.versions.append(row_files.version(number))
        layout.starts.append(0)
        layout.file_rows.append(int(own_rows.sum()))
        rows.append(own_rows)
        sizes.append(own_bytes)
    assert layout is not None
    layout.rows, layout.bytes = np.concatenate(rows), np.concatenate(sizes)
    if batch_offsets:
        layout.batch_offsets = np.concatenate(batch_offsets)
    return layout


def _of_parquet(file: AnyFile, shown: str, footer: bytes) -> tuple[pa.Schema, Ints, Ints]:
    try:
        with parquet_file(file, footer) as parquet:
            data = parquet.metadata
            groups = [data.row_group(number) for number in range(data.num_row_groups)]
            rows = np.array([group.num_rows for group in groups], np.int64)
            return parquet.schema, rows, np.array([group.total_byte_size for group in groups], np.int64)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        if is_encrypted(error):
            raise encrypted(repr(shown)) from error
        raise InputError(f"{shown!r} is not a complete Parquet file: {reason}.", hint="Write it again.") from error


def of_arrow(file: AnyFile, shown: str) -> tuple[pa.Schema, Ints, Ints]:
    """Return the schema, the rows of each batch, and the range of each: see `TableLayout.batch_offsets`."""
    arrow_file = ArrowFile(file, shown)
    batches = np.array(list(arrow_file.batches()), np.int64).reshape(-1, 3)
    arrow_file.close()
    start, rows, size = batches.T
    return arrow_file.schema, rows.copy(), np.stack([running(rows)[:-1], start, start + size], axis=1)


def row_units(layout: TableLayout, unit_bytes: int, align: int, limit: int | None) -> Iterator[Unit]:
    """Yield the units; each but the last has a multiple of `align` rows."""
    total = layout.total_rows if limit is None else min(limit, layout.total_rows)
    before = running(np.array(layout.file_rows, np.int64))
    rows_before, bytes_before = running(layout.rows), running(layout.bytes)
    start, number = 0, 0
    while start < total:
        goal = _goal(layout, rows_before, bytes_before, start, unit_bytes)
        end = min(max(math.ceil(goal / align), start // align + 1) * align, total)
        max_end = int(before[min(int(np.searchsorted(before, start, "right")) - 1 + SPANS_PER_UNIT, len(before) - 1)])
        if end > max_end:  # more files than a unit may have: use the multiple below, or else the one above
            below = max_end // align * align
            end = min(below if below > start else below + align, total)
        parts = _parts(layout, before, start, end, rows_before, bytes_before)
        yield make_unit(number, parts, rows=end - start, first_row=start)
        start, number = end, number + 1


def _bytes_at(row: float, rows_before: Ints, bytes_before: Ints) -> float:
    return float(np.interp(row, rows_before, bytes_before))


def _goal(layout: TableLayout, rows_before: Ints, bytes_before: Ints, start: int, unit_bytes: int) -> float:
    """Return the row at which a unit that starts at `start` should end."""
    target_bytes = _bytes_at(start, rows_before, bytes_before) + unit_bytes
    if target_bytes >= bytes_before[-1]:
        return float(rows_before[-1])
    group = int(np.searchsorted(bytes_before, target_bytes, "right")) - 1
    low, high = int(rows_before[group]), int(rows_before[group + 1])
    size = int(layout.bytes[group])
    exact = low + (high - low) * (target_bytes - float(bytes_before[group])) / max(size, 1)
    if layout.kind == "arrow":
        return exact
    part_count = min(_PIECES_OF_GROUP, max(1, size // max(unit_bytes, _LEAST_PIECE_BYTES)))
    edges = [low + (high - low) * part / part_count for part in range(part_count + 1)]
    later_edges = [edge for edge in edges if edge > start] or [float(high)]
    return min(later_edges, key=lambda edge: abs(edge - exact))


def _parts(
    layout: TableLayout, before: Ints, start: int, end: int, rows_before: Ints, bytes_before: Ints
) -> list[SpanInfo]:
    parts = []
    number = int(np.searchsorted(before, start, "right")) - 1
    while start < end:
        stop = min(end, int(before[number + 1]))
        if stop > start:
            path, shown, size, mtime = layout.names[number]
            offset = layout.starts[number] - int(before[number])
            weight = _bytes_at(stop, rows_before, bytes_before) - _bytes_at(start, rows_before, bytes_before)
            version = layout.versions[number] if layout.versions else None
            batches = _batches(layout, rows_before, start, stop)
            span = Span(path, layout.kind, start + offset, stop + offset, version, batches)
            parts.append(SpanInfo(span, shown, size, mtime, round(weight)))
        start, number = stop, number + 1
    return parts


def _batches(layout: TableLayout, rows_before: Ints, start: int, stop: int) -> tuple[int, int, int] | None:
    """Return the range of the Arrow batches with these rows: see `Span.batches`."""
    if layout.batch_offsets is None:
        return None
    first = int(np.searchsorted(rows_before, start, "right")) - 1
    last = int(np.searchsorted(rows_before, stop, "left")) - 1
    row, offset, _ = layout.batch_offsets[first].tolist()
    return row, offset, int(layout.batch_offsets[last, 2])
