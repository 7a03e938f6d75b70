"""The Parquet shards of a dataset, by any writer: their footers, and their common schema and features.

Which shards there are: dataset_files.py. The content of one footer: dataset_shard.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import BrimError, SourceError
from brim.file_set import Ints
from brim.formats.file_views import FileView
from brim.formats.range_readers import LocalFile, Readable
from brim.formats.shard_listing import ShardListing
from brim.sources.dataset_files import DatasetFile, RemoteShard, open_together
from brim.sources.dataset_shard import BROKEN, DatasetShard, broken
from brim.sources.features import NoFeature, feature_of, feature_of_type, fits_type, kind_of
from brim.sources.file_table import Split
from brim.sources.hive_partitions import partition_array, partition_fields
from brim.storage.reading import fetch_together


class ParquetShards:
    """The shards of a dataset, in order. Remote shards stay open until `close`."""

    def __init__(self, name: str, files: Sequence[DatasetFile], card_features: Mapping[str, Any] | None) -> None:
        if not files:
            raise SourceError(f"{name} has no Parquet files.")
        self.files, self._card_features = files, card_features or {}
        self._readers: dict[int, Readable] = {}
        self._shards_by_number: dict[int, DatasetShard] = {}
        self.first = self.shard(0)
        self.content = self.first.content
        # If manifests list all shards, a shard is requested only when values are taken from it.
        self.is_listed = all(file.listing is not None and self._fits(file.listing) for file in files)
        if self.is_listed:
            counts = [0 if file.listing is None else file.listing.rows for file in files]
        else:
            counts = [shard.rows for shard in self.shards()]
        self.edges = np.cumsum([0, *counts]).astype(np.int64)
        schema = self._common_schema()
        fields = partition_fields((file.shown for file in files), schema.names)
        self.partitions = {field.name: field for field in fields}
        self.schema = pa.schema([*schema, *fields], schema.metadata)
        # Columns of which only a part, or nothing, can be read without bytes.
        self.partial = [*self.first.content, *self.first.nested, *self.first.deep]
        # Whether a row group takes a request.
        self.has_remote_groups = not self.is_listed and any(file.remote is not None for file in files)

    def __len__(self) -> int:
        return int(self.edges[-1])

    def open(self, number: int) -> Readable:
        file = self.files[number]
        if file.remote is not None and number not in self._readers:
            (self._readers[number],) = open_together([file])
        if number in self._readers:
            return self._readers[number]
        try:
            return LocalFile(file.path)
        except OSError as error:
            raise SourceError(f"{file.shown!r} cannot be read: {error.strerror}.", path=file.shown) from error

    @contextmanager
    def reading(self, number: int) -> Iterator[Readable]:
        """Open a shard. Errors about its content are raised with its name."""
        file, reader = self.files[number], self.open(number)
        try:
            yield reader
        except BrimError:
            raise
        except BROKEN as error:
            raise broken(file, error) from error
        finally:
            if file.remote is None:
                reader.close()

    @contextmanager
    def parquet(self, number: int) -> Iterator[Any]:
        """Open a shard with pyarrow."""
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": 1 << 20}
        with self.reading(number) as reader, pq.ParquetFile(FileView(reader), **options) as parquet:
            yield parquet.reader

    def shard(self, number: int) -> DatasetShard:
        if number not in self._shards_by_number:
            file = self.files[number]
            with self.reading(number) as reader:
                shard = DatasetShard(file, reader)
                if file.listing is not None and file.listing.rows != shard.rows:
                    raise ValueError("it does not have the rows that its manifest lists")
            self._shards_by_number[number] = shard
        return self._shards_by_number[number]

    def shards(self, numbers: Iterable[int] | None = None) -> list[DatasetShard]:
        """Return some shards, or all. The footers of those that are remote are fetched together."""
        numbers = list(range(len(self.files)) if numbers is None else numbers)
        remote = [n for n in numbers if n not in self._readers and self.files[n].remote is not None]
        self._readers |= dict(zip(remote, open_together([self.files[n] for n in remote]), strict=True))
        return [self.shard(number) for number in numbers]

    def fetch(self, numbers: Iterable[int], ranges_of: Callable[[int], Sequence[tuple[int, int]]]) -> None:
        """Fetch ranges of those shards that are remote, together."""
        readers = ((number, self._readers.get(number)) for number in numbers)
        fetch_together([(shard, ranges_of(number)) for number, shard in readers if isinstance(shard, RemoteShard)])

    def _fits(self, listing: ShardListing) -> bool:
        """Return whether the columns that a manifest lists are those of the shards."""
        types = {field.name: field.type for field in self.first.schema}
        partial = (*self.first.content, *self.first.nested)
        return all(field.name in partial or types.get(field.name) == field.type for field in listing.small.schema)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _common_schema(self) -> pa.Schema:
        """Return the schema that holds the rows of all shards, whose columns may be in another order.

        A column that is nullable in one shard is nullable. Numbers and texts have the wider type. Columns of bytes
        must have one type, because their values are not decoded.
        """
        first, nullable = self.first, set()
        types = {field.name: field.type for field in first.schema}
        for shard in self._shards_by_number.values():
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

    def partition_values(self, number: int) -> dict[str, Any]:
        """Return the values that the folders of a shard have in their names."""
        arrays = {name: partition_array(self.files[number].shown, f, 1) for name, f in self.partitions.items()}
        return {name: array[0].as_py() for name, array in arrays.items()}

    @property
    def splits(self) -> tuple[Split, ...]:
        """The splits, in the order of the shards. Shards of one split follow each other."""
        splits: list[Split] = []
        for file, start, stop in zip(self.files, self.edges[:-1].tolist(), self.edges[1:].tolist(), strict=True):
            if splits and splits[-1].name == file.split:
                splits[-1] = Split(file.split, splits[-1].start, stop)
            else:
                splits.append(Split(file.split, start, stop))
        return tuple(splits)

    @cached_property
    def declared_features(self) -> dict[str, Any]:
        """The features that the files declare, or the card, as far as they fit the types of the columns."""
        stored = (self.schema.metadata or {}).get(b"huggingface")
        features: Mapping[str, Any] = self._card_features
        if stored is not None:
            try:
                features = dict(json.loads(stored)["info"]["features"])
            except (ValueError, KeyError, TypeError):
                stored = None
        names = [field.name for field in self.schema if field.name in features]
        types = {field.name: field.type for field in self.schema}
        return {name: features[name] for name in names if fits_type(features[name], types[name], stored is not None)}

    def features(self, paths_of: Callable[[pa.Field], list[str]]) -> dict[str, Any] | None:
        """Return the features that `datasets` gives the columns: as declared, otherwise by type.

        None if a type has no feature. `paths_of` returns some paths of a column of files, by which its type is guessed.
        """
        features = {}
        try:
            for field in self.schema:
                column, name = self.content.get(field.name), field.name
                if name in self.declared_features:
                    features[name] = self.declared_features[name]
                    continue
                kinds = {kind_of(path) for path in paths_of(field)} if column is not None and not column.bare else set()
                if column is None or len(kinds) != 1 or kinds == {"file"}:
                    features[name] = feature_of_type(field.type)
                    continue
                feature: Any = feature_of(kinds.pop())
                list_type = "LargeList" if pa.types.is_large_list(field.type) else "List"
                features[name] = {"feature": feature, "_type": list_type} if column.is_list else feature
        except NoFeature:
            return None
        return features

    def rows_by_shard(self, rows: Ints) -> list[tuple[int, Ints]]:
        """Split sorted rows by the shards that have them: number, and rows counted in the shard."""
        cuts = np.searchsorted(rows, self.edges)
        numbers = [number for number in range(len(self.files)) if cuts[number] < cuts[number + 1]]
        return [(number, rows[cuts[number] : cuts[number + 1]] - self.edges[number]) for number in numbers]


def _wider(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type that holds numbers or texts of both; None without one."""
    kinds = first, second
    if all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
        both = [pa.schema([("", kind)]) for kind in kinds]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in kinds):
        return pa.large_string()
    if pa.types.is_null(first) or pa.types.is_null(second):
        return second if pa.types.is_null(first) else first
    return None
