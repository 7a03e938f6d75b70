"""A plan: the shards of a job, known by name, rows and bytes before anything is read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import SourceError
from brim.file_set import FILE_TYPE, Ints
from brim.formats.parquet_levels import is_list_type, list_array, nulls_of, with_empty_bytes
from brim.options.groups import ShardOptions
from brim.plans.cut_shards import Shard, Shards, cut_shards
from brim.plans.fingerprint import digest_ints, digest_items, digest_json, digest_table
from brim.records import dataclass
from brim.sources.file_table import FileTable, flat_numbers, nested_numbers, no_rows_error, one_array

Format = Literal["parquet", "webdataset"]
EXTENSIONS: dict[Format, str] = {"parquet": ".parquet", "webdataset": ".tar"}
# A tar has a kilobyte of headers per row, and they are made before the shard is written.
_MAX_ROWS: dict[Format, int | None] = {"parquet": None, "webdataset": 20_000}
_BLOCK = 131_072  # rows digested at a time
FORMAT_VERSION = 1  # raise it if the same plan would give other bytes


@dataclass(frozen=True)
class Plan:
    """The shards to build. `table` has the order of the shards."""

    table: FileTable
    shards: Shards
    format: Format
    cut: ShardOptions
    why: str

    @cached_property
    def fingerprint(self) -> str:
        """The digest of paths, sizes, metadata, schema, shards and format; not of the source's location and mtimes."""
        return digest_json({name: fact for name, fact in self.facts.items() if name not in ("cut", "recipe")})

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs, separately, so that a difference can be named, and the requested options."""
        table = self.table
        return {
            "format": f"{self.format} {FORMAT_VERSION}",
            "rows": len(table),
            "files": table.file_count(),
            "bytes": int(table.file_bytes().sum()),
            "columns": {field.name: str(field.type) for field in self.schema},
            "features": digest_json(table.features),
            "cut": self.cut.fingerprint_inputs(),
            "shards": digest_items([s.name, s.rows] for s in self.shards),
            "content": self._digest(0, len(table)),
            "recipe": dict(table.recipe),
        }

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of every shard, with the features for `datasets` in its metadata."""
        fields = []
        for field in self.table.rows.schema:
            column = self.table.columns.get(field.name)
            if field.name in self.table.nested:
                fields.append(field.with_type(self.table.nested[field.name]))
            elif column is None:
                fields.append(field)
            else:
                stored = column.stored or _stored_type(field.type)
                fields.append(pa.field(field.name, stored, nullable=field.nullable))
        metadata = None
        if self.table.features is not None:
            metadata = {"huggingface": json.dumps({"info": {"features": dict(self.table.features)}})}
        return pa.schema(fields, metadata=metadata)

    def shard_table(self, shard: Shard) -> tuple[pa.Table, dict[str, Ints]]:
        """Return a shard's rows with empty file contents, and the files of each file column in order."""
        return self._rows(shard.start, shard.stop)

    def shard_key(self, shard: Shard) -> str:
        """Return a digest of a shard's content without its name: equal keys mean equal shards."""
        facts = self.facts
        content = self._digest(shard.start, shard.stop)
        return digest_json([facts["format"], facts["columns"], facts["features"], content])

    def shard_mtimes(self, shard: Shard) -> str:
        """Return a digest of the dates of a shard's files, and of the ranges of its values in them."""
        return next(self.with_mtimes([shard]))[1]

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        """Yield shards with their `shard_mtimes`; adjacent shards are processed together."""
        names = [name for name in self.schema.names if name in self.table.columns]
        inside = [name for name in self.schema.names if name in self.table.nested]
        for run in _runs(shards):
            columns = [self._dates(name, run) for name in names]
            columns += [dates for name in inside for dates in self._nested_dates(name, run)]
            for number, shard in enumerate(run):
                digests = [
                    digest_ints(date[edges[number] : edges[number + 1]]) for dates, edges in columns for date in dates
                ]
                yield shard, digest_json(digests)[:16]

    def _dates(self, name: str, run: list[Shard]) -> tuple[list[Ints], list[int]]:
        """Return the dates of a column's files in a run of shards, and the boundaries of each shard."""
        first = run[0].start
        edges = np.array([first, *(shard.stop for shard in run)]) - first
        cells = one_array(self.table.rows.column(name).slice(first, int(edges[-1])))
        if is_list_type(cells.type):
            edges = cuts.running(cuts.list_lengths(cells))[edges]
            cells = cells.flatten()
        has_date = np.array(cells.is_valid().to_numpy(zero_copy_only=False))
        numbers = np.asarray(cells.drop_null().to_numpy(zero_copy_only=False), np.int64)
        has_content = self.table.files.has_content(numbers)
        has_date[has_date] = has_content
        return self.table.files.dates(numbers[has_content]), cuts.running(has_date)[edges].tolist()

    def _nested_dates(self, name: str, run: list[Shard]) -> Iterator[tuple[list[Ints], list[int]]]:
        """Yield the same for each leaf of bytes inside a column."""
        first = run[0].start
        edges = np.array([first, *(shard.stop for shard in run)]) - first
        column = self.table.rows.column(name).slice(first, int(edges[-1]))
        for numbers, rows in nested_numbers(column, self.table.nested[name]):
            yield self.table.files.dates(numbers), np.searchsorted(rows, edges).tolist()

    def _rows(self, start: int, stop: int) -> tuple[pa.Table, dict[str, Ints]]:
        rows = self.table.rows.slice(start, stop - start)
        arrays = []
        numbers: dict[str, Ints] = {}
        for field in self.schema:
            column = rows.column(field.name)
            if field.name in self.table.columns:
                present = flat_numbers(column)
                numbers[field.name] = present[self.table.files.has_content(present)]
                column = self._placeholders(one_array(column), self.table.columns[field.name].stored)
            elif field.name in self.table.nested:
                numbers[field.name] = self.table.numbers_of(field.name, rows)
                column = with_empty_bytes(one_array(column), field.type)
            elif pa.types.is_dictionary(column.type):
                # Values in the order of their first use, so that bytes depend on values alone.
                kind = column.type
                encoded = one_array(column).dictionary_decode().dictionary_encode()
                indices = encoded.indices.cast(kind.index_type)
                column = pa.DictionaryArray.from_arrays(indices, encoded.dictionary, ordered=kind.ordered)
            arrays.append(column)
        return pa.Table.from_arrays(arrays, schema=self.schema), numbers

    def _placeholders(self, cells: pa.Array, kind: pa.DataType | None = None) -> pa.Array:
        kind = kind or _stored_type(cells.type)
        mask = nulls_of(cells)
        if is_list_type(cells.type):
            values = self._placeholders(cells.flatten(), kind.value_type)
            return list_array(kind, cuts.list_lengths(cells), values, mask)
        files = self.table.files
        empty = pa.repeat(pa.scalar(b"", pa.binary()), len(cells))
        if files.ranges is not None and len(files):
            present = files.has_content(cells.fill_null(0).to_numpy(zero_copy_only=False))
            empty = pc.if_else(pa.array(present), empty, pa.scalar(None, pa.binary()))
        if not pa.types.is_struct(kind):
            return (empty if mask is None else pc.if_else(mask, pa.scalar(None, pa.binary()), empty)).cast(kind)
        paths = files.paths.take(cells).cast(pa.string())
        parts = [empty if field.name == FILE_TYPE[0].name else paths for field in kind]
        parts = [part.cast(field.type) for part, field in zip(parts, kind, strict=True)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=mask)

    def _digest(self, start: int, stop: int) -> str:
        blocks, bundles, sizes_of = [], self.table.files.bundles, self.table.files.sizes
        for first in range(start, stop, _BLOCK):
            table, numbers = self._rows(first, min(first + _BLOCK, stop))
            sizes = [digest_ints(sizes_of[n]) for n in numbers.values()]
            # Names and sizes inside of folders that are packed as one value.
            found = (bundles.get(n) for column in numbers.values() for n in (column.tolist() if bundles else ()))
            inside = [
                [list(b.names), [int(self.table.files.sizes[n]) for n in b.numbers]] for b in found if b is not None
            ]
            blocks.append([digest_table(table, deep=self.table.verbatim), sizes, *inside])
        return digest_json(blocks)


def _runs(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Group adjacent shards into runs with few rows."""
    run: list[Shard] = []
    for shard in shards:
        if run and (shard.start != run[-1].stop or shard.stop - run[0].start > _BLOCK):
            yield run
            run = []
        run.append(shard)
    if run:
        yield run


def _stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of a file column in shards. In the table its type is `kind`: file numbers, or lists of them."""
    if pa.types.is_large_list(kind):
        return pa.large_list(FILE_TYPE)
    return pa.list_(FILE_TYPE) if is_list_type(kind) else FILE_TYPE


def make_plan(table: FileTable, format: Format, cut: ShardOptions, folder: str = "data") -> Plan:
    """Cut a checked file table into shards, named to lie in `folder`."""
    if format == "webdataset" and table.files.ranges is not None and table.files.paths.null_count:
        raise SourceError("The dataset has values without a file name, which WebDataset cannot store.")
    if len(table) == 0 and table.query:
        raise no_rows_error(table, "build")
    if len(table) == 0 and not table.verbatim:
        raise SourceError("The source has no rows.", hint="There is nothing to build.")
    try:
        table.rows.validate(full=True)
    except pa.ArrowInvalid as error:
        raise SourceError(f"The table has values that do not match their type: {error}.") from error
    ordered, shards, why = cut_shards(table, EXTENSIONS[format], cut, _MAX_ROWS[format], folder)
    plan = Plan(ordered, shards, format, cut, why)
    _check_schema(plan)
    return plan


def _check_schema(plan: Plan) -> None:
    """Raise SourceError if a shard cannot store a column's type."""
    if plan.format == "webdataset" and "__files__" in plan.schema.names:
        raise SourceError("The column name '__files__' is reserved in WebDataset shards.", hint="Rename it.")
    import pyarrow.parquet as pq

    empty = plan.shard_table(Shard("", "", 0, 0, 0))[0].replace_schema_metadata(None)
    for field in plan.schema:
        if _has_duplicate_fields(field.type):
            raise SourceError(f"The column {field.name!r} has two fields of the same name.", hint="Rename one of them.")
        try:
            pq.write_table(empty.select([field.name]), pa.BufferOutputStream())
        except (pa.ArrowException, NotImplementedError) as error:
            raise SourceError(
                f"The column {field.name!r} holds {field.type}, which Parquet cannot store.",
                hint=f"Cast it to another type, or leave it out with --drop={field.name}.",
            ) from error


def _has_duplicate_fields(kind: pa.DataType) -> bool:
    """Return whether a struct inside a type has two fields with the same name."""
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return len(set(names)) < len(names) or any(_has_duplicate_fields(field.type) for field in kind)
    return _has_duplicate_fields(kind.value_type) if pa.types.is_nested(kind) and hasattr(kind, "value_type") else False
