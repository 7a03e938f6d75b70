"""Read a table of metadata as Arrow: from disk, from a bucket, or from memory."""

from __future__ import annotations

import csv as csv_module
import gzip
import io
import os
import sys
from collections import Counter
from typing import IO, Any

import pyarrow as pa

from brim.errors import SourceError
from brim.formats.encrypted import encrypted, is_encrypted
from brim.sources.exact_values import exact, load_row
from brim.sources.folder_tree import LocalTree, Tree
from brim.sources.table_batches import read_csv, read_jsonl, read_parquet
from brim.sources.table_memory import check_table_fits
from brim.state.atomic_files import reason
from brim.state.scratch import Scratch

DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COPY_BYTES = 1 << 20
_MOST_HEADER_BYTES = 16 << 20
TABLE_EXTENSIONS = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")


def table_extension(path: str) -> str | None:
    """Return the extension of a table, without .gz; None if a file is not a table."""
    name = path.lower()
    name = name.removesuffix(".gz") if name.endswith((".csv.gz", ".tsv.gz", ".jsonl.gz")) else name
    return next((extension for extension in TABLE_EXTENSIONS if name.endswith(extension)), None)


class _TableFile:
    """The file of a table, which is read several times. An object is fetched once, to a scratch file."""

    def __init__(self, path: str, tree: Tree) -> None:
        self.shown = os.path.basename(path)
        self._zipped = path.endswith(".gz")
        self._full = os.path.join(tree.root, path)
        self._scratch: Scratch | None = None
        if tree.bucket is not None:
            self._scratch = Scratch()
            with tree.open(path) as file, open(self._scratch.descriptor, "wb", closefd=False) as copy:
                while block := file.read(_COPY_BYTES):
                    copy.write(block)

    def for_arrow(self) -> Any:
        if self._scratch is None:
            return pa.memory_map(self._full)
        return pa.PythonFile(self._raw(), "r")

    def open(self) -> IO[bytes]:
        """Open the content, uncompressed."""
        return gzip.open(self._raw(), "rb") if self._zipped else self._raw()  # type: ignore[return-value]

    def _raw(self) -> IO[bytes]:
        if self._scratch is None:
            return open(self._full, "rb")
        os.lseek(self._scratch.descriptor, 0, os.SEEK_SET)
        return open(self._scratch.descriptor, "rb", closefd=False)


def read_table(path: str, tree: Tree | None = None, memory: str | int | float | None = None) -> pa.Table:
    """Read the table at a path of a tree. MemoryLimitError if it does not fit into `memory`."""
    tree = tree or LocalTree("/")
    extension = table_extension(path)
    shown = os.path.basename(path)
    if extension is None:
        raise SourceError(
            f"{shown!r} is not a table that brim can read.",
            hint=f"Use a folder, or a file that ends in {', '.join(TABLE_EXTENSIONS)}.",
            path=path,
        )
    try:
        if tree.size(path) == 0:
            raise SourceError(f"The table {shown!r} is empty.", path=path)
        source = _TableFile(path, tree)
        if extension in DELIMITERS:
            check_table_fits(shown, memory, _count_csv_columns(source, DELIMITERS[extension]))
            _check_quotes(source, DELIMITERS[extension])
            table = read_csv(source.open, DELIMITERS[extension], lambda names: _check_names(names, shown))
        elif extension == ".parquet":
            import pyarrow.parquet as pq

            with source.for_arrow() as file:
                parquet = pq.ParquetFile(file)
                check_table_fits(shown, memory, len(parquet.schema_arrow), parquet.metadata.num_rows)
                table = read_parquet(parquet)
        else:
            with source.open() as file:  # about the number of keys of the first row
                check_table_fits(shown, memory, file.readline(_MOST_HEADER_BYTES).count(b'":'))
            table = _read_jsonl(source)
        check_table_fits(shown, memory, table.num_columns, table.num_rows)
        return checked(table, shown)
    except OSError as error:
        if extension == ".parquet" and is_encrypted(error):
            raise encrypted(f"The table {shown!r}") from error
        raise SourceError(f"The table {shown!r} cannot be read: {reason(error)}.", path=path) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        reason_text = str(error).replace(os.path.dirname(path) + os.sep, "").strip().rstrip(".")
        raise SourceError(
            f"The table {shown!r} is not valid: {reason_text}.",
            hint="Fix it and run the same command again.",
            path=path,
        ) from error


def as_table(source: Any) -> pa.Table:
    """Convert a pandas, Polars or Arrow table, or a list of dicts."""
    try:
        if isinstance(source, pa.Table):
            table = source
        elif type(source).__module__.split(".")[0] == "pandas":
            has_index = any(name is not None for name in source.index.names)
            table = pa.Table.from_pandas(source, preserve_index=has_index)
        elif isinstance(source, list):
            names = dict.fromkeys(name for row in source for name in row)  # not only those of the first row
            table = pa.table({name: [row.get(name) for row in source] for name in names})
        elif type(source).__module__.split(".")[0] == "polars":
            oldest = sys.modules["polars"].CompatLevel.oldest()  # without view types, which few functions take
            table = source.lazy().collect().to_arrow(compat_level=oldest)
        elif hasattr(source, "__arrow_c_stream__") or isinstance(source, pa.RecordBatch):
            table = pa.table(source)
        else:
            raise SourceError(
                f"brim.table() cannot read a {type(source).__name__}.",
                hint="Use a path, a pandas, Polars or Arrow table, or a list of dicts.",
            )
    except (pa.ArrowException, TypeError, AttributeError) as error:
        raise SourceError(f"The table cannot be converted to Arrow: {error}.") from error
    return checked(table, "the table")


def checked(table: pa.Table, shown: str) -> pa.Table:
    """Return a table without metadata of other libraries and without views, which few functions take."""
    _check_names(table.column_names, shown)
    table = table.replace_schema_metadata(None)
    schema = pa.schema([field.with_type(plain_type(field.type)) for field in table.schema])
    return table if schema.equals(table.schema) else table.cast(schema)


def _check_names(names: list[str], shown: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SourceError(f"{shown!r} has several columns named {twice[0]!r}.", hint="Rename all but one.")
    if "" in names:
        raise SourceError(f"{shown!r} has a column without a name.", hint="Name it in the header.")


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return a type with texts and binaries in place of views of them."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    return kind


def _count_csv_columns(source: _TableFile, delimiter: str) -> int:
    with source.open() as file:
        header = file.readline(_MOST_HEADER_BYTES).decode(errors="replace")
    try:
        return len(next(csv_module.reader([header], delimiter=delimiter), ()))
    except csv_module.Error:  # the reader of the table raises a better error
        return header.count(delimiter) + 1


def _check_quotes(source: _TableFile, delimiter: str) -> None:
    """Raise ArrowInvalid if a quote is never closed: it would make one cell of the rest of the table."""
    with source.open() as file:
        quotes = sum(block.count(b'"') for block in iter(lambda: file.read(1 << 20), b""))
    if quotes % 2 == 0:
        return
    try:
        with io.TextIOWrapper(source.open(), encoding="utf-8-sig", newline="") as text:
            for _ in csv_module.reader(text, delimiter=delimiter, strict=True):
                pass
    except csv_module.Error as error:
        raise pa.ArrowInvalid(f"a quote is opened and never closed ({error})") from error


def _read_jsonl(source: _TableFile) -> pa.Table:
    with source.open() as file:
        if any(line.lstrip().startswith(b"n") for line in file):  # pyarrow reads null as a row, or crashes
            _check_lines(source, None)
    try:
        table, may_differ = read_jsonl(source.open)
    except pa.ArrowInvalid:
        _check_lines(source, None)
        raise
    if may_differ:
        _check_lines(source, table.schema)
    return table


def _check_lines(source: _TableFile, schema: pa.Schema | None) -> None:
    """Refuse the first line that is not a row of distinct keys, or whose integers the schema does not hold."""
    with source.open() as file:
        for number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            name = None
            try:
                row = load_row(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                for name, value in row.items() if schema is not None else ():
                    exact(value, schema.field(name).type)  # type: ignore[union-attr]
            except ValueError as error:
                hint = "Write such values as text, in quotes." if name is not None else "Correct this line."
                column = "" if name is None else f"in the column {name!r}, "
                message = f"The table {source.shown!r} is broken: line {number:,}: {column}{error}."
                raise SourceError(message, hint=hint) from error
