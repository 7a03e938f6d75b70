"""Read a Parquet shard without its media: describe its columns, and locate the files inside it.

`ParquetColumns` has the types, the sizes and the numbers of values of a file by any writer. Of a file column only the
paths are read, however large the files are.

`locate_parquet` is used to verify and unpack shards that brim wrote, so it shares no state with the writer: it reads
the footer, walks the pages, and yields byte ranges. It takes the memory of one small page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import BrimError, VerificationError
from brim.file_set import Ints
from brim.formats import thrift
from brim.formats.parquet_footer import UNREADABLE, Leaf, check_footer, damaged, is_damage, open_parquet, schema_leaves
from brim.formats.parquet_levels import decode_levels, is_list_type, single_array
from brim.formats.parquet_writer import CREATED_BY, LEAF
from brim.formats.range_readers import FileView, Readable, ShardFile
from brim.formats.thrift import Struct
from brim.partition import list_lengths

_BUFFER_BYTES = 1 << 20  # makes pyarrow read page by page instead of complete columns


class ParquetColumns:
    """The columns of one file. Close the Readable after use. Raises VerificationError if it cannot be read."""

    def __init__(self, shard: Readable) -> None:
        self._name = shard.name
        self.file = open_parquet(shard, buffer_size=_BUFFER_BYTES)
        try:
            self.footer = self.file.metadata
            self.schema: pa.Schema = self.file.schema_arrow
            self._leaf_paths = [self.footer.schema.column(n).path for n in range(self.footer.num_columns)]
        except UNREADABLE as error:
            if not is_damage(error):
                raise
            raise damaged(shard.name, error) from error

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)

    @property
    def is_spliced(self) -> bool:
        """Return whether brim wrote the file, so that files are stored in it unchanged."""
        return str(self.footer.created_by or "") == CREATED_BY.decode()

    def features(self) -> dict[str, Any]:
        """Return the features that the file has for `datasets`, if any."""
        return _features(self.schema)

    @cached_property
    def _by_column(self) -> dict[str, list[int]]:
        """The leaves of each column: the longest name that a leaf's path starts with. Names may contain dots."""
        names = frozenset(self.schema.names)
        numbers: dict[str, list[int]] = {}
        for number, path in enumerate(self._leaf_paths):
            end = len(path)
            while end > 0 and path[:end] not in names:
                end = path.rfind(".", 0, end)
            numbers.setdefault(path[: max(end, 0)], []).append(number)
        return numbers

    def column_leaves(self, name: str) -> list[int]:
        """Return the numbers of a column's leaves."""
        return self._by_column.get(name, [])

    def column_bytes(self) -> dict[str, int]:
        """Return the stored bytes of each column."""
        total = dict.fromkeys(self.schema.names, 0)
        for group in range(self.footer.num_row_groups):
            row_group = self.footer.row_group(group)
            for name, numbers in self._by_column.items():
                total[name] += sum(int(row_group.column(number).total_compressed_size) for number in numbers)
        return total

    def cells(self, group: int, name: str) -> pa.Array:
        """Read a column of a row group; of a file column only the paths."""
        numbers = self.column_leaves(name)
        if is_file_type(self.schema.field(name).type):
            small = [number for number in numbers if not self._leaf_paths[number].endswith(f".{LEAF}")]
            numbers = (small or numbers)[:1]
        read = self.file.reader.read_row_group(group, column_indices=numbers, use_threads=False)
        return single_array(read.column(0))

    def counts(self, group: int, name: str) -> tuple[Ints, int, int]:
        """Return the list length of each row (0 or 1 outside of lists), the number of values, and of non-empty rows."""
        array = self.cells(group, name)
        if is_list_type(array.type):
            lengths, elements = list_lengths(array), array.flatten()
            return lengths, len(elements) - elements.null_count, int((lengths > 0).sum())
        valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
        return valid.astype(np.int64), int(valid.sum()), int(valid.sum())

    def unequal_lists(self, pairs: dict[str, str]) -> Iterator[str]:
        """Describe rows in which lists that belong together differ in length, three per row group and pair."""
        names = self.schema.names
        pairs = {name: partner for name, partner in pairs.items() if name in names and partner in names}
        first = 0
        for group in range(self.footer.num_row_groups) if pairs else ():
            lengths = {name: self.counts(group, name)[0] for name in {*pairs, *pairs.values()}}
            for name, partner in pairs.items():
                for row in np.flatnonzero(lengths[name] != lengths[partner])[:3].tolist():
                    own, other = lengths[name][row], lengths[partner][row]
                    yield f"row {first + row}: {name!r} holds {own} and {partner!r}, with which it is aligned, {other}"
            first += self.footer.row_group(group).num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        if isinstance(error, UNREADABLE) and not isinstance(error, BrimError) and is_damage(error):
            raise damaged(self._name, error) from error


def _features(schema: pa.Schema) -> dict[str, Any]:
    stored = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(stored)["info"]["features"] if stored else {}
    except (ValueError, KeyError, TypeError):
        return {}
    return features if isinstance(features, dict) else {}


def features_of_arrow(shard: Readable) -> dict[str, Any]:
    """Return the features that an Arrow stream has for `datasets`, if any."""
    with pa.ipc.open_stream(FileView(shard)) as stream:
        return _features(stream.schema)


def is_file_type(kind: pa.DataType) -> bool:
    """Return whether a column has files as `datasets` stores them: bytes and a path, or lists of that."""
    inner = kind.value_type if is_list_type(kind) else kind
    return bool(pa.types.is_struct(inner) and {field.name for field in inner} == {LEAF, "path"})


_HEADER_BYTES = 1024
_BYTE_ARRAY, _UNCOMPRESSED = 6, 0
_WHOLE_PAGE_BYTES = 4 << 20  # larger pages have one row: only the lengths of its values are read


def locate_parquet(
    shard: Readable, footer_of: Readable | None = None, first_rows: int | None = None, column: str | None = None
) -> Iterator[ShardFile]:
    """Yield every file of a shard that brim wrote, by row group and column.

    `first_rows` limits them to the first rows of the first row group, `column` to one column. Pages are read forwards
    only, the range of each file before the length of the next. The footer and the paths are read from `footer_of`, for
    shards that cannot be read backwards.
    """
    try:
        yield from _locate(shard, footer_of or shard, first_rows, column)
    except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
        if not is_damage(error):
            raise
        raise VerificationError(f"{shard.name} is not a shard that brim can read: {error}.") from error


def _locate(shard: Readable, footer_of: Readable, first_rows: int | None, column: str | None) -> Iterator[ShardFile]:
    footer, _ = check_footer(footer_of)
    file_leaves = _file_leaves(schema_leaves(footer))
    with open_parquet(footer_of) as parquet:
        row_before = 0
        for number, group in enumerate(footer[4][1].items):
            paths = [tuple(part.decode() for part in entry[3][1][3][1].items) for entry in group[1][1].items]
            for entry, path in zip(group[1][1].items, paths, strict=True):
                meta = entry[3][1]
                # Other columns of this shape were written by pyarrow, which compresses them.
                is_spliced = meta[1][1] == _BYTE_ARRAY and meta[4][1] == _UNCOMPRESSED
                if path not in file_leaves or not is_spliced or column not in (None, path[0]):
                    continue
                leaf = file_leaves[path]
                names = _read_paths(parquet, number, paths.index((*path[:-1], "path")))
                max_definition, path_definition = leaf.max_definition, leaf.repeated
                slot = 0
                row = row_before - 1
                for repetition, definition, ranges in _pages(shard, meta, leaf):
                    if first_rows is not None and row + 1 >= first_rows:
                        break
                    for repeats, defines in zip(repetition.tolist(), definition.tolist(), strict=True):
                        row += repeats == 0
                        if defines == max_definition:
                            offset, size = next(ranges)
                            yield ShardFile(path[0], row, names[slot].as_py(), offset, size)
                        slot += defines >= path_definition  # the struct, null or not, has a path
                    if next(ranges, None) is not None:
                        raise ValueError("a page holds more values than its levels say")
            row_before += group[3][1]
            if first_rows is not None:
                return


def _file_leaves(leaves: list[Leaf]) -> dict[tuple[str, ...], Leaf]:
    """Return the `bytes` leaves of file columns: structs of `bytes` and `path`, or lists of such structs."""
    children: dict[tuple[str, ...], set[str]] = {}
    for leaf in leaves:
        for depth, name in enumerate(leaf.path):
            children.setdefault(leaf.path[:depth], set()).add(name)
    return {
        leaf.path: leaf
        for leaf in leaves
        if leaf.path[-1] == LEAF and children[leaf.path[:-1]] == {LEAF, "path"}
        # Deeper structs are values of a nested column, not files.
        if len(leaf.path) in (2, 4) and leaf.max_repetition == len(leaf.path) // 4
    }


def _read_paths(parquet: pq.ParquetFile, group: int, column: int) -> Any:
    """Return the values of a `path` leaf, one per struct. The column is a number because names may contain dots."""
    # In this thread: if one of Arrow's threads releases Python's bytes at the exit of the interpreter, it aborts.
    read = parquet.reader.read_row_group(group, column_indices=[column], use_threads=False)
    array = single_array(read.column(0))
    while is_list_type(array.type):
        array = array.flatten()
    return array.field(array.type.get_field_index("path"))


def _pages(shard: Readable, meta: Struct, leaf: Leaf) -> Iterator[tuple[Ints, Ints, Iterator[tuple[int, int]]]]:
    """Yield the repetition levels, definition levels and value ranges of each page."""
    position, end = int(meta[9][1]), int(meta[9][1]) + int(meta[7][1])
    while position < end:
        header, used = thrift.decode(shard.read_at(position, min(_HEADER_BYTES, end - position)))
        if header[1][1] != 0 or header[5][1][2][1] != 0:
            raise ValueError("its file column is encoded, so brim did not write it")
        size, count = int(header[3][1]), int(header[5][1][1][1])
        body = position + used
        if size < 0 or body + size > end:
            raise ValueError("a page runs past its column")
        # The levels of a page take a few bits per slot; the rest of the page may be one huge file.
        data = shard.read_at(body, size if size <= _WHOLE_PAGE_BYTES else 64 + count * 4)
        repetition, used_r = decode_levels(data, count, leaf.max_repetition)
        definition, used_d = decode_levels(memoryview(data)[used_r:], count, leaf.max_definition)
        values = int(np.count_nonzero(definition == leaf.max_definition))
        yield repetition, definition, _ranges(shard, body, size, data, used_r + used_d, values)
        position = body + size


def _ranges(
    shard: Readable, body: int, size: int, data: bytes, position: int, values: int
) -> Iterator[tuple[int, int]]:
    """Yield the byte range of each value of a page; `data` is the page or its start."""
    for _ in range(values):
        raw = data[position : position + 4] if position + 4 <= len(data) else b""
        length = int.from_bytes(raw or shard.read_at(body + position, 4), "little")
        if position + 4 + length > size:
            raise ValueError("the lengths in a page do not add up to its size")
        yield body + position + 4, length
        position += 4 + length
    if position != size:
        raise ValueError("the lengths in a page do not add up to its size")
