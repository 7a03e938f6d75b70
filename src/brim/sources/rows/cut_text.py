"""Cut text files into units: byte ranges that end at row ends, small files together.

Cuts are found near every multiple of the unit's bytes. Files of lines are not read for it; those of CSV are, in
order and as units are asked for, because a line end inside of quotes is not the end of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from brim.sources.rows.found import Found
from brim.sources.rows.opening import AnyFile, head_of, located, looked_into
from brim.sources.rows.scan import RowScanner, blocks, count_rows, csv_header, end_of_row, next_line
from brim.sources.rows.unit import Span, Unit
from brim.sources.rows.units import SPANS_PER_UNIT, Named, make_unit


def text_units(found: Found, unit_bytes: int, *, count: bool, limit: int | None) -> Iterator[Unit]:
    """The units of plain text files. With `count` or a limit, rows are counted."""
    number, first = 0, 0
    for named in _grouped(_pieces(found, unit_bytes), unit_bytes):
        rows = None
        if found.kind == "document":
            rows = len(named)
        elif count or limit is not None:
            named, rows = _counted(named, found, None if limit is None else limit - first)
        if limit is not None and rows is not None and first + rows >= limit:
            if found.kind == "document":
                named, rows = named[: limit - first], limit - first
            yield make_unit(number, named, rows=rows, first_row=first)
            return
        yield make_unit(number, named, rows=rows, first_row=first if rows is not None else None)
        number, first = number + 1, first + (rows or 0)


def _pieces(found: Found, unit_bytes: int) -> Iterator[Named]:
    for number in range(len(found.files)):
        size, mtime = int(found.files.sizes[number]), int(found.files.mtimes_ns[number])
        path, shown, version = found.full(number), found.shown(number), found.version(number)
        start = 0
        for end in [size] if found.kind == "document" else _cuts(found, number, shown, size, unit_bytes):
            yield Named(Span(path, found.kind, start, end, version), shown, size, mtime, end - start)
            start = end


def _cuts(found: Found, number: int, shown: str, size: int, unit_bytes: int) -> Iterator[int]:
    """Where pieces of a file end; the last is its size."""
    if size > unit_bytes:
        is_csv, file = found.kind == "csv", found.file(number)
        row_ends = _row_ends(file, size, unit_bytes, found.delimiter, shown) if is_csv else None
        for end in row_ends or _line_ends(file, size, unit_bytes):
            if end < size:
                yield end
    yield size


def _line_ends(file: AnyFile, size: int, unit_bytes: int) -> Iterator[int]:
    place = 0
    while (goal := (place // unit_bytes + 1) * unit_bytes) < size:
        place = next_line(file, goal, size)
        yield place


def _row_ends(file: AnyFile, size: int, unit_bytes: int, delimiter: str, shown: str) -> Iterator[int]:
    scanner = RowScanner("csv", delimiter)
    with looked_into(file) as content:
        place, goal = 0, max(unit_bytes, csv_header(head_of(content, size), delimiter, shown)[1])
    for block in blocks(file, 0, size):
        ends = scanner.feed(block) + place
        at = int(ends.searchsorted(goal))
        while at < len(ends):
            end = int(ends[at])
            yield end
            goal = (end // unit_bytes + 1) * unit_bytes
            at = int(ends.searchsorted(goal))
        place += len(block)


def _grouped(pieces: Iterator[Named], unit_bytes: int) -> Iterator[list[Named]]:
    held: list[Named] = []
    size = 0
    for piece in pieces:
        if held and (size + piece.bytes > unit_bytes or len(held) >= SPANS_PER_UNIT):
            yield held
            held, size = [], 0
        held.append(piece)
        size += piece.bytes
    if held:
        yield held


def _counted(named: list[Named], found: Found, limit: int | None) -> tuple[list[Named], int]:
    """The rows of pieces, which are cut short where the limit is reached."""
    kept, rows = list[Named](), 0
    for piece in named:
        span = piece.span
        file = located(span, piece.shown, found.options)
        own = count_rows(file, span.kind, span.start, span.end, found.delimiter)
        if limit is not None and rows + own >= limit:
            end = end_of_row(file, span.kind, span.start, span.end, limit - rows, found.delimiter)
            short = replace(span, end=end)
            return [*kept, Named(short, piece.shown, piece.size, piece.mtime_ns, end - span.start)], limit
        kept.append(piece)
        rows += own
    return kept, rows
