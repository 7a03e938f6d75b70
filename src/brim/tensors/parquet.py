"""Vectors as fixed-size lists in a Parquet file, with id columns beside them.

pyarrow writes it from files that already hold all values, a row group at a time, so that the bytes depend on the
values alone and not on how they were appended. Vectors are stored plain: they do not compress.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DamageFound, InputError
from brim.tensors.spec import RAW_BITS, STRING, Tensor

ROW_GROUP_BYTES = 16 * 1024 * 1024  # pyarrow holds a row group three to four times while it writes it


@dataclass(frozen=True, slots=True)
class Column:
    """A tensor and the files of its values; strings have two, their lengths and their text."""

    tensor: Tensor
    files: tuple[Path, ...]


def check_columns(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if tensor.dtype in RAW_BITS or tensor.dtype == "complex64":
            raise InputError(
                f"A Parquet file cannot hold {tensor.name!r}: it has no {tensor.dtype}.",
                hint="Convert it to float16 or float32, or write a .safetensors file.",
            )


def write_parquet(target: Path, columns: Sequence[Column], rows: int, metadata: Mapping[str, str] | None) -> None:
    """Write the whole file. Not synced."""
    schema = pa.schema([(column.tensor.name, _arrow_type(column.tensor)) for column in columns], metadata=metadata)
    scalars = [column.tensor.name for column in columns if not column.tensor.dims]
    readers = [_Reader(column, rows) for column in columns]
    total = sum(reader.size for reader in readers)
    step = max(1, ROW_GROUP_BYTES * rows // total) if total else 1
    compression = {name: "zstd" if name in scalars else "none" for name in schema.names}
    with pq.ParquetWriter(
        target, schema, compression=compression, use_dictionary=scalars, write_statistics=scalars
    ) as writer:
        for start in range(0, rows, step):
            arrays = [reader.take(start, min(start + step, rows)) for reader in readers]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=step)


class _Reader:
    """The first rows of a column as Arrow, from its files as they are mapped; what follows them is not looked at."""

    def __init__(self, column: Column, rows: int) -> None:
        self._tensor = column.tensor
        self._width = int(np.prod(self._tensor.dims, dtype=int))
        carrier = np.dtype(np.int64) if column.tensor.is_text else column.tensor.carrier
        self._values = _mapped(column.files[0], carrier, rows * self._width)
        self._text = None
        self._text_at = 0
        self.size = self._values.nbytes
        if column.tensor.is_text:
            self._text = _mapped(column.files[1], np.dtype(np.uint8), int(self._values.sum()))
            self.size += self._text.nbytes

    def take(self, start: int, stop: int) -> Any:
        values = self._values[start * self._width : stop * self._width]
        if self._text is not None:
            ends = np.concatenate([[0], np.cumsum(values)])
            text = self._text[self._text_at : self._text_at + int(ends[-1])]
            self._text_at += int(ends[-1])
            return pa.LargeStringArray.from_buffers(stop - start, pa.py_buffer(ends), pa.py_buffer(text)).cast(
                pa.string()
            )
        array = pa.array(values)
        for size in reversed(self._tensor.dims):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    return np.memmap(path, dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)


def _arrow_type(tensor: Tensor) -> Any:
    if tensor.dtype == STRING:
        return pa.string()
    kind = pa.from_numpy_dtype(tensor.carrier)
    for size in reversed(tensor.dims):
        kind = pa.list_(kind, size)
    return kind


def read_spec(path: Path) -> tuple[dict[str, Tensor], int]:
    """The tensors of a file and its rows. Columns that brim does not write have the names of their Arrow types."""
    found = {}
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except pa.ArrowInvalid as error:
        raise DamageFound(f"{str(path)!r} is not a Parquet file: {error}", path=str(path)) from error
    for field in schema:
        dims, kind = [], field.type
        while pa.types.is_fixed_size_list(kind):
            dims.append(kind.list_size)
            kind = kind.value_type
        name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
        found[field.name] = Tensor(field.name, tuple(dims), name)
    return found, rows
