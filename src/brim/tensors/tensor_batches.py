"""Turn batches of NumPy, torch and Arrow into bytes, without copies if memory already has the layout of the file.

Other batches (on another device, transposed, big-endian, booleans as bits) are converted in chunks of 16 MB, so that a
large batch costs the memory of one chunk. torch is looked up among the loaded modules and never imported: a caller that
passes one of its tensors has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import InputError
from brim.records import dataclass
from brim.tensors.tensor_files import RAW_BITS, STRING, Tensor, dtype_name

CHUNK_BYTES = 16 * 1024 * 1024

Array = np.ndarray[Any, Any]
Blocks = Iterator[memoryview]


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Some rows. `streams` are their bytes: one stream for numbers, two for strings (lengths, then text)."""

    rows: int
    dims: tuple[int, ...]
    dtype: str
    streams: tuple[Callable[[], Blocks], ...]


def batch_for(tensor: Tensor, value: Any) -> TensorBatch:
    """Convert a batch, or raise InputError with the difference between the batch and its tensor."""
    batch = text_batch(tensor.name, value) if tensor.is_text else as_batch(tensor.name, value)
    if batch.dims != tensor.dims:
        raise InputError(
            f"The batch for {tensor.name!r} has rows of shape {batch.dims}, and the file has {tensor.dims}.",
            hint="Nothing of this batch was written.",
            name=tensor.name,
        )
    is_raw = tensor.dtype in RAW_BITS and batch.dtype == tensor.carrier.name
    if batch.dtype != tensor.dtype and not is_raw:
        conversion = ""
        if _is_torch(value):
            conversion = f" For example: batch.to(torch.{tensor.dtype})."
        elif isinstance(value, np.ndarray) and tensor.dtype not in RAW_BITS:
            conversion = f" For example: batch.astype({tensor.dtype!r})."
        raise InputError(
            f"The batch for {tensor.name!r} has values of type {batch.dtype}, and the file has {tensor.dtype}.",
            hint=f"Convert it first; nothing of this batch was written.{conversion}",
            name=tensor.name,
        )
    return batch


def as_batch(name: str, value: Any) -> TensorBatch:
    """Convert a batch of numbers from any supported library."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return _from_arrow(name, value)
    if _is_torch(value):
        return _from_torch(name, value)
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"The batch for {name!r} is masked.", hint="Fill masked values: batch.filled(0).")
    if isinstance(value, np.ndarray | list | tuple) or hasattr(value, "__array__"):
        return _from_numpy(name, np.asarray(value))
    raise InputError(
        f"The batch for {name!r} is a {type(value).__name__}, and not an array.",
        hint="Hand over a NumPy array, a torch tensor or an Arrow array.",
    )


def text_batch(name: str, value: Any) -> TensorBatch:
    """Convert a batch of strings: a list, or a NumPy or Arrow array."""
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    elif isinstance(value, Sequence) and not isinstance(value, str | list):
        value = list(value)
    if isinstance(value, pa.Array):
        kind = value.type.value_type if pa.types.is_dictionary(value.type) else value.type
        tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
        if not any(test(kind) for test in tests):
            raise InputError(
                f"The batch for {name!r} is made of {value.type}, and not of strings.", hint="Cast it first."
            )
    try:
        texts = value.cast(pa.large_string()) if isinstance(value, pa.Array) else pa.array(value, pa.large_string())
    except (pa.ArrowException, TypeError) as error:
        raise InputError(
            f"The batch for {name!r} is not made of strings: {error}", hint="Hand over a list of strings."
        ) from error
    _refuse_nulls(name, texts)
    _, ends, data = texts.buffers()
    offsets = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1] if ends else np.zeros(1, int)
    lengths = np.diff(offsets)
    text = memoryview(data)[int(offsets[0]) : int(offsets[-1])] if data else memoryview(b"")
    return TensorBatch(len(texts), (), STRING, (lambda: iter([_memory(lengths)]), lambda: iter([text])))


def _from_numpy(name: str, array: Array) -> TensorBatch:
    dtype = _checked_dtype(name, array.ndim, array.dtype)
    little_endian = array.dtype.newbyteorder("<")

    def blocks() -> Blocks:
        if array.flags.c_contiguous and array.dtype == little_endian:
            yield _memory(array)
            return
        for chunk in _chunks(len(array), array.nbytes):
            yield _memory(np.ascontiguousarray(array[chunk], little_endian))

    return TensorBatch(len(array), array.shape[1:], dtype, (blocks,))


def _from_torch(name: str, tensor: Any) -> TensorBatch:
    torch = sys.modules["torch"]
    dtype = _checked_dtype(name, tensor.dim(), tensor.dtype)
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise InputError(f"The batch for {name!r} is sparse or has no values.", hint="Make it dense: batch.to_dense().")
    tensor = tensor.detach()

    def blocks() -> Blocks:
        is_ready = tensor.device.type == "cpu" and tensor.is_contiguous()
        size = tensor.numel() * tensor.element_size()
        for chunk in [slice(None)] if is_ready else _chunks(len(tensor), size):
            part = tensor[chunk].resolve_conj().resolve_neg().to("cpu").contiguous()
            if dtype in RAW_BITS:  # NumPy does not have the type, and the bytes are the same
                part = part.view(torch.int16 if part.element_size() == 2 else torch.uint8)
            yield _memory(part.numpy())

    return TensorBatch(len(tensor), tuple(tensor.shape[1:]), dtype, (blocks,))


def _from_arrow(name: str, array: Any) -> TensorBatch:
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    parts = [_arrow_values(name, chunk) for chunk in chunks or [pa.array([], array.type)]]
    if len({dims for _, dims in parts}) != 1:
        raise InputError(f"The batch for {name!r} has rows of different lengths.")
    first_values, dims = parts[0]
    try:
        dtype = _checked_dtype(name, 1, first_values.type.to_pandas_dtype())
    except NotImplementedError as error:
        raise InputError(
            f"The batch for {name!r} has values of type {first_values.type}, which cannot be written."
        ) from error

    def blocks() -> Blocks:
        for values, _ in parts:
            for chunk in _chunks(len(values), values.nbytes):
                yield _memory(values[chunk].to_numpy(zero_copy_only=False))

    return TensorBatch(len(array), dims, dtype, (blocks,))


def _arrow_values(name: str, array: Any) -> tuple[Any, tuple[int, ...]]:
    """Flatten nested lists to their values; return the sizes of the lists too."""
    dims: list[int] = []
    _refuse_nulls(name, array)
    if isinstance(array.type, pa.FixedShapeTensorType):
        if array.type.permutation not in (None, list(range(len(array.type.shape)))):
            raise InputError(
                f"The batch for {name!r} has its dimensions in another order than its values.",
                hint="Hand over batch.to_numpy_ndarray().",
            )
        dims += array.type.shape
        array = array.storage.flatten()
    while pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if pa.types.is_fixed_size_list(array.type):
            dims.append(array.type.list_size)
        else:
            lengths = pc.unique(pc.list_value_length(array)).to_pylist()
            if len(lengths) != 1:
                raise InputError(f"The batch for {name!r} has rows of different lengths.")
            dims += lengths
        array = array.flatten()
        _refuse_nulls(name, array)
    return array, tuple(dims)


def _checked_dtype(name: str, dimensions: int, dtype: Any) -> str:
    if dimensions == 0:
        raise InputError(f"The batch for {name!r} is a single value without rows.", hint="Its first dimension is rows.")
    supported = dtype_name(dtype)
    if supported is None or supported == STRING:
        raise InputError(
            f"The batch for {name!r} has values of type {getattr(dtype, 'name', dtype)}, which cannot be written.",
            hint="Convert it to a type of numbers first, such as float32.",
        )
    return supported


def _refuse_nulls(name: str, array: Any) -> None:
    if array.null_count:
        raise InputError(f"The batch for {name!r} has nulls.", hint="Fill or leave out those rows.")


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _chunks(rows: int, size: int) -> Iterator[slice]:
    step = max(1, rows * CHUNK_BYTES // size) if size else max(rows, 1)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _memory(array: Array) -> memoryview:
    """Return the memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
