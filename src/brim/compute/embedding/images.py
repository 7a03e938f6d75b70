"""Pictures as columns hold them: `struct<bytes, path>` of `datasets` and brim, bytes, or paths of files or objects."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.embedding.libraries import need
from brim.errors import InputError
from brim.objects.address import Access, ObjectAddress, is_object_address
from brim.objects.reading import TO_END, Changed, Piece, fetch


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
    if is_object_address(path):
        return path
    return f"{root}/{path}" if root is not None and is_object_address(root) else None


def fetched(cell: Any, root: str | None, access: Access) -> Any:
    """A cell with the bytes of its object, where it is one; other cells as they are."""
    address = in_bucket(cell, root)
    if address is None:
        return cell
    scheme, _, rest = address.partition("://")
    bucket, _, key = rest.partition("/")
    try:
        content = fetch(ObjectAddress(scheme, bucket, "", access), Piece(key, 0, TO_END))
    except Changed:
        return cell  # it is not there: `decoded` says so of the row
    return {"bytes": content, "path": key}


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
