"""What the columns of a Parquet file hold, without their media: types, bytes, how many values each row has.

Of a column of files only the paths are read, whatever the files weigh. Any writer's files are understood.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import BrimError
from brim.file_set import Ints
from brim.formats.parquet_footer import UNREADABLE, damaged, is_damage, open_parquet
from brim.formats.parquet_shard import CREATED_BY, LEAF
from brim.formats.readable import Readable, ReadableFile

_BUFFER_BYTES = 1 << 20  # pages are read as they are wanted, not whole columns


class ParquetColumns:
    """One file. Close the Readable after use. DamageFound for one that cannot be read, also inside of its context."""

    def __init__(self, shard: Readable) -> None:
        self._name = shard.name
        self.file = open_parquet(shard, buffer_size=_BUFFER_BYTES)
        try:
            self.footer = self.file.metadata
            self.schema: pa.Schema = self.file.schema_arrow
            self._leaves = [self.footer.schema.column(n).path for n in range(self.footer.num_columns)]
        except UNREADABLE as error:
            if not is_damage(error):
                raise
            raise damaged(shard.name, error) from error

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)

    def features(self) -> dict[str, Any]:
        """What `datasets` is told of the columns; nothing if nobody said."""
        return _features(self.schema)

    def column_bytes(self) -> dict[str, int]:
        """The bytes of each column as stored."""
        total = dict.fromkeys(self.schema.names, 0)
        owner = [self._owner(path) for path in self._leaves]
        for group in range(self.footer.num_row_groups):
            row_group = self.footer.row_group(group)
            for number, name in enumerate(owner):
                total[name] += int(row_group.column(number).total_compressed_size)
        return total

    def _owner(self, path: str) -> str:
        """The column that a leaf belongs to: the longest name that its path begins with. Names may hold dots."""
        end = len(path)
        while end > 0 and path[:end] not in self._names:
            end = path.rfind(".", 0, end)
        return path[: max(end, 0)]

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(self.schema.names)

    @cached_property
    def _numbers(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, path in enumerate(self._leaves):
            found.setdefault(self._owner(path), []).append(number)
        return found

    def leaves_of(self, name: str) -> list[int]:
        """The numbers of a column's leaves."""
        return self._numbers.get(name, [])

    @property
    def is_spliced(self) -> bool:
        """Whether brim wrote it: then files lie in it as they are."""
        return str(self.footer.created_by or "") == CREATED_BY.decode()

    def _small_leaves(self, name: str) -> list[int]:
        """The leaves of a column that tell how many values there are: the path of a file, not its content."""
        mine = self.leaves_of(name)
        small = [number for number in mine if not self._leaves[number].endswith(f".{LEAF}")]
        return (small or mine)[:1] if is_file_type(self.schema.field(name).type) else mine

    def cells(self, group: int, name: str) -> pa.Array:
        """A column of a row group; of files only what is beside their content."""
        read = self.file.reader.read_row_group(group, column_indices=self._small_leaves(name), use_threads=False)
        array = read.column(0).combine_chunks()
        return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array

    def counts(self, group: int, name: str) -> tuple[Ints, int, int]:
        """The places that each row has (one or none if it is no list), all values in them, and rows that have one."""
        array = self.cells(group, name)
        if is_list_type(array.type):
            places = np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
            inner = array.flatten()
            return places, len(inner) - inner.null_count, int((places > 0).sum())
        there = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), bool)
        return there.astype(np.int64), int(there.sum()), int(there.sum())

    def crooked(self, pairs: dict[str, str]) -> Iterator[str]:
        """Rows in which lists that go together are not of one length, in words."""
        here = {name: of for name, of in pairs.items() if name in self.schema.names and of in self.schema.names}
        first = 0
        for group in range(self.footer.num_row_groups) if here else ():
            places = {name: self.counts(group, name)[0] for name in {*here, *here.values()}}
            for name, of in here.items():
                for row in np.flatnonzero(places[name] != places[of])[:3].tolist():
                    held, its = places[name][row], places[of][row]
                    yield f"row {first + row}: {name!r} holds {held} and {of!r}, which it is beside, {its}"
            first += self.footer.row_group(group).num_rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        if isinstance(error, UNREADABLE) and not isinstance(error, BrimError) and is_damage(error):
            raise damaged(self._name, error) from error


def _features(schema: pa.Schema) -> dict[str, Any]:
    said = (schema.metadata or {}).get(b"huggingface")
    try:
        found = json.loads(said)["info"]["features"] if said else {}
    except (ValueError, KeyError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def features_of_arrow(shard: Readable) -> dict[str, Any]:
    """What `datasets` is told of the columns of an Arrow stream; nothing if nobody said."""
    with pa.ipc.open_stream(ReadableFile(shard)) as stream:
        return _features(stream.schema)


def is_list_type(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_file_type(kind: pa.DataType) -> bool:
    """Whether a column holds files as `datasets` stores them: bytes and a path, or lists of that."""
    inner = kind.value_type if is_list_type(kind) else kind
    return bool(pa.types.is_struct(inner) and {field.name for field in inner} == {LEAF, "path"})
