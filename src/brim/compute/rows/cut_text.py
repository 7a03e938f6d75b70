"""Cut text files into units that end at row ends: lines, JSON lines, and CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from brim.compute.rows.open_files import AnyFile, head_of, located, looked_into, streamed
from brim.compute.rows.unit import SPANS_PER_UNIT, Kind, Named, Span, Unit, make_unit
from brim.errors import InputError
from brim.formats.row_scanner import BOM as BOM
from brim.formats.row_scanner import RowScanner as RowScanner

if TYPE_CHECKING:  # a worker reads what was found: it finds nothing
    from brim.compute.rows.row_files import RowFiles

SCAN_BYTES = 4 << 20
_LINE_BYTES = 1 << 16


def blocks(file: AnyFile, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file, the mark at its very start left in place."""
    with streamed(file, start, end) as content:
        while start < end:
            block = content.read_at(start, min(SCAN_BYTES, end - start))
            if not block:
                return
            yield block
            start += len(block)
            content.release(start)


def count_rows(file: AnyFile, kind: Kind, start: int, end: int, delimiter: str = ",") -> int:
    """The rows of a part of a file that starts and ends at row ends."""
    scanner = RowScanner(kind, delimiter)
    rows = sum(len(scanner.feed(block)) for block in blocks(file, start, end))
    rows += scanner.rest() if end > start else 0
    return rows - 1 if kind == "csv" and start == 0 and rows else rows  # the header


def end_of_row(file: AnyFile, kind: Kind, start: int, end: int, rows: int, delimiter: str = ",") -> int:
    """Where the first `rows` rows of a part end, or the end of the part."""
    scanner = RowScanner(kind, delimiter)
    rows += 1 if kind == "csv" and start == 0 else 0
    place = start
    for block in blocks(file, start, end):
        found = scanner.feed(block)
        if len(found) >= rows:
            return place + int(found[rows - 1])
        rows -= len(found)
        place += len(block)
    return end


_LONG_STRING = 1 << 16
_STAND_IN = b"a long text"


def shortened_row(blocks: Iterable[bytes]) -> bytes:
    """The first line of JSON, with another text for each string of more than 64 KB.

    It has the types of the line without its bytes: a text of 50 MB would take several times that to look at.
    """
    row, string, is_escaped = bytearray(), bytearray(), False
    in_string = False
    for whole in blocks:
        end = whole.find(b"\n") + 1
        block, at = whole[:end] if end else whole, 0
        while at < len(block):
            quote = block.find(b'"', at)
            stop = len(block) if quote < 0 else quote
            if not in_string:
                row += block[at:stop]
            else:
                before = block[at:stop]
                slashes = len(before) - len(before.rstrip(b"\\"))
                if slashes < len(before):
                    is_escaped = False
                is_escaped ^= bool(slashes % 2)
                if len(string) <= _LONG_STRING:
                    string += before
            if quote >= 0 and in_string and is_escaped:
                string += b'"'
                is_escaped = False
            elif quote >= 0 and in_string:
                row += (_STAND_IN if len(string) > _LONG_STRING else string) + b'"'
                in_string = False
            elif quote >= 0:
                row += b'"'
                string.clear()
                in_string, is_escaped = True, False
            at = stop + 1
        if end:
            break
    return bytes(row + string) if in_string else bytes(row)


def next_line(file: AnyFile, place: int, size: int) -> int:
    """The start of the first line at or behind a place: a line that starts exactly there counts."""
    if place <= 0:
        return 0
    at = place - 1
    with looked_into(file) as content:
        while at < size and (block := content.read_at(at, min(_LINE_BYTES, size - at))):
            found = block.find(b"\n")
            if found >= 0:
                return at + found + 1
            at += len(block)
    return size


def csv_header(content: Iterable[bytes], delimiter: str, shown: str) -> tuple[list[str], int]:
    """The names in the first row of a CSV file whose bytes these are, and where that row ends."""
    import csv

    scanner, head, end = RowScanner("csv", delimiter), b"", 0
    for block in content:
        found = scanner.feed(block)
        head += block
        if len(found):
            end = len(head) - len(block) + int(found[0])
            break
    else:
        end = len(head)
    if scanner.in_quotes and end == len(head):
        raise InputError(f"{shown!r} has a quote in its first row that is never closed.", path=shown)
    try:
        text = head[:end].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{shown!r} is not UTF-8 text (byte {error.start:,} of its first row).",
            hint="Save it as UTF-8.",
            path=shown,
        ) from error
    if "\r" in text.rstrip("\r\n").replace("\r\n", "") and '"' not in text:
        raise InputError(f"{shown!r} ends its lines with a bare carriage return.", hint="Save it with line feeds.")
    rows = [row for row in csv.reader(text.lstrip("\r\n").splitlines(keepends=True), delimiter=delimiter) if row]
    names = rows[0] if rows else []
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if not names or twice or "" in names:
        what = "has no header" if not names else f"has several columns named {twice[0]!r}" if twice else ""
        raise InputError(
            f"{shown!r} {what or 'has a column without a name'}.",
            hint="Its first row must name each column.",
            path=shown,
        )
    return names, end


def text_units(found: RowFiles, unit_bytes: int, *, count: bool, limit: int | None) -> Iterator[Unit]:
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


def _pieces(found: RowFiles, unit_bytes: int) -> Iterator[Named]:
    for number in range(len(found.files)):
        size, mtime = int(found.files.sizes[number]), int(found.files.mtimes_ns[number])
        path, shown, version = found.full(number), found.shown(number), found.version(number)
        start = 0
        for end in [size] if found.kind == "document" else _cuts(found, number, shown, size, unit_bytes):
            yield Named(Span(path, found.kind, start, end, version), shown, size, mtime, end - start)
            start = end


def _cuts(found: RowFiles, number: int, shown: str, size: int, unit_bytes: int) -> Iterator[int]:
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


def _counted(named: list[Named], found: RowFiles, limit: int | None) -> tuple[list[Named], int]:
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
