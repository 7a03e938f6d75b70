"""Rows of a `datasets` table in another order or with media embedded, a little at a time.

Batches are cut by bytes, not by rows: a row may be a kilobyte or a gigabyte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from brim import cuts
from brim.errors import SourceError
from brim.fileset import Ints
from brim.sources.spill import BATCH_BYTES, BATCH_ROWS


def row_bytes(table: pa.Table) -> Ints:
    """About how many bytes each row takes."""
    columns = (cuts.column_bytes(column) for column in table.columns)
    return sum(columns, np.zeros(len(table), np.int64))


def batches_of(table: Any, rows: Ints | None) -> Iterator[pa.Table]:
    """The rows of a `datasets.table.Table` in batches; in the order of `rows` if that is given."""
    from datasets.formatting import query_table

    weights = row_bytes(table.table)
    weights = weights if rows is None else weights[rows]
    edges = cuts.fill(weights, BATCH_BYTES, BATCH_ROWS).tolist()
    for start, stop in itertools.pairwise(edges):
        key = slice(start, stop) if rows is None else rows[start:stop].tolist()
        yield query_table(table, key).combine_chunks()


def embedded(tables: Iterator[pa.Table], feature: Any, name: str, tokens: Any) -> Iterator[pa.Table]:
    """Tables of one column with its media embedded as `datasets` does it; row by row where files are read."""
    from datasets.table import embed_array_storage

    for table in tables:
        step = 1 if _names_files(table.column(0)) else max(len(table), 1)
        for start in range(0, len(table), step):
            column = table.column(0).slice(start, step)
            try:
                column = embed_array_storage(column, feature, token_per_repo_id=tokens)
            except (OSError, TypeError, ValueError, ImportError, pa.ArrowException) as error:
                raise SourceError(f"A file of the column {name!r} cannot be embedded: {error}.") from error
            yield pa.table({name: column})


def _names_files(array: Any) -> bool:
    """Whether a struct somewhere inside has a path and no bytes."""
    if isinstance(array, pa.ChunkedArray):
        return any(_names_files(chunk) for chunk in array.chunks)
    if isinstance(array, pa.ExtensionArray):
        return _names_files(array.storage)
    kind = array.type
    if pa.types.is_struct(kind):
        if {"bytes", "path"} <= {field.name for field in kind}:
            empty = array.field("bytes").is_null().to_numpy(zero_copy_only=False)
            return bool((empty & array.field("path").is_valid().to_numpy(zero_copy_only=False)).any())
        return any(_names_files(child) for child in array.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _names_files(array.flatten())
    return False
