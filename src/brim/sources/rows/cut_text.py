"""Cut text files into units: byte ranges that end at row ends, small files together.

Cuts are found near every multiple of the unit's bytes. Files of lines are not read for it; those of CSV are, in
order and as units are asked for, because a line end inside of quotes is not the end of a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from brim.sources.rows.found import Found
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
            named, rows = _counted(named, found.delimiter, None if limit is None else limit - first)
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
        path, shown = found.full(number), found.shown(number)
        start = 0
        for end in [size] if found.kind == "document" else _cuts(found, path, shown, size, unit_bytes):
            yield Named(Span(path, found.kind, start, end), shown, size, mtime, end - start)
            start = end


def _cuts(found: Found, path: str, shown: str, size: int, unit_bytes: int) -> Iterator[int]:
    """Where pieces of a file end; the last is its size."""
    if size > unit_bytes:
        is_csv = found.kind == "csv"
        row_ends = _row_ends(path, size, unit_bytes, found.delimiter, shown) if is_csv else None
        for end in row_ends or _line_ends(path, size, unit_bytes):
            if end < size:
                yield end
    yield size


def _line_ends(path: str, size: int, unit_bytes: int) -> Iterator[int]:
    place = 0
    while (goal := (place // unit_bytes + 1) * unit_bytes) < size:
        place = next_line(path, goal, size)
        yield place


def _row_ends(path: str, size: int, unit_bytes: int, delimiter: str, shown: str) -> Iterator[int]:
    scanner = RowScanner("csv", delimiter)
    place, goal = 0, max(unit_bytes, csv_header(blocks(path, 0, size), delimiter, shown)[1])
    for block in blocks(path, 0, size):
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


def _counted(named: list[Named], delimiter: str, limit: int | None) -> tuple[list[Named], int]:
    """The rows of pieces, which are cut short where the limit is reached."""
    kept, rows = list[Named](), 0
    for piece in named:
        span = piece.span
        own = count_rows(span.path, span.kind, span.start, span.end, delimiter)
        if limit is not None and rows + own >= limit:
            end = end_of_row(span.path, span.kind, span.start, span.end, limit - rows, delimiter)
            short = Span(span.path, span.kind, span.start, end)
            return [*kept, Named(short, piece.shown, piece.size, piece.mtime_ns, end - span.start)], limit
        kept.append(piece)
        rows += own
    return kept, rows
