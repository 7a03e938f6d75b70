"""Pictures as columns hold them: `struct<bytes, path>` of `datasets` and brim, bytes, or paths."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa

from brim.compute.embedding.libraries import need
from brim.errors import InputError


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


def decoded(cell: Any, root: str | None) -> Any:
    """The picture in RGB, turned as its camera was held. An InputError says what is wrong with it."""
    pillow = need("PIL.Image")
    from PIL import ImageOps

    content, path = _content(cell)
    if content is None and path is None:
        raise InputError("The image is null.", hint="Leave such rows out of the source.")
    source = io.BytesIO(content) if content is not None else Path(root or "", path or "")
    try:
        with pillow.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, pillow.DecompressionBombError) as error:
        what = f" {Path(path).name!r}" if path else ""
        reason = str(error) if content is None or not isinstance(error, OSError) else "it is damaged, or no image"
        raise InputError(
            f"The image{what} cannot be decoded: {reason.replace(str(root), '') if root else reason}.",
            hint="Leave it out of the source, or use --on-error skip.",
        ) from error


def _content(cell: Any) -> tuple[bytes | None, str | None]:
    if cell is None or isinstance(cell, bytes):
        return cell, None
    if isinstance(cell, str):
        return None, cell
    return cell.get("bytes"), cell.get("path")
