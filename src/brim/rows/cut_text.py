"""Where rows end in text: lines, JSON lines, and CSV whose quoted values may hold line ends.

A scanner is fed blocks in order and says where rows end in each, with NumPy and no Python object per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from brim.errors import InputError
from brim.file_set import Ints
from brim.rows.open_files import AnyFile, head_of, located, looked_into, streamed
from brim.rows.unit import SPANS_PER_UNIT, Kind, Named, Span, Unit, make_unit

if TYPE_CHECKING:  # a worker reads what was found: it finds nothing
    from brim.rows.row_files import RowFiles

Octets = np.ndarray[Any, np.dtype[np.uint8]]

SCAN_BYTES = 4 << 20
_LINE_BYTES = 1 << 16
_NEWLINE, _QUOTE, _RETURN = 10, 34, 13
BOM = b"\xef\xbb\xbf"


class RowScanner:
    """Feed it consecutive blocks of a file, from the start of a row on."""

    def __init__(self, kind: Kind, delimiter: str = ",") -> None:
        self.kind = kind
        self.in_quotes = False
        self._delimiter = ord(delimiter)
        self._before = b"\n"  # the last byte of the block before
        self._closed = False  # whether that byte is a quote that closed a value
        self._first = True
        self._empty = True  # whether the line that is being read has nothing but blanks so far

    def feed(self, block: bytes) -> Ints:
        """The places in the block just behind the line ends that end a row. Blank lines of JSON and CSV end none."""
        if not block:
            return np.zeros(0, np.int64)
        if self._first and self.kind == "csv" and block.startswith(BOM):
            block = bytes([self._delimiter]) * len(BOM) + block[len(BOM) :]  # a quote may follow the mark
        self._first = False
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(data == _NEWLINE)
        if self.kind == "csv":
            ends = self._outside_quotes(block, data, ends)
        found = ends + 1
        if self.kind != "lines":
            found = self._without_blank(block, data, found)
        self._before = block[-1:]
        return found.astype(np.int64)

    def rest(self) -> int:
        """How many rows end where the file does: one, if its last line has no line end."""
        return 0 if (self._before == b"\n" and not self.in_quotes) or (self.kind != "lines" and self._empty) else 1

    def _without_blank(self, block: bytes, data: Octets, ends: Ints) -> Ints:
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        blank_bytes = b"\r\n" if self.kind == "csv" else b" \t\r\n"
        table = np.zeros(256, bool)
        table[list(blank_bytes)] = True
        first = data[np.minimum(starts, len(data) - 1)]  # a line that starts with a blank may be nothing else
        suspects = np.flatnonzero(table[first])
        keep = np.ones(len(ends), bool)
        for number in suspects.tolist():
            if number < len(ends) and not block[starts[number] : ends[number]].strip(blank_bytes):
                keep[number] = False
        if len(ends):
            if not self._empty:
                keep[0] = True
            self._empty = True
        self._empty = self._empty and not block[starts[-1] :].removeprefix(BOM).strip(blank_bytes)
        return ends[keep]

    def _outside_quotes(self, block: bytes, data: Octets, ends: Ints) -> Ints:
        quotes = np.flatnonzero(data == _QUOTE)
        was_in = self.in_quotes
        if not len(quotes):
            self._closed = False
            return ends[:0] if was_in else ends
        if not self._is_regular(data, quotes):
            quotes = np.array(self._real_quotes(block, quotes.tolist()), np.int64)
        odd = (np.searchsorted(quotes, ends) + was_in) % 2
        self.in_quotes = bool((len(quotes) + was_in) % 2)
        self._closed = not self.in_quotes and bool(len(quotes)) and quotes[-1] == len(block) - 1
        return np.asarray(ends[odd == 0], np.int64)

    def _is_regular(self, data: Octets, quotes: Ints) -> bool:
        """Whether each quote that would open a value stands at the start of one, or doubles another."""
        opening = quotes[1 if self.in_quotes else 0 :: 2]
        before = np.where(opening > 0, data[opening - 1], self._before[0])
        good = (before == self._delimiter) | (before == _NEWLINE) | (before == _RETURN) | (before == _QUOTE)
        return bool(good.all()) and not (len(opening) and opening[0] == 0 and self._before == b'"' and not self._closed)

    def _real_quotes(self, block: bytes, quotes: list[int]) -> list[int]:
        """The quotes that open or close a value: others, as in `5" disk`, are part of one."""
        starters = bytes([self._delimiter]) + b"\r\n"
        inside, real = self.in_quotes, list[int]()
        for place in quotes:
            before = block[place - 1 : place] if place else self._before
            doubled = real[-1] == place - 1 if real else self._closed and not place
            if inside or doubled or before in starters:
                inside = not inside
                real.append(place)
        return real


def blocks(file: AnyFile, start: int, end: int) -> Iterator[bytes]:
    """The bytes of a part of a file, the mark at its very start left in place."""
    with streamed(file, start, end) as content:
        while start < end:
            block = content.read_at(start, min(SCAN_BYTES, end - start))
            if not block:
                return
            yield block
            start += len(block)
            content.passed(start)


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
        raise InputError(f"{shown!r} opens a quote in its first row and never closes it.", path=shown)
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
    twice = sorted({name for name in names if names.count(name) > 1})
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
