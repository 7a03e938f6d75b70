"""Read the rows of a file table or a selection with the content of their files, a few megabytes at a time."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim import partition as cuts
from brim.errors import InputError
from brim.file_set import FILE_TYPE
from brim.formats.parquet_levels import is_list_type, list_array, map_leaves, nulls_of
from brim.sources.file_table import FileTable, contents_of, one_array

_BATCH_BYTES, _BATCH_ROWS = 16_000_000, 1024


class SelectedRows:
    """The rows of one split, as in a dataset that is built from them."""

    def __init__(self, table: FileTable, split: str | None, name: str) -> None:
        self.name = name
        names = [item.name for item in table.splits]
        if split is None and len(names) > 1:
            raise InputError("The rows have several splits.", hint=f"Name one with --from-split: {', '.join(names)}.")
        if split is not None and split not in names:
            raise InputError(f"The rows have no split {split!r}.", hint=f"It has: {', '.join(names)}.")
        own = table.splits[names.index(split) if split is not None else 0]
        self._table = table.replace(rows=table.rows.slice(own.start, own.stop - own.start), splits=(own,))

    def __len__(self) -> int:
        return len(self._table)

    @property
    def schema(self) -> pa.Schema:
        table, fields = self._table, []
        for field in table.rows.schema:
            kind = table.nested.get(field.name, field.type)
            if field.name in table.columns:
                kind = table.columns[field.name].stored or _stored(field.type)
            fields.append(field.with_type(kind))
        metadata = {"huggingface": json.dumps({"info": {"features": dict(table.features)}})} if table.features else None
        return pa.schema(fields, metadata)

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs: the rows of the table, and the files with their values."""
        files, digest = self._table.files, hashlib.sha256()
        on_disk = files.on_disk
        for part in (files.sizes, on_disk.sizes, *(() if files.ranges is None else (files.ranges.starts,))):
            digest.update(np.ascontiguousarray(part).tobytes())
        for remote in on_disk.remotes.values():
            digest.update(remote.version.encode())
        for batch in self._table.rows.to_batches():
            digest.update(memoryview(batch.serialize()))
        return {"kind": "selection", "rows": len(self), "digest": digest.hexdigest()[:32]}

    def tables(self) -> Iterator[pa.Table]:
        table = self._table
        edges = cuts.fill(table.file_bytes() + cuts.row_bytes(table.rows), _BATCH_BYTES, _BATCH_ROWS).tolist()
        for start, stop in itertools.pairwise(edges):
            rows = table.rows.slice(start, stop - start)
            arrays = []
            for field in self.schema:
                cells = rows.column(field.name)
                if field.name in table.nested:
                    cells = map_leaves(one_array(cells), field.type, field.type, self._content)
                elif field.name in table.columns:
                    cells = self._files(one_array(cells), field.type)
                arrays.append(cells)
            yield pa.Table.from_arrays(arrays, schema=self.schema)

    def _files(self, cells: Any, kind: pa.DataType) -> Any:
        absent = nulls_of(cells)
        if is_list_type(cells.type):
            values = self._files(cells.flatten(), kind.value_type)
            return list_array(kind, cuts.list_lengths(cells), values, absent)
        if not pa.types.is_struct(kind):
            return self._content(cells, kind)
        paths = self._table.files.paths.take(cells)
        parts = [
            self._content(cells, child.type) if child.name == FILE_TYPE[0].name else paths.cast(child.type)
            for child in kind
        ]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=absent)

    def _content(self, cells: Any, kind: pa.DataType) -> Any:
        return pa.array(contents_of(self._table.files, cells), kind)


def _stored(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.large_list(FILE_TYPE)
    return pa.list_(FILE_TYPE) if is_list_type(kind) else FILE_TYPE
