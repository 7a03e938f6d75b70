"""A `.npy` file for each tensor, with the header that NumPy writes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from brim.errors import InputError
from brim.tensors.body import Body
from brim.tensors.spec import RAW_BITS, Tensor


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
