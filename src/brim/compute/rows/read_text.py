"""Read byte ranges of text as tables, a block of whole rows at a time.

A block is parsed with the types that the plan settled. Where it does not fit them, its own types are found out and
widened with those before; the rows that follow keep the wider types. Dates stay the texts they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.compute.rows.cut_text import BOM, RowScanner, blocks, csv_header
from brim.compute.rows.open_files import AnyFile, FileContent, head_of, looked_into
from brim.compute.rows.python_rows import table_of
from brim.compute.rows.schemas import TypesDiffer, cast, merged, unify
from brim.compute.rows.source_hash import SourceHash
from brim.compute.rows.unit import Kind, Span
from brim.compute.rows.unreadable import OnUnreadable, UnreadableRow
from brim.errors import InputError
from brim.sources.exact_values import (
    CHANGES_AS_NUMBER,
    LONG_NUMBER,
    is_parseable,
    json_as_text,
    load_row,
    may_differ,
    reaches,
)
from brim.storage.reading import RemoteFile

_BLANK = b" \t\r\n"
_COUNTED_BYTES = 1 << 28
_MOST_COUNTED_BYTES = 1 << 32  # behind so much of a file, each unit would take seconds to count its lines
_AS_TEXT = "Put such a value into the first rows, so that the column is read as text."
_OR_LEAVE_OUT = "Or leave such rows out with --on-error=skip or --on-error=quarantine."


def row_blocks(
    content: FileContent, span: Span, shown: str, block_bytes: int, delimiter: str
) -> Iterator[tuple[int, bytes]]:
    """(place in the file, bytes) of consecutive blocks that end at row ends. A row that is longer is one block."""
    place = span.start
    while place < span.end:
        size = min(block_bytes, span.end - place)
        while True:
            block = content.read_at(place, size)
            if place + len(block) >= span.end or len(block) < size:
                break
            end = _last_end(block, span.kind, delimiter)
            if end:
                block = block[:end]
                break
            size = min(2 * size, span.end - place)
        if not block:
            raise InputError(f"{shown!r} became shorter while it was read (byte {place:,}).")
        yield place, block
        place += len(block)
        content.release(place)


def _last_end(block: bytes, kind: Kind, delimiter: str) -> int:
    if kind != "csv" or b'"' not in block:
        return block.rfind(b"\n") + 1
    ends = RowScanner("csv", delimiter).feed(block)
    return int(ends[-1]) if len(ends) else 0


class TextReader:
    """Parses blocks of one kind. `schema` grows where rows need it.

    Rows that cannot be read are an error, or, with `on_unreadable`, are left out and reported. `rows` counts both.
    Values of `json_columns` in JSON lines become JSON texts; with `other_columns`, no further columns are read.
    """

    def __init__(
        self,
        schema: pa.Schema,
        columns: tuple[str, ...] | None,
        delimiter: str = ",",
        on_unreadable: OnUnreadable | None = None,
        json_columns: Sequence[str] = (),
        other_columns: Sequence[str] | None = None,
    ) -> None:
        self.schema = schema if columns is None else pa.schema([schema.field(n) for n in columns], schema.metadata)
        self.columns = columns
        self.delimiter = delimiter
        self.rows = 0
        self._on_unreadable = on_unreadable
        self._json_columns = frozenset(json_columns)
        self._others = None if other_columns is None else (*json_columns, *other_columns)

    def read(
        self,
        file: AnyFile,
        content: FileContent,
        span: Span,
        shown: str,
        block_bytes: int,
        lines_before: int | None = None,
        hashed: SourceHash | None = None,
    ) -> Iterator[pa.Table]:
        """The rows of a span of a file, whose content from the span's start on is given.

        `lines_before` is for a copy of a part of a file: how many lines of the original are before its first.
        """
        names, start = None, span.start
        if span.kind == "csv":
            names, end = self._header(file, content, span, shown)
            start = max(start, end)
            if hashed is not None:
                hashed.add_names(names)
        whole = Span(span.path, span.kind, start, span.end)
        lines = LineCounter(file, lines_before)
        for place, block in row_blocks(content, whole, shown, block_bytes, self.delimiter):
            if hashed is not None:
                hashed.update(block)
            table = self.parse(span.kind, block, names, Place(file, shown, place, lines))
            if table is not None:
                yield table

    def _header(self, file: AnyFile, content: FileContent, span: Span, shown: str) -> tuple[list[str], int]:
        if span.start == 0:
            return csv_header(head_of(content, span.end), self.delimiter, shown)
        with looked_into(file) as start_of_file:
            return csv_header(head_of(start_of_file, span.end), self.delimiter, shown)

    def parse(self, kind: Kind, block: bytes, names: list[str] | None, place: Place) -> pa.Table | None:
        """The rows of a block that starts and ends at row ends; None if it has none. `names` is for CSV."""
        text = block.removeprefix(BOM) if place.place == 0 else block
        place = place.moved(len(block) - len(text))
        is_text = text.isascii()
        if not is_text:
            try:
                text.decode()
                is_text = True
            except UnicodeDecodeError as error:
                if self._on_unreadable is None:
                    raise InputError(
                        f"{place.shown!r} is not UTF-8 text (byte {place.place + error.start:,}).",
                        hint=f"Save it as UTF-8. {_OR_LEAVE_OUT}",
                    ) from error
        if kind == "lines":
            table = _lines(text if is_text else self._valid_lines(text, place))
        elif names is None:
            table = self._json(text, place) if is_text else self._json_by_line(text, place)
        else:
            table = self._csv(text, names, place)
        if table is None:
            return None
        self.rows += table.num_rows
        return self._widened(table, place)

    def _left_out(self, place: Place, text: bytes, rows: Rows, reasons: dict[int, str]) -> None:
        """Report the rows of a block that are not in its table, by their numbers in it."""
        assert self._on_unreadable is not None
        for number in sorted(reasons):
            start, content = rows[number]
            line = place.line_number(text, start) if place.place < _MOST_COUNTED_BYTES else None
            byte = None if place.is_copy else place.place + start
            row = UnreadableRow(self.rows + number, place.shown, line, byte, content, reasons[number])
            self._on_unreadable(row)
        self.rows += len(reasons)  # the others are counted with their table

    def _widened(self, table: pa.Table, place: Place) -> pa.Table:
        if self.columns is not None:
            table = table.select([name for name in self.columns if name in table.column_names])
        try:
            self.schema = merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        except TypesDiffer as error:  # a column that the plan has not seen, and that changes later
            raise InputError(
                f"{place.shown!r}, after byte {place.place:,}: the column {error.column!r} is {error.second} here and "
                f"{error.first} before.",
                hint="Use one type for the column in all rows.",
                column=error.column,
            ) from error
        return cast(table, self.schema)

    def _valid_lines(self, text: bytes, place: Place) -> bytes:
        """The lines that are UTF-8."""
        rows, reasons = _rows_of_lines(text, blank=b""), dict[int, str]()
        for number, (_, line) in enumerate(rows):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                reasons[number] = f"this is not UTF-8 text (character {error.start + 1:,} of the line)"
        self._left_out(place, text, rows, reasons)
        kept = [line for number, (_, line) in enumerate(rows) if number not in reasons]
        return b"".join(line + b"\n" for line in kept)

    def _json(self, text: bytes, place: Place) -> pa.Table | None:
        if self._json_columns or not is_parseable(text):
            return self._json_by_line(text, place)
        rows = text.count(b"\n") + (not text.endswith(b"\n"))
        expected = self._expected()
        table = parse_json(text, expected, ignore_others=self._is_complete(expected))
        if table is None or table.num_rows != rows:
            lines = [line for line in text.split(b"\n") if line.strip(_BLANK)]
            if table is None:
                table = parse_json(text, None)
            if table is None or table.num_rows != len(lines):
                return self._json_by_line(text, place)
        try:
            cast(table, merged(self.schema, table.schema.with_metadata(self.schema.metadata)))
        except (TypesDiffer, InputError):
            return self._json_by_line(text, place)
        return self._json_by_line(text, place) if may_differ(text, table) else table

    def _is_complete(self, expected: pa.Schema | None) -> bool:
        """Whether nothing else is wanted: chosen columns of known types, without fields that could be new."""
        if self.columns is None or expected is None or len(expected) < len(self.columns):
            return False
        return not any(_holds_struct(field.type) for field in expected)

    def _expected(self) -> pa.Schema | None:
        fields = [field for field in self.schema if not _holds_null(field.type)]
        return pa.schema(fields) if fields else None

    def _json_by_line(self, text: bytes, place: Place) -> pa.Table | None:
        rows, reasons = _rows_of_lines(text), dict[int, str]()
        objects, numbers = list[Any](), list[int]()
        wanted = self.columns if self.columns is not None else self._others
        for number, (start, line) in enumerate(rows):
            try:
                objects.append(json_as_text(load_row(line, wanted), self._json_columns))
                numbers.append(number)
            except ValueError as error:
                if self._on_unreadable is None:
                    hint = f"Each line must be one JSON object. {_OR_LEAVE_OUT}"
                    raise InputError(f"{place.line(text, start)}: {error}.", hint=hint) from error
                reasons[number] = str(error)

        def refuse(row: int, reason: str) -> None:
            reasons[numbers[row]] = reason

        table = None
        if objects:
            known = self.schema
            may_leave_out = None if self._on_unreadable is None else refuse
            try:
                table = table_of(objects, lambda row: place.line(text, rows[numbers[row]][0]), known, may_leave_out)
            except InputError as error:
                message, hint = error.words
                raise InputError(message, hint=f"{hint} {_OR_LEAVE_OUT}".strip(), **error.facts) from error
        if reasons:
            self._left_out(place, text, rows, reasons)
        return table

    def _csv(self, text: bytes, names: list[str], place: Place) -> pa.Table | None:
        if text.count(b'"') % 2:
            scanner = RowScanner("csv", self.delimiter)
            scanner.feed(text)
            if scanner.in_quotes:
                raise InputError(
                    f"{place.shown!r} has a quote after byte {place.place:,} that is never closed.",
                    hint="Close it, or double it if it is part of a value.",
                )
        try:
            return self._csv_table(text, names, place)
        except _DOES_NOT_PARSE as error:
            if self._on_unreadable is None:
                raise self._csv_error(text, names, place, error) from error
        tables, reasons = list[pa.Table](), dict[int, str]()
        rows = _rows_of_csv(text, self.delimiter)
        self._csv_by_halves(rows, 0, len(rows), names, tables, reasons)
        self._left_out(place, text, rows, reasons)
        if len(tables) < 2:
            return tables[0] if tables else None
        schema = unify(table.schema for table in tables)
        return pa.concat_tables([cast(table, schema) for table in tables])

    def _csv_by_halves(
        self, rows: Rows, start: int, stop: int, names: list[str], tables: list[pa.Table], reasons: dict[int, str]
    ) -> None:
        """Parse rows; where that fails, parse both halves of them, down to the rows that are to blame."""
        text = b"".join(content for _, content in rows[start:stop])
        try:
            tables.append(self._csv_table(text, names, None))
        except _DOES_NOT_PARSE as error:
            if stop - start == 1:
                reasons[start] = self._csv_error(text, names, None, error).words[0].rstrip(".")
                return
            middle = (start + stop) // 2
            self._csv_by_halves(rows, start, middle, names, tables, reasons)
            self._csv_by_halves(rows, middle, stop, names, tables, reasons)

    def _csv_error(self, text: bytes, names: list[str], place: Place | None, error: Exception) -> InputError:
        """What is wrong, and where if a place is given."""
        if isinstance(error, InputError):
            return error
        if isinstance(error, UnicodeDecodeError):
            return InputError(f"this is not UTF-8 text (character {error.start + 1:,} of the row).")
        return _csv_error(text, names, self.delimiter, self.schema, place, error)

    def _csv_table(self, text: bytes, names: list[str], place: Place | None) -> pa.Table:
        """The rows of a text, or one of _DOES_NOT_PARSE."""
        if not text.isascii():
            text.decode()
        types = {field.name: field.type for field in self.schema if not pa.types.is_null(field.type)}
        wanted = [name for name in names if self.columns is None or name in self.columns]
        try:
            table = parse_csv(text, names, self.delimiter, types, wanted)
        except pa.ArrowInvalid:
            known = {name: kind for name, kind in types.items() if kind == pa.string()}
            table = parse_csv(text, names, self.delimiter, known, wanted)
            merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        self._check_numbers(text, names, table, place)
        return table

    def _check_numbers(self, text: bytes, names: list[str], table: pa.Table, place: Place | None) -> None:
        """007 or 0x10 behind the samples of the plan must not become 7 or 16, nor a long id another number."""
        wide = merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        floats = [name for name in table.column_names if pa.types.is_floating(wide.field(name).type)]
        numbers = [name for name in table.column_names if name in floats or pa.types.is_integer(wide.field(name).type)]
        is_long = any(reaches(table.column(name), LONG_NUMBER) for name in floats)
        if not numbers or not (is_long or _starts_with_zero(text, self.delimiter)):
            return
        table = parse_csv(text, names, self.delimiter, dict.fromkeys(numbers, pa.string()), numbers)
        for name in numbers:
            pattern = CHANGES_AS_NUMBER if is_long and name in floats else r"^[+-]?0[0-9xX]"
            lost = pc.index(pc.match_substring_regex(table.column(name), pattern), True).as_py()
            if lost >= 0:
                here = "" if place is None else f"{place.shown}, after byte {place.place:,}: "
                value, kind = table.column(name)[lost].as_py(), wide.field(name).type
                raise InputError(
                    f"{here}the column {name!r} holds {value!r}, which would be changed as {kind}.",
                    hint=f"{_AS_TEXT} {_OR_LEAVE_OUT}",
                    column=name,
                )


_DOES_NOT_PARSE = (pa.ArrowInvalid, TypesDiffer, UnicodeDecodeError, InputError)
Rows = list[tuple[int, bytes]]  # where each row of a block starts in it, and its bytes


def _rows_of_lines(text: bytes, blank: bytes = _BLANK) -> Rows:
    """The lines of a text, without those that have nothing but blanks."""
    rows, start = Rows(), 0
    lines = text.split(b"\n")
    for line in lines[:-1] if not lines[-1] else lines:
        if not blank or line.strip(blank):
            rows.append((start, line))
        start += len(line) + 1
    return rows


def _rows_of_csv(text: bytes, delimiter: str) -> Rows:
    rows, start = Rows(), 0
    for end in [*RowScanner("csv", delimiter).feed(text).tolist(), len(text)]:
        content = text[start:end]
        own = content.lstrip(b"\r\n")  # blank lines before it
        if own:
            rows.append((start + len(content) - len(own), own))
        start = end
    return rows


def well_formed_csv(text: bytes, cells: int, delimiter: str) -> bytes:
    """The rows that are UTF-8 text with so many cells."""
    import csv

    kept = []
    for _, row in _rows_of_csv(text, delimiter):
        try:
            parsed = list(csv.reader(_split_lines(row.decode()), delimiter=delimiter))
        except (UnicodeDecodeError, csv.Error):
            continue
        if len(parsed) == 1 and len(parsed[0]) == cells:
            kept.append(row)
    return b"".join(kept)


def _starts_with_zero(text: bytes, delimiter: str) -> bool:
    """Whether a value may start with a zero and another digit, or with 0x."""
    data = np.frombuffer(text, np.uint8)
    zeros = np.flatnonzero(data[:-1] == ord("0"))
    follows = data[zeros + 1]
    zeros = zeros[((follows >= ord("0")) & (follows <= ord("9"))) | (follows == ord("x")) | (follows == ord("X"))]
    before = data[np.maximum(zeros - 1, 0)]
    return bool(np.isin(before, [*f'{delimiter}\n\r"+- '.encode()]).any() or (len(zeros) and zeros[0] == 0))


def _lines(text: bytes) -> pa.Table:
    if b"\r\n" in text:
        text = text.replace(b"\r\n", b"\n")
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 10)
    if not text.endswith(b"\n"):
        ends = np.append(ends, len(text))
    offsets = np.concatenate([np.zeros(1, np.int64), ends - np.arange(len(ends))])
    data = text.replace(b"\n", b"")
    if len(data) >= 2**31:
        raise InputError("A line is longer than 2 GiB.", hint="Read such files with --text=document, or split them.")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
    return pa.table({"text": pa.StringArray.from_buffers(len(ends), buffers[1], buffers[2])})


def parse_json(text: bytes, expected: pa.Schema | None, *, ignore_others: bool = False) -> pa.Table | None:
    """The rows of whole lines with dates left as texts, or None where pyarrow cannot parse them so."""
    from pyarrow import json as arrow_json

    others = "ignore" if ignore_others else "infer"
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    while True:
        parse = arrow_json.ParseOptions(explicit_schema=expected, unexpected_field_behavior=others)
        try:
            table = arrow_json.read_json(pa.BufferReader(text), read, parse)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        plain = without_dates(table.schema)
        if plain is table.schema or plain.equals(table.schema):
            return table
        kept = [field for field in plain if not _holds_null(field.type)]
        again = pa.schema(kept)
        if expected is not None and again.equals(expected):
            return None
        expected = again


def without_dates(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_without_dates(field.type)) for field in schema])


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_dates(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_dates(field.type)) for field in kind])
    return kind


def _holds_null(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(kind)) or any(_holds_null(kind.field(i).type) for i in range(kind.num_fields))


def _holds_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) or any(_holds_struct(kind.field(i).type) for i in range(kind.num_fields))


def parse_csv(
    text: bytes, names: list[str], delimiter: str, types: dict[str, pa.DataType], wanted: list[str]
) -> pa.Table:
    """Rows without a header. Columns whose type is not given are what they look like, or text."""
    from pyarrow import csv

    read = csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names)
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=b'"' in text)
    convert = csv.ConvertOptions(column_types=types, include_columns=wanted, check_utf8=False)
    if not text.strip(b"\r\n"):
        return pa.table({name: pa.nulls(0, types.get(name, pa.null())) for name in wanted})
    table = csv.read_csv(pa.BufferReader(text), read, parse, convert)
    plain = without_dates(table.schema)
    if plain.equals(table.schema):
        return table
    types = types | {field.name: field.type for field in plain if field.type != table.schema.field(field.name).type}
    return parse_csv(text, names, delimiter, types, wanted)


def _csv_error(
    text: bytes, names: list[str], delimiter: str, schema: pa.Schema, place: Place | None, reason: Exception
) -> InputError:
    """The first row that is to blame, with its place if that is given."""
    import csv

    def here(line: int) -> str:
        start = sum(len(one.encode()) for one in lines[:line])
        return "" if place is None else f"{place.line(text, start)}: "

    lines = text.decode().splitlines(keepends=True) if b"\n" not in text else _split_lines(text.decode())
    reader = csv.reader(lines, delimiter=delimiter)
    begin = 0
    try:
        for row in reader:
            line, begin = begin, reader.line_num
            if row and len(row) != len(names):
                return InputError(
                    f"{here(line)}this row has {len(row)} values, and the header names {len(names)} columns.",
                    hint=f"Correct the row. Is the delimiter right? {_OR_LEAVE_OUT}",
                )
            for name, value in zip(names, row, strict=False):
                kind = schema.field(name).type if name in schema.names else pa.string()
                if kind != pa.string() and not _converts(value, kind):
                    return InputError(
                        f"{here(line)}the column {name!r} holds {value[:60]!r}, and {kind} before.",
                        hint=f"{_AS_TEXT} {_OR_LEAVE_OUT}",
                        column=name,
                    )
    except csv.Error as error:
        return InputError(f"{here(begin)}this is not CSV: {error}.")
    return InputError(f"{here(0)}this cannot be read as CSV: {reason}.")


def _split_lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [line + "\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _converts(value: str, kind: pa.DataType) -> bool:
    if not value:
        return True
    try:
        text = '"' + value.replace('"', '""') + '"\n'
        if pa.types.is_integer(kind):  # a float widens it
            kind = pa.float64()
        parse_csv(text.encode(), ["x"], ",", {"x": kind}, ["x"])
    except pa.ArrowInvalid:
        return False
    return True


def too_far(file: AnyFile, place: int) -> bool:
    """Whether it would take too long to count the lines of an object up to a place, only to name it."""
    return isinstance(file, RemoteFile) and place > _COUNTED_BYTES


class LineCounter:
    """Counts the lines of a file up to a place; the next place is counted from there."""

    def __init__(self, file: AnyFile, lines_before: int | None = None) -> None:
        self.is_copy = lines_before is not None
        self._file, self._place, self._lines = file, 0, lines_before or 0

    def before(self, place: int) -> int:
        self._lines += sum(block.count(b"\n") for block in blocks(self._file, self._place, place))
        self._place = place
        return self._lines


class Place:
    """Where a block lies, to name its lines, which count from 1."""

    def __init__(self, file: AnyFile, shown: str, place: int, lines: LineCounter | None = None) -> None:
        self.file, self.shown, self.place = file, shown, place
        self._lines = lines or LineCounter(file)
        self.is_copy = self._lines.is_copy

    def moved(self, by: int) -> Place:
        return Place(self.file, self.shown, self.place + by, self._lines) if by else self

    def line_number(self, text: bytes, start: int) -> int | None:
        """Of the line that starts at this byte of the block; None where it would take too long to count."""
        if too_far(self.file, self.place):
            return None
        return self._lines.before(self.place) + text.count(b"\n", 0, start) + 1

    def line(self, text: bytes, start: int) -> str:
        """The line that starts at this byte of the block, for people."""
        number, at = self.line_number(text, start), self.place + start
        if number is None:
            return f"{self.shown}, byte {at:,}"
        return f"{self.shown}, line {number:,}" + ("" if self.is_copy else f" (byte {at:,})")
