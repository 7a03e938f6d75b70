"""How many bytes the metadata of each row takes, whatever its neighbours take."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim import cuts
from brim.fileset import Ints
from brim.sources.filetable import FileTable, one_array

_OTHER_BYTES = 16  # of a value whose size is not worth finding out


def metadata_bytes(table: FileTable) -> Ints:
    """The bytes of each row's values outside of file columns."""
    total = np.zeros(len(table), np.int64)
    for name in table.rows.column_names:
        if name not in table.columns:
            total += _sizes(one_array(table.rows.column(name)))
    return total


def _sizes(array: pa.Array) -> Ints:
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _sizes(array.dictionary_decode())
    if str(kind) in ("string", "large_string", "binary", "large_binary"):
        return np.asarray(pc.binary_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64) + 4
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.asarray(pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        before = cuts.running(_sizes(array.flatten()))
        ends = np.cumsum(lengths)
        return np.asarray(before[ends] - before[ends - lengths], np.int64) + 4
    if pa.types.is_struct(kind):
        return sum((_sizes(child) for child in array.flatten()), np.zeros(len(array), np.int64))
    width = kind.bit_width // 8 if pa.types.is_primitive(kind) else _OTHER_BYTES
    return np.full(len(array), max(width, 1), np.int64)
