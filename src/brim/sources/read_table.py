"""Read a table of metadata as Arrow: from disk, from a bucket, or from memory.

pyarrow infers the types of a CSV or JSON file from all of it, which it holds in memory. Here a few megabytes are read
at a time, with the types of the earlier blocks. A block that does not fit makes them wider by pyarrow's own rules, and
the file is read again from its start. Types only become wider, so most files are read once and few more than twice.
The types and chunks are those of a single read.
"""

from __future__ import annotations

import csv as csv_module
import gzip
import io
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import MemoryLimitError, SourceError
from brim.formats.encrypted import encrypted, is_encrypted
from brim.formats.parquet_levels import plain_type
from brim.formats.row_scanner import RowScanner
from brim.memory.limit import effective_limit
from brim.sizes import format_size
from brim.sources.exact_values import CHANGES_AS_NUMBER, exact, load_row, may_differ
from brim.sources.folder_tree import LocalTree, Tree
from brim.sources.spools import SMALL_TABLE_BYTES, GrowingArray, TableSpool, collect_batches, contiguous
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
    schema = pa.schema(
        [field.with_type(plain_type(field.type, pa.large_string(), pa.large_binary())) for field in table.schema]
    )
    return table if schema.equals(table.schema) else table.cast(schema)


def _check_names(names: list[str], shown: str) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise SourceError(f"{shown!r} has several columns named {twice[0]!r}.", hint="Rename all but one.")
    if "" in names:
        raise SourceError(f"{shown!r} has a column without a name.", hint="Name it in the header.")


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


_BLOCK_BYTES = 1 << 20  # of text that are parsed at a time
# Where chunks end: at the last row end before a multiple of this. pyarrow ends chunks there when it reads a complete
# file, and the chunks of a table decide the bytes of its shards.
_CSV_CHUNK_BYTES = 8 << 20
_JSON_CHUNK_BYTES = 4 << 20
_LONGER = 8  # a line longer than a chunk makes chunks this many times longer
_BATCH_ROWS, _BATCH_BYTES = 65_536, 4 << 20
OpenFile = Callable[[], IO[bytes]]  # opens the text of a table at its start

# pyarrow tries the types of a CSV column in this order, until all values convert.
_CSV_TYPES = (
    pa.int64(), pa.bool_(), pa.date32(), pa.time32("s"), pa.timestamp("s"), pa.timestamp("ns"), pa.float64(),
    pa.string(), pa.binary(),
)  # fmt: skip


class _TypesChanged(Exception):
    """A block does not fit the types so far, so the file is read again from its start."""


class _LineTooLong(Exception):
    """A line spans a whole chunk."""


def _blocks(file: IO[bytes], scanner: RowScanner, chunk_bytes: int) -> Iterator[bytes]:
    """Yield blocks of complete rows. An empty block marks the end of a chunk."""
    pending, position, has_row_end, too_long = [b""], 0, True, False
    while data := file.read(_BLOCK_BYTES):
        if too_long:
            raise _LineTooLong
        ends = scanner.feed(data)
        position += len(data)
        end = int(ends[-1]) if len(ends) else 0
        if position % chunk_bytes == 0 and data.endswith(b"\r") and not scanner.in_quotes:
            end = len(data)  # for pyarrow the row ends here, and the next line feed is an empty line
        pending.append(data[:end])
        if end:
            has_row_end = True
            yield from _unless_blank(b"".join(pending))
            pending = []
        pending.append(data[end:])
        if position % chunk_bytes == 0:
            too_long = not has_row_end and scanner.kind == "jsonl"
            has_row_end = False
            yield b""
    yield from _unless_blank(b"".join(pending))
    yield b""


def _unless_blank(block: bytes) -> Iterator[bytes]:
    if block[:3].strip(b"\r\n") or block.strip(b"\r\n"):
        yield block


def _chunks(blocks: Iterator[bytes], parse: Callable[[bytes], pa.Table]) -> Iterator[pa.RecordBatch]:
    """Yield a record batch for each chunk; at least one, which may have no rows.

    After a block that does not fit the earlier types, the others are only parsed, and _TypesChanged is raised.
    """
    pending: list[pa.Table] = []
    schema: pa.Schema | None = None
    fits, has_rows = True, False
    for block in blocks:
        try:
            if block:
                table = parse(block)
                pending += [table] if table.num_rows else []
                schema = table.schema
        except _TypesChanged:
            fits = False
        if not fits:
            pending = []
        elif pending and not block:
            has_rows = True
            yield from pa.concat_tables(pending).combine_chunks().to_batches()
            pending = []
    if not fits:
        raise _TypesChanged
    if schema is None:
        raise pa.ArrowInvalid("it is empty")
    if not has_rows:
        yield pa.RecordBatch.from_pylist([], schema=schema)


def read_csv(open_file: OpenFile, delimiter: str, check_names: Callable[[list[str]], None]) -> pa.Table:
    """Read a CSV file, with types inferred from its values. Columns that would lose digits as numbers stay text."""
    reader = _CsvReader(delimiter, check_names)
    while True:
        try:
            with open_file() as file:
                reader.rows = 0
                blocks = _blocks(file, RowScanner("csv", delimiter), _CSV_CHUNK_BYTES)
                return collect_batches(_chunks(blocks, reader.parse))
        except _TypesChanged:
            continue


class _CsvReader:
    def __init__(self, delimiter: str, check_names: Callable[[list[str]], None]) -> None:
        from pyarrow import csv

        self._csv, self._check_names = csv, check_names
        self._parsing = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        self._names: list[str] = []
        self._types: dict[str, pa.DataType] = {}
        self._with_nulls: set[str] = set()  # texts that look like numbers, in which the texts for null are null
        self.rows = 0  # before the present block; the header is one

    def parse(self, text: bytes) -> pa.Table:
        """Parse a block; the first one has the header. Raises _TypesChanged if earlier rows had other types."""
        before = dict(self._types)
        while True:
            table = self._convert(text)
            if not self._names:
                self._check_names(table.column_names)
                self._names = table.column_names
            for field in table.schema:
                if pa.types.is_binary(field.type):
                    raise pa.ArrowInvalid(f"the column {field.name!r} is not UTF-8 text; save the table as UTF-8")
                if not pa.types.is_null(field.type):
                    self._types[field.name] = field.type
            as_text = self._numbers_to_keep_as_text(text, table.schema)
            if not as_text:
                break
            self._types |= dict.fromkeys(as_text, pa.string())
            self._with_nulls |= set(as_text)
        has_rows_before = self.rows > 1
        self.rows += table.num_rows + (self.rows == 0)
        if has_rows_before and self._types != before:
            raise _TypesChanged
        for name in self._with_nulls:
            column = table.column(name)
            null = pc.is_in(column, pa.array(self._csv.ConvertOptions().null_values))
            index = table.column_names.index(name)
            table = table.set_column(index, name, pc.if_else(null, pa.scalar(None, pa.string()), column))
        return table

    def _convert(self, text: bytes) -> pa.Table:
        """Parse a block with the types so far, which become wider until it fits."""
        while True:
            try:
                return self._read(text, self._csv.ConvertOptions(column_types=self._types))
            except pa.ArrowInvalid as error:
                match = re.match(r"In CSV column #(\d+): ", str(error))
                if match is None:
                    # With the number of the row in the table instead of that in the block.
                    fault = re.sub(r"Row #(\d+)", lambda row: f"Row #{int(row[1]) + self.rows}", str(error))
                    raise pa.ArrowInvalid(fault) from None
                name = self._names[int(match[1])]
                self._types[name] = _CSV_TYPES[_CSV_TYPES.index(self._types[name]) + 1]

    def _read(self, text: bytes, converting: Any) -> pa.Table:
        names = self._names if self.rows else None
        reading = self._csv.ReadOptions(use_threads=False, block_size=len(text) + 1, column_names=names)
        return self._csv.read_csv(pa.BufferReader(text), reading, self._parsing, converting)

    def _numbers_to_keep_as_text(self, text: bytes, schema: pa.Schema) -> list[str]:
        numbers = [f.name for f in schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
        if not numbers:
            return []
        as_text = self._csv.ConvertOptions(
            include_columns=numbers, column_types=dict.fromkeys(numbers, pa.string()), strings_can_be_null=True
        )
        texts = self._read(text, as_text)
        return [
            name for name in numbers if pc.any(pc.match_substring_regex(texts.column(name), CHANGES_AS_NUMBER)).as_py()
        ]


def read_jsonl(open_file: OpenFile) -> tuple[pa.Table, bool]:
    """Read JSON lines, with types inferred from their values; and return whether a value may have changed."""
    reader, chunk_bytes = _JsonReader(), _JSON_CHUNK_BYTES
    while True:
        try:
            with open_file() as file:
                reader.rows, reader.may_differ = 0, False
                blocks = _blocks(file, RowScanner("jsonl"), chunk_bytes)
                return collect_batches(_chunks(blocks, reader.parse)), reader.may_differ
        except _TypesChanged:
            continue
        except _LineTooLong:
            chunk_bytes *= _LONGER


class _JsonReader:
    def __init__(self) -> None:
        from pyarrow import json

        self._json = json
        self._schema: pa.Schema | None = None
        self.rows = 0  # before the present block
        self.may_differ = False

    def parse(self, text: bytes) -> pa.Table:
        """Parse a block. Raises _TypesChanged if earlier rows had other types."""
        before = self._schema
        try:
            table = self._read(text, self._schema)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            if self._schema is None:
                raise
            table = self._read(text, None)
        if self._schema is None or not table.schema.equals(self._schema):
            if self._schema is None:
                self._schema = table.schema
            else:  # types that hold the values of both, by pyarrow's rules for JSON; fields keep their first order
                first, second = (pa.struct(list(schema)) for schema in (self._schema, table.schema))
                self._schema = pa.schema(list(_merged_type(first, second, "")))
            if not table.schema.equals(self._schema):
                table = self._read(text, self._schema)
        has_rows_before = self.rows > 0
        self.rows += table.num_rows
        self.may_differ = self.may_differ or may_differ(b"", table)
        if has_rows_before and self._schema != before:
            raise _TypesChanged
        return table

    def _read(self, text: bytes, schema: pa.Schema | None) -> pa.Table:
        reading = self._json.ReadOptions(use_threads=False, block_size=len(text) + 1)
        parsing = self._json.ParseOptions(explicit_schema=schema)
        return self._json.read_json(pa.BufferReader(text), reading, parsing)


def _merged_type(first: pa.DataType, second: pa.DataType, column: str) -> pa.DataType:
    if first.equals(second) or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        added = {field.name: field.type for field in second}
        fields = []
        for field in first:
            kind = added.pop(field.name, field.type)
            fields.append(field.with_type(_merged_type(field.type, kind, f"{column}.{field.name}")))
        return pa.struct(fields + [pa.field(name, kind) for name, kind in added.items()])
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(_merged_type(first.value_type, second.value_type, f"{column}[]"))
    for wider, kinds in (
        (pa.float64(), (pa.int64(), pa.float64())),
        (pa.timestamp("ns"), (pa.timestamp("s"), pa.timestamp("ns"))),
        (pa.string(), (pa.timestamp("s"), pa.timestamp("ns"), pa.string())),
    ):
        if first in kinds and second in kinds:
            return wider
    raise pa.ArrowInvalid(f"the column {column[1:]!r} holds {first} in some rows and {second} in others")


def read_parquet(file: Any) -> pa.Table:
    """Read an opened Parquet file column by column. Each column is one chunk."""
    plain = [field for field in file.schema_arrow if GrowingArray.takes(field.type)]
    leaf_counts = [_count_leaves(field.type) for field in file.schema_arrow]
    # The values in memory; encoded values may be smaller.
    encoded = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    size = int(max(encoded, file.metadata.num_rows * 8 * max(len(plain), 1)))
    if sum(leaf_counts) != len(file.schema) or size <= SMALL_TABLE_BYTES:
        return file.read()
    spool, spooled, first = TableSpool(), {}, 0
    for number, field in enumerate(file.schema_arrow):
        own = list(range(first, first + leaf_counts[number]))
        first += leaf_counts[number]
        groups = list(range(file.num_row_groups))
        if field in plain:
            row_groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            size = sum(int(group.column(leaf).total_uncompressed_size) for group in row_groups for leaf in own)
            rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(size // max(file.metadata.num_rows, 1), 1)))
            batches = file.reader.iter_batches(rows, row_groups=groups, column_indices=own, use_threads=False)
            spool.write(pa.schema([field]), contiguous(field, (batch.column(0) for batch in batches)))
        else:
            spooled[number] = file.reader.read_row_groups(groups, column_indices=own, use_threads=False).column(0)
    mapped = iter(spool.tables())
    columns = [spooled[number] if number in spooled else next(mapped).column(0) for number in range(len(leaf_counts))]
    return pa.Table.from_arrays(columns, schema=file.schema_arrow)


def _count_leaves(kind: pa.DataType) -> int:
    return sum(_count_leaves(kind.field(number).type) for number in range(kind.num_fields)) or 1


# Measured on Python 3.11 with pyarrow 26: the interpreter with the imports of a build, and what a column and a row take
# apart from their values (types, readers, writers and the footer; running sums and numbers of files).
BASE_BYTES = 48_000_000
COLUMN_BYTES = 26_000
ROW_BYTES = 48
SPOOLED_BYTES = 5_000_000  # what reading a table to disk took, and the allocator keeps
SPOOLED_WORKER_BYTES = 24_000_000  # what Arrow's allocator keeps for each thread that writes shards of such a table
_WRITER_BYTES = 130_000_000  # at most, for writing the values of a shard
_MANY_COLUMNS, _MANY_ROWS = 1_000, 500_000


def check_table_fits(name: str, memory: str | int | float | None, columns: int, rows: int = 0) -> None:
    """Raise MemoryLimitError if a table of this shape cannot be built within the limit of a job.

    The error names memory that is enough for the whole job, and not only for the part of the table that was read.
    """
    if columns < _MANY_COLUMNS and rows < _MANY_ROWS:
        return
    limit = effective_limit(memory)
    least = BASE_BYTES + COLUMN_BYTES * columns + ROW_BYTES * rows
    if least <= limit.bytes:
        return
    need = least + SPOOLED_BYTES + SPOOLED_WORKER_BYTES + _WRITER_BYTES
    shape = f"has {columns:,} columns" + (f" and {rows:,} rows" if rows else "")
    raise MemoryLimitError(
        f"The table {name!r} {shape}: it needs about {format_size(need)} of memory and the limit is {limit}.",
        hint=f"Raise it with --memory={-(-need // 1_000_000)}MB"
        + (", or leave columns out of the table." if COLUMN_BYTES * columns > least // 2 else "."),
        need_bytes=need,
        limit_bytes=limit.bytes,
    )
