"""The schema of text files, settled from samples: the first block of some files, the middle and end of the largest."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError
from brim.rows.cut_text import BOM, RowScanner, csv_header, next_line
from brim.rows.open_files import decompressed, head_of, looked_into
from brim.rows.read_text import Place, TextReader, parse_csv, row_blocks
from brim.rows.row_files import RowFiles
from brim.rows.row_options import RowOptions
from brim.rows.schemas import TypesDiffer, merged
from brim.rows.unit import Span

SAMPLE_BYTES = 2 << 20
_FILES = 16
# 007 is a name and not the number seven, and twenty digits are more than a number holds.
_LOSES_DIGITS = r"^[+-]?(0[0-9]|[0-9]{19,}$|[0-9]{16,}\.?[0-9]*$)"


def settle(found: RowFiles, options: RowOptions) -> pa.Schema:
    """The schema of lines, documents, JSON or CSV."""
    if found.kind == "lines":
        return pa.schema([("text", pa.string())])
    if found.kind == "document":
        return pa.schema([("text", pa.string()), ("path", pa.string())])
    schema = _of_csv(found, options) if found.kind == "csv" else _of_json(found)
    if not len(schema):
        raise InputError(f"{found.shown(0)!r} has no rows to tell the columns from.")
    return schema


def _samples(found: RowFiles) -> Iterator[tuple[int, int, bytes]]:
    """(file, place, whole rows)."""
    for number in range(min(len(found.files), _FILES)):
        if found.codec is None:
            yield number, *_rows_at(found, number, 0, int(found.files.sizes[number]))
        else:
            yield number, 0, _first_rows(found, number)
    if found.codec is None:
        largest = int(found.files.sizes.argmax())
        size, file = int(found.files.sizes[largest]), found.file(largest)
        for place in (size // 2, size - SAMPLE_BYTES // 2):
            if place > SAMPLE_BYTES and (start := next_line(file, place, size)) < size:
                end = min(start + SAMPLE_BYTES, size)
                end = next_line(file, end, size) if end < size else end
                yield largest, *_rows_at(found, largest, start, end)


def _rows_at(found: RowFiles, number: int, start: int, end: int) -> tuple[int, bytes]:
    """The first block of whole rows of a part of a file, and where it starts."""
    span = Span(found.full(number), found.kind, start, end)
    with looked_into(found.file(number)) as content:
        return next(row_blocks(content, span, found.shown(number), SAMPLE_BYTES, found.delimiter))


def _first_rows(found: RowFiles, number: int) -> bytes:
    content = b""
    scanner, end = RowScanner(found.kind, found.delimiter), 0
    for block in decompressed(found.file(number), str(found.codec), found.shown(number)):
        ends = scanner.feed(block)
        if len(ends):
            end = len(content) + int(ends[-1])
        content += block
        if len(content) >= SAMPLE_BYTES and end:
            return content[:end]
    return content


def _of_json(found: RowFiles) -> pa.Schema:
    reader = TextReader(pa.schema([]), None)
    for number, place, text in _samples(found):
        shown = found.shown(number)
        if not place and text.removeprefix(BOM).lstrip()[:1] == b"[":
            raise InputError(
                f"{shown!r} is one JSON array, not JSON lines.", hint="Make lines of it: jq -c '.[]' FILE > FILE.jsonl"
            )
        reader.parse("jsonl", text, None, Place(found.file(number), shown, place))
    return reader.schema


def _of_csv(found: RowFiles, options: RowOptions) -> pa.Schema:
    whole: pa.Schema | None = None
    for number, place, text in _samples(found):
        shown = found.shown(number)
        names, end = _header(found, number, text)
        place, text = (place, text) if place else (end, text[end:])
        known = {name: pa.string() for name in options.as_text if name in names}
        text = text if text.isascii() else text.decode("utf-8", "replace").encode()
        try:
            own = _kept_digits(parse_csv(text, names, found.delimiter, known, names), text, names, found.delimiter)
        except pa.ArrowInvalid:
            if place == end:  # the reader tells which row is to blame
                reader = TextReader(pa.schema([(name, pa.string()) for name in names]), None, found.delimiter)
                reader.parse("csv", text, names, Place(found.file(number), shown, place))
            continue  # a block from the middle may have started inside of quotes
        whole = own if whole is None else _text_where_they_differ(whole, own)
    assert whole is not None
    missing = sorted(set(options.as_text) - set(whole.names))
    if missing:
        raise InputError(f"The source has no column {missing[0]!r}.", hint=f"It has {', '.join(whole.names)}.")
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in whole])


def _header(found: RowFiles, number: int, text: bytes) -> tuple[list[str], int]:
    if found.codec is None:
        with looked_into(found.file(number)) as content:
            return csv_header(head_of(content, int(found.files.sizes[number])), found.delimiter, found.shown(number))
    return csv_header([text], found.delimiter, found.shown(number))


def _kept_digits(table: pa.Table, text: bytes, names: list[str], delimiter: str) -> pa.Schema:
    numbers = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    schema = table.schema
    if not numbers:
        return schema
    texts = parse_csv(text, names, delimiter, dict.fromkeys(numbers, pa.string()), numbers)
    for name in numbers:
        if pc.any(pc.match_substring_regex(texts.column(name), _LOSES_DIGITS)).as_py():
            schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    return schema


def _text_where_they_differ(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    while True:
        try:
            return merged(first, second)
        except TypesDiffer as error:
            at = first.get_field_index(error.column)
            first = first.set(at, pa.field(error.column, pa.string()))
            second = second.set(second.get_field_index(error.column), pa.field(error.column, pa.string()))
