"""Parquet shards that anybody wrote as a source: small columns are read, large values stay where they are.

`ParquetOrigin` reads footers and small columns first; the values of the rows that were chosen are found when they are
(`locate`), so that one subject of a dataset far away costs its own bytes. Which shards there are: dataset_files.py;
what is in one: dataset_shard.py; where values lie: value_places.py; which rows are chosen: selection.py.
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
from brim.file_set import Ints
from brim.formats.readable import LocalFile, Readable, ReadableFile
from brim.formats.value_spool import ValueSpool
from brim.sources.dataset_files import DatasetFile, RemoteShard
from brim.sources.dataset_shard import BROKEN, ContentColumn, DatasetShard, broken, plain_schema
from brim.sources.features import NoFeature, feature_of, feature_of_type, fits_type, kind_of, kind_of_feature
from brim.sources.file_table import FileColumn, FileTable, Split, is_list, one_array
from brim.sources.value_places import Finder, Places, numbers_type

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
        self._shards = [DatasetShard(file, self._open(number)) for number, file in enumerate(files)]
        if not self._shards:
            raise SourceError(f"{name} holds no Parquet files.")
        self.schema = self._one_schema()
        self.edges = np.cumsum([0, *(shard.rows for shard in self._shards)]).astype(np.int64)
        self.held: list[object] = []
        self.notes: list[str] = []

    def __len__(self) -> int:
        return int(self.edges[-1])

    def _open(self, number: int) -> Readable:
        """The shard; of one far away its end is asked for at once, and kept."""
        if number not in self._opened:
            file = self.files[number]
            try:
                opened: Readable = LocalFile(file.path) if file.remote is None else RemoteShard(file)
            except OSError as error:
                raise SourceError(f"{file.shown!r} cannot be read: {error.strerror}.", path=file.shown) from error
            if file.remote is None:
                return opened
            self._opened[number] = opened
        return self._opened[number]

    def close(self) -> None:
        for opened in self._opened.values():
            opened.close()
        self._opened.clear()

    def _one_schema(self) -> pa.Schema:
        first = self._shards[0]
        for shard in self._shards[1:]:
            if shard.schema.remove_metadata() != first.schema.remove_metadata():
                names = {*first.schema.names} ^ {*shard.schema.names}
                differs = sorted(names) or [
                    field.name for field in shard.schema if field != first.schema.field(field.name)
                ] or ["their order"]  # fmt: skip
                raise SourceError(
                    f"{shard.file.shown} has other columns than {first.file.shown}: {differs[0]}.",
                    hint="Name one config with --from-config, or give a glob of files that belong together.",
                )
        return first.schema

    @property
    def columns(self) -> list[str]:
        return list(self.schema.names)

    @property
    def file_columns(self) -> list[str]:
        return list(self.content)

    @property
    def content(self) -> Mapping[str, ContentColumn]:
        return self._shards[0].content

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
    def features(self) -> dict[str, Any] | None:
        """What `datasets` makes of the columns: as the files say, else the card, else by what is there."""
        said = (self.schema.metadata or {}).get(b"huggingface")
        card: Mapping[str, Any] = self._card_features or {}
        known = {field.name: card[field.name] for field in self.schema if fits_type(card.get(field.name), field.type)}
        if said is not None:
            try:
                known = json.loads(said)["info"]["features"]
            except (ValueError, KeyError, TypeError):
                pass
        features = {}
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
        names = self.small([field.name]).column(field.name).slice(0, 100)
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
        first = self._shards[0]
        left = {name for name in (*first.content, *first.deep) if not first.small_leaves([name])}
        return [name for name in self.schema.names if name not in left]

    @property
    def partial(self) -> list[str]:
        """The columns of which `small` gives only a part, or nothing."""
        return [*self.content, *self._shards[0].deep]

    def small(self, names: Iterable[str] | None = None) -> pa.Table:
        """Columns without their content. What is large in sum is mapped from disk."""
        names = [name for name in self.readable if names is None or name in set(names)]
        if not hasattr(self, "_read"):
            self._read: dict[str, Any] = {}
        missing = [name for name in names if name not in self._read]
        if missing:
            table = self._read_small(missing)
            self._read |= {name: table.column(name) for name in missing}
        if not names:
            return pa.table({}).select([]) if not len(self) else pa.table({"": pa.nulls(len(self))}).select([])
        return pa.table({name: self._read[name] for name in names})

    def _read_small(self, names: list[str]) -> pa.Table:
        total, leaves = 0, []
        for shard in self._shards:
            leaves.append(shard.small_leaves(names))
            for group in range(len(shard.groups)):
                total += sum(int(shard.meta(group, leaf)[6][1]) for leaf in leaves[-1])
        self._fetch_small(leaves)
        spool = ValueSpool() if total > HELD_BYTES else None
        tables: list[pa.Table] = []
        writer: Any = None
        sink = None
        for number, shard in enumerate(self._shards):
            try:
                for table in self._tables(number, shard, leaves[number], spool is not None):
                    if spool is None:
                        tables.append(table)
                        continue
                    if writer is None:
                        sink = open(spool.descriptor, "wb", closefd=False)  # noqa: SIM115  # closed below
                        writer = pa.ipc.new_stream(sink, table.schema)
                    writer.write_table(table)
            except BrimError:
                raise
            except BROKEN as error:
                raise broken(shard.file, error) from error
        if spool is not None and writer is not None and sink is not None:
            writer.close()
            sink.close()
            self.held.append(spool)
            self._note("large columns of text are kept on disk while rows are chosen")
            return pa.ipc.open_stream(pa.memory_map(spool.path)).read_all()
        return pa.concat_tables(tables)

    def _fetch_small(self, leaves: list[list[int]]) -> None:
        """Of shards far away, the small columns of all by few requests."""
        for number, shard in enumerate(self._shards):
            opened = self._opened.get(number)
            if isinstance(opened, RemoteShard):
                opened.fetch(shard.ranges_of(leaves[number]))

    def _tables(self, number: int, shard: DatasetShard, leaves: list[int], in_batches: bool) -> Iterable[pa.Table]:
        opened = self._open(number)
        try:
            with pq.ParquetFile(ReadableFile(opened), pre_buffer=False, buffer_size=1 << 20) as parquet:
                if in_batches:
                    groups = list(range(len(shard.groups)))
                    for batch in parquet.reader.iter_batches(_BATCH_ROWS, groups, leaves, use_threads=False):
                        yield _plain(pa.Table.from_batches([batch]))
                    return
                table = parquet.reader.read_all(column_indices=leaves, use_threads=False)
                if table.num_rows != shard.rows:
                    raise ValueError("its columns have other rows than it says")
                yield _plain(table)
        finally:
            if shard.file.remote is None:
                opened.close()

    # Values

    def locate(self, rows: Ints | None = None, names: Sequence[str] | None = None) -> FileTable:
        """The file table of some rows, in their order, and of some columns: their values found, none of them read."""
        names = [name for name in self.schema.names if names is None or name in set(names)]
        wanted = np.arange(len(self), dtype=np.int64) if rows is None else np.unique(rows)
        places = Places()
        found = {name: self.content[name] for name in names if name in self.content}
        cells: dict[str, list[pa.Array]] = {name: [] for name in found}
        deep = [name for name in names if name in self._shards[0].deep]
        small = self.small([name for name in names if name not in deep and not (name in found and found[name].bare)])
        paths = {name: small.column(name) for name in found if not found[name].bare}
        held: list[object] = list(self.held)
        if found:
            for number, shard in enumerate(self._shards):
                low, high = np.searchsorted(wanted, self.edges[number : number + 2])
                if low == high and rows is not None:
                    continue
                own = wanted[low:high] - self.edges[number]
                finder = Finder(
                    functools.partial(self._open, number), self._note, shard, places,
                    None if rows is None else own, found,
                )  # fmt: skip
                for name, column in found.items():
                    of = paths[name].slice(int(self.edges[number]), shard.rows) if name in paths else None
                    cells[name].append(finder.column(column, of))
                finder.close()
        columns: dict[str, Any] = {}
        whole = self._decoded(deep, wanted, held) if deep else None
        order = None if rows is None else np.searchsorted(wanted, rows)
        for name in names:
            if name in found:
                kind = pa.int64() if not found[name].is_list else numbers_type(found[name].kind)
                chunked = pa.chunked_array(cells[name], kind)
                columns[name] = chunked if order is None else chunked.combine_chunks().take(pa.array(order))
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
        )

    def _decoded(self, names: Sequence[str], wanted: Ints, held: list[object]) -> pa.Table:
        """Columns with bytes deep inside, of some rows in the order of the source: decoded a few at a time, to disk.

        Of a shard far away the row groups are read that hold a chosen row.
        """
        spool, schema = ValueSpool(), pa.schema([self.schema.field(name) for name in names])
        with (
            open(spool.descriptor, "wb", closefd=False) as sink,
            pa.ipc.new_stream(sink, schema.remove_metadata()) as writer,
        ):
            for number, shard in enumerate(self._shards):
                low, high = np.searchsorted(wanted, self.edges[number : number + 2])
                if low < high:
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
            with pq.ParquetFile(ReadableFile(opened), pre_buffer=False, buffer_size=1 << 20) as parquet:
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
                        raise ValueError("its columns have other rows than it says")
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


def _plain(table: pa.Table) -> pa.Table:
    """What was read, without metadata and without views."""
    schema = plain_schema(table.schema)
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
