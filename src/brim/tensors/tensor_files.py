"""The header of a safetensors file, as the library itself would write it around the whole tensors.

The library writes a header only together with all the values. So it is asked for the same tensors without rows,
which tells the order it puts them in and what it calls their types; sizes and offsets are then filled in. That
brim fills them in as the library does (spelling, offsets, padding) is not taken for granted: for every file some
small shapes are put to the library, and must come out the same, byte for byte.

The notes (`metadata`) are sorted by name. The library's own order of two or more is random, from call to call.

A `Tensor` is what one is called and made of: its name, the shape of a row, and the type of its values.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DamageFound, InputError
from brim.extras import missing
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Body:
    """A file but for its values. `starts` are offsets, in the order of the file; nothing lies between tensors."""

    header: bytes
    starts: Mapping[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor in a file. A shape of nothing is a single value, which brim does not write and others do."""

    path: Path
    tensor: Tensor
    shape: tuple[int, ...]
    offset: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def size(self) -> int:
        return prod(self.shape) * self.tensor.carrier.itemsize


STRING = "string"

# The type's name is the one that torch and NumPy share. A type that NumPy lacks is carried by its raw bits, in
# unsigned integers of its size; the code is what a safetensors file calls it.
_DTYPES: dict[str, tuple[str, str]] = {
    "bool": ("?", "BOOL"),
    "uint8": ("u1", "U8"),
    "int8": ("i1", "I8"),
    "uint16": ("<u2", "U16"),
    "int16": ("<i2", "I16"),
    "uint32": ("<u4", "U32"),
    "int32": ("<i4", "I32"),
    "uint64": ("<u8", "U64"),
    "int64": ("<i8", "I64"),
    "float16": ("<f2", "F16"),
    "bfloat16": ("<u2", "BF16"),
    "float32": ("<f4", "F32"),
    "float64": ("<f8", "F64"),
    "complex64": ("<c8", "C64"),
    "float8_e4m3fn": ("u1", "F8_E4M3"),
    "float8_e5m2": ("u1", "F8_E5M2"),
}
RAW_BITS = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})
NAMES_BY_CODE = {code: name for name, (_, code) in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file. `dims` is the shape of a row; strings have none."""

    name: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        return self.dtype == STRING

    @property
    def carrier(self) -> np.dtype[Any]:
        """The NumPy type that holds the values, or their raw bits."""
        return np.dtype(_DTYPES[self.dtype][0])

    @property
    def row_bytes(self) -> int:
        """0 for strings, whose rows differ."""
        return 0 if self.is_text else self.carrier.itemsize * int(np.prod(self.dims, dtype=object))

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.dims)

    def __str__(self) -> str:
        return f"({', '.join(map(str, (*self.dims, self.dtype)))})"


def tensors_from(given: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The tensors of `text=(768, "float32"), id="string"`."""
    if not given:
        raise InputError("No tensor is named.", hint='Name each with the shape of a row: text=(768, "float32").')
    return tuple(_tensor(name, value) for name, value in given.items())


def _tensor(name: str, value: Any) -> Tensor:
    if not isinstance(name, str) or not _is_usable(name):
        raise InputError(f"A tensor cannot be called {name!r}.", hint="Give it another name.")
    *dims, dtype = value if isinstance(value, tuple | list) and value else (value,)
    known = dtype_name(dtype)
    sizes = [int(size) for size in dims if isinstance(size, int | np.integer) and not isinstance(size, bool)]
    if known is None or len(sizes) != len(dims) or any(size < 1 for size in sizes):
        raise InputError(
            f"{value!r} does not describe the rows of the tensor {name!r}.",
            hint='Write the sizes of a row and then the type of its values: (768, "float32"); "int64" for one value.',
        )
    if known == STRING and dims:
        raise InputError(f"The column {name!r} has strings with dimensions.", hint='Write it as "string".')
    return Tensor(name, tuple(sizes), known)


def _is_usable(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return bool(name) and name != "__metadata__"  # a safetensors file keeps its notes under that name


def dtype_name(dtype: Any) -> str | None:
    """The name of a type given as a name, a NumPy type or a torch one; None for what brim does not write."""
    if dtype is str:
        return STRING
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = {"str": STRING}.get(str(dtype), str(dtype).removeprefix("torch."))
        if name in _DTYPES or name == STRING:
            return name
    try:
        name = "" if dtype is None else np.dtype(dtype).name  # NumPy takes None for float64
    except TypeError:
        return None
    return name if name in _DTYPES else None


class NpyLayout:
    """One tensor in one file."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_text or tensor.dtype in RAW_BITS:
            raise InputError(
                f"A .npy file cannot hold {tensor.name!r}: NumPy has no {tensor.dtype}.",
                hint="Write a .parquet file for strings, a .safetensors file for the rest.",
            )
        self._tensor = tensor

    def body(self, rows: Mapping[str, int]) -> Body:
        count = rows[self._tensor.name]
        buffer = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(self._tensor.carrier)
        np.lib.format.write_array_header_1_0(
            buffer, {"descr": descr, "fortran_order": False, "shape": self._tensor.shape(count)}
        )
        header = buffer.getvalue()
        return Body(header, {self._tensor.name: len(header)}, len(header) + count * self._tensor.row_bytes)


def npy_path(path: Path, name: str, alone: bool) -> Path:
    """`emb.npy` if there is one tensor, `emb.text.npy` if there are several."""
    if alone:
        return path
    if "/" in name or "\0" in name:
        raise InputError(f"A file cannot be called after the tensor {name!r}.", hint="Write a .safetensors file.")
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


_ALIGNMENT = 8
_HEADER_LIMIT_BYTES = 100_000_000  # the library refuses to read more
_PROBES = (0, 1, 12, 123, 1234)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    code: str
    shape: tuple[int, ...]
    size: int


class SafetensorsLayout:
    """All tensors in one file."""

    def __init__(self, tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> None:
        if text := next((tensor.name for tensor in tensors if tensor.is_text), None):
            raise InputError(
                f"A safetensors file cannot hold the strings of {text!r}.", hint="Write a .parquet file, which can."
            )
        self._metadata = None if metadata is None else dict(sorted(metadata.items()))
        self._codes = _ask_library(tensors, self._metadata)
        self._tensors = {tensor.name: tensor for tensor in tensors}

    def body(self, rows: Mapping[str, int]) -> Body:
        """The file for these numbers of rows."""
        entries = [
            _Entry(name, code, self._tensors[name].shape(rows[name]), self._tensors[name].row_bytes * rows[name])
            for name, code in self._codes.items()
        ]
        header = _render(entries, self._metadata)
        starts, position = {}, len(header)
        for entry in entries:
            starts[entry.name] = position
            position += entry.size
        return Body(header, starts, position)


def _render(entries: Sequence[_Entry], metadata: Mapping[str, str] | None) -> bytes:
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size
        content[entry.name] = {"dtype": entry.code, "shape": entry.shape, "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _ask_library(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """What the library calls each type, in its order of the tensors."""
    one = None if metadata is None else dict(list(metadata.items())[:1])
    known: dict[str, str] = {}
    for probe in _PROBES:
        shapes = {
            tensor.name: tensor.shape(0) if probe == 0 else (probe + place,) for place, tensor in enumerate(tensors)
        }
        theirs = _serialize(tensors, shapes, one)
        length = int.from_bytes(theirs[:8], "little")
        content = json.loads(theirs[8 : 8 + length])
        content.pop("__metadata__", None)
        known = known or {name: entry["dtype"] for name, entry in content.items()}
        sizes = {tensor.name: tensor.carrier.itemsize for tensor in tensors}
        entries = [
            _Entry(name, known[name], shapes[name], sizes[name] * int(np.prod(shapes[name]))) for name in content
        ]
        if list(known) != list(content) or theirs[: 8 + length] != _render(entries, one):
            raise InputError(
                "This version of safetensors writes its headers in a way that brim does not know.",
                hint="Use another version of it: brim was made with 0.8.",
            )
    return known


def _serialize(
    tensors: Sequence[Tensor], shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None
) -> bytes:
    try:
        import safetensors
    except ImportError as error:
        raise missing("embed", "Writing .safetensors needs the safetensors library.", "safetensors") from error
    zeros = {t.name: np.zeros(int(np.prod(shapes[t.name])), t.carrier) for t in tensors}
    if hasattr(safetensors, "TensorSpec"):
        given: dict[str, Any] = {
            t.name: safetensors.TensorSpec(
                dtype=t.dtype,
                shape=list(shapes[t.name]),
                data_ptr=zeros[t.name].ctypes.data,
                data_len=zeros[t.name].nbytes,
            )
            for t in tensors
        }
    else:  # before 0.8
        given = {
            t.name: {"dtype": t.dtype, "shape": list(shapes[t.name]), "data": zeros[t.name].tobytes()} for t in tensors
        }
    return bytes(safetensors.serialize(given, metadata=None if metadata is None else dict(metadata)))


def read_header(path: Path) -> dict[str, TensorPlace]:
    """What is in a file, in its order."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_HEADER_LIMIT_BYTES, size):
                raise ValueError("its header is longer than it can be")
            content = json.loads(file.read(length))
        content.pop("__metadata__", None)
        found, position = {}, 8 + length
        for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if (code := entry["dtype"]) not in NAMES_BY_CODE:
                raise InputError(f"The values of {name!r} in {path.name} have a type that brim does not know: {code}.")
            found[name] = TensorPlace(path, Tensor(name, shape[1:], NAMES_BY_CODE[code]), shape, position)
            if 8 + length + start != position or end - start != found[name].size:
                raise ValueError(f"the place of {name!r} does not fit its shape")
            position += end - start
        if position != size:
            raise ValueError(f"it has {size} bytes and should have {position}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamageFound(f"{str(path)!r} is not a whole safetensors file: {error}.", path=str(path)) from error
    return found


ROW_GROUP_BYTES = 16 * 1024 * 1024  # pyarrow holds a row group three to four times while it writes it


@dataclass(frozen=True, slots=True)
class VectorColumn:
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


def write_parquet(target: Path, columns: Sequence[VectorColumn], rows: int, metadata: Mapping[str, str] | None) -> None:
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

    def __init__(self, column: VectorColumn, rows: int) -> None:
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
