"""Parquet shards that anybody wrote as a source: small columns are read, large values stay where they are.

`ParquetOrigin` reads footers and small columns first; the values of the rows that were chosen are found when they are
(`locate`), so that one subject of a dataset far away costs its own bytes. Which shards there are: dataset_files.py;
what is in one: dataset_shard.py; where values lie: value_locator.py; which rows are chosen: selection.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import BrimError, SourceError
from brim.file_set import Bools, Ints
from brim.formats.file_views import FileView
from brim.formats.nested_values import merge_leaves, numbered_type
from brim.formats.range_readers import LocalFile, Readable
from brim.formats.shard_listing import ShardListing
from brim.sources.dataset_files import DatasetFile, RemoteShard, open_together
from brim.sources.dataset_shard import BROKEN, ContentColumn, DatasetShard, broken, plain_schema
from brim.sources.features import NoFeature, feature_of, feature_of_type, fits_type, kind_of, kind_of_feature
from brim.sources.file_table import FileColumn, FileTable, Split, is_list, one_array
from brim.sources.hive_partitions import partition_array, partition_fields
from brim.sources.value_locator import Finder, ValuePlaces, ValueSpool, fetch_chosen, numbers_type
from brim.sources.where import may_choose
from brim.storage.reading import fetch_together

HELD_BYTES = 64_000_000  # of small columns; more goes to disk
_BATCH_ROWS = 1024
DECODED_ROWS = 16  # of columns that hold bytes


class ParquetOrigin:
    """The rows of Parquet shards, in order. `about` is what the dataset says of itself, `features` its card's."""

    def __init__(
        self, name: str, files: Sequence[DatasetFile], about: Mapping[str, Any], features: Mapping[str, Any] | None
    ) -> None:
        self.name, self.files, self.about = name, files, about
        self._card_features = features
        self._opened: dict[int, Readable] = {}
        self._known: dict[int, DatasetShard] = {}
        if not files:
            raise SourceError(f"{name} has no Parquet files.")
        self._first = self._shard(0)
        # With what a manifest tells, shards are asked for when values are taken from them.
        self._listed = all(file.listing is not None and self._fits(file.listing) for file in files)
        if self._listed:
            counts = [0 if file.listing is None else file.listing.rows for file in files]
        else:
            counts = [shard.rows for shard in self._shards(range(len(files)))]
        self.schema = self._one_schema()
        fields = partition_fields((file.shown for file in files), self.schema.names)
        self._partitions = {field.name: field for field in fields}
        self.schema = pa.schema([*self.schema, *fields], self.schema.metadata)
        self.edges = np.cumsum([0, *counts]).astype(np.int64)
        self.held: list[object] = []
        self.notes: list[str] = []

    def __len__(self) -> int:
        return int(self.edges[-1])

    def _open(self, number: int) -> Readable:
        """The shard; one far away stays open."""
        file = self.files[number]
        if number in self._opened:
            return self._opened[number]
        if file.remote is not None:
            (self._opened[number],) = open_together([file])
            return self._opened[number]
        try:
            return LocalFile(file.path)
        except OSError as error:
            raise SourceError(f"{file.shown!r} cannot be read: {error.strerror}.", path=file.shown) from error

    def _shard(self, number: int) -> DatasetShard:
        if number not in self._known:
            file, opened = self.files[number], self._open(number)
            try:
                shard = DatasetShard(file, opened)
            finally:
                if file.remote is None:
                    opened.close()
            if file.listing is not None and file.listing.rows != shard.rows:
                raise broken(file, ValueError("it does not have the rows that its manifest lists"))
            self._known[number] = shard
        return self._known[number]

    def _shards(self, numbers: Iterable[int]) -> list[DatasetShard]:
        """Some shards; what is asked for of those far away is on its way together."""
        numbers = list(numbers)
        far = [n for n in numbers if n not in self._opened and self.files[n].remote is not None]
        self._opened |= dict(zip(far, open_together([self.files[n] for n in far]), strict=True))
        return [self._shard(number) for number in numbers]

    def _fits(self, listing: ShardListing) -> bool:
        """Whether what a manifest lists are columns of the shards."""
        known = {field.name: field.type for field in self._first.schema}
        partial = (*self._first.content, *self._first.nested)
        return all(field.name in partial or known.get(field.name) == field.type for field in listing.small.schema)

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _one_schema(self) -> pa.Schema:
        """The schema that holds all shards, whose columns may stand in another order.

        What is null in one is in all, and numbers and texts have the wider type. Values that stay where they lie must
        have one type.
        """
        first, nullable = self._first, set()
        types = {field.name: field.type for field in first.schema}
        for shard in self._known.values():
            names = {*first.schema.names} ^ {*shard.schema.names}
            differs = sorted(names)
            fixed = {*first.content, *first.nested, *first.deep, *shard.content, *shard.nested, *shard.deep}
            for field in shard.schema if not names else ():
                wide = types[field.name] if field.type == types[field.name] else None
                if wide is None and field.name not in fixed:
                    wide = _wider(types[field.name], field.type)
                if wide is None:
                    differs.append(f"{field.name} ({field.type}, not {types[field.name]})")
                else:
                    types[field.name] = wide
            if differs:
                raise SourceError(
                    f"{shard.file.shown} has different columns than {first.file.shown}: {differs[0]}.",
                    hint="Name one config with --from-config, or use a glob that matches files with the same columns.",
                )
            nullable |= {field.name for field in shard.schema if field.nullable}
        fields = [pa.field(f.name, types[f.name], f.name in nullable, f.metadata) for f in first.schema]
        return pa.schema(fields, first.schema.metadata)

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def file_columns(self) -> list[str]:
        return list(self.content)

    @property
    def content(self) -> Mapping[str, ContentColumn]:
        return self._first.content

    @property
    def splits(self) -> tuple[Split, ...]:
        """Shards of one split follow each other."""
        found: list[Split] = []
        for file, start, stop in zip(self.files, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True):
            if found and found[-1].name == file.split:
                found[-1] = Split(file.split, found[-1].start, stop)
            else:
                found.append(Split(file.split, start, stop))
        return tuple(found)

    @cached_property
    def told_features(self) -> Mapping[str, Any]:
        """What the files say of the columns, else the card."""
        said = (self.schema.metadata or {}).get(b"huggingface")
        card: Mapping[str, Any] = self._card_features or {}
        known = {field.name: card[field.name] for field in self.schema if fits_type(card.get(field.name), field.type)}
        if said is not None:
            try:
                told = dict(json.loads(said)["info"]["features"])
            except (ValueError, KeyError, TypeError):
                return known
            known = {
                f.name: told[f.name] for f in self.schema if f.name in told and fits_type(told[f.name], f.type, True)
            }
        return known

    @cached_property
    def features(self) -> dict[str, Any] | None:
        """What `datasets` makes of the columns: as it is told, else by what is there."""
        known, features = self.told_features, {}
        try:
            for field in self.schema:
                features[field.name] = known[field.name] if field.name in known else self._guess(field)
        except NoFeature:
            return None
        return features

    def _guess(self, field: pa.Field) -> Any:
        column = self.content.get(field.name)
        if column is None or column.bare:
            return feature_of_type(field.type)
        names = self.small([field.name], np.arange(min(100, len(self)))).column(field.name).slice(0, 100)
        array = one_array(names)
        array = array.flatten() if is_list(array.type) else array
        kinds = {kind_of(path) for path in array.field("path").drop_null().to_pylist()}
        kind = kinds.pop() if len(kinds) == 1 else "file"
        if kind == "file":
            return feature_of_type(field.type)
        feature: Any = feature_of(kind)
        return (
            {"feature": feature, "_type": "LargeList" if pa.types.is_large_list(field.type) else "List"}
            if (column.is_list)
            else feature
        )

    # Small columns

    @cached_property
    def readable(self) -> list[str]:
        """The columns that `small` gives: of files their paths, of others what is not bytes, nothing of bytes alone."""
        first = self._first
        left = {name for name in (*first.content, *first.nested, *first.deep) if not first.small_leaves([name])}
        return [name for name in self.schema.names if name not in left]

    @property
    def partial(self) -> list[str]:
        """The columns of which `small` gives only a part, or nothing."""
        return [*self.content, *self._first.nested, *self._first.deep]

    @cached_property
    def _read(self) -> dict[str, Any]:
        """Columns of all rows that were read."""
        return {}

    @cached_property
    def _read_groups(self) -> dict[tuple[str, int, int], pa.ChunkedArray]:
        """What was read of shards far away: by column, shard and row group."""
        return {}

    @cached_property
    def _far(self) -> bool:
        """Whether a row group takes a request."""
        return not self._listed and any(file.remote is not None for file in self.files)

    def possible(self, expression: str) -> Bools | None:
        """By the statistics of row groups that lie far away."""
        if not self._far:
            return None
        bounds: list[Mapping[str, tuple[Any, Any]]] = []
        counts: list[int] = []
        for number, shard in enumerate(self._shards(range(len(self.files)))):
            values = {
                name: partition_array(shard.file.shown, field, 1)[0].as_py() for name, field in self._partitions.items()
            }
            known = {name: (value, value) for name, value in values.items() if value is not None}
            opened = self._open(number)
            try:
                bounds += [{**group, **known} for group in shard.bounds(opened)]
            finally:
                if shard.file.remote is None:
                    opened.close()
            counts += np.diff(shard.edges).tolist()
        mask = np.repeat(may_choose(expression, self.schema, bounds), counts)
        return None if mask.all() else mask

    def small(self, names: Iterable[str] | None = None, rows: Ints | None = None) -> pa.Table:
        """Columns without their content. What is large in sum is mapped from disk."""
        asked = set(self.readable if names is None else names)
        names = [name for name in self.readable if name in asked]
        for name in names:
            if name in self._partitions and name not in self._read:
                self._read[name] = self._partition(self._partitions[name])
        missing = [name for name in names if name not in self._read]
        if missing and rows is not None and self._far:
            some = self._of_groups(missing, rows)
            if some is not None:
                return pa.table({name: some[name] if name in some else self._read[name] for name in names})
        if missing:
            table = self._read_small(missing)
            self._read |= {name: table.column(name) for name in missing}
        if not names:
            return pa.table({}).select([]) if not len(self) else pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table({name: self._read[name] for name in names})

    def _partition(self, field: pa.Field) -> pa.ChunkedArray:
        """A column that the names of folders hold."""
        counts = np.diff(self.edges).tolist()
        arrays = [partition_array(file.shown, field, rows) for file, rows in zip(self.files, counts, strict=True)]
        return pa.chunked_array(arrays, field.type)

    def _of_groups(self, names: list[str], rows: Ints) -> dict[str, pa.ChunkedArray] | None:
        """Columns of the row groups that hold some rows, and null elsewhere; None if that is too much to hold."""
        shards = self._shards(range(len(self.files)))
        places = [(number, group) for number, shard in enumerate(shards) for group in range(len(shard.groups))]
        ends = [self.edges[number] + shard.edges[1:] for number, shard in enumerate(shards)]
        used = np.unique(np.searchsorted(np.concatenate(ends), rows, side="right")).tolist()
        wanted: dict[int, list[int]] = {}
        for number, group in (places[place] for place in used):
            if any((name, number, group) not in self._read_groups for name in names):
                wanted.setdefault(number, []).append(group)
        leaves = {number: shards[number].small_leaves(names) for number in {0, *wanted}}
        size = sum(
            int(shards[number].meta(group, leaf)[6][1])
            for number, groups in wanted.items() for group in groups for leaf in leaves[number]
        )  # fmt: skip
        if size > HELD_BYTES:
            return None
        fetch_together(
            [
                (opened, shards[number].ranges_of(shards[number].near(leaves[number], groups), groups))
                for number, groups in wanted.items()
                if isinstance(opened := self._opened.get(number), RemoteShard)
            ]
        )
        (nothing,) = self._tables(0, shards[0], leaves[0], [])
        for number, groups in wanted.items():
            tables = self._tables(number, shards[number], leaves[number], groups)
            for group, table in zip(groups, tables, strict=True):
                self._read_groups |= {(name, number, group): table.column(name) for name in names}
        found = {}
        for name in names:
            kind = nothing.schema.field(name).type
            parts = [
                self._read_groups[name, number, group].chunks
                if (name, number, group) in self._read_groups
                else [pa.nulls(int(shards[number].groups[group][3][1]), kind)]
                for number, group in places
            ]
            found[name] = pa.chunked_array([chunk for part in parts for chunk in part], kind)
        return found

    def _read_small(self, names: list[str]) -> pa.Table:
        listings = [file.listing.small for file in self.files if file.listing is not None]
        if self._listed and all(name in listings[0].column_names for name in names):
            return pa.concat_tables([table.select(names) for table in listings])
        total, leaves = 0, []
        shards = self._shards(range(len(self.files)))
        for shard in shards:
            leaves.append(shard.small_leaves(names))
            for group in range(len(shard.groups)):
                total += sum(int(shard.meta(group, leaf)[6][1]) for leaf in leaves[-1])
        fetch_together(
            [
                (opened, shard.ranges_of(of if total > HELD_BYTES else shard.near(of, range(len(shard.groups)))))
                for number, (shard, of) in enumerate(zip(shards, leaves, strict=True))
                if isinstance(opened := self._opened.get(number), RemoteShard)
            ]
        )
        spool = ValueSpool() if total > HELD_BYTES else None
        tables: list[pa.Table] = []
        writer: Any = None
        sink = None
        for number, shard in enumerate(shards):
            for table in self._tables(number, shard, leaves[number], in_batches=spool is not None):
                table = table.select(names)
                if spool is None:
                    tables.append(table)
                    continue
                if writer is None:
                    sink = open(spool.descriptor, "wb", closefd=False)  # noqa: SIM115  # closed below
                    writer = pa.ipc.new_stream(sink, table.schema)
                writer.write_table(table)
        if spool is not None and writer is not None and sink is not None:
            writer.close()
            sink.close()
            self.held.append(spool)
            self._note("large columns of text are kept on disk while rows are chosen")
            return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all()
        return pa.concat_tables(tables)

    def _tables(
        self, number: int, shard: DatasetShard, leaves: list[int], groups: list[int] | None = None,
        in_batches: bool = False,
    ) -> Iterator[pa.Table]:  # fmt: skip
        """Some leaves of a shard: all rows at once, or in batches, or each row group alone (of none: no rows)."""
        opened = self._open(number)
        try:
            with pq.ParquetFile(FileView(opened), pre_buffer=False, buffer_size=1 << 20) as parquet:
                reader = parquet.reader
                if in_batches:
                    every = list(range(len(shard.groups)))
                    for batch in reader.iter_batches(_BATCH_ROWS, every, leaves, use_threads=False):
                        yield self._widened(_plain(pa.Table.from_batches([batch])), shard)
                    return
                for some in [None] if groups is None else [[group] for group in groups] or [[]]:
                    if some is None:
                        rows, table = shard.rows, reader.read_all(column_indices=leaves, use_threads=False)
                    else:
                        rows = sum(int(shard.groups[group][3][1]) for group in some)
                        table = reader.read_row_groups(some, column_indices=leaves, use_threads=False)
                    if table.num_rows != rows:
                        raise ValueError("its columns do not have the number of rows that it declares")
                    yield self._widened(_plain(table), shard)
        except BrimError:
            raise
        except BROKEN as error:
            raise broken(shard.file, error) from error
        finally:
            if shard.file.remote is None:
                opened.close()

    def _widened(self, table: pa.Table, shard: DatasetShard) -> pa.Table:
        """Columns with the types that all shards have."""
        for at, field in enumerate(table.schema):
            wide = self.schema.field(field.name)
            if field.name in self.partial or field.type == wide.type:
                continue
            try:
                table = table.set_column(at, field.name, table.column(at).cast(wide.type))
            except pa.ArrowInvalid as error:
                raise SourceError(
                    f"The column {field.name!r} is {field.type} in {shard.file.shown}, and its values would change if "
                    f"stored as {wide.type}, which the files need together: {str(error)[:200]}.",
                    hint="Use one type for the column in all files.",
                    path=shard.file.shown,
                ) from error
        return table

    # Values

    def locate(self, rows: Ints | None = None, names: Sequence[str] | None = None) -> FileTable:
        """The file table of some rows, in their order, and of some columns: their values found, none of them read."""
        asked = set(self.schema.names if names is None else names)
        names = [name for name in self.schema.names if name in asked]
        wanted = np.arange(len(self), dtype=np.int64) if rows is None else np.unique(rows)
        places = ValuePlaces()
        found = {name: self.content[name] for name in names if name in self.content}
        cells: dict[str, list[pa.Array]] = {name: [] for name in found}
        deep = [name for name in names if name in self._first.deep]
        nested = {name: self._first.nested[name] for name in names if name in self._first.nested}
        inside: dict[str, list[list[pa.Array]]] = {name: [[] for _ in of] for name, of in nested.items()}
        shown = [name for name in names if name not in deep and not (name in found and found[name].bare)]
        small = self.small(shown, rows)
        paths = {name: small.column(name) for name in found if not found[name].bare}
        held: list[object] = list(self.held)
        if found or nested:
            finders = self._finders(wanted, rows is None, places, (*found, *nested))
            fetch_chosen([finder for _, finder in finders], places)
            for number, finder in finders:
                for name, column in found.items():
                    count = int(self.edges[number + 1] - self.edges[number])
                    of = paths[name].slice(int(self.edges[number]), count) if name in paths else None
                    cells[name].append(finder.column(column, of))
                for name, leaves in inside.items():
                    for parts, one in zip(leaves, self._known[number].nested[name], strict=True):
                        parts.append(finder.nested(one, self._known[number].schema.field(name)))
                finder.close()
        columns: dict[str, Any] = {}
        whole = self._decoded(deep, wanted, held) if deep else None
        order = None if rows is None else np.searchsorted(wanted, rows)
        for name in names:
            if name in found:
                kind = pa.int64() if not found[name].is_list else numbers_type(found[name].kind)
                chunked = pa.chunked_array(cells[name], kind)
                columns[name] = chunked if order is None else chunked.combine_chunks().take(pa.array(order))
            elif name in nested:
                own = small.column(name) if name in small.column_names else None
                columns[name] = self._merged(name, inside[name], own, None if rows is None else wanted)
                columns[name] = columns[name] if order is None else columns[name].take(pa.array(order))
            elif whole is not None and name in deep:
                column = whole.column(name)
                columns[name] = column if order is None else taken(column, order, held)
            else:
                columns[name] = small.column(name) if rows is None else taken(small.column(name), rows, held)
        fields = [pa.field(name, columns[name].type, nullable=self.schema.field(name).nullable) for name in names]
        features = self.features
        return FileTable(
            rows=pa.table(columns, schema=pa.schema(fields)),
            columns={name: self._file_column(name) for name in found},
            files=places.finish(held),
            features=None if features is None else {name: features[name] for name in names},
            splits=self.splits if rows is None else (Split(self.splits[0].name, 0, len(rows)),),
            far=tuple(file.path for file in self.files if file.remote is not None),
            about=self.about,
            verbatim=True,
            held=tuple(held),
            nested={name: self.schema.field(name).type for name in nested},
            shards_read=int(np.count_nonzero(np.diff(np.searchsorted(wanted, self.edges)))),
        )

    def _merged(
        self, name: str, leaves: list[list[pa.Array]], small: pa.ChunkedArray | None, rows: Ints | None
    ) -> pa.Array:
        """A column with numbers where its bytes are, from these and from what else is in it, of some rows or of all."""
        kind = self.schema.field(name).type
        parts = [one_array(pa.chunked_array(parts)) for parts in leaves if parts]
        if not parts:
            return pa.array([], numbered_type(kind))
        if small is not None:
            parts.append(one_array(small if rows is None else small.take(pa.array(rows))))
        try:
            return merge_leaves(numbered_type(kind), parts)
        except BROKEN as error:
            raise broken(self._first.file, error) from error

    def _finders(
        self, wanted: Ints, every: bool, places: ValuePlaces, names: Iterable[str]
    ) -> list[tuple[int, Finder]]:
        """By the number of the shard: those with a row that is wanted, or all."""
        cuts = np.searchsorted(wanted, self.edges)
        numbers = [n for n in range(len(self.files)) if every or cuts[n] < cuts[n + 1]]
        found = []
        for number, shard in zip(numbers, self._shards(numbers), strict=True):
            own = None if every else wanted[cuts[number] : cuts[number + 1]] - self.edges[number]
            opening = functools.partial(self._open, number)
            found.append((number, Finder(opening, self._note, shard, places, own, names)))
        return found

    def _decoded(self, names: Sequence[str], wanted: Ints, held: list[object]) -> pa.Table:
        """Columns with bytes deep inside, of some rows in the order of the source: decoded a few at a time, to disk.

        Of a shard far away the row groups are read that hold a chosen row.
        """
        spool, schema = ValueSpool(), pa.schema([self.schema.field(name) for name in names])
        with (
            open(spool.descriptor, "wb", closefd=False) as sink,
            pa.ipc.new_stream(sink, schema.remove_metadata()) as writer,
        ):
            for number in range(len(self.files)):
                low, high = np.searchsorted(wanted, self.edges[number : number + 2])
                if low < high:
                    shard = self._shard(number)
                    try:
                        for table in self._deep_rows(number, shard, names, wanted[low:high] - self.edges[number]):
                            writer.write_table(table.select(list(names)).cast(schema.remove_metadata()))
                    except BrimError:
                        raise
                    except BROKEN as error:
                        raise broken(shard.file, error) from error
        held.append(spool)
        self._note(f"bytes inside of {', '.join(map(repr, names))} are decoded to disk")
        return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all()

    def _deep_rows(self, number: int, shard: DatasetShard, names: Sequence[str], rows: Ints) -> Iterator[pa.Table]:
        opened = self._open(number)
        try:
            with pq.ParquetFile(FileView(opened), pre_buffer=False, buffer_size=1 << 20) as parquet:
                for group in range(len(shard.groups)):
                    first, last = shard.edges[group : group + 2]
                    own = rows[np.searchsorted(rows, first) : np.searchsorted(rows, last)] - first
                    at = 0
                    if not len(own):
                        continue
                    leaves = shard.all_leaves(names)
                    for batch in parquet.reader.iter_batches(DECODED_ROWS, [group], leaves, use_threads=False):
                        inside = own[np.searchsorted(own, at) : np.searchsorted(own, at + len(batch))] - at
                        at += len(batch)
                        if len(inside):
                            yield _plain(pa.Table.from_batches([batch])).take(pa.array(inside))
                    if at != last - first:
                        raise ValueError("its columns do not have the number of rows that it declares")
        finally:
            if shard.file.remote is None:
                opened.close()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _file_column(self, name: str) -> FileColumn:
        column = self.content[name]
        if column.bare:
            return FileColumn("binary", column.is_list, stored=column.kind)
        features = self.features
        known = None if features is None else kind_of_feature(features[name])
        return FileColumn("file" if known is None else known[0], column.is_list, stored=column.kind)


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """The type that holds numbers or texts of both; None if there is none."""
    kinds = first, second
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        both = [pa.schema([("", kind)]) for kind in kinds]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds):
        return pa.large_string()
    if pa.types.is_null(first) or pa.types.is_null(second):
        return second if pa.types.is_null(first) else first
    return None


def _plain(table: pa.Table) -> pa.Table:
    """What was read, without metadata and without views; any of it may be null in another shard."""
    schema = plain_schema(pa.schema([field.with_nullable(True) for field in table.schema], table.schema.metadata))
    return (table if schema == table.schema else table.cast(schema)).replace_schema_metadata(None)


def taken(column: pa.ChunkedArray, rows: Ints, held: list[object]) -> pa.ChunkedArray:
    """Rows of a column; those of one that is large go to disk, a batch at a time."""
    if column.nbytes <= HELD_BYTES:
        return column.take(pa.array(rows))
    spool = ValueSpool()
    schema = pa.schema([pa.field("", column.type)])
    with open(spool.descriptor, "wb", closefd=False) as sink, pa.ipc.new_stream(sink, schema) as writer:
        for start in range(0, len(rows), _BATCH_ROWS):
            part = column.take(pa.array(rows[start : start + _BATCH_ROWS]))
            writer.write_table(pa.table([part], schema=schema))
    held.append(spool)
    return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all().column(0)
