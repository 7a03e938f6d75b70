"""One Parquet file of a dataset: its footer, which of its columns are read, and which are left where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import BrimError, SourceError, VerificationError
from brim.formats import thrift
from brim.formats.file_views import FileView
from brim.formats.nested_values import byte_leaves
from brim.formats.parquet_footer import Leaf, read_footer, schema_leaves
from brim.formats.parquet_levels import is_list_type
from brim.formats.parquet_values import PageSpan, page_spans
from brim.formats.range_readers import Readable
from brim.formats.thrift import Struct
from brim.records import dataclass
from brim.sources.dataset_files import DatasetFile

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


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the same type without views, of which pyarrow cannot take rows."""
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(plain_type(part.type)) for part in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)), kind.list_size)
    if pa.types.is_map(kind):
        inside = plain_type(kind.key_type), plain_type(kind.item_type)
        return kind if inside == (kind.key_type, kind.item_type) else pa.map_(*inside, kind.keys_sorted)
    return kind


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
    """Bytes inside of a column: the leaf of the file, and its place in the column's type (formats/nested_values.py)."""

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

    def all_leaves(self, names: Iterable[str]) -> list[int]:
        names_set = set(names)
        return [leaf.number for leaf in self.leaf_list if leaf.path[0] in names_set]

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
