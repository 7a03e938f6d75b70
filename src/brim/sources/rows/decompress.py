"""The bytes of a compressed file, in order and a block at a time, by pyarrow's own codecs."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.opening import AnyFile, as_arrow_file

_BLOCK_BYTES = 1 << 20


def decompressed(file: AnyFile, codec: str, shown: str) -> Iterator[bytes]:
    """Blocks of what is inside. Damage is an InputError that says how far the file could be read."""
    place = 0
    try:
        with as_arrow_file(file) as opened, pa.CompressedInputStream(opened, codec) as stream:
            while block := stream.read(_BLOCK_BYTES):
                place += len(block)
                yield block
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        raise InputError(
            f"{shown!r} is damaged or cut off behind byte {place:,} of what is inside: {reason}.",
            hint="Get or write the file again.",
            path=shown,
        ) from error
