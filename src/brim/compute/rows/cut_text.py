"""Cut text files into units that end at row ends: lines, JSON lines, and CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from brim.compute.rows.open_files import AnyFile, head_of, located, looked_into, streamed
from brim.compute.rows.unit import SPANS_PER_UNIT, Kind, Span, SpanInfo, Unit, make_unit
from brim.errors import InputError
from brim.formats.row_scanner import BOM as BOM
from brim.formats.row_scanner import RowScanner as RowScanner

if TYPE_CHECKING:  # workers read files but do not search for them
    from brim.compute.rows.row_files import RowFiles

SCAN_BYTES = 4 << 20
_LINE_BYTES = 1 << 16


def blocks(file: AnyFile, start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes of a part of a file, including a byte order mark."""
    with streamed(file, start, end) as content:
        while start < end:
            block = content.read_at(start, min(SCAN_BYTES, end - start))
            if not block:
                return
            yield block
            start += len(block)
            content.release(start)


def count_rows(file: AnyFile, kind: Kind, start: int, end: int, delimiter: str = ",") -> int:
    """Count the rows of a part of a file that starts and ends at row ends."""
    scanner = RowScanner(kind, delimiter)
    rows = sum(len(scanner.feed(block)) for block in blocks(file, start, end))
    rows += scanner.rest() if end > start else 0
    return rows - 1 if kind == "csv" and start == 0 and rows else rows  # the header


def end_of_row(file: AnyFile, kind: Kind, start: int, end: int, rows: int, delimiter: str = ",") -> int:
    """Return where the first `rows` rows of a part end, or the end of the part."""
    scanner = RowScanner(kind, delimiter)
    rows += 1 if kind == "csv" and start == 0 else 0
    offset = start
    for block in blocks(file, start, end):
        ends = scanner.feed(block)
        if len(ends) >= rows:
            return offset + int(ends[rows - 1])
        rows -= len(ends)
        offset += len(block)
    return end


_LONG_STRING = 1 << 16
_STAND_IN = b"a long text"


def shortened_row(blocks: Iterable[bytes]) -> bytes:
    """Return the first line of JSON, with each string of more than 64 KB replaced by a short one.

    The types stay the same, and parsing a string of 50 MB would take several times its size.
    """
    row, string, is_escaped = bytearray(), bytearray(), False
    in_string = False
    for whole in blocks:
        end = whole.find(b"\n") + 1
        block, position = whole[:end] if end else whole, 0
        while position < len(block):
            quote = block.find(b'"', position)
            stop = len(block) if quote < 0 else quote
            if not in_string:
                row += block[position:stop]
            else:
                before = block[position:stop]
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
            position = stop + 1
        if end:
            break
    return bytes(row + string) if in_string else bytes(row)


def next_line(file: AnyFile, offset: int, size: int) -> int:
    """Return the start of the first line that starts at `offset` or later."""
    if offset <= 0:
        return 0
    position = offset - 1
    with looked_into(file) as content:
        while position < size and (block := content.read_at(position, min(_LINE_BYTES, size - position))):
            newline = block.find(b"\n")
            if newline >= 0:
                return position + newline + 1
            position += len(block)
    return size


def csv_header(content: Iterable[bytes], delimiter: str, shown: str) -> tuple[list[str], int]:
    """Return the names in the first row of a CSV file, and where that row ends."""
    import csv

    scanner, head, end = RowScanner("csv", delimiter), b"", 0
    for block in content:
        ends = scanner.feed(block)
        head += block
        if len(ends):
            end = len(head) - len(block) + int(ends[0])
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
        problem = "has no header" if not names else f"has several columns named {twice[0]!r}" if twice else ""
        raise InputError(
            f"{shown!r} {problem or 'has a column without a name'}.",
            hint="Its first row must name each column.",
            path=shown,
        )
    return names, end


def text_units(row_files: RowFiles, unit_bytes: int, *, count: bool, limit: int | None) -> Iterator[Unit]:
    """Yield the units of uncompressed text files. With `count` or a limit, rows are counted."""
    number, first = 0, 0
    for infos in _grouped(_span_infos(row_files, unit_bytes), unit_bytes):
        rows = None
        if row_files.kind == "document":
            rows = len(infos)
        elif count or limit is not None:
            infos, rows = _counted(infos, row_files, None if limit is None else limit - first)
        if limit is not None and rows is not None and first + rows >= limit:
            if row_files.kind == "document":
                infos, rows = infos[: limit - first], limit - first
            yield make_unit(number, infos, rows=rows, first_row=first)
            return
        yield make_unit(number, infos, rows=rows, first_row=first if rows is not None else None)
        number, first = number + 1, first + (rows or 0)


def _span_infos(row_files: RowFiles, unit_bytes: int) -> Iterator[SpanInfo]:
    for number in range(len(row_files.files)):
        size, mtime = int(row_files.files.sizes[number]), int(row_files.files.mtimes_ns[number])
        path, shown, version = row_files.full(number), row_files.shown(number), row_files.version(number)
        start = 0
        for end in [size] if row_files.kind == "document" else _cuts(row_files, number, shown, size, unit_bytes):
            yield SpanInfo(Span(path, row_files.kind, start, end, version), shown, size, mtime, end - start)
            start = end


def _cuts(row_files: RowFiles, number: int, shown: str, size: int, unit_bytes: int) -> Iterator[int]:
    """Yield where the parts of a file end; the last end is its size."""
    if size > unit_bytes:
        is_csv, file = row_files.kind == "csv", row_files.file(number)
        if is_csv:
            yield from (end for end in _row_ends(file, size, unit_bytes, row_files.delimiter, shown) if end < size)
        else:
            offset = 0
            while (goal := (offset // unit_bytes + 1) * unit_bytes) < size:
                offset = next_line(file, goal, size)
                if offset < size:
                    yield offset
    yield size


def _row_ends(file: AnyFile, size: int, unit_bytes: int, delimiter: str, shown: str) -> Iterator[int]:
    scanner = RowScanner("csv", delimiter)
    with looked_into(file) as content:
        offset, goal = 0, max(unit_bytes, csv_header(head_of(content, size), delimiter, shown)[1])
    for block in blocks(file, 0, size):
        ends = scanner.feed(block) + offset
        index = int(ends.searchsorted(goal))
        while index < len(ends):
            end = int(ends[index])
            yield end
            goal = (end // unit_bytes + 1) * unit_bytes
            index = int(ends.searchsorted(goal))
        offset += len(block)


def _grouped(infos: Iterator[SpanInfo], unit_bytes: int) -> Iterator[list[SpanInfo]]:
    group: list[SpanInfo] = []
    size = 0
    for info in infos:
        if group and (size + info.bytes > unit_bytes or len(group) >= SPANS_PER_UNIT):
            yield group
            group, size = [], 0
        group.append(info)
        size += info.bytes
    if group:
        yield group


def _counted(infos: list[SpanInfo], row_files: RowFiles, limit: int | None) -> tuple[list[SpanInfo], int]:
    """Count the rows of spans; the span in which the limit is reached is cut there."""
    kept_infos, rows = list[SpanInfo](), 0
    for info in infos:
        span = info.span
        file = located(span, info.shown, row_files.options)
        own = count_rows(file, span.kind, span.start, span.end, row_files.delimiter)
        if limit is not None and rows + own >= limit:
            end = end_of_row(file, span.kind, span.start, span.end, limit - rows, row_files.delimiter)
            short = replace(span, end=end)
            return [*kept_infos, SpanInfo(short, info.shown, info.size, info.mtime_ns, end - span.start)], limit
        kept_infos.append(info)
        rows += own
    return kept_infos, rows
