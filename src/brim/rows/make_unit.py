"""What all cuts end in: spans with names that hold on every machine, made into a unit with its digests."""

from __future__ import annotations

import hashlib
import os
import zlib

from brim.records import dataclass
from brim.rows.open_files import changed
from brim.rows.unit import Span, Unit
from brim.state.durable import reason

SPANS_PER_UNIT = 4096
_MOST_BYTES, _PARTS = 128 << 20, 64


def unit_size(total_bytes: int, least_bytes: int) -> int:
    """The bytes of a unit, from the input alone: a 64th, but neither tiny nor huge."""
    return min(max(total_bytes // _PARTS, least_bytes), _MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Named:
    """A span, the name of its file relative to the source, what the file was when it was found, and its weight."""

    span: Span
    shown: str
    size: int
    mtime_ns: int
    bytes: int


def make_unit(number: int, parts: list[Named], *, rows: int | None = None, first_row: int | None = None) -> Unit:
    digest = hashlib.sha256()
    for part in parts:
        span = part.span
        text = f"{part.shown}\0{part.size}\0{span.kind}\0{span.start}\0{span.end}\0"
        digest.update(text.encode("utf-8", "surrogateescape"))
    return Unit(
        number=number,
        spans=tuple(part.span for part in parts),
        bytes=sum(part.bytes for part in parts),
        key=digest.hexdigest(),
        mtimes="".join(_stamp(part.size, part.mtime_ns) for part in parts),
        first_row=first_row,
        rows=rows,
    )


def _stamp(size: int, mtime_ns: int) -> str:
    return f"{zlib.crc32(f'{size} {mtime_ns}'.encode()):08x}"


def check_unchanged(unit: Unit, number: int, shown: str) -> None:
    """The file of a span is what it was when the unit was made, or SourceChanged."""
    expected = unit.mtimes[8 * number : 8 * number + 8]
    if not expected or unit.spans[number].version is not None:  # each request for an object says which it means
        return
    try:
        found = os.stat(unit.spans[number].path)
        what = "" if _stamp(found.st_size, found.st_mtime_ns) == expected else "was written to"
    except OSError as error:
        what = f"cannot be read any more ({reason(error)})"
    if what:
        raise changed(shown, what)
