"""Open a source of rows of any kind: see `open_rows`. The schema of text files is inferred from samples."""

from __future__ import annotations

import errno
import glob
import hashlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.compute.rows.cut_tables import TableLayout, lay_out, of_arrow, row_units
from brim.compute.rows.cut_text import BOM, RowScanner, blocks, csv_header, next_line, shortened_row, text_units
from brim.compute.rows.open_files import decompressed, head_of, looked_into
from brim.compute.rows.python_rows import digest_of_tables, peek, rows_as_json, tables_of, vote
from brim.compute.rows.read_text import BlockPosition, TextReader, parse_csv, row_blocks, well_formed_csv
from brim.compute.rows.read_unit import read_unit
from brim.compute.rows.row_files import WILD, RowFiles, RowOptions, Skip, find, never
from brim.compute.rows.schemas import TypesDiffer, merged, stored_features, unify
from brim.compute.rows.selected_rows import SelectedRows
from brim.compute.rows.spool import table_spool, text_spool
from brim.compute.rows.unit import Reading, RowSource, Span, Unit, UnreadableRow, unit_size
from brim.errors import InputError, SourceError
from brim.file_set import FileSet, FileSetBuilder
from brim.options.groups import InputOptions
from brim.partition import arrow_bytes
from brim.records import dataclass
from brim.sources.dataset_source import batches_of
from brim.sources.datasets_private import fingerprint_of, is_reordered, is_stream, row_order
from brim.sources.exact_values import CHANGES_AS_NUMBER
from brim.sources.file_table import FileTable, no_rows_error
from brim.sources.hive_partitions import partition_fields
from brim.sources.parquet_shards import plain_schema
from brim.sources.read_table import as_table
from brim.sources.selection import Selection
from brim.sources.where import labels_of, where_mask
from brim.state.atomic_files import reason
from brim.state.scratch import scratch_folder

SAMPLE_BYTES = 2 << 20
_FILES = 16


def infer_schema(row_files: RowFiles, options: RowOptions) -> pa.Schema:
    """Infer the schema of text files from the start of several files, and the middle and end of the largest."""
    if row_files.kind == "lines":
        return pa.schema([("text", pa.string())])
    if row_files.kind == "document":
        return pa.schema([("text", pa.string()), ("path", pa.string())])
    schema = _of_csv(row_files, options) if row_files.kind == "csv" else _of_json(row_files, options)
    if not len(schema):
        if options.json_columns:
            raise InputError(
                f"{row_files.shown(0)!r} has none of the columns {', '.join(options.json_columns)}.",
                hint="Name the column of the messages with --column.",
            )
        raise InputError(f"{row_files.shown(0)!r} has no rows, so its columns are unknown.")
    return schema


def _samples(row_files: RowFiles) -> Iterator[tuple[int, int, bytes]]:
    """Yield samples as (number of the file, offset, complete rows)."""
    for number in range(min(len(row_files.files), _FILES)):
        if row_files.codec is None:
            yield number, *_rows_at(row_files, number, 0, int(row_files.files.sizes[number]))
        else:
            yield number, 0, _first_rows(row_files, number)
    if row_files.codec is None:
        largest = int(row_files.files.sizes.argmax())
        size, file = int(row_files.files.sizes[largest]), row_files.file(largest)
        for offset in (size // 2, size - SAMPLE_BYTES // 2):
            if offset > SAMPLE_BYTES and (start := next_line(file, offset, size)) < size:
                end = min(start + SAMPLE_BYTES, size)
                end = next_line(file, end, size) if end < size else end
                yield largest, *_rows_at(row_files, largest, start, end)


def _rows_at(row_files: RowFiles, number: int, start: int, end: int) -> tuple[int, bytes]:
    """Return the first block of complete rows of a part of a file, and where it starts."""
    span = Span(row_files.full(number), row_files.kind, start, end)
    with looked_into(row_files.file(number)) as content:
        is_long = row_files.kind == "jsonl" and end - start > SAMPLE_BYTES
        if is_long and b"\n" not in content.read_at(start, SAMPLE_BYTES):
            return start, shortened_row(blocks(row_files.file(number), start, end))
        return next(row_blocks(content, span, row_files.shown(number), SAMPLE_BYTES, row_files.delimiter))


def _first_rows(row_files: RowFiles, number: int) -> bytes:
    content = b""
    scanner, end = RowScanner(row_files.kind, row_files.delimiter), 0
    stream = decompressed(row_files.file(number), str(row_files.codec), row_files.shown(number))
    for block in stream:
        ends = scanner.feed(block)
        if len(ends):
            end = len(content) + int(ends[-1])
        content += block
        if len(content) >= SAMPLE_BYTES and end:
            return content[:end]
        if len(content) >= SAMPLE_BYTES and row_files.kind == "jsonl":
            return shortened_row(chain([content], stream))
    return content


def _of_json(row_files: RowFiles, options: RowOptions) -> pa.Schema:
    """Infer the schema of JSON lines. If unreadable rows are skipped, each column gets the type that most rows have."""
    columns: dict[str, Any] = {"json_columns": options.json_columns, "other_columns": options.other_columns}
    reader = TextReader(pa.schema([]), None, **columns)
    samples = []
    for number, offset, text in _samples(row_files):
        shown = row_files.shown(number)
        if not offset and text.removeprefix(BOM).lstrip()[:1] == b"[":
            raise InputError(
                f"{shown!r} is one JSON array, not JSON lines.",
                hint="Convert it to lines: jq -c '.[]' FILE > FILE.jsonl",
            )
        if options.leave_out_unreadable:
            reader = TextReader(pa.schema([]), None, on_unreadable=lambda row: None, **columns)
        table = reader.parse("jsonl", text, None, BlockPosition(row_files.file(number), shown, offset))
        samples.append((reader.schema, 0 if table is None else table.num_rows))
    if not options.leave_out_unreadable:
        return reader.schema
    types: dict[str, list[tuple[pa.DataType, int]]] = {}
    for schema, rows in samples:
        for field in schema:
            types.setdefault(field.name, []).append((field.type, rows))
    return pa.schema([(name, vote(name, type_counts)) for name, type_counts in types.items()])


def _of_csv(row_files: RowFiles, options: RowOptions) -> pa.Schema:
    whole: pa.Schema | None = None
    for number, offset, text in _samples(row_files):
        shown = row_files.shown(number)
        names, end = _header(row_files, number, text)
        offset, text = (offset, text) if offset else (end, text[end:])
        text_types = {name: pa.string() for name in options.as_text if name in names}
        if options.leave_out_unreadable:
            text = well_formed_csv(text, len(names), row_files.delimiter)
        text = text if text.isascii() else text.decode("utf-8", "replace").encode()
        try:
            own = _kept_digits(
                parse_csv(text, names, row_files.delimiter, text_types, names), text, names, row_files.delimiter
            )
        except pa.ArrowInvalid:
            if offset == end:  # the reader's error names the row
                reader = TextReader(pa.schema([(name, pa.string()) for name in names]), None, row_files.delimiter)
                reader.parse("csv", text, names, BlockPosition(row_files.file(number), shown, offset))
            continue  # a block from the middle may have started inside of quotes
        whole = own if whole is None else _text_where_they_differ(whole, own)
    assert whole is not None
    missing = sorted(set(options.as_text) - set(whole.names))
    if missing:
        raise InputError(f"The source has no column {missing[0]!r}.", hint=f"It has {', '.join(whole.names)}.")
    return pa.schema([field.with_type(pa.string()) if pa.types.is_null(field.type) else field for field in whole])


def _header(row_files: RowFiles, number: int, text: bytes) -> tuple[list[str], int]:
    if row_files.codec is None:
        with looked_into(row_files.file(number)) as content:
            return csv_header(
                head_of(content, int(row_files.files.sizes[number])), row_files.delimiter, row_files.shown(number)
            )
    return csv_header([text], row_files.delimiter, row_files.shown(number))


def _kept_digits(table: pa.Table, text: bytes, names: list[str], delimiter: str) -> pa.Schema:
    numbers = [f.name for f in table.schema if pa.types.is_integer(f.type) or pa.types.is_floating(f.type)]
    schema = table.schema
    if not numbers:
        return schema
    texts = parse_csv(text, names, delimiter, dict.fromkeys(numbers, pa.string()), numbers)
    for name in numbers:
        if pc.any(pc.match_substring_regex(texts.column(name), CHANGES_AS_NUMBER)).as_py():
            schema = schema.set(schema.get_field_index(name), pa.field(name, pa.string()))
    return schema


def _text_where_they_differ(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    while True:
        try:
            return merged(first, second)
        except TypesDiffer as error:
            index = first.get_field_index(error.column)
            first = first.set(index, pa.field(error.column, pa.string()))
            second = second.set(second.get_field_index(error.column), pa.field(error.column, pa.string()))


def pick_split(dataset: Any, options: RowOptions) -> Any:
    """Return the dataset, or the chosen split of a dict of datasets."""
    if not isinstance(dataset, dict):
        return dataset
    names = [str(name) for name in dataset]
    listed = f"It has: {', '.join(names)}."
    if options.from_split is None and len(names) == 1:
        return dataset[names[0]]
    if options.from_split is None:
        raise InputError("The dict of datasets has several splits.", hint=f"{listed} Name one with --from-split.")
    if options.from_split not in names:
        raise InputError(f"The dict of datasets has no split {options.from_split!r}.", hint=listed)
    return dataset[options.from_split]


def mapped_layout(dataset: Any) -> tuple[TableLayout, dict[str, str]] | None:
    """Return the layout of a dataset's Arrow files and their column names; None if rows are not in files in order."""
    if is_reordered(dataset):
        return None
    block_rows = getattr(dataset.data, "blocks", [[dataset.data]])
    layout = TableLayout("arrow", dataset.features.arrow_schema)
    rows, sizes, batch_offsets = [], [], []
    stored: dict[str, str] | None = None
    for block_row in block_rows:
        path = getattr(block_row[0], "path", None) if len(block_row) == 1 else None
        if path is None or not os.path.exists(path):
            return None
        path = os.path.abspath(path)
        schema, own_rows, own_places = of_arrow(path, os.path.basename(path))
        replayed = _follow(block_row[0].replays, schema.names, int(own_rows.sum()))
        if replayed is None:
            return None
        start, stop, names = replayed
        types = {new: schema.field(old).type for new, old in names.items()}
        expected_types = {field.name: field.type for field in layout.schema}
        if types != expected_types or (stored is not None and names != stored):
            return None
        stored = names
        file_stat = os.stat(path)
        layout.names.append((path, os.path.basename(path), file_stat.st_size, file_stat.st_mtime_ns))
        layout.starts.append(start)
        layout.file_rows.append(stop - start)
        edges = np.clip(np.concatenate([[0], np.cumsum(own_rows)]), start, stop)
        kept_rows = np.diff(edges)
        rows.append(kept_rows.astype(np.int64))
        own_bytes = own_places[:, 2] - own_places[:, 1]
        sizes.append((own_bytes * kept_rows / np.maximum(own_rows, 1)).astype(np.int64))
        batch_offsets.append(own_places)
    if stored is None:
        return None
    layout.rows, layout.bytes = np.concatenate(rows), np.concatenate(sizes)
    layout.batch_offsets = np.concatenate(batch_offsets)
    return layout, {field.name: stored[field.name] for field in layout.schema}


def _follow(replays: list[Any], names: list[str], rows: int) -> tuple[int, int, dict[str, str]] | None:
    """Apply recorded operations to a file's rows and columns; None for an unknown operation."""
    start, stop = 0, rows
    columns = {name: name for name in names}
    for action, arguments, options in replays:
        if action == "slice" and not options:
            offset, length = (*arguments, None)[:2] if arguments else (0, None)
            start = min(start + offset, stop)
            stop = stop if length is None else min(start + length, stop)
        elif action == "rename_columns" and len(arguments) == 1 and len(arguments[0]) == len(columns):
            columns = dict(zip(arguments[0], columns.values(), strict=True))
        elif action == "drop" and len(arguments) == 1:
            columns = {new: old for new, old in columns.items() if new not in arguments[0]}
        elif action == "select" and len(arguments) == 1:
            columns = {new: columns[new] for new in arguments[0]}
        elif action != "replace_schema_metadata":
            return None
    return start, stop, columns


def dataset_tables(dataset: Any) -> Iterator[pa.Table]:
    """Yield the rows of a dataset in small tables, read by `datasets`."""
    if is_stream(dataset):
        yield from dataset.with_format("arrow").iter(batch_size=100)
        return
    if len(dataset):
        yield from batches_of(dataset.data, row_order(dataset))


_STREAM_BYTES = 32 << 20  # size of a unit of a source of unknown size
_RATIO = 4  # assumed ratio of decompressed to compressed text
_SAMPLE_BYTES = 1 << 20

_Cut = Callable[[int, bool, Path | None, Skip], Iterator[Unit]]


@dataclass(slots=True)
class Rows:
    """A `RowSource` whose units are made by the function `cut`."""

    name: str
    schema: pa.Schema
    facts: dict[str, Any]
    reading: Reading
    total_bytes: int | None
    total_rows: int | None
    cut: _Cut
    files: FileSet | None = None
    table: FileTable | None = None
    notes: tuple[str, ...] = ()
    stamp: str = ""

    def units(
        self, align: int, *, indices: bool = False, spool: Path | None = None, skip: Skip = never
    ) -> Iterator[Unit]:
        if align < 1:
            raise ValueError("align must be 1 or more")
        return self.cut(align, indices, spool, skip)


def open_rows(source: Any, options: RowOptions | None = None) -> RowSource:
    """Open a path, glob, folder, a list of those, a `datasets.Dataset`, a selection, or an iterable of dicts or tables.

    A folder may be one that `datasets` saved. An iterator can be cut into units only once; a function that returns an
    iterator, any number of times. A list of dicts, and a pandas, Polars or Arrow table, are iterables too.
    """
    options = options or RowOptions()
    return _open_all(source, options) if options.where is None else _open_filtered(source, options)


def _open_filtered(source: Any, options: RowOptions) -> RowSource:
    """Open the rows for which `where` is true. They are spooled, so that batches consist of selected rows only."""
    text = str(options.where)
    whole = _open_all(source, replace(options, where=None, columns=(), limit=None, other_columns=None))
    labels, schema = labels_of(stored_features(whole.schema)), plain_schema(whole.schema)
    where_mask(text, schema.empty_table(), labels)  # report an invalid condition now

    unreadable: list[UnreadableRow] = []
    report = unreadable.append if options.leave_out_unreadable else None

    def tables() -> Iterator[pa.Table]:
        none = True
        unreadable.clear()
        with tempfile.TemporaryDirectory(prefix="brim-where-", dir=scratch_folder()) as folder:
            for unit in whole.units(1, spool=Path(folder)):
                for table in read_unit(whole.reading, unit, on_unreadable=report):
                    table = table if table.schema == schema else table.cast(schema)
                    mask = where_mask(text, table, labels)
                    if mask.any():
                        none = False
                        yield table if mask.all() else table.filter(pa.array(mask))
        if none:
            raise InputError("No row was selected.", hint=f"There is nothing to read: from {whole.name}; where {text}.")

    facts = {**whole.facts, "options": options.facts}
    rows = _spooled(whole.name, tables, schema, facts, None, options, unreadable)
    rows.reading.options["json_columns"] = whole.reading.options.get("json_columns", ())
    rows.notes, rows.stamp = whole.notes, whole.stamp
    return rows


def _open_all(source: Any, options: RowOptions) -> RowSource:
    if isinstance(source, str | os.PathLike):
        return _open_files([os.fspath(source)], options)
    if isinstance(source, list | tuple) and all(isinstance(item, str | os.PathLike) for item in source):
        _refuse_texts(source)
        return _open_files([os.fspath(item) for item in source], options)
    _refuse_options_of_files(options)
    if isinstance(source, Selection | FileTable):
        table = source.table() if isinstance(source, Selection) else source
        if table.recipe.get("steps") and not len(table):
            raise no_rows_error(table, "read")
        name = options.name or (source.name if isinstance(source, Selection) else "the table")
        selected_rows = SelectedRows(table, options.from_split, name)
        facts = {**selected_rows.facts, "options": options.facts}
        rows = _spooled(name, selected_rows.tables, selected_rows.schema, facts, len(selected_rows), options)
        rows.table, rows.stamp = table, _stamp(table.files.on_disk)
        return rows
    library = type(source).__module__.split(".")[0]
    if options.from_split is not None and not (library == "datasets" and isinstance(source, dict)):
        raise InputError("--from-split can only be used with a dataset that has splits.", hint="Leave it out.")
    if library == "datasets":
        return _open_dataset(pick_split(source, options), options)
    if library in ("pandas", "polars") or (hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__next__")):
        table = as_table(source)
        return _open_stream(lambda: iter([table]), options, total_rows=table.num_rows, in_memory=True)
    if callable(source):
        return _open_stream(lambda: _iterated(source()), options)
    if isinstance(source, Iterator):
        return _open_stream(lambda: source, options, once=True)
    return _open_stream(lambda: _iterated(source), options, in_memory=isinstance(source, list | tuple))


def _refuse_texts(source: Sequence[Any]) -> None:
    """InputError for a list of strings of which none is a path, a glob or an address: they are texts, or mistyped."""
    if not source or any(not isinstance(item, str) or "://" in item or item == "-" for item in source):
        return
    if any(os.path.exists(item) or (WILD.search(item) and next(glob.iglob(item), None)) for item in source):
        return
    first = source[0] if len(source[0]) <= 60 else f"{source[0][:60]}…"
    raise InputError(
        f"A list of strings must name files, and none of these {len(source):,} is a file (the first is {first!r}).",
        hint='Pass texts as rows: [{"text": text} for text in texts].',
    )


def _refuse_options_of_files(options: RowOptions) -> None:
    for item in options.changed(InputOptions):
        if item.name in ("input_format", "text", "delimiter", "from_config"):
            raise InputError(
                f"{item.spelling} can only be used with files, and this source is already in memory.",
                hint="Leave it out.",
            )


def _iterated(rows: Any) -> Iterator[Any]:
    try:
        return iter(rows)
    except TypeError as error:
        raise InputError(
            f"Rows cannot be read from a {type(rows).__name__}.",
            hint="Use a path, a list of paths, a datasets.Dataset, or an iterable of dicts.",
        ) from error


def _open_files(sources: list[str], options: RowOptions) -> RowSource:
    row_files = find(sources, options)
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1:,} more"
    facts = {
        "kind": row_files.kind,
        "files": len(row_files.files),
        "bytes": int(row_files.files.sizes.sum()),
        "digest": row_files.digest(),
        "options": options.facts,
    }
    reading: dict[str, Any] = {"root": row_files.files.root, "hashed": True, **row_files.options}
    if row_files.kind == "csv":
        reading["delimiter"] = row_files.delimiter
    if row_files.kind == "jsonl" and options.json_columns:
        reading["json_columns"] = options.json_columns
    if row_files.codec:
        facts["codec"] = reading["codec"] = row_files.codec
    if row_files.kind in ("parquet", "arrow"):
        layout = lay_out(row_files)
        layout.schema = _with_partitions(layout.schema, row_files, reading)
        rows = _laid_out(name, layout, facts, reading, options)
    else:
        try:
            schema = infer_schema(row_files, options)
        except OSError as error:
            shown = os.path.basename(error.filename or "") or name
            raise InputError(f"{shown!r} cannot be read: {reason(error)}.", path=shown) from error
        schema = _with_partitions(schema, row_files, reading)
        rows = _open_text(name, row_files, schema, facts, reading, options)
    rows.files, rows.stamp = row_files.files, _stamp(row_files.files)
    if row_files.empty:
        more_text = f" and {len(row_files.empty) - 1:,} more" if len(row_files.empty) > 1 else ""
        rows.notes = (f"left out files that are empty: {row_files.empty[0]}{more_text}",)
    return rows


def _with_partitions(schema: pa.Schema, row_files: RowFiles, reading: dict[str, Any]) -> pa.Schema:
    """Add the columns encoded in folder names (year=2024) to the schema, and their names to `reading`."""
    fields = partition_fields((row_files.shown(number) for number in range(len(row_files.files))), schema.names)
    if fields:
        reading["partitions"] = [field.name for field in fields]
    return pa.schema([*schema, *fields], schema.metadata) if fields else schema


def _stamp(files: FileSet) -> str:
    """Return a digest of the sizes and dates (or ETags) of files."""
    digest = hashlib.sha256()
    for numbers in (files.sizes, files.mtimes_ns):
        digest.update(np.ascontiguousarray(numbers).tobytes())
    for remote in files.remotes.values():
        digest.update(remote.version.encode())
    return digest.hexdigest()[:32]


def _open_text(
    name: str,
    row_files: RowFiles,
    schema: pa.Schema,
    facts: dict[str, Any],
    reading: dict[str, Any],
    options: RowOptions,
) -> RowSource:
    total = int(row_files.files.sizes.sum())
    spooled = row_files.codec is not None and row_files.kind != "document"
    unit_bytes = options.unit_bytes or unit_size(total * _RATIO if spooled else total, options.least_unit_bytes)

    def cut(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        if spooled:
            return text_spool(row_files, unit_bytes, align, options.limit, spool, skip)
        return text_units(row_files, unit_bytes, count=indices, limit=options.limit)

    rows = len(row_files.files) if row_files.kind == "document" else None
    rows = rows if options.limit is None or rows is None else min(rows, options.limit)
    return _rows(name, schema, facts, reading, total, rows, cut, options)


def _laid_out(
    name: str, layout: TableLayout, facts: dict[str, Any], reading: dict[str, Any], options: RowOptions
) -> RowSource:
    unit_bytes = options.unit_bytes or unit_size(layout.total_bytes, options.least_unit_bytes)

    def cut(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        return row_units(layout, unit_bytes, align, options.limit)

    rows = layout.total_rows if options.limit is None else min(layout.total_rows, options.limit)
    return _rows(name, layout.schema, facts, reading, layout.total_bytes, rows, cut, options)


def _rows(
    name: str,
    schema: pa.Schema,
    facts: dict[str, Any],
    reading: dict[str, Any],
    total_bytes: int | None,
    total_rows: int | None,
    cut: _Cut,
    options: RowOptions,
) -> RowSource:
    if options.columns:
        missing = [column for column in options.columns if column not in schema.names]
        if missing:
            raise InputError(
                f"The source has no column {missing[0]!r}.", hint=f"Its columns are: {', '.join(schema.names)}."
            )
    names = options.columns or schema.names
    twice = [column for column in names if len(schema.get_all_field_indices(column)) > 1]
    if twice:
        raise InputError(
            f"The source has several columns named {twice[0]!r}.", hint="Rename one, or choose others with --columns."
        )
    if options.columns:
        schema = pa.schema([schema.field(column) for column in options.columns])
    read_config = Reading(schema.serialize().to_pybytes(), tuple(options.columns) or None, reading)

    def with_source_errors(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        """Yield units; report an OSError as one of the source, since the caller may be writing elsewhere."""
        try:
            yield from cut(align, indices, spool, skip)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # from writing the spool
                raise
            path = error.filename if isinstance(error.filename, str) else name
            raise SourceError(f"{path!r} cannot be read: {error.strerror or error}.", path=path) from error

    return Rows(name, schema, facts, read_config, total_bytes, total_rows, with_source_errors)


def _open_dataset(dataset: Any, options: RowOptions) -> RowSource:
    if is_stream(dataset):
        if not dataset.features:
            return _open_stream(lambda: dataset_tables(dataset), options)
        schema, facts = dataset.features.arrow_schema, _stream_facts(options)
        return _spooled(options.name or "the stream", lambda: dataset_tables(dataset), schema, facts, None, options)
    facts = {"kind": "dataset", "options": options.facts, "fingerprint": fingerprint_of(dataset)}
    if (mapped := mapped_layout(dataset)) is not None:
        layout, stored = mapped
        rows = _laid_out("the dataset", layout, facts, {"stored": stored}, options)
        files = FileSetBuilder("/")
        for path, *_ in layout.names:
            files.add(path, os.stat(path))
        rows.files = files.finish()
        return rows
    schema = dataset.features.arrow_schema
    return _spooled("the dataset", lambda: dataset_tables(dataset), schema, facts, len(dataset), options)


def _stream_facts(options: RowOptions) -> dict[str, Any]:
    """Return the fingerprint inputs of a stream: its name, and the code that makes it if it is known."""
    facts: dict[str, Any] = {"iterator": True, "options": options.facts}
    if options.name:
        facts["name"] = options.name
        if options.code is not None:
            facts["code"] = options.code
    return facts


def _open_stream(
    make: Callable[[], Iterator[Any]],
    options: RowOptions,
    *,
    total_rows: int | None = None,
    once: bool = False,
    in_memory: bool = False,
) -> RowSource:
    """Open an iterable. Its schema is that of the first rows, which the first pass over the units yields again.

    `in_memory`: the rows can be read twice cheaply, so their content is a fingerprint input.
    """
    name = options.name or "the iterator"
    has_dicts = False

    def make_tables() -> Iterator[pa.Table]:
        nonlocal has_dicts
        first_row, rows = peek(make())
        has_dicts = isinstance(first_row, dict)
        yield from tables_of(rows_as_json(rows, options.json_columns) if has_dicts else rows, name)

    tables = make_tables()
    first, size = list[pa.Table](), 0
    for table in tables:
        first.append(table)
        size += arrow_bytes(table)
        if size >= _SAMPLE_BYTES:
            break
    if not first:
        raise InputError(f"{name} has no rows.", hint="There is nothing to do.")
    schema = unify(table.schema for table in first)
    if not len(schema):
        raise InputError(f"{name} has rows without columns.")
    started: list[Iterator[pa.Table]] = [itertools.chain(first, tables)]

    def all_tables() -> Iterable[pa.Table]:
        if started:
            return started.pop()
        if once:
            raise InputError("This iterator was already consumed.", hint="Pass a function that returns a new iterator.")
        return make_tables()

    facts = _stream_facts(options)
    if in_memory and options.name:
        facts["digest"] = digest_of_tables(make_tables())
    rows = _spooled(name, all_tables, schema, facts, total_rows, options)
    if has_dicts and options.json_columns:
        rows.reading.options["json_columns"] = options.json_columns
    return rows


def _spooled(
    name: str,
    make: Callable[[], Iterable[pa.Table]],
    schema: pa.Schema,
    facts: dict[str, Any],
    total_rows: int | None,
    options: RowOptions,
    unreadable: list[UnreadableRow] | None = None,
) -> RowSource:
    unit_bytes = options.unit_bytes or _STREAM_BYTES
    if not set(options.columns) <= set(schema.names):
        missing = next(column for column in options.columns if column not in schema.names)
        raise InputError(f"{name} has no column {missing!r}.", hint=f"Its columns are: {', '.join(schema.names)}.")

    def cut(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        return table_spool(make(), name, unit_bytes, align, options.limit, spool, skip, schema, unreadable)

    rows = total_rows if options.limit is None or total_rows is None else min(total_rows, options.limit)
    return _rows(name, schema, facts, {}, None, rows, cut, options)
