"""Where each file lies inside a spliced Parquet shard, found by reading the shard alone.

Used to verify and to unpack, so it shares no state with the writer: it starts from the footer on disk,
walks the pages, and yields byte ranges. Memory is that of one small page, whatever the files weigh.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DamageFound
from brim.file_set import Ints
from brim.formats import thrift
from brim.formats.parquet_footer import UNREADABLE, check_footer, is_damage, open_parquet
from brim.formats.parquet_levels import decode_levels
from brim.formats.parquet_shard import LEAF
from brim.formats.readable import Readable, ShardFile
from brim.formats.thrift import Struct
from brim.records import dataclass

_HEADER_BYTES = 1024
_BYTE_ARRAY, _UNCOMPRESSED = 6, 0
_WHOLE_PAGE_BYTES = 4 << 20  # larger pages hold one row: its lengths are read one by one


def locate_parquet(
    shard: Readable, footer_of: Readable | None = None, first_rows: int | None = None, column: str | None = None
) -> Iterator[ShardFile]:
    """Every file of a shard that brim wrote: row group by row group, column by column; or those of the first rows of
    its first row group, or of one column.

    Pages are read forwards only, each file's range before the next one's length. What stands at the end (the
    footer) or is small (the paths) is read from `footer_of`, for shards that only go forwards.
    """
    try:
        yield from _locate(shard, footer_of or shard, first_rows, column)
    except (*UNREADABLE, KeyError, IndexError, TypeError) as error:
        if not is_damage(error):
            raise
        raise DamageFound(f"{shard.name} is not a shard that brim can read: {error}.") from error


def _locate(shard: Readable, footer_of: Readable, first_rows: int | None, column: str | None) -> Iterator[ShardFile]:
    footer, _ = check_footer(footer_of)
    leaves = _leaves(footer[2][1].items)
    with open_parquet(footer_of) as parquet:
        row_before = 0
        for number, group in enumerate(footer[4][1].items):
            paths = [tuple(part.decode() for part in entry[3][1][3][1].items) for entry in group[1][1].items]
            for entry, path in zip(group[1][1].items, paths, strict=True):
                meta = entry[3][1]
                if path not in leaves or not _is_spliced(meta) or column not in (None, path[0]):
                    continue
                leaf = leaves[path]
                names = _path_values(parquet, number, paths.index((*path[:-1], "path")))
                slot = 0
                row = row_before - 1
                for repetition, definition, ranges in _pages(shard, meta, leaf):
                    if first_rows is not None and row + 1 >= first_rows:
                        break
                    for repeats, defines in zip(repetition.tolist(), definition.tolist(), strict=True):
                        row += repeats == 0
                        if defines == leaf.max_definition:
                            offset, size = next(ranges)
                            yield ShardFile(path[0], row, names[slot].as_py(), offset, size)
                        slot += defines >= leaf.slot_definition
                    if next(ranges, None) is not None:
                        raise ValueError("a page holds more values than its levels say")
            row_before += group[3][1]
            if first_rows is not None:
                return


@dataclass(frozen=True, slots=True)
class _Leaf:
    max_repetition: int
    max_definition: int
    slot_definition: int  # from here on, the struct (null or not) has a slot


def _leaves(elements: list[Struct]) -> dict[tuple[str, ...], _Leaf]:
    """The `bytes` leaves that stand beside a `path`, with their levels."""
    found: dict[tuple[str, ...], _Leaf] = {}
    at = 1

    def walk(prefix: tuple[str, ...], repetition: int, definition: int) -> None:
        nonlocal at
        element = elements[at]
        at += 1
        kind = element[3][1]  # 0 required, 1 optional, 2 repeated
        path = (*prefix, element[4][1].decode())
        slot = definition + (kind == 2)
        repetition, definition = repetition + (kind == 2), definition + (kind != 0)
        children = element[5][1] if 5 in element else 0
        begin, names = at, []
        for _ in range(children):
            names.append(elements[at][4][1].decode())
            walk(path, repetition, definition)
        # Deeper ones are values of a nested column, and no files.
        if sorted(names) == sorted([LEAF, "path"]) and len(path) in (1, 3) and repetition == len(path) // 3:
            leaf = elements[begin + names.index(LEAF)]
            found[(*path, LEAF)] = _Leaf(repetition, definition + (leaf[3][1] == 1), slot)

    for _ in range(elements[0][5][1] if 5 in elements[0] else 0):
        walk((), 0, 0)
    return found


def _is_spliced(meta: Struct) -> bool:
    """Whether brim wrote a chunk: other columns of this shape are pyarrow's, and compressed."""
    return bool(meta[1][1] == _BYTE_ARRAY and meta[4][1] == _UNCOMPRESSED)


def _path_values(parquet: pq.ParquetFile, group: int, column: int) -> Any:
    """The values of a `path` leaf, one a slot of its struct. By number, because names may hold dots."""
    # In this thread: one of Arrow's that lets go of Python's bytes while the interpreter ends aborts the process.
    read = parquet.reader.read_row_group(group, column_indices=[column], use_threads=False)
    array = read.column(0).combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = array.chunk(0)
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    return array.field(array.type.get_field_index("path"))


def _pages(shard: Readable, meta: Struct, leaf: _Leaf) -> Iterator[tuple[Ints, Ints, Iterator[tuple[int, int]]]]:
    """For each page: repetition levels, definition levels, and the byte range of each value."""
    at, end = int(meta[9][1]), int(meta[9][1]) + int(meta[7][1])
    while at < end:
        header, used = thrift.decode(shard.read_at(at, min(_HEADER_BYTES, end - at)))
        if header[1][1] != 0 or header[5][1][2][1] != 0:
            raise ValueError("its file column is encoded, so brim did not write it")
        size, count = int(header[3][1]), int(header[5][1][1][1])
        body = at + used
        if size < 0 or body + size > end:
            raise ValueError("a page runs past its column")
        # The levels of a page of n slots take a few bits each; the rest of it may be one huge file.
        data = shard.read_at(body, size if size <= _WHOLE_PAGE_BYTES else 64 + count * 4)
        repetition, used_r = decode_levels(data, count, leaf.max_repetition)
        definition, used_d = decode_levels(memoryview(data)[used_r:], count, leaf.max_definition)
        values = int(np.count_nonzero(definition == leaf.max_definition))
        yield repetition, definition, _ranges(shard, body, size, data, used_r + used_d, values)
        at = body + size


def _ranges(
    shard: Readable, body: int, size: int, data: bytes, position: int, values: int
) -> Iterator[tuple[int, int]]:
    """The byte range of each value of a page, whose beginning (or all of it) is `data`."""
    for _ in range(values):
        raw = data[position : position + 4] if position + 4 <= len(data) else b""
        length = int.from_bytes(raw or shard.read_at(body + position, 4), "little")
        if position + 4 + length > size:
            raise ValueError("the lengths in a page do not add up to its size")
        yield body + position + 4, length
        position += 4 + length
    if position != size:
        raise ValueError("the lengths in a page do not add up to its size")
