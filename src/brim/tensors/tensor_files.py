"""Describe tensors, and write and read the formats that contain them: safetensors, .npy and Parquet.

A `Tensor` has a name, the shape of a row, and the type of its values.

The safetensors library writes a header only together with all the values. So brim has it serialize the same tensors
without rows, which shows their order and the names of their types, and fills in sizes and offsets itself. That brim
does this like the library (spelling, offsets, padding) is checked for every file: the library serializes some small
shapes, and brim's headers must be identical. `metadata` is sorted by name, because the library's order of two or more
entries is random.
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

from brim.errors import InputError, VerificationError
from brim.extras import missing
from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Body:
    """A file without its values. `starts` are offsets in the order of the file; there are no gaps between tensors."""

    header: bytes
    starts: Mapping[str, int]
    size: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file. An empty shape is a single value, which brim does not write and others do."""

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

# The name that torch and NumPy share: the NumPy type, and the name in a safetensors file. Types that NumPy does not
# have are stored as unsigned integers of their size.
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
    """The name and type of one tensor. `dims` is the shape of a row; strings have none."""

    name: str
    dims: tuple[int, ...]
    dtype: str

    @property
    def is_text(self) -> bool:
        return self.dtype == STRING

    @property
    def carrier(self) -> np.dtype[Any]:
        """Return the NumPy type of the values, or of their raw bits."""
        return np.dtype(_DTYPES[self.dtype][0])

    @property
    def row_bytes(self) -> int:
        """Return the size of a row; 0 for strings, whose rows differ in size."""
        return 0 if self.is_text else self.carrier.itemsize * int(np.prod(self.dims, dtype=object))

    def shape(self, rows: int) -> tuple[int, ...]:
        return (rows, *self.dims)

    def __str__(self) -> str:
        return f"({', '.join(map(str, (*self.dims, self.dtype)))})"


def tensors_from(specs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Parse the tensors of `text=(768, "float32"), id="string"`."""
    if not specs:
        raise InputError("No tensor is named.", hint='Name each with the shape of a row: text=(768, "float32").')
    tensors = []
    for name, spec in specs.items():
        # The name must be encodable, and a safetensors file keeps its metadata under "__metadata__".
        if not isinstance(name, str) or name in ("", "__metadata__") or any("\ud800" <= c <= "\udfff" for c in name):
            raise InputError(f"A tensor cannot be called {name!r}.", hint="Give it another name.")
        *dims, last = spec if isinstance(spec, tuple | list) and spec else (spec,)
        dtype = dtype_name(last)
        sizes = [int(size) for size in dims if isinstance(size, int | np.integer) and not isinstance(size, bool)]
        if dtype is None or len(sizes) != len(dims) or any(size < 1 for size in sizes):
            raise InputError(
                f"{spec!r} does not describe the rows of the tensor {name!r}.",
                hint='Write the sizes of a row and then the type of its values: (768, "float32"); '
                '"int64" for one value.',
            )
        if dtype == STRING and dims:
            raise InputError(f"The column {name!r} has strings with dimensions.", hint='Write it as "string".')
        tensors.append(Tensor(name, tuple(sizes), dtype))
    return tuple(tensors)


def dtype_name(dtype: Any) -> str | None:
    """Return the name of a type that is a name, a NumPy type or a torch type; None for types that brim cannot write."""
    if dtype is str:
        return STRING
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = {"str": STRING}.get(str(dtype), str(dtype).removeprefix("torch."))
        if name in _DTYPES or name == STRING:
            return name
    try:
        name = "" if dtype is None else np.dtype(dtype).name  # NumPy reads None as float64
    except TypeError:
        return None
    return name if name in _DTYPES else None


class NpyLayout:
    """Header and offsets of a .npy file, which contains one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.is_text or tensor.dtype in RAW_BITS:
            raise InputError(
                f"A .npy file cannot hold {tensor.name!r}: NumPy has no {tensor.dtype}.",
                hint="Write a .parquet file for strings, a .safetensors file for the rest.",
            )
        self.tensors = (tensor,)

    def body(self, rows: Mapping[str, int]) -> Body:
        """Return the header and offsets for these numbers of rows."""
        (tensor,) = self.tensors
        count = rows[tensor.name]
        buffer = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(tensor.carrier)
        np.lib.format.write_array_header_1_0(
            buffer, {"descr": descr, "fortran_order": False, "shape": tensor.shape(count)}
        )
        header = buffer.getvalue()
        return Body(header, {tensor.name: len(header)}, len(header) + count * tensor.row_bytes)


def npy_path(path: Path, name: str, is_single: bool) -> Path:
    """Return `emb.npy` for a single tensor, `emb.text.npy` for one of several."""
    if is_single:
        return path
    if "/" in name or "\0" in name:
        raise InputError(f"A file cannot be called after the tensor {name!r}.", hint="Write a .safetensors file.")
    return path.with_name(f"{path.stem}.{name}{path.suffix}")


_ALIGNMENT = 8
_HEADER_LIMIT_BYTES = 100_000_000  # the library refuses to read more
_TEST_LENGTHS = (0, 1, 12, 123, 1234)


class SafetensorsLayout:
    """Header and offsets of a safetensors file, which contains all tensors."""

    def __init__(self, tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> None:
        if text := next((tensor.name for tensor in tensors if tensor.is_text), None):
            raise InputError(
                f"A safetensors file cannot hold the strings of {text!r}.", hint="Write a .parquet file, which can."
            )
        self._metadata = None if metadata is None else dict(sorted(metadata.items()))
        self._codes = _library_codes(tensors, self._metadata)
        self._by_name = {tensor.name: tensor for tensor in tensors}
        self.tensors = tuple(tensors)

    def body(self, rows: Mapping[str, int]) -> Body:
        """Return the header and offsets for these numbers of rows."""
        tensors = [self._by_name[name] for name in self._codes]
        sizes = {tensor.name: tensor.row_bytes * rows[tensor.name] for tensor in tensors}
        shapes = {tensor.name: tensor.shape(rows[tensor.name]) for tensor in tensors}
        header = _safetensors_header(self._codes, shapes, sizes, self._metadata)
        starts, position = {}, len(header)
        for name, size in sizes.items():
            starts[name] = position
            position += size
        return Body(header, starts, position)


def _safetensors_header(
    codes: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, int],
    metadata: Mapping[str, str] | None,
) -> bytes:
    content: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, code in codes.items():
        start, end = end, end + sizes[name]
        content[name] = {"dtype": code, "shape": shapes[name], "data_offsets": [start, end]}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _library_codes(tensors: Sequence[Tensor], metadata: Mapping[str, str] | None) -> dict[str, str]:
    """Return the library's name for each tensor's type, in the library's order of the tensors.

    Raises InputError if brim's headers of small tensors differ from the library's.
    """
    try:
        import safetensors
    except ImportError as error:
        raise missing("embed", "Writing .safetensors needs the safetensors library.", "safetensors") from error
    entry = None if metadata is None else dict(list(metadata.items())[:1])
    codes: dict[str, str] = {}
    for length in _TEST_LENGTHS:
        shapes = {
            tensor.name: tensor.shape(0) if length == 0 else (length + number,) for number, tensor in enumerate(tensors)
        }
        zeros = {tensor.name: np.zeros(int(np.prod(shapes[tensor.name])), tensor.carrier) for tensor in tensors}
        specs: dict[str, Any] = {}
        for tensor in tensors:
            shape, array = list(shapes[tensor.name]), zeros[tensor.name]
            if hasattr(safetensors, "TensorSpec"):
                memory = {"data_ptr": array.ctypes.data, "data_len": array.nbytes}
                specs[tensor.name] = safetensors.TensorSpec(dtype=tensor.dtype, shape=shape, **memory)
            else:  # before 0.8
                specs[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data": array.tobytes()}
        serialized = bytes(safetensors.serialize(specs, metadata=entry))
        header_end = 8 + int.from_bytes(serialized[:8], "little")
        content = json.loads(serialized[8:header_end])
        content.pop("__metadata__", None)
        codes = codes or {name: each["dtype"] for name, each in content.items()}
        sizes = {name: array.nbytes for name, array in zeros.items()}
        if list(codes) != list(content) or serialized[:header_end] != _safetensors_header(codes, shapes, sizes, entry):
            raise InputError(
                "This version of safetensors writes its headers in a way that brim does not know.",
                hint="Use another version of it: brim was made with 0.8.",
            )
    return codes


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, in the order of the file."""
    size = path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_HEADER_LIMIT_BYTES, size):
                raise ValueError("its header is longer than it can be")
            content = json.loads(file.read(length))
        content.pop("__metadata__", None)
        stored, position = {}, 8 + length
        for name, entry in sorted(content.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            if (code := entry["dtype"]) not in NAMES_BY_CODE:
                raise InputError(f"The values of {name!r} in {path.name} have a type that brim does not know: {code}.")
            stored[name] = StoredTensor(path, Tensor(name, shape[1:], NAMES_BY_CODE[code]), shape, position)
            if 8 + length + start != position or end - start != stored[name].size:
                raise ValueError(f"the place of {name!r} does not fit its shape")
            position += end - start
        if position != size:
            raise ValueError(f"it has {size} bytes and should have {position}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerificationError(f"{str(path)!r} is not a whole safetensors file: {error}.", path=str(path)) from error
    return stored


ROW_GROUP_BYTES = 16 * 1024 * 1024  # pyarrow needs three to four times the memory of a row group to write it


def write_parquet(
    target: Path, columns: Sequence[tuple[Tensor, Sequence[Path]]], rows: int, metadata: Mapping[str, str] | None
) -> None:
    """Write a Parquet file from the files of each column: one for numbers, two for strings (lengths, text).

    The file is not synced.
    """
    fields = []
    for tensor, _ in columns:
        kind = pa.string() if tensor.is_text else pa.from_numpy_dtype(tensor.carrier)
        for size in reversed(tensor.dims):
            kind = pa.list_(kind, size)
        fields.append((tensor.name, kind))
    schema = pa.schema(fields, metadata=metadata)
    scalars = [tensor.name for tensor, _ in columns if not tensor.dims]
    readers = [_ColumnReader(tensor, files, rows) for tensor, files in columns]
    total = sum(reader.size for reader in readers)
    step = max(1, ROW_GROUP_BYTES * rows // total) if total else 1
    compression = {name: "zstd" if name in scalars else "none" for name in schema.names}
    with pq.ParquetWriter(
        target, schema, compression=compression, use_dictionary=scalars, write_statistics=scalars
    ) as writer:
        for start in range(0, rows, step):
            arrays = [reader.read(start, min(start + step, rows)) for reader in readers]
            writer.write_table(pa.table(arrays, schema=schema), row_group_size=step)


class _ColumnReader:
    """Read the first `rows` rows of a column as Arrow arrays from its memory-mapped files, in order."""

    def __init__(self, tensor: Tensor, files: Sequence[Path], rows: int) -> None:
        self._tensor = tensor
        self._row_values = int(np.prod(tensor.dims, dtype=int))
        dtype = np.dtype(np.int64) if tensor.is_text else tensor.carrier
        count = rows * self._row_values  # an empty file cannot be mapped
        self._values = np.memmap(files[0], dtype, "r", shape=(count,)) if count else np.zeros(0, dtype)
        self._text = None
        self._text_position = 0
        self.size = self._values.nbytes
        if tensor.is_text:
            size = int(self._values.sum())
            self._text = np.memmap(files[1], np.uint8, "r", shape=(size,)) if size else np.zeros(0, np.uint8)
            self.size += self._text.nbytes

    def read(self, start: int, stop: int) -> Any:
        values = self._values[start * self._row_values : stop * self._row_values]
        if self._text is not None:
            ends = np.concatenate([[0], np.cumsum(values)])
            text = self._text[self._text_position : self._text_position + int(ends[-1])]
            self._text_position += int(ends[-1])
            array = pa.LargeStringArray.from_buffers(stop - start, pa.py_buffer(ends), pa.py_buffer(text))
            return array.cast(pa.string())
        array = pa.array(values)
        for size in reversed(self._tensor.dims):
            array = pa.FixedSizeListArray.from_arrays(array, size)
        return array


def read_spec(path: Path) -> tuple[dict[str, Tensor], int]:
    """Read the columns of a Parquet file and its number of rows. Unsupported types keep the names of Arrow."""
    try:
        with pq.ParquetFile(path) as file:
            schema, rows = file.schema_arrow, file.metadata.num_rows
    except pa.ArrowInvalid as error:
        raise VerificationError(f"{str(path)!r} is not a Parquet file: {error}", path=str(path)) from error
    tensors = {}
    for field in schema:
        dims, kind = [], field.type
        while pa.types.is_fixed_size_list(kind):
            dims.append(kind.list_size)
            kind = kind.value_type
        name = {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
        tensors[field.name] = Tensor(field.name, tuple(dims), name)
    return tensors, rows
