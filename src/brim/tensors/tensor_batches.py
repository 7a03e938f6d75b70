"""Batches as bytes: NumPy, torch and Arrow, without copies where memory already lies as the file wants it.

Where it does not (another device, transposed, big-endian, bits for booleans) a batch is turned piece by piece, so
that a large one costs one piece. torch is looked for among the modules that are loaded, never imported: a caller
who hands over one of its tensors has it.
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

PIECE_BYTES = 16 * 1024 * 1024

Array = np.ndarray[Any, Any]
Blocks = Iterator[memoryview]


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Some rows. `streams` are its bytes: one for numbers, two for strings (lengths, and then the text)."""

    rows: int
    dims: tuple[int, ...]
    dtype: str
    streams: tuple[Callable[[], Blocks], ...]


def batch_for(tensor: Tensor, value: Any) -> TensorBatch:
    """The batch, or an error that says how it differs from what the tensor is made of."""
    batch = text_batch(tensor.name, value) if tensor.is_text else as_batch(tensor.name, value)
    if batch.dims != tensor.dims:
        raise InputError(
            f"The batch for {tensor.name!r} has rows of shape {batch.dims}, and the file has {tensor.dims}.",
            hint="Nothing of this batch was written.",
            name=tensor.name,
        )
    bits = tensor.dtype in RAW_BITS and batch.dtype == tensor.carrier.name
    if batch.dtype != tensor.dtype and not bits:
        raise InputError(
            f"The batch for {tensor.name!r} has values of type {batch.dtype}, and the file has {tensor.dtype}.",
            hint=f"Convert it first; nothing of this batch was written. {_conversion(value, tensor.dtype)}".strip(),
            name=tensor.name,
        )
    return batch


def as_batch(name: str, value: Any) -> TensorBatch:
    """A batch of numbers, whatever holds it."""
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return _from_arrow(name, value)
    if _is_torch(value):
        return _from_torch(name, value)
    if isinstance(value, np.ma.MaskedArray):
        raise InputError(f"The batch for {name!r} is masked.", hint="Fill what is masked: batch.filled(0).")
    if isinstance(value, np.ndarray | list | tuple) or hasattr(value, "__array__"):
        return _from_numpy(name, np.asarray(value))
    raise InputError(
        f"The batch for {name!r} is a {type(value).__name__}, and not an array.",
        hint="Hand over a NumPy array, a torch tensor or an Arrow array.",
    )


def text_batch(name: str, value: Any) -> TensorBatch:
    """A batch of strings: a list, or an array of NumPy or Arrow."""
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    elif isinstance(value, Sequence) and not isinstance(value, str | list):
        value = list(value)
    if isinstance(value, pa.Array) and not _is_text(value.type):
        raise InputError(f"The batch for {name!r} is made of {value.type}, and not of strings.", hint="Cast it first.")
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
    return TensorBatch(len(texts), (), STRING, (lambda: iter([_bytes_of(lengths)]), lambda: iter([text])))


def _conversion(value: Any, dtype: str) -> str:
    if _is_torch(value):
        return f"For example: batch.to(torch.{dtype})."
    return f"For example: batch.astype({dtype!r})." if isinstance(value, np.ndarray) and dtype not in RAW_BITS else ""


def _from_numpy(name: str, array: Array) -> TensorBatch:
    _refuse_scalar(name, array.ndim)
    dtype = _known(name, array.dtype)
    little = array.dtype.newbyteorder("<")

    def blocks() -> Blocks:
        if array.flags.c_contiguous and array.dtype == little:
            yield _bytes_of(array)
            return
        for start, stop in _pieces(len(array), array.nbytes):
            yield _bytes_of(np.ascontiguousarray(array[start:stop], little))

    return TensorBatch(len(array), array.shape[1:], dtype, (blocks,))


def _from_torch(name: str, tensor: Any) -> TensorBatch:
    torch = sys.modules["torch"]
    _refuse_scalar(name, tensor.dim())
    dtype = _known(name, tensor.dtype)
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise InputError(f"The batch for {name!r} is sparse or has no values.", hint="Make it dense: batch.to_dense().")
    tensor = tensor.detach()

    def plain(part: Any) -> Array:
        part = part.resolve_conj().resolve_neg().to("cpu").contiguous()
        if dtype in RAW_BITS:  # NumPy does not know the type, and the bytes are the same
            part = part.view(torch.int16 if part.element_size() == 2 else torch.uint8)
        array: Array = part.numpy()
        return array

    def blocks() -> Blocks:
        rows = len(tensor)
        if tensor.device.type == "cpu" and tensor.is_contiguous():
            yield _bytes_of(plain(tensor))
            return
        for start, stop in _pieces(rows, tensor.numel() * tensor.element_size()):
            yield _bytes_of(plain(tensor[start:stop]))

    return TensorBatch(len(tensor), tuple(tensor.shape[1:]), dtype, (blocks,))


def _from_arrow(name: str, array: Any) -> TensorBatch:
    chunks = array.chunks if isinstance(array, pa.ChunkedArray) else [array]
    parts = [_arrow_leaf(name, chunk) for chunk in chunks or [pa.array([], array.type)]]
    if len({dims for _, dims in parts}) != 1:
        raise InputError(f"The batch for {name!r} has rows of different lengths.")
    (leaf, dims), rows = parts[0], len(array)
    try:
        dtype = _known(name, leaf.type.to_pandas_dtype())
    except NotImplementedError as error:
        raise InputError(f"The batch for {name!r} has values of type {leaf.type}, which cannot be written.") from error

    def blocks() -> Blocks:
        for values, _ in parts:
            for start, stop in _pieces(len(values), values.nbytes):
                yield _bytes_of(values[start:stop].to_numpy(zero_copy_only=False))

    return TensorBatch(rows, dims, dtype, (blocks,))


def _arrow_leaf(name: str, array: Any) -> tuple[Any, tuple[int, ...]]:
    """The values of lists in lists, and the sizes of those lists."""
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


def _known(name: str, dtype: Any) -> str:
    known = dtype_name(dtype)
    if known is None or known == STRING:
        raise InputError(
            f"The batch for {name!r} has values of type {getattr(dtype, 'name', dtype)}, which cannot be written.",
            hint="Convert it to a type of numbers first, such as float32.",
        )
    return known


def _refuse_scalar(name: str, dimensions: int) -> None:
    if dimensions == 0:
        raise InputError(f"The batch for {name!r} is a single value without rows.", hint="Its first dimension is rows.")


def _refuse_nulls(name: str, array: Any) -> None:
    if array.null_count:
        raise InputError(f"The batch for {name!r} has nulls.", hint="Fill or leave out those rows.")


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _pieces(rows: int, size: int) -> Iterator[tuple[int, int]]:
    step = max(1, rows * PIECE_BYTES // size) if size else max(rows, 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data
