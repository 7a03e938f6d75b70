"""What a tensor is called and made of: its name, the shape of a row, and the type of its values."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from brim.errors import InputError
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
