"""Open a source of rows, whatever it is: see `open_rows`."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.durable import reason
from brim.errors import InputError, SourceError
from brim.fileset import FileSet, FileSetBuilder
from brim.sources.readers import as_table
from brim.sources.rows.cut_rows import Layout, lay_out, row_units
from brim.sources.rows.cut_text import text_units
from brim.sources.rows.found import Found, find
from brim.sources.rows.mapped_dataset import dataset_tables, mapped_layout, pick_split
from brim.sources.rows.options import RowOptions, Skip, never
from brim.sources.rows.schemas import unify
from brim.sources.rows.settle import settle
from brim.sources.rows.spool import table_spool, text_spool
from brim.sources.rows.stream import tables_of
from brim.sources.rows.unit import Reading, RowSource, Unit
from brim.sources.rows.units import unit_size

_STREAM_BYTES = 32 << 20  # of a unit of what has no size
_RATIO = 4  # what text is taken to grow by when it is decompressed
_SAMPLE_BYTES = 1 << 20

_Cut = Callable[[int, bool, Path | None, Skip], Iterator[Unit]]


@dataclass(slots=True)
class Rows:
    """A RowSource: what is known of it, and the function that cuts it."""

    name: str
    schema: pa.Schema
    facts: dict[str, Any]
    reading: Reading
    total_bytes: int | None
    total_rows: int | None
    cut: _Cut
    files: FileSet | None = None

    def units(
        self, align: int, *, indices: bool = False, spool: Path | None = None, skip: Skip = never
    ) -> Iterator[Unit]:
        if align < 1:
            raise ValueError("align must be 1 or more")
        return self.cut(align, indices, spool, skip)


def open_rows(source: Any, options: RowOptions | None = None) -> RowSource:
    """The rows of a path, a glob, a folder, a list of those, a `datasets.Dataset`, or an iterable of dicts or tables.

    A folder may be one that `datasets` saved. An iterator can be cut into units once; a function that makes one, as
    often as wanted. A list of dicts, and a pandas, Polars or Arrow table, are iterables too.
    """
    options = options or RowOptions()
    if isinstance(source, str | os.PathLike):
        return _open_files([os.fspath(source)], options)
    if isinstance(source, list | tuple) and all(isinstance(one, str | os.PathLike) for one in source):
        return _open_files([os.fspath(one) for one in source], options)
    library = type(source).__module__.split(".")[0]
    if library == "datasets":
        return _open_dataset(pick_split(source, options), options)
    if library in ("pandas", "polars") or (hasattr(source, "__arrow_c_stream__") and not hasattr(source, "__next__")):
        table = as_table(source)
        return _open_stream(lambda: iter([table]), options, total_rows=table.num_rows)
    if callable(source):
        return _open_stream(lambda: _iterated(source()), options)
    if isinstance(source, Iterator):
        return _open_stream(lambda: source, options, once=True)
    return _open_stream(lambda: _iterated(source), options)


def _iterated(rows: Any) -> Iterator[Any]:
    try:
        return iter(rows)
    except TypeError as error:
        raise InputError(
            f"Rows cannot be read from a {type(rows).__name__}.",
            hint="Give a path, a list of paths, a datasets.Dataset, or an iterable of dicts.",
        ) from error


def _open_files(sources: list[str], options: RowOptions) -> RowSource:
    found = find(sources, options)
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1:,} more"
    facts = {
        "kind": found.kind,
        "files": len(found.files),
        "bytes": int(found.files.sizes.sum()),
        "digest": found.digest(),
        "options": options.facts,
    }
    reading: dict[str, Any] = {"root": found.files.root, **found.options}
    if found.kind == "csv":
        reading["delimiter"] = found.delimiter
    if found.codec:
        facts["codec"] = reading["codec"] = found.codec
    if found.kind in ("parquet", "arrow"):
        rows = _laid_out(name, lay_out(found), facts, reading, options)
    else:
        try:
            schema = settle(found, options)
        except OSError as error:
            raise InputError(f"{name!r} cannot be read: {reason(error)}.") from error
        rows = _open_text(name, found, schema, facts, reading, options)
    rows.files = found.files
    return rows


def _open_text(
    name: str, found: Found, schema: pa.Schema, facts: dict[str, Any], reading: dict[str, Any], options: RowOptions
) -> RowSource:
    total = int(found.files.sizes.sum())
    spooled = found.codec is not None and found.kind != "document"
    unit_bytes = options.unit_bytes or unit_size(total * _RATIO if spooled else total, options.least_unit_bytes)

    def cut(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        if spooled:
            return text_spool(found, unit_bytes, align, options.limit, spool, skip)
        return text_units(found, unit_bytes, count=indices, limit=options.limit)

    rows = len(found.files) if found.kind == "document" else None
    rows = rows if options.limit is None or rows is None else min(rows, options.limit)
    return _rows(name, schema, facts, reading, total, rows, cut, options)


def _laid_out(
    name: str, layout: Layout, facts: dict[str, Any], reading: dict[str, Any], options: RowOptions
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
    if options.columns is not None:
        missing = [column for column in options.columns if column not in schema.names]
        if missing:
            raise InputError(
                f"The source has no column {missing[0]!r}.", hint=f"Its columns are: {', '.join(schema.names)}."
            )
        schema = pa.schema([schema.field(column) for column in options.columns])
    how = Reading(schema.serialize().to_pybytes(), options.columns, reading)

    def blamed(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        """Units, and what the system says of the source while they are cut: whoever asks may be writing."""
        try:
            yield from cut(align, indices, spool, skip)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # of what is spooled
                raise
            where = error.filename if isinstance(error.filename, str) else name
            raise SourceError(f"{where!r} cannot be read: {error.strerror or error}.", path=where) from error

    return Rows(name, schema, facts, how, total_bytes, total_rows, blamed)


def _open_dataset(dataset: Any, options: RowOptions) -> RowSource:
    streamed = not hasattr(dataset, "_indices")
    facts: dict[str, Any] = {"kind": "dataset", "options": options.facts}
    if streamed:
        return _open_stream(lambda: dataset_tables(dataset), options)
    facts["fingerprint"] = str(dataset._fingerprint)
    laid = mapped_layout(dataset)
    if laid is not None:
        layout, stored = laid

        rows = _laid_out("the dataset", layout, facts, {"stored": stored}, options)
        files = FileSetBuilder("/")
        for path, *_ in layout.names:
            files.add(path, os.stat(path))
        rows.files = files.finish()
        return rows
    schema = dataset.features.arrow_schema
    return _spooled("the dataset", lambda: dataset_tables(dataset), schema, facts, len(dataset), options)


def _open_stream(
    make: Callable[[], Iterator[Any]], options: RowOptions, *, total_rows: int | None = None, once: bool = False
) -> RowSource:
    """The schema is that of the first rows; they are given again to who asks for units first."""
    name = options.name or "the iterator"
    tables = tables_of(make(), name)
    first = list(_first(tables))
    if not first:
        raise InputError(f"{name} gives no rows.", hint="There is nothing to do.")
    schema = unify(table.schema for table in first)
    if not len(schema):
        raise InputError(f"{name} gives rows without columns.")
    started: list[Iterator[pa.Table]] = [itertools.chain(first, tables)]

    def all_tables() -> Iterable[pa.Table]:
        if started:
            return started.pop()
        if once:
            raise InputError(
                "The rows of this iterator were read already.", hint="Give a function that makes it, not the iterator."
            )
        return tables_of(make(), name)

    facts: dict[str, Any] = {"iterator": True, "options": options.facts}
    if options.name:
        facts["name"] = options.name
    return _spooled(name, all_tables, schema, facts, total_rows, options)


def _first(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    size = 0
    for table in tables:
        yield table
        size += table.nbytes
        if size >= _SAMPLE_BYTES:
            return


def _spooled(
    name: str,
    make: Callable[[], Iterable[pa.Table]],
    schema: pa.Schema,
    facts: dict[str, Any],
    total_rows: int | None,
    options: RowOptions,
) -> RowSource:
    unit_bytes = options.unit_bytes or _STREAM_BYTES
    if options.columns is not None and not set(options.columns) <= set(schema.names):
        missing = next(column for column in options.columns if column not in schema.names)
        raise InputError(f"{name} has no column {missing!r}.", hint=f"Its columns are: {', '.join(schema.names)}.")

    def cut(align: int, indices: bool, spool: Path | None, skip: Skip) -> Iterator[Unit]:
        return table_spool(make(), name, unit_bytes, align, options.limit, spool, skip, schema)

    rows = total_rows if options.limit is None or total_rows is None else min(total_rows, options.limit)
    return _rows(name, schema, facts, {}, None, rows, cut, options)
