"""Values that only pyarrow can decode, to a spool: a few rows at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.file_set import Pieces
from brim.formats.parquet_levels import levels_of
from brim.formats.parquet_values import FoundValues, Leaf, Spooling
from brim.formats.readable import Readable, ReadableFile

_ROWS = 16


def decode_chunk(file: Readable, group: int, leaf: Leaf, spool: Spooling) -> FoundValues:
    """All values of one column chunk, as ranges of the spool."""
    rows, definition, starts, sizes = [], [], [], []
    before = 0
    with pq.ParquetFile(ReadableFile(file), pre_buffer=False, buffer_size=1 << 20) as parquet:
        for batch in parquet.reader.iter_batches(_ROWS, [group], [leaf.number], use_threads=False):
            field, array = batch.schema.field(0), batch.column(0)
            levels = levels_of(array, field.nullable, leaf.path[-1])
            rows.append(before + np.cumsum(levels.repetition == 0) - 1)
            definition.append(levels.definition.astype(np.uint8))
            before += len(array)
            for value in _values(array).drop_null():
                data = value.as_buffer()
                starts.append(spool.append(data) if data is not None else 0)
                sizes.append(0 if data is None else data.size)
    none = np.zeros(0, np.int64)
    pieces = Pieces(np.zeros(1, np.int64), none, none)
    return FoundValues(
        np.concatenate([none, *rows]), np.concatenate([none.astype(np.uint8), *definition]),
        np.ones(len(sizes), bool), np.array(starts, np.int64), np.array(sizes, np.int64), pieces,
    )  # fmt: skip


def _values(array: Any) -> Any:
    """The bytes inside of a column, without what is null around them."""
    while not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        array = array.drop_null()
        array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
    return array
