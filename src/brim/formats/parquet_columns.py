"""Describe the columns of a Parquet file without reading their media: types, sizes, number of values in each row.

Of a file column only the paths are read, however large the files are. The file may come from any writer.
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
from brim.formats.file_views import FileView
from brim.formats.parquet_footer import UNREADABLE, damaged, is_damage, open_parquet
from brim.formats.parquet_levels import is_list_type, single_array
from brim.formats.parquet_writer import CREATED_BY, LEAF
from brim.formats.range_readers import Readable

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
            lengths = np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
            elements = array.flatten()
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
                    yield f"row {first + row}: {name!r} holds {own} and {partner!r}, which it is beside, {other}"
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
