"""What a model gives, as the columns of a table: checked, normalised, in a type that Arrow has."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from brim.buckets.bucket_address import Access, is_bucket_address, parse_object_address
from brim.buckets.read_object import TO_END, Changed, ObjectPiece, fetch
from brim.errors import InputError
from brim.steps.models import VectorType, need

Array = np.ndarray[Any, Any]

VECTOR = b"brim.vector"  # in the metadata of a field: it holds vectors, of this type
_SMALLEST_NORM = 1e-12  # as torch has it
_ARROW = {"float32": pa.float32(), "float16": pa.float16(), "bfloat16": pa.uint16()}
_NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def plain_vectors(
    name: str, value: Any, rows: int, *, normalize: bool, keep_bfloat16: bool
) -> tuple[Array, VectorType]:
    """Rows of numbers, and what they are. bfloat16 is float32, or its bits if they are to be kept."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        _check_shape(name, tuple(value.shape), rows)
        value = value.detach()
        if normalize:
            value = torch.nn.functional.normalize(value, p=2, dim=1)
            normalize = False
        value = value.cpu().contiguous()
        if value.dtype == torch.bfloat16:
            if keep_bfloat16:
                return value.view(torch.int16).numpy().view(np.uint16), VectorType(value.shape[1], "bfloat16")
            value = value.float()
        value = value.numpy()
    array = np.asarray(value)
    _check_shape(name, array.shape, rows)
    if array.dtype.kind not in "fiu":
        raise InputError(f"The vectors {name!r} are of type {array.dtype}.", hint="Give back an array of floats.")
    if array.dtype not in (np.float16, np.float32):
        array = array.astype(np.float32)
    if normalize:
        norms = np.linalg.norm(array.astype(np.float32), axis=1, keepdims=True)
        array = (array / np.maximum(norms, _SMALLEST_NORM)).astype(array.dtype)
    return array, VectorType(array.shape[1], array.dtype.name)


def empty_vectors(rows: int, output: VectorType) -> Array:
    return np.empty((rows, output.dim), _NUMPY[output.dtype])


def first_bad_row(array: Array, dtype: str) -> int | None:
    """The first row with a value that is no number, or infinite."""
    good = (array & 0x7F80) != 0x7F80 if dtype == "bfloat16" else np.isfinite(array)
    if good.all():
        return None
    return int(np.flatnonzero(~good.all(axis=1))[0])


def vector_field(name: str, output: VectorType) -> Any:
    kind = pa.list_(_ARROW[output.dtype], output.dim)
    return pa.field(name, kind, nullable=False, metadata={VECTOR: output.dtype.encode()})


def vector_column(array: Array, output: VectorType) -> Any:
    values = pa.array(array.reshape(-1), _ARROW[output.dtype])
    return pa.FixedSizeListArray.from_arrays(values, type=pa.list_(_ARROW[output.dtype], output.dim))


def stored(output: VectorType, *, keep_bfloat16: bool) -> VectorType:
    """As it lies in the tables."""
    widen = output.dtype not in _ARROW or (output.dtype == "bfloat16" and not keep_bfloat16)
    return VectorType(output.dim, "float32") if widen else output


def vectors_in(schema: Any) -> Mapping[str, VectorType]:
    """The columns of a table that hold vectors."""
    return {
        field.name: VectorType(field.type.list_size, field.metadata[VECTOR].decode())
        for field in schema
        if field.metadata and VECTOR in field.metadata
    }


def _check_shape(name: str, shape: tuple[int, ...], rows: int) -> None:
    if len(shape) != 2 or shape[0] != rows or shape[1] < 1:
        raise InputError(
            f"The model gave {name!r} in the shape {shape} for {rows} rows.", hint=f"It has to be ({rows}, dimensions)."
        )


def check_image_type(name: str, kind: Any) -> None:
    if pa.types.is_struct(kind) and {field.name for field in kind} & {"bytes", "path"}:
        return
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        return
    if any(test(kind) for test in (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)):
        return
    raise InputError(
        f"The column {name!r} holds {kind}, and not images.",
        hint="Images are struct<bytes, path>, the bytes of their files, or paths.",
    )


def in_bucket(cell: Any, root: str | None) -> str | None:
    """The address of a picture that is an object and whose bytes are not in the row."""
    content, path = _content(cell)
    if content is not None or not path:
        return None
    if is_bucket_address(path):
        return path
    return f"{root}/{path}" if root is not None and is_bucket_address(root) else None


def fetched(cell: Any, root: str | None, access: Access) -> Any:
    """A cell with the bytes of its object, where it is one; other cells as they are."""
    address = in_bucket(cell, root)
    if address is None:
        return cell
    there = parse_object_address(address, access)
    try:
        content = fetch(there, ObjectPiece(there.prefix, 0, TO_END))
    except Changed:
        return cell  # it is not there: `decoded` says so of the row
    return {"bytes": content, "path": there.prefix}


def decoded(cell: Any, root: str | None) -> Any:
    """The picture in RGB, turned as its camera was held. An InputError says what is wrong with it."""
    pillow = need("PIL.Image")
    from PIL import ImageOps

    content, path = _content(cell)
    if content is None and path is None:
        raise InputError("The image is null.", hint="Leave such rows out of the source.")
    if in_bucket(cell, root):
        raise InputError(f"The image {path!r} is not in the bucket.", hint="Put it there, or use --on-error=skip.")
    source = io.BytesIO(content) if content is not None else Path(root or "", path or "")
    try:
        with pillow.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, pillow.DecompressionBombError) as error:
        what = f" {Path(path).name!r}" if path else ""
        reason = str(error) if content is None or not isinstance(error, OSError) else "it is damaged, or no image"
        raise InputError(
            f"The image{what} cannot be decoded: {reason.replace(str(root), '') if root else reason}.",
            hint="Leave it out of the source, or use --on-error=skip.",
        ) from error


def _content(cell: Any) -> tuple[bytes | None, str | None]:
    if cell is None or isinstance(cell, bytes):
        return cell, None
    if isinstance(cell, str):
        return None, cell
    return cell.get("bytes"), cell.get("path")
