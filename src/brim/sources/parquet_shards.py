"""The Parquet shards of a dataset, by any writer: their footers, and their common schema and features.

A `DatasetShard` is the footer of one file: which of its columns are read, and which are left in the shard. Which shards
there are: dataset_files.py.
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

from brim.errors import BrimError, SourceError, VerificationError
from brim.file_set import Ints
from brim.formats import thrift
from brim.formats.parquet_footer import Leaf, read_footer, schema_leaves
from brim.formats.parquet_levels import byte_leaves, is_list_type, plain_type
from brim.formats.parquet_values import PageSpan, page_spans
from brim.formats.range_readers import FileView, LocalFile, Readable
from brim.formats.shard_listing import ShardListing
from brim.formats.thrift import Struct
from brim.records import dataclass
from brim.sources.dataset_files import DatasetFile, RemoteShard, open_together
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


_NEAR_BYTES = 1_000_000
BROKEN = (
    thrift.ThriftError, ValueError, KeyError, IndexError, TypeError, OverflowError, OSError, UnicodeDecodeError,
    RecursionError, MemoryError, AttributeError, pa.ArrowException,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ContentColumn:
    """A column whose values are found and not read: files, or plain bytes, alone or in lists."""

    name: str
    kind: pa.DataType
    is_list: bool
    bare: bool


def plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(plain_type(field.type)) for field in schema], schema.metadata)


def content_column(field: pa.Field) -> ContentColumn | None:
    """Return the content of an Arrow field that stays in the shard; None for a column that is read."""
    kind, is_list = field.type, is_list_type(field.type)
    inner = kind.value_type if is_list else kind
    if pa.types.is_binary(inner) or pa.types.is_large_binary(inner):
        return ContentColumn(field.name, kind, is_list, bare=True)
    if pa.types.is_struct(inner) and {part.name for part in inner} == {"bytes", "path"} and len(inner) == 2:
        types = {part.name: part.type for part in inner}
        texts = pa.types.is_string(types["path"]) or pa.types.is_large_string(types["path"])
        if texts and (pa.types.is_binary(types["bytes"]) or pa.types.is_large_binary(types["bytes"])):
            return ContentColumn(field.name, kind, is_list, bare=False)
    return None


@dataclass(frozen=True, slots=True)
class NestedLeaf:
    """Bytes inside of a column: the leaf of the file, and its path and levels in the column's type."""

    leaf: Leaf
    path: tuple[str, ...]
    levels: tuple[int, ...]


class DatasetShard:
    """The footer of one Parquet file, and its columns."""

    def __init__(self, file: DatasetFile, source: Readable) -> None:
        self.file = file
        if source.size > 12 and source.read_at(source.size - 4, 4) == b"PARE":
            raise encrypted(file, file.shown)
        try:
            self.footer: Struct = read_footer(source)
            self.leaf_list = schema_leaves(self.footer)
            with pq.ParquetFile(FileView(source), pre_buffer=False) as parquet:
                self.schema: pa.Schema = plain_schema(parquet.schema_arrow)
                self.rows = int(parquet.metadata.num_rows)
            names = self.schema.names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                text = f"{file.shown} has two columns of the name {twice!r}."
                raise SourceError(text, hint="Write it again with other names.", path=file.shown)
            self.groups: list[Struct] = self.footer[4][1].items if 4 in self.footer else []
            counts = [int(group[3][1]) for group in self.groups]
            if sum(counts) != self.rows or min(counts, default=0) < 0:
                raise ValueError("its row groups do not have the number of rows that it declares")
            self.edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(counts, np.int64))])
            for group in self.groups:
                if len(group[1][1].items) != len(self.leaf_list):
                    raise ValueError("a row group has different columns than the file")
            self.content = {c.name: c for field in self.schema if (c := content_column(field)) is not None}
            self.leaf_of = {name: self._leaf(column) for name, column in self.content.items()}
            raw = [leaf for leaf in self.leaf_list if leaf.is_raw and leaf.path[0] not in self.content]
            self._unlisted = {leaf.number for leaf in (*raw, *self.leaf_of.values())}
            inside = dict.fromkeys(leaf.path[0] for leaf in raw)
            self.nested = {name: leaves for name in inside if (leaves := self._nested(name, raw))}
            # Bytes that cannot be separated from other values: decoded, only for selected rows.
            self.deep = [name for name in inside if name not in self.nested]
        except BrimError:
            raise
        except BROKEN as error:
            raise broken(file, error) from error

    def _leaf(self, column: ContentColumn) -> Leaf:
        for leaf in self.leaf_list:
            if leaf.path[0] == column.name and leaf.is_bytes and (column.bare or leaf.path[-1] == "bytes"):
                return leaf
        raise ValueError(f"the column {column.name!r} has no bytes")

    def _nested(self, name: str, raw: Sequence[Leaf]) -> list[NestedLeaf]:
        """Return the leaves of bytes inside of a column; none if a part of it cannot be split."""
        field, own = self.schema.field(name), [leaf for leaf in raw if leaf.path[0] == name]
        shapes = byte_leaves(field.type, field.nullable)
        if shapes is None or len(shapes) != len(own):
            return []
        return [NestedLeaf(leaf, *shape) for leaf, shape in zip(own, shapes, strict=True)]

    def content_leaves(self, names: Iterable[str]) -> list[Leaf]:
        """Return the leaves of some columns whose values are located, not read."""
        content = []
        for name in names:
            content += [self.leaf_of[name]] if name in self.leaf_of else [item.leaf for item in self.nested[name]]
        return content

    def small_leaves(self, names: Iterable[str]) -> list[int]:
        """Return the numbers of the leaves of some columns, without those with bytes."""
        own = set(names)
        return [leaf.number for leaf in self.leaf_list if leaf.path[0] in own and leaf.number not in self._unlisted]

    def meta(self, group: int, leaf: int) -> Struct:
        entry = self.groups[group][1][1].items[leaf]
        if 3 not in entry or 8 in entry:
            raise encrypted(self.file, f"The column {self.leaf_list[leaf].path[0]!r} of {self.file.shown}")
        if not isinstance(entry[3][1], dict):
            raise broken(self.file, ValueError("the metadata of a column is damaged"))
        return entry[3][1]

    def plain_bytes(self, leaves: Sequence[int], groups: Iterable[int] | None = None) -> int:
        """Return the uncompressed size of some leaves, in all row groups or in some."""
        groups = range(len(self.groups)) if groups is None else groups
        return sum(int(self.meta(group, leaf)[6][1]) for group in groups for leaf in leaves)

    def ranges_of(self, leaves: Sequence[int], groups: Iterable[int] | None = None) -> list[tuple[int, int]]:
        """Return the ranges of the chunks of some leaves, in all row groups or in some."""
        ranges = []
        for group in range(len(self.groups)) if groups is None else groups:
            for leaf in leaves:
                meta = self.meta(group, leaf)
                start = min(int(meta[n][1]) for n in (9, 11) if n in meta and meta[n][1])
                ranges.append((start, start + int(meta[7][1])))
        return ranges

    def near(self, leaves: Sequence[int], groups: Sequence[int]) -> list[int]:
        """Return the leaves to fetch with some others: all small ones, if that costs few bytes and saves a request."""
        every = [leaf.number for leaf in self.leaf_list if leaf.number not in self._unlisted]
        few, whole = (sum(stop - start for start, stop in self.ranges_of(some, groups)) for some in (leaves, every))
        return every if whole <= max(2 * few, _NEAR_BYTES) else list(leaves)

    def bounds(self, source: Readable) -> list[dict[str, tuple[Any, Any]]]:
        """Return the smallest and largest value of columns with statistics, for each row group."""
        bounds_by_group: list[dict[str, tuple[Any, Any]]] = []
        with pq.ParquetFile(FileView(source), pre_buffer=False) as parquet:
            for group in range(len(self.groups)):
                row_group, own = parquet.metadata.row_group(group), {}
                for leaf in self.leaf_list:
                    if len(leaf.path) > 1:
                        continue
                    try:
                        statistics = row_group.column(leaf.number).statistics
                        if statistics is not None and statistics.has_min_max:
                            own[leaf.path[0]] = (statistics.min, statistics.max)
                    except (ValueError, TypeError, OverflowError, pa.ArrowException):
                        continue  # without it, the values decide
                bounds_by_group.append(own)
        return bounds_by_group

    def index_ranges(self, leaves: Sequence[Leaf]) -> list[tuple[int, int]]:
        """Return where the page indexes of some leaves are."""
        entries = [group[1][1].items[leaf.number] for group in self.groups for leaf in leaves]
        return [(int(e[4][1]), int(e[4][1]) + int(e[5][1])) for e in entries if 4 in e and 5 in e]

    def pages(self, source: Readable, group: int, leaf: int) -> list[PageSpan] | None:
        """By the page index, if the file has one."""
        entry = self.groups[group][1][1].items[leaf]
        if 4 not in entry or 5 not in entry:
            return None
        start, size = int(entry[4][1]), int(entry[5][1])
        if not 0 < size <= source.size - start:
            raise ValueError("the page index is damaged")
        return page_spans(source.read_at(start, size), int(self.groups[group][3][1]))


def encrypted(file: DatasetFile, part: str) -> SourceError:
    hint = "Write it again without encryption."
    return SourceError(f"{part} is encrypted, and brim has no key.", hint=hint, path=file.shown)


def broken(file: DatasetFile, error: BaseException) -> VerificationError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return VerificationError(
        f"{file.shown} is not a Parquet file that brim can read: {reason[:300]}.",
        hint="Download or write the file again.",
    )
