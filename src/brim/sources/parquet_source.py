"""Parquet shards by any writer as a source: small columns are read, and large values are located, not read.

`ParquetOrigin` reads footers and small columns first, and locates the values of the chosen rows (`locate`), so that
one subject of a remote dataset costs its own bytes. The shards: parquet_shards.py; small columns: small_columns.py;
values: value_locator.py; the choice of rows: selection.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from brim.file_set import Bools, Ints
from brim.formats.nested_values import merge_leaves, numbered_type
from brim.formats.parquet_levels import is_list_type
from brim.sources.dataset_files import DatasetFile
from brim.sources.dataset_shard import BROKEN, ContentColumn, broken
from brim.sources.features import kind_of_feature
from brim.sources.file_table import FileColumn, FileTable, Split, one_array
from brim.sources.parquet_shards import ParquetShards
from brim.sources.small_columns import SmallColumns, plain_table, take_rows
from brim.sources.table_spool import TableSpool
from brim.sources.value_locator import ChunkLocator, ShardValues, ValueStores, fetch_chosen, numbers_type
from brim.sources.value_spool import DECODED_ROWS

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
                leaf_numbers = shard.all_leaves(names)
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
