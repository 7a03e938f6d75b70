"""Read byte ranges of text as tables, a block of whole rows at a time.

A block is parsed with the types that the plan settled. Where it does not fit them, its own types are found out and
widened with those before; the rows that follow keep the wider types. Dates stay the texts they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError
from brim.rows.cut_text import BOM, RowScanner, blocks, csv_header
from brim.rows.open_files import AnyFile, FileContent, RemotePlace, head_of, looked_into
from brim.rows.python_rows import table_of
from brim.rows.schemas import TypesDiffer, cast, merged
from brim.rows.unit import Kind, Span

_BLANK = b" \t\r\n"
_COUNTED_BYTES = 1 << 28


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
            raise InputError(f"{shown!r} is shorter than it was (byte {place:,}).")
        yield place, block
        place += len(block)
        content.passed(place)


def _last_end(block: bytes, kind: Kind, delimiter: str) -> int:
    if kind != "csv" or b'"' not in block:
        return block.rfind(b"\n") + 1
    ends = RowScanner("csv", delimiter).feed(block)
    return int(ends[-1]) if len(ends) else 0


class TextReader:
    """Parses blocks of one kind. `schema` grows where rows need it."""

    def __init__(self, schema: pa.Schema, columns: tuple[str, ...] | None, delimiter: str = ",") -> None:
        self.schema = schema if columns is None else pa.schema([schema.field(n) for n in columns], schema.metadata)
        self.columns = columns
        self.delimiter = delimiter

    def read(self, file: AnyFile, content: FileContent, span: Span, shown: str, block_bytes: int) -> Iterator[pa.Table]:
        """The rows of a span of a file, whose content from the span's start on is given."""
        names, start = None, span.start
        if span.kind == "csv":
            names, end = self._header(file, content, span, shown)
            start = max(start, end)
        whole = Span(span.path, span.kind, start, span.end)
        for place, block in row_blocks(content, whole, shown, block_bytes, self.delimiter):
            table = self.parse(span.kind, block, names, Place(file, shown, place))
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
        if not text.isascii():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                at = place.place + error.start + len(block) - len(text)
                raise InputError(
                    f"{place.shown!r} is not UTF-8 text (byte {at:,}).", hint="Save it as UTF-8."
                ) from error
        if kind == "lines":
            table = _lines(text)
        else:
            table = self._json(text, place) if names is None else self._csv(text, names, place)
        return None if table is None else self._widened(table, place)

    def _widened(self, table: pa.Table, place: Place) -> pa.Table:
        if self.columns is not None:
            table = table.select([name for name in self.columns if name in table.column_names])
        try:
            self.schema = merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        except TypesDiffer as error:  # a column that the plan has not seen, and that changes later
            raise InputError(
                f"{place.shown!r}, behind byte {place.place:,}: the column {error.column!r} is {error.second} here and "
                f"{error.first} before.",
                hint="Give the column one type in all rows.",
                column=error.column,
            ) from error
        return cast(table, self.schema)

    def _json(self, text: bytes, place: Place) -> pa.Table | None:
        rows = text.count(b"\n") + (not text.endswith(b"\n"))
        expected = self._expected()
        table = parse_json(text, expected, ignore_others=self._is_complete(expected))
        if table is None or table.num_rows != rows:
            lines = [line for line in text.split(b"\n") if line.strip(_BLANK)]
            if not lines:
                return None
            if table is None:
                table = parse_json(text, None)
            if table is None or table.num_rows != len(lines):
                return self._json_by_line(text, place)
        try:
            merged(self.schema, table.schema.with_metadata(self.schema.metadata))
        except TypesDiffer:
            return self._json_by_line(text, place)
        return table

    def _is_complete(self, expected: pa.Schema | None) -> bool:
        """Whether nothing else is wanted: chosen columns of known types, without fields that could be new."""
        if self.columns is None or expected is None or len(expected) < len(self.columns):
            return False
        return not any(_holds_struct(field.type) for field in expected)

    def _expected(self) -> pa.Schema | None:
        fields = [field for field in self.schema if not _holds_null(field.type)]
        return pa.schema(fields) if fields else None

    def _json_by_line(self, text: bytes, place: Place) -> pa.Table:
        rows, numbers = [], []
        for number, line in enumerate(text.split(b"\n")):
            if not line.strip(_BLANK):
                continue
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise InputError(
                    f"{place.line(text, number)}: this is not a row of JSON: {error}.",
                    hint="Each line must be one JSON object.",
                ) from error
            numbers.append(number)
        return table_of(rows, lambda row: place.line(text, numbers[row]), self.schema)

    def _csv(self, text: bytes, names: list[str], place: Place) -> pa.Table:
        types = {field.name: field.type for field in self.schema if not pa.types.is_null(field.type)}
        wanted = [name for name in names if self.columns is None or name in self.columns]
        if text.count(b'"') % 2:
            scanner = RowScanner("csv", self.delimiter)
            scanner.feed(text)
            if scanner.in_quotes:
                raise InputError(
                    f"{place.shown!r} opens a quote behind byte {place.place:,} and never closes it.",
                    hint="Close it, or double it if it is part of a value.",
                )
        self._check_zeros(text, names, types, wanted, place)
        try:
            return parse_csv(text, names, self.delimiter, types, wanted)
        except pa.ArrowInvalid as error:
            reason = error
        try:
            table = parse_csv(text, names, self.delimiter, {n: t for n, t in types.items() if t == pa.string()}, wanted)
            merged(self.schema, table.schema.with_metadata(self.schema.metadata))
            return table
        except (pa.ArrowInvalid, TypesDiffer):
            raise _csv_error(text, names, self.delimiter, self.schema, place, reason) from reason

    def _check_zeros(
        self, text: bytes, names: list[str], types: dict[str, pa.DataType], wanted: list[str], place: Place
    ) -> None:
        """007 behind the samples of the plan must not become 7."""
        numbers = [name for name in wanted if name in types and not pa.types.is_string(types[name])]
        if not numbers or not _starts_with_zero(text, self.delimiter):
            return
        try:
            table = parse_csv(text, names, self.delimiter, dict.fromkeys(numbers, pa.string()), numbers)
        except pa.ArrowInvalid:
            return  # the reading of the numbers tells what is wrong
        for name in numbers:
            lost = pc.index(pc.match_substring_regex(table.column(name), r"^[+-]?0[0-9]"), True).as_py()
            if lost >= 0:
                raise InputError(
                    f"{place.shown}, behind byte {place.place:,}: the column {name!r} holds "
                    f"{table.column(name)[lost].as_py()!r}, which would lose its zeros as {types[name]}.",
                    hint=f"Read it as text: as_text={name!r}.",
                    column=name,
                )


def _starts_with_zero(text: bytes, delimiter: str) -> bool:
    """Whether a value may start with a zero and another digit."""
    data = np.frombuffer(text, np.uint8)
    zeros = np.flatnonzero(data[:-1] == ord("0"))
    follows = data[zeros + 1]
    zeros = zeros[(follows >= ord("0")) & (follows <= ord("9"))]
    before = data[np.maximum(zeros - 1, 0)]
    return bool(np.isin(before, [*f'{delimiter}\n\r"+-'.encode()]).any() or (len(zeros) and zeros[0] == 0))


def _lines(text: bytes) -> pa.Table:
    if b"\r\n" in text:
        text = text.replace(b"\r\n", b"\n")
    ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 10)
    if not text.endswith(b"\n"):
        ends = np.append(ends, len(text))
    offsets = np.concatenate([np.zeros(1, np.int64), ends - np.arange(len(ends))])
    data = text.replace(b"\n", b"")
    if len(data) >= 2**31:
        raise InputError("A line is longer than 2 GiB.", hint="Read such files as documents or cut them.")
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
    text: bytes, names: list[str], delimiter: str, schema: pa.Schema, place: Place, reason: Exception
) -> InputError:
    """The first row that is to blame."""
    import csv

    lines = text.decode().splitlines(keepends=True) if b"\n" not in text else _split_lines(text.decode())
    reader = csv.reader(lines, delimiter=delimiter)
    begin = 0
    try:
        for row in reader:
            line, begin = begin, reader.line_num
            if row and len(row) != len(names):
                here = place.line(text, line)
                return InputError(
                    f"{here}: this row has {len(row)} values, and the header names {len(names)} columns.",
                    hint="Mend the row. Is the delimiter right?",
                )
            for name, value in zip(names, row, strict=False):
                kind = schema.field(name).type if name in schema.names else pa.string()
                if kind != pa.string() and not _converts(value, kind):
                    return InputError(
                        f"{place.line(text, line)}: the column {name!r} holds {value[:60]!r}, and {kind} before.",
                        hint=f"Read it as text: as_text={name!r}.",
                        column=name,
                    )
    except csv.Error as error:
        return InputError(f"{place.line(text, begin)}: this is not CSV: {error}.")
    return InputError(f"{place.line(text, 0)} and what follows cannot be read as CSV: {reason}.")


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
    return isinstance(file, RemotePlace) and place > _COUNTED_BYTES


class Place:
    """Where a block lies, to name its lines in errors."""

    def __init__(self, file: AnyFile, shown: str, place: int) -> None:
        self.file, self.shown, self.place = file, shown, place

    def line(self, text: bytes, number: int) -> str:
        """The number-th line of the block, counted from the start of the file."""
        at = 0
        for _ in range(number):
            at = text.find(b"\n", at) + 1
        at += self.place
        if too_far(self.file, self.place):
            return f"{self.shown}, byte {at:,}"
        before = sum(block.count(b"\n") for block in blocks(self.file, 0, self.place))
        return f"{self.shown}, line {before + number + 1:,} (byte {at:,})"
