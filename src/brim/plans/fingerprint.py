"""Digests of what decides the output's bytes, and of nothing else.

Two tables with the same content have the same digest, however their memory is laid out and whichever
release of pyarrow made them: chunks, offsets and what lies behind nulls do not count.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.fileset import Ints
from brim.sources.filetable import one_array


def digest_table(table: pa.Table) -> str:
    """The SHA-256 of a table's names, types and values."""
    digest = hashlib.sha256()
    for name in table.column_names:
        field = table.schema.field(name)
        digest.update(json.dumps([name, str(field.type), field.nullable, table.num_rows]).encode())
        _feed(digest, one_array(table.column(name)))
    return digest.hexdigest()


def digest_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_ints(values: Ints) -> str:
    return hashlib.sha256(values.astype("<i8").tobytes()).hexdigest()


def _feed(digest: hashlib._Hash, array: Any) -> None:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind = array.type
    digest.update(len(array).to_bytes(8, "little"))
    digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    values = array.drop_null()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        digest.update(pc.list_value_length(values).to_numpy().astype("<i8").tobytes())
        _feed(digest, values.flatten())
    elif pa.types.is_struct(kind):
        for child in values.flatten():
            _feed(digest, child)
    elif pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        _feed_bytes(digest, values.cast(pa.large_string()))
    elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        _feed_bytes(digest, values.cast(pa.large_binary()))
    elif pa.types.is_boolean(kind):
        digest.update(np.packbits(values.to_numpy(zero_copy_only=False)).tobytes())
    elif pa.types.is_primitive(kind) and not pa.types.is_null(kind):
        width = kind.bit_width // 8
        data = values.buffers()[1]
        if data is not None:
            digest.update(memoryview(data)[values.offset * width : (values.offset + len(values)) * width])
    else:  # decimals, maps, fixed sizes: rare, and small
        digest.update(repr(values.to_pylist()).encode())


def _feed_bytes(digest: hashlib._Hash, values: Any) -> None:
    digest.update(pc.binary_length(values).to_numpy().astype("<i8").tobytes())
    _, offsets, data = values.buffers()
    if len(values) and data is not None:
        ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
