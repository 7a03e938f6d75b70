"""Read byte ranges of text as tables, one block of complete rows at a time.

A block is parsed with the types of the plan. If it does not fit them, its own types are inferred and merged with those
before; the rows that follow keep the wider types. Dates stay texts.
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
from brim.compute.rows.schemas import TypesDiffer, cast, contains_type, merged, unify
from brim.compute.rows.source_hash import SourceHash
from brim.compute.rows.unit import Kind, OnUnreadable, Span, UnreadableRow
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
_MOST_COUNTED_BYTES = 1 << 32  # beyond that, each unit would take seconds to count lines
_AS_TEXT = "Put such a value into the first rows, so that the column is read as text."
_OR_LEAVE_OUT = "Or leave such rows out with --on-error=skip or --on-error=quarantine."


def row_blocks(
    content: FileContent, span: Span, shown: str, block_bytes: int, delimiter: str
) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of consecutive blocks that end at row ends. A longer row is one block."""
    offset = span.start
    while offset < span.end:
        size = min(block_bytes, span.end - offset)
        while True:
            block = content.read_at(offset, size)
            if offset + len(block) >= span.end or len(block) < size:
                break
            if span.kind == "csv" and b'"' in block:
                ends = RowScanner("csv", delimiter).feed(block)
                end = int(ends[-1]) if len(ends) else 0
            else:
                end = block.rfind(b"\n") + 1
            if end:
                block = block[:end]
                break
            size = min(2 * size, span.end - offset)
        if not block:
            raise InputError(f"{shown!r} became shorter while it was read (byte {offset:,}).")
        yield offset, block
        offset += len(block)
        content.release(offset)


class TextReader:
    """Parse blocks of one format. `schema` grows if rows need it.

    Unreadable rows are an error, or, with `on_unreadable`, are skipped and reported. `rows` counts both.
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
        """Yield the rows of a span of a file, as tables. `content` starts at the span's start.

        `lines_before` is for a copy of a part of a file: how many lines of the original precede it.
        """
        names, start = None, span.start
        if span.kind == "csv":
            names, end = self._header(file, content, span, shown)
            start = max(start, end)
            if hashed is not None:
                hashed.add_names(names)
        whole = Span(span.path, span.kind, start, span.end)
        lines = LineCounter(file, lines_before)
        for offset, block in row_blocks(content, whole, shown, block_bytes, self.delimiter):
            if hashed is not None:
                hashed.update(block)
            table = self.parse(span.kind, block, names, BlockPosition(file, shown, offset, lines))
            if table is not None:
                yield table

    def _header(self, file: AnyFile, content: FileContent, span: Span, shown: str) -> tuple[list[str], int]:
        if span.start == 0:
            return csv_header(head_of(content, span.end), self.delimiter, shown)
        with looked_into(file) as start_of_file:
            return csv_header(head_of(start_of_file, span.end), self.delimiter, shown)

    def parse(self, kind: Kind, block: bytes, names: list[str] | None, position: BlockPosition) -> pa.Table | None:
        """Parse a block that starts and ends at row ends; None if it has no rows. `names` is for CSV."""
        text = block.removeprefix(BOM) if position.offset == 0 else block
        position = position.advance(len(block) - len(text))
        is_text = text.isascii()
        if not is_text:
            try:
                text.decode()
                is_text = True
            except UnicodeDecodeError as error:
                if self._on_unreadable is None:
                    raise InputError(
                        f"{position.shown!r} is not UTF-8 text (byte {position.offset + error.start:,}).",
                        hint=f"Save it as UTF-8. {_OR_LEAVE_OUT}",
                    ) from error
        if kind == "lines":
            table = _lines(text if is_text else self._valid_lines(text, position))
        elif names is None:
            table = self._json(text, position) if is_text else self._json_by_line(text, position)
        else:
            table = self._csv(text, names, position)
        if table is None:
            return None
        self.rows += table.num_rows
        return self._widened(table, position)

    def _left_out(self, position: BlockPosition, text: bytes, rows: Rows, reasons: dict[int, str]) -> None:
        """Report skipped rows of a block, by their numbers in the block."""
        assert self._on_unreadable is not None
        for number in sorted(reasons):
            start, content = rows[number]
            line = position.line_number(text, start) if position.offset < _MOST_COUNTED_BYTES else None
            byte = None if position.is_copy else position.offset + start
            row = UnreadableRow(self.rows + number, position.shown, line, byte, content, reasons[number])
            self._on_unreadable(row)
        self.rows += len(reasons)  # the others are counted with their table

    def _widened(self, table: pa.Table, position: BlockPosition) -> pa.Table:
        if self.columns is not None:
            table = table.select([name for name in self.columns if name in table.column_names])
        try:
            self.schema = merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        except TypesDiffer as error:  # a column that is not in the plan, and that changes later
            raise InputError(
                f"{position.shown!r}, after byte {position.offset:,}: the column {error.column!r} is {error.second} "
                f"here and {error.first} before.",
                hint="Use one type for the column in all rows.",
                column=error.column,
            ) from error
        return cast(table, self.schema)

    def _valid_lines(self, text: bytes, position: BlockPosition) -> bytes:
        """Return the lines that are UTF-8; report the others."""
        rows, reasons = _rows_of_lines(text, blank=b""), dict[int, str]()
        for number, (_, line) in enumerate(rows):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                reasons[number] = f"this is not UTF-8 text (character {error.start + 1:,} of the line)"
        self._left_out(position, text, rows, reasons)
        kept_lines = [line for number, (_, line) in enumerate(rows) if number not in reasons]
        return b"".join(line + b"\n" for line in kept_lines)

    def _json(self, text: bytes, position: BlockPosition) -> pa.Table | None:
        if self._json_columns or not is_parseable(text):
            return self._json_by_line(text, position)
        newlines = np.count_nonzero(np.frombuffer(text, np.uint8) == ord("\n"))  # 6 times as fast as bytes.count
        rows = newlines + (not text.endswith(b"\n"))
        expected = self._expected()
        table = parse_json(text, expected, ignore_others=self._is_complete(expected))
        if table is None or table.num_rows != rows:
            lines = [line for line in text.split(b"\n") if line.strip(_BLANK)]
            if table is None:
                table = parse_json(text, None)
            if table is None or table.num_rows != len(lines):
                return self._json_by_line(text, position)
        try:
            cast(table, merged(self.schema, table.schema.with_metadata(self.schema.metadata)))
        except (TypesDiffer, InputError):
            return self._json_by_line(text, position)
        return self._json_by_line(text, position) if may_differ(text, table) else table

    def _is_complete(self, expected: pa.Schema | None) -> bool:
        """Return whether new fields can be ignored: the columns are chosen, their types known, and none is a struct."""
        if self.columns is None or expected is None or len(expected) < len(self.columns):
            return False
        return not any(contains_type(field.type, pa.types.is_struct) for field in expected)

    def _expected(self) -> pa.Schema | None:
        fields = [field for field in self.schema if not contains_type(field.type, pa.types.is_null)]
        return pa.schema(fields) if fields else None

    def _json_by_line(self, text: bytes, position: BlockPosition) -> pa.Table | None:
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
                    raise InputError(f"{position.describe_line(text, start)}: {error}.", hint=hint) from error
                reasons[number] = str(error)

        def refuse(row: int, reason: str) -> None:
            reasons[numbers[row]] = reason

        table = None
        if objects:
            schema = self.schema
            may_leave_out = None if self._on_unreadable is None else refuse
            try:
                table = table_of(
                    objects, lambda row: position.describe_line(text, rows[numbers[row]][0]), schema, may_leave_out
                )
            except InputError as error:
                message, hint = error.words
                raise InputError(message, hint=f"{hint} {_OR_LEAVE_OUT}".strip(), **error.facts) from error
        if reasons:
            self._left_out(position, text, rows, reasons)
        return table

    def _csv(self, text: bytes, names: list[str], position: BlockPosition) -> pa.Table | None:
        if text.count(b'"') % 2:
            scanner = RowScanner("csv", self.delimiter)
            scanner.feed(text)
            if scanner.in_quotes:
                raise InputError(
                    f"{position.shown!r} has a quote after byte {position.offset:,} that is never closed.",
                    hint="Close it, or double it if it is part of a value.",
                )
        try:
            return self._csv_table(text, names, position)
        except _DOES_NOT_PARSE as error:
            if self._on_unreadable is None:
                raise self._csv_error(text, names, position, error) from error
        tables, reasons = list[pa.Table](), dict[int, str]()
        rows = _rows_of_csv(text, self.delimiter)
        self._csv_by_halves(rows, 0, len(rows), names, tables, reasons)
        self._left_out(position, text, rows, reasons)
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

    def _csv_error(self, text: bytes, names: list[str], position: BlockPosition | None, error: Exception) -> InputError:
        """Return the error of the first invalid row, with its location if `position` is given."""
        if isinstance(error, InputError):
            return error
        if isinstance(error, UnicodeDecodeError):
            return InputError(f"this is not UTF-8 text (character {error.start + 1:,} of the row).")
        return _csv_error(text, names, self.delimiter, self.schema, position, error)

    def _csv_table(self, text: bytes, names: list[str], position: BlockPosition | None) -> pa.Table:
        """Parse rows; raise one of _DOES_NOT_PARSE."""
        if not text.isascii():
            text.decode()
        types = {field.name: field.type for field in self.schema if not pa.types.is_null(field.type)}
        columns = [name for name in names if self.columns is None or name in self.columns]
        try:
            table = parse_csv(text, names, self.delimiter, types, columns)
        except pa.ArrowInvalid:
            text_types = {name: kind for name, kind in types.items() if kind == pa.string()}
            table = parse_csv(text, names, self.delimiter, text_types, columns)
            merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        self._check_numbers(text, names, table, position)
        return table

    def _check_numbers(self, text: bytes, names: list[str], table: pa.Table, position: BlockPosition | None) -> None:
        """Refuse values that would change as numbers: 007 or 0x10 after the plan's samples, or a long id."""
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
                location = "" if position is None else f"{position.shown}, after byte {position.offset:,}: "
                value, kind = table.column(name)[lost].as_py(), wide.field(name).type
                raise InputError(
                    f"{location}the column {name!r} holds {value!r}, which would be changed as {kind}.",
                    hint=f"{_AS_TEXT} {_OR_LEAVE_OUT}",
                    column=name,
                )


_DOES_NOT_PARSE = (pa.ArrowInvalid, TypesDiffer, UnicodeDecodeError, InputError)
Rows = list[tuple[int, bytes]]  # offset of each row in its block, and its bytes


def _rows_of_lines(text: bytes, blank: bytes = _BLANK) -> Rows:
    """Return the lines of a text, without blank ones."""
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
    """Return the rows that are UTF-8 text with `cells` cells."""
    import csv

    kept_rows = []
    for _, row in _rows_of_csv(text, delimiter):
        try:
            parsed = list(csv.reader(_split_lines(row.decode()), delimiter=delimiter))
        except (UnicodeDecodeError, csv.Error):
            continue
        if len(parsed) == 1 and len(parsed[0]) == cells:
            kept_rows.append(row)
    return b"".join(kept_rows)


def _starts_with_zero(text: bytes, delimiter: str) -> bool:
    """Return whether a value may start with a zero and another digit, or with 0x."""
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
    """Parse complete lines, with dates as texts; None if pyarrow cannot."""
    from pyarrow import json as arrow_json

    unexpected = "ignore" if ignore_others else "infer"
    read = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    while True:
        parse = arrow_json.ParseOptions(explicit_schema=expected, unexpected_field_behavior=unexpected)
        try:
            table = arrow_json.read_json(pa.BufferReader(text), read, parse)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return None
        plain = without_dates(table.schema)
        if plain is table.schema or plain.equals(table.schema):
            return table
        fields = [field for field in plain if not contains_type(field.type, pa.types.is_null)]
        narrowed = pa.schema(fields)
        if expected is not None and narrowed.equals(expected):
            return None
        expected = narrowed


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


def parse_csv(
    text: bytes, names: list[str], delimiter: str, types: dict[str, pa.DataType], columns: list[str]
) -> pa.Table:
    """Parse rows without a header. The types of columns that are not in `types` are inferred."""
    from pyarrow import csv

    read = csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names)
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=b'"' in text)
    convert = csv.ConvertOptions(column_types=types, include_columns=columns, check_utf8=False)
    if not text.strip(b"\r\n"):
        return pa.table({name: pa.nulls(0, types.get(name, pa.null())) for name in columns})
    table = csv.read_csv(pa.BufferReader(text), read, parse, convert)
    plain = without_dates(table.schema)
    if plain.equals(table.schema):
        return table
    types = types | {field.name: field.type for field in plain if field.type != table.schema.field(field.name).type}
    return parse_csv(text, names, delimiter, types, columns)


def _csv_error(
    text: bytes, names: list[str], delimiter: str, schema: pa.Schema, position: BlockPosition | None, reason: Exception
) -> InputError:
    """Return the error of the first invalid row, with its location if `position` is given."""
    import csv

    def at_line(line: int) -> str:
        start = sum(len(text_line.encode()) for text_line in lines[:line])
        return "" if position is None else f"{position.describe_line(text, start)}: "

    lines = text.decode().splitlines(keepends=True) if b"\n" not in text else _split_lines(text.decode())
    reader = csv.reader(lines, delimiter=delimiter)
    next_line = 0
    try:
        for row in reader:
            line, next_line = next_line, reader.line_num
            if row and len(row) != len(names):
                return InputError(
                    f"{at_line(line)}this row has {len(row)} values, and the header names {len(names)} columns.",
                    hint=f"Correct the row. Is the delimiter right? {_OR_LEAVE_OUT}",
                )
            for name, value in zip(names, row, strict=False):
                kind = schema.field(name).type if name in schema.names else pa.string()
                if kind != pa.string() and not _converts(value, kind):
                    return InputError(
                        f"{at_line(line)}the column {name!r} holds {value[:60]!r}, and {kind} before.",
                        hint=f"{_AS_TEXT} {_OR_LEAVE_OUT}",
                        column=name,
                    )
    except csv.Error as error:
        return InputError(f"{at_line(next_line)}this is not CSV: {error}.")
    return InputError(f"{at_line(0)}this cannot be read as CSV: {reason}.")


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


def too_far(file: AnyFile, offset: int) -> bool:
    """Return whether counting the lines of a remote file up to an offset would take too long."""
    return isinstance(file, RemoteFile) and offset > _COUNTED_BYTES


class LineCounter:
    """Count the lines of a file up to an offset; the next count continues there."""

    def __init__(self, file: AnyFile, lines_before: int | None = None) -> None:
        self.is_copy = lines_before is not None
        self._file, self._offset, self._lines = file, 0, lines_before or 0

    def before(self, offset: int) -> int:
        self._lines += sum(block.count(b"\n") for block in blocks(self._file, self._offset, offset))
        self._offset = offset
        return self._lines


class BlockPosition:
    """The position of a block in its file, to name its lines, which count from 1."""

    def __init__(self, file: AnyFile, shown: str, offset: int, lines: LineCounter | None = None) -> None:
        self.file, self.shown, self.offset = file, shown, offset
        self._lines = lines or LineCounter(file)
        self.is_copy = self._lines.is_copy

    def advance(self, by: int) -> BlockPosition:
        return BlockPosition(self.file, self.shown, self.offset + by, self._lines) if by else self

    def line_number(self, text: bytes, start: int) -> int | None:
        """Return the line number of this byte of the block; None if counting would take too long."""
        if too_far(self.file, self.offset):
            return None
        return self._lines.before(self.offset) + text.count(b"\n", 0, start) + 1

    def describe_line(self, text: bytes, start: int) -> str:
        """Describe a line by a byte of the block, for messages."""
        number, offset = self.line_number(text, start), self.offset + start
        if number is None:
            return f"{self.shown}, byte {offset:,}"
        return f"{self.shown}, line {number:,}" + ("" if self.is_copy else f" (byte {offset:,})")
