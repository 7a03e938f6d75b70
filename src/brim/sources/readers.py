"""Read a table of metadata from disk, or take one that is in memory, as Arrow."""

from __future__ import annotations

import os
import sys
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import SourceError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
TABLE_EXTENSIONS = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")


def table_extension(path: str) -> str | None:
    """The extension that says how to read a table, or None if it is not one."""
    name = path.lower()
    name = name.removesuffix(".gz") if name.endswith((".csv.gz", ".tsv.gz", ".jsonl.gz")) else name
    return next((extension for extension in TABLE_EXTENSIONS if name.endswith(extension)), None)


def read_table(path: str) -> pa.Table:
    extension = table_extension(path)
    shown = os.path.basename(path)
    if extension is None:
        raise SourceError(
            f"{shown!r} is not a table that brim reads.",
            hint=f"Give a folder, or a file that ends in {', '.join(TABLE_EXTENSIONS)}.",
            path=path,
        )
    try:
        if os.path.getsize(path) == 0:
            raise SourceError(f"The table {shown!r} is empty.", path=path)
        if extension in DELIMITERS:
            table = _read_csv(path, DELIMITERS[extension])
        elif extension == ".parquet":
            import pyarrow.parquet as pq

            table = pq.ParquetFile(path).read()
        else:
            table = _read_jsonl(path)
        return checked(table, shown)
    except OSError as error:
        raise SourceError(f"The table {shown!r} cannot be read: {error.strerror or error}.", path=path) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).replace(os.path.dirname(path) + os.sep, "").strip().rstrip(".")
        raise SourceError(
            f"The table {shown!r} is broken: {reason}.", hint="Mend that place and run again.", path=path
        ) from error


def as_table(source: Any) -> pa.Table:
    """A pandas, Polars or Arrow table, or a list of dicts."""
    try:
        if isinstance(source, pa.Table):
            table = source
        elif type(source).__module__.split(".")[0] == "pandas":
            table = pa.Table.from_pandas(source, preserve_index=False)
        elif isinstance(source, list):
            table = pa.Table.from_pylist(source)
        elif type(source).__module__.split(".")[0] == "polars":
            oldest = sys.modules["polars"].CompatLevel.oldest()  # without view types, which few functions take
            table = source.lazy().collect().to_arrow(compat_level=oldest)
        elif hasattr(source, "__arrow_c_stream__") or isinstance(source, pa.RecordBatch):
            table = pa.table(source)
        else:
            raise SourceError(
                f"brim.table() cannot read a {type(source).__name__}.",
                hint="Give a path, a pandas, Polars or Arrow table, or a list of dicts.",
            )
    except (pa.ArrowException, TypeError) as error:
        raise SourceError(f"The table cannot be turned into Arrow: {error}.") from error
    return checked(table, "the table")


def checked(table: pa.Table, shown: str) -> pa.Table:
    """A table with distinct, non-empty column names, without metadata of other libraries."""
    names = table.column_names
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SourceError(f"{shown!r} has several columns named {twice[0]!r}.", hint="Rename all but one.")
    if "" in names:
        raise SourceError(f"{shown!r} has a column without a name.", hint="Name it in the header.")
    return _without_views(table.replace_schema_metadata(None))


def _without_views(table: pa.Table) -> pa.Table:
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    schema = pa.schema([field.with_type(plain.get(field.type, field.type)) for field in table.schema])
    return table if schema.equals(table.schema) else table.cast(schema)


def _read_csv(path: str, delimiter: str) -> pa.Table:
    from pyarrow import csv

    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # One thread: the reader's threads would each keep memory of their own.
    read = csv.ReadOptions(use_threads=False, block_size=8 << 20)
    table = csv.read_csv(path, read, parse)
    # 007 is a name, not the number seven: columns that would lose leading zeros stay text.
    numbers = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    if numbers:
        as_text = csv.ConvertOptions(include_columns=numbers, column_types=dict.fromkeys(numbers, pa.string()))
        texts = csv.read_csv(path, read, parse, as_text)
        for name in numbers:
            text = texts.column(name)
            if pc.any(pc.match_substring_regex(text, r"^[+-]?0[0-9]")).as_py():
                null = pc.is_null(table.column(name))
                kept = pc.if_else(null, pa.scalar(None, pa.string()), text)
                table = table.set_column(table.column_names.index(name), name, kept)
    return table


def _read_jsonl(path: str) -> pa.Table:
    from pyarrow import json

    block = 4 << 20
    while True:
        try:
            return json.read_json(path, json.ReadOptions(use_threads=False, block_size=block))
        except pa.ArrowInvalid as error:  # a line longer than a block
            if "straddling" not in str(error) or block > max(os.path.getsize(path), 1) * 64:
                raise
            block *= 8
