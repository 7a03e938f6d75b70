"""Parquet shards by any writer as a source: small columns are read, and large values are located, not read.

`SmallColumns` reads everything except bytes (of files, their paths): of remote shards only the needed row groups, and
columns that are large in sum are kept on disk. `ParquetOrigin` locates the values of the chosen rows (`locate`), so
that one subject of a remote dataset costs its own bytes. The shards: parquet_shards.py; values: value_locator.py; the
choice of rows: selection.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from brim.errors import SourceError
from brim.file_set import Bools, Ints
from brim.formats.parquet_levels import is_list_type, merge_leaves, numbered_type
from brim.sources.dataset_files import DatasetFile
from brim.sources.features import kind_of_feature
from brim.sources.file_table import FileColumn, FileTable, Split, one_array
from brim.sources.hive_partitions import partition_array
from brim.sources.parquet_shards import BROKEN, ContentColumn, ParquetShards, broken, plain_schema
from brim.sources.spools import TableSpool
from brim.sources.value_locator import DECODED_ROWS, ChunkLocator, ShardValues, ValueStores, fetch_chosen, numbers_type
from brim.sources.where import may_choose

_SAMPLED_ROWS = 100


class ParquetOrigin:
    """The rows of Parquet shards, in order. `about` and `features` are those of its card."""

    def __init__(
        self, name: str, files: Sequence[DatasetFile], about: Mapping[str, Any], features: Mapping[str, Any] | None
    ) -> None:
        self.name, self.about = name, about
        self.shards = ParquetShards(name, files, features)
        self.schema, self.splits, self.partial = self.shards.schema, self.shards.splits, self.shards.partial
        self.columns = list(self.schema.names)
        self.content: Mapping[str, ContentColumn] = self.shards.content
        self.file_columns = list(self.content)
        self.notes: list[str] = []
        self._small = SmallColumns(self.shards, self._note)

    def __len__(self) -> int:
        return len(self.shards)

    def close(self) -> None:
        self.shards.close()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @property
    def told_features(self) -> Mapping[str, Any]:
        return self.shards.declared_features

    @cached_property
    def features(self) -> dict[str, Any] | None:
        """The features that the files declare, or the card, otherwise those of the types and of the files' names."""

        def paths_of(field: pa.Field) -> list[str]:
            some = self.small([field.name], np.arange(min(_SAMPLED_ROWS, len(self))))
            array = one_array(some.column(field.name).slice(0, _SAMPLED_ROWS))
            array = array.flatten() if is_list_type(array.type) else array
            return array.field("path").drop_null().to_pylist()  # type: ignore[no-any-return]

        return self.shards.features(paths_of)

    def possible(self, expression: str) -> Bools | None:
        return self._small.possible_rows(expression)

    def small(self, names: Iterable[str] | None = None, rows: Ints | None = None) -> pa.Table:
        """Return columns without bytes; of files their paths."""
        return self._small.read(self._small.names if names is None else names, rows)

    def locate(self, rows: Ints | None = None, names: Sequence[str] | None = None) -> FileTable:
        """Return the file table of some rows, in the given order, and of some columns. Values are located, not read."""
        requested = set(self.schema.names if names is None else names)
        names = [name for name in self.schema.names if name in requested]
        numbers = np.arange(len(self), dtype=np.int64) if rows is None else np.unique(rows)
        order = None if rows is None else np.searchsorted(numbers, rows)
        first, stores, spools = self.shards.first, ValueStores(), list[object]()
        content = {name: self.content[name] for name in names if name in self.content}
        nested = {name: first.nested[name] for name in names if name in first.nested}
        deep = [name for name in names if name in first.deep]
        small = self.small([n for n in names if n not in deep and not (n in content and content[n].bare)], rows)
        located = self._located(content, nested, small, numbers, rows is None, stores) if content or nested else {}
        decoded = self._decoded(deep, numbers) if deep else None
        columns: dict[str, Any] = {}
        for name in names:
            if name in located:
                column = located[name]
                columns[name] = column if order is None else column.combine_chunks().take(pa.array(order))
            elif decoded is not None and name in deep:
                columns[name] = decoded.column(name) if order is None else take_rows(decoded.column(name), order)
            else:
                columns[name] = small.column(name) if rows is None else take_rows(small.column(name), rows)
        fields = [pa.field(name, columns[name].type, nullable=self.schema.field(name).nullable) for name in names]
        features = self.features
        edges = self.shards.edges
        file_columns = {}
        for name, column in content.items():
            media = None if self.features is None or column.bare else kind_of_feature(self.features[name])
            kind = "binary" if column.bare else "file" if media is None else media[0]
            file_columns[name] = FileColumn(kind, column.is_list, stored=column.kind)
        return FileTable(
            rows=pa.table(columns, schema=pa.schema(fields)),
            columns=file_columns,
            files=stores.finish(spools),
            features=None if features is None else {name: features[name] for name in names},
            splits=self.splits if rows is None else (Split(self.splits[0].name, 0, len(rows)),),
            far=tuple(file.path for file in self.shards.files if file.remote is not None),
            about=self.about,
            verbatim=True,
            held=tuple(spools),
            nested={name: self.schema.field(name).type for name in nested},
            shards_read=int(np.count_nonzero(np.diff(np.searchsorted(numbers, edges)))),
        )

    def _located(
        self, content: Mapping[str, ContentColumn], nested: Mapping[str, Any], small: pa.Table, row_numbers: Ints,
        every: bool, stores: ValueStores,
    ) -> dict[str, pa.ChunkedArray]:  # fmt: skip
        """Return the columns of bytes as numbers of values, of sorted rows or of all."""
        by_shard: list[tuple[int, Any]] = [(number, None) for number in range(len(self.shards.files))]
        by_shard = by_shard if every else self.shards.rows_by_shard(row_numbers)
        values = []
        for (number, rows), shard in zip(by_shard, self.shards.shards(n for n, _ in by_shard), strict=True):
            opening = functools.partial(self.shards.open, number)
            chunks = ChunkLocator(opening, self._note, shard, stores, (*content, *nested))
            values.append((number, ShardValues(chunks, stores, rows)))
        fetch_chosen([of_shard for _, of_shard in values], stores)
        cells: dict[str, list[pa.Array]] = {name: [] for name in content}
        arrays_by_leaf: dict[str, list[list[pa.Array]]] = {name: [[] for _ in own] for name, own in nested.items()}
        for number, of_shard in values:
            start, stop = self.shards.edges[number : number + 2].tolist()
            for name, column in content.items():
                paths = None if column.bare else small.column(name).slice(start, stop - start)
                cells[name].append(of_shard.column(column, paths))
            shard = self.shards.shard(number)
            for name in nested:
                for parts, leaf in zip(arrays_by_leaf[name], shard.nested[name], strict=True):
                    parts.append(of_shard.nested(leaf, shard.schema.field(name)))
            of_shard.close()
        columns = {
            name: pa.chunked_array(cells[name], numbers_type(column.kind) if column.is_list else pa.int64())
            for name, column in content.items()
        }
        for name in nested:
            kind = numbered_type(self.schema.field(name).type)
            parts = [one_array(pa.chunked_array(own)) for own in arrays_by_leaf[name] if own]
            if parts and name in small.column_names:
                other_values = small.column(name)
                parts.append(one_array(other_values if every else other_values.take(pa.array(row_numbers))))
            try:
                columns[name] = pa.chunked_array([merge_leaves(kind, parts) if parts else pa.array([], kind)])
            except BROKEN as error:
                raise broken(self.shards.first.file, error) from error
        return columns

    def _decoded(self, names: Sequence[str], rows: Ints) -> pa.Table:
        """Decode columns with bytes deep inside to disk, for sorted rows, from the row groups that have one."""
        schema = pa.schema([self.schema.field(name) for name in names]).remove_metadata()

        def batches() -> Iterator[pa.RecordBatch]:
            for number, own in self.shards.rows_by_shard(rows):
                shard = self.shards.shard(number)
                leaf_numbers = [leaf.number for leaf in shard.leaf_list if leaf.path[0] in names]
                with self.shards.parquet(number) as reader:
                    for group in range(len(shard.groups)):
                        first, last = shard.edges[group : group + 2]
                        inside = own[np.searchsorted(own, first) : np.searchsorted(own, last)] - first
                        if not len(inside):
                            continue
                        position = 0
                        for batch in reader.iter_batches(DECODED_ROWS, [group], leaf_numbers, use_threads=False):
                            stop = position + len(batch)
                            first, last = np.searchsorted(inside, [position, stop])
                            numbers = inside[first:last] - position
                            position = stop
                            if len(numbers):
                                table = plain_table(pa.Table.from_batches([batch])).take(pa.array(numbers))
                                yield from table.select(list(names)).cast(schema).to_batches()
                        if position != last - first:
                            raise ValueError("its columns do not have the number of rows that it declares")

        self._note(f"bytes inside of {', '.join(map(repr, names))} are decoded to disk")
        spool = TableSpool()
        spool.write(schema, batches())
        return spool.tables()[0]


HELD_BYTES = 64_000_000  # of small columns; more is kept on disk
_BATCH_ROWS = 1024


class SmallColumns:
    """The small columns of some shards. Each column of a shard, or of a row group, is read once."""

    def __init__(self, shards: ParquetShards, note: Callable[[str], None]) -> None:
        self._shards, self._note = shards, note
        self._read: dict[str, pa.ChunkedArray] = {}  # columns of all rows
        self._groups: dict[tuple[str, int, int], pa.ChunkedArray] = {}  # by column, shard and row group
        first = shards.first
        bytes_only = {name for name in shards.partial if not first.small_leaves([name])}
        self.names = [name for name in shards.schema.names if name not in bytes_only]

    def read(self, names: Iterable[str], rows: Ints | None = None) -> pa.Table:
        """Return columns of all rows. If only `rows` are needed, other rows may be null."""
        requested = set(names)
        names = [name for name in self.names if name in requested]
        for name in names:
            if name in self._shards.partitions and name not in self._read:
                field = self._shards.partitions[name]  # its values are in the names of folders
                files = zip(self._shards.files, np.diff(self._shards.edges).tolist(), strict=True)
                arrays = [partition_array(file.shown, field, rows) for file, rows in files]
                self._read[name] = pa.chunked_array(arrays, field.type)
        missing = [name for name in names if name not in self._read]
        columns: Mapping[str, pa.ChunkedArray] = {}
        if missing and rows is not None and self._shards.has_remote_groups:
            columns = self._read_groups(missing, rows)
        if missing and not columns:
            table = self._read_all(missing)
            self._read |= {name: table.column(name) for name in missing}
        if not names:
            total = len(self._shards)
            return (pa.table({"": pa.nulls(total)}) if total else pa.table({})).select([])
        return pa.table({name: columns[name] if name in columns else self._read[name] for name in names})

    def possible_rows(self, condition: str) -> Bools | None:
        """Return which rows a condition can choose, by the statistics of remote row groups; None for all rows."""
        if not self._shards.has_remote_groups:
            return None
        bounds: list[Mapping[str, tuple[Any, Any]]] = []
        counts: list[int] = []
        for number, shard in enumerate(self._shards.shards()):
            values = self._shards.partition_values(number)
            exact = {name: (value, value) for name, value in values.items() if value is not None}
            with self._shards.reading(number) as reader:
                bounds += [{**group, **exact} for group in shard.bounds(reader)]
            counts += np.diff(shard.edges).tolist()
        mask = np.repeat(may_choose(condition, self._shards.schema, bounds), counts)
        return None if mask.all() else mask

    def _read_groups(self, names: list[str], rows: Ints) -> dict[str, pa.ChunkedArray]:
        """Return columns, read only in row groups with some of `rows` and null in others; {} if they are too large."""
        all_shards = self._shards.shards()
        groups = [(number, group) for number, shard in enumerate(all_shards) for group in range(len(shard.groups))]
        ends = [self._shards.edges[number] + shard.edges[1:] for number, shard in enumerate(all_shards)]
        used = np.unique(np.searchsorted(np.concatenate(ends), rows, side="right")).tolist()
        by_shard: dict[int, list[int]] = {}
        for number, group in (groups[index] for index in used):
            if any((name, number, group) not in self._groups for name in names):
                by_shard.setdefault(number, []).append(group)
        leaf_ids = {number: all_shards[number].small_leaves(names) for number in {0, *by_shard}}
        if sum(all_shards[n].plain_bytes(leaf_ids[n], own_groups) for n, own_groups in by_shard.items()) > HELD_BYTES:
            return {}
        near = {number: all_shards[number].near(leaf_ids[number], own) for number, own in by_shard.items()}
        self._shards.fetch(by_shard, lambda number: all_shards[number].ranges_of(near[number], by_shard[number]))
        (empty_table,) = self._tables(0, leaf_ids[0], [])
        for number, own in by_shard.items():
            for group, table in zip(own, self._tables(number, leaf_ids[number], own), strict=True):
                self._groups |= {(name, number, group): table.column(name) for name in names}
        tables = {}
        for name in names:
            kind, chunks = empty_table.schema.field(name).type, list[pa.Array]()
            for number, group in groups:
                column = self._groups.get((name, number, group))
                nulls = int(all_shards[number].groups[group][3][1]) if column is None else 0
                chunks += [pa.nulls(nulls, kind)] if column is None else column.chunks
            tables[name] = pa.chunked_array(chunks, kind)
        return tables

    def _read_all(self, names: list[str]) -> pa.Table:
        listings = [file.listing.small for file in self._shards.files if file.listing is not None]
        if self._shards.is_listed and all(name in listings[0].column_names for name in names):
            return pa.concat_tables([table.select(names) for table in listings])
        shards = self._shards.shards()
        leaf_ids = [shard.small_leaves(names) for shard in shards]
        is_large = sum(shard.plain_bytes(own) for shard, own in zip(shards, leaf_ids, strict=True)) > HELD_BYTES

        def ranges_of(number: int) -> Sequence[tuple[int, int]]:
            shard, own = shards[number], leaf_ids[number]
            return shard.ranges_of(own if is_large else shard.near(own, range(len(shard.groups))))

        self._shards.fetch(range(len(shards)), ranges_of)
        tables = (t.select(names) for n, own in enumerate(leaf_ids) for t in self._tables(n, own, in_batches=is_large))
        if not is_large:
            return pa.concat_tables(list(tables))
        self._note("large columns of text are kept on disk while rows are chosen")
        first = next(tables)
        spool = TableSpool()
        spool.write(first.schema, (batch for table in chain([first], tables) for batch in table.to_batches()))
        return spool.tables()[0]

    def _tables(
        self, number: int, leaf_ids: list[int], groups: list[int] | None = None, in_batches: bool = False
    ) -> Iterator[pa.Table]:
        """Yield some leaves of a shard: all rows at once, or in batches, or each row group alone (of none: no rows)."""
        shard = self._shards.shard(number)
        with self._shards.parquet(number) as reader:
            if in_batches:
                every = list(range(len(shard.groups)))
                for batch in reader.iter_batches(_BATCH_ROWS, every, leaf_ids, use_threads=False):
                    yield self._widened(plain_table(pa.Table.from_batches([batch])), number)
                return
            for some in [None] if groups is None else [[group] for group in groups] or [[]]:
                if some is None:
                    rows, table = shard.rows, reader.read_all(column_indices=leaf_ids, use_threads=False)
                else:
                    rows = sum(int(shard.groups[group][3][1]) for group in some)
                    table = reader.read_row_groups(some, column_indices=leaf_ids, use_threads=False)
                if table.num_rows != rows:
                    raise ValueError("its columns do not have the number of rows that it declares")
                yield self._widened(plain_table(table), number)

    def _widened(self, table: pa.Table, number: int) -> pa.Table:
        """Return columns in the types that hold the values of all shards."""
        for index, field in enumerate(table.schema):
            wide = self._shards.schema.field(field.name)
            if field.name in self._shards.partial or field.type == wide.type:
                continue
            try:
                table = table.set_column(index, field.name, table.column(index).cast(wide.type))
            except pa.ArrowInvalid as error:
                name = self._shards.files[number].shown
                raise SourceError(
                    f"The column {field.name!r} is {field.type} in {name}, and its values would change if stored as "
                    f"{wide.type}, which the files need together: {str(error)[:200]}.",
                    hint="Use one type for the column in all files.",
                    path=name,
                ) from error
        return table


def plain_table(table: pa.Table) -> pa.Table:
    """Return a table without metadata and without views. Any column may be null in another shard."""
    schema = plain_schema(pa.schema([field.with_nullable(True) for field in table.schema], table.schema.metadata))
    return (table if schema == table.schema else table.cast(schema)).replace_schema_metadata(None)


def take_rows(column: pa.ChunkedArray, rows: Ints) -> pa.ChunkedArray:
    """Return rows of a column; of a large one on disk."""
    if column.nbytes <= HELD_BYTES:
        return column.take(pa.array(rows))
    spool, schema = TableSpool(), pa.schema([pa.field("", column.type)])
    starts: Sequence[int] = range(0, len(rows), _BATCH_ROWS)
    parts = (column.take(pa.array(rows[start : start + _BATCH_ROWS])) for start in starts)
    spool.write(schema, (batch for part in parts for batch in pa.table([part], schema=schema).to_batches()))
    return spool.tables()[0].column(0)
