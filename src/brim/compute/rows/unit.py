"""A unit: the rows that one worker processes and one receipt records. Where units end is part of the plan.

Boundaries depend on the input and the batch size alone, never on memory or the number of workers. A worker gets a unit
and a `Reading`, both of plain values, and needs nothing else to read its rows. `make_unit` makes every unit, with names
and digests that are the same on every machine.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from brim.errors import SourceChangedError
from brim.records import dataclass
from brim.state.atomic_files import reason

if TYPE_CHECKING:
    from brim.file_set import FileSet
    from brim.sources.file_table import FileTable


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """An unreadable line or record. `offset` counts the rows of its unit, unreadable ones included, from 0.

    `line` counts from 1 and is None if counting would take too long; `byte` is where the row starts, None in a
    compressed file. Both are None for a file that is one row.
    """

    offset: int
    file: str
    line: int | None
    byte: int | None
    content: bytes
    reason: str


OnUnreadable = Callable[[UnreadableRow], None]
Kind = Literal["jsonl", "csv", "parquet", "arrow", "lines", "document"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one file: rows of Parquet and Arrow, bytes of everything else.

    For an object (whose path is its address), `version` is the planned size and ETag. `batches` is for Arrow files:
    the first row and first byte of the first batch with these rows, and the end of the last one.
    """

    path: str
    kind: Kind
    start: int
    end: int
    version: tuple[int, str] | None = None
    batches: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive rows. `first_row` is the index of the first one in the whole source, if it is known.

    `key` is a digest of the inputs that determine the rows (names relative to the source, sizes, spans), the same on
    every machine; `mtimes` is a digest of sizes and dates. `spooled`: the spans are files made for this unit, and
    removed when it is done; `origins` has the source of each: a name for messages, and the numbers of rows and of lines
    (without the header of CSV) before it in that source. The spans of a skipped unit are never read. `unreadable` are
    rows that were skipped when the unit was made.
    """

    number: int
    spans: tuple[Span, ...]
    bytes: int
    key: str
    mtimes: str = ""
    first_row: int | None = None
    rows: int | None = None
    spooled: bool = False
    origins: tuple[tuple[str, int, int], ...] = ()
    unreadable: tuple[UnreadableRow, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """How the spans of a source are read: the schema of the plan, and options of its format."""

    schema: bytes  # pa.Schema.serialize()
    columns: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class RowSource(Protocol):
    """Rows, and how they are cut."""

    name: str  # for messages: as the user gave it
    schema: pa.Schema
    facts: dict[str, Any]  # fingerprint inputs: no path or date of this machine
    reading: Reading
    total_bytes: int | None  # None if unknown before the end
    total_rows: int | None
    files: FileSet | None  # with the rows; None if they are not in files
    stamp: str  # digest of the dates (or ETags) of the files; empty without files
    table: FileTable | None  # of a selection
    notes: tuple[str, ...]  # notes about the source for the user

    def units(
        self,
        align: int,
        *,
        indices: bool = False,
        spool: Path | None = None,
        skip: Callable[[int], bool] = lambda number: False,
    ) -> Iterator[Unit]:
        """Yield the units in order, made on demand.

        If rows can be addressed (Parquet, Arrow) or are counted, every unit but the last has a multiple of `align`
        rows. Then batches of `align` rows are the same as if the source were not divided. With `indices`, `first_row`
        is known for every unit; for that, the source may be read once more to count its rows.

        Sources that cannot be read from the middle (compressed files, iterators) are read in order by this call, and
        each unit is written to files in the folder `spool`, unless `skip` returns True for its number.
        """


SPANS_PER_UNIT = 4096
_MOST_BYTES, _PARTS = 128 << 20, 64


def unit_size(total_bytes: int, least_bytes: int) -> int:
    """Return the bytes per unit, from the input alone: a 64th of it, within limits."""
    return min(max(total_bytes // _PARTS, least_bytes), _MOST_BYTES)


@dataclass(frozen=True, slots=True)
class SpanInfo:
    """A span, the name of its file relative to the source, the file's size and date, and the bytes of the span."""

    span: Span
    shown: str
    size: int
    mtime_ns: int
    bytes: int


def make_unit(number: int, parts: list[SpanInfo], *, rows: int | None = None, first_row: int | None = None) -> Unit:
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


def changed(shown: str, change: str = "was changed or removed") -> SourceChangedError:
    return SourceChangedError(
        f"The source file {shown!r} {change} since the job was planned.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=shown,
    )


def check_unchanged(unit: Unit, number: int, shown: str) -> None:
    """Raise SourceChangedError if the file of a span changed since the unit was made."""
    expected = unit.mtimes[8 * number : 8 * number + 8]
    if not expected or unit.spans[number].version is not None:  # each request for an object names its version
        return
    try:
        file_stat = os.stat(unit.spans[number].path)
        change = "" if _stamp(file_stat.st_size, file_stat.st_mtime_ns) == expected else "was written to"
    except OSError as error:
        change = f"cannot be read any more ({reason(error)})"
    if change:
        raise changed(shown, change)
