"""A unit: the rows that one worker does and one receipt records. Where units end is part of the plan.

Boundaries depend on the input and the batch size alone, never on memory or the number of workers. A worker is given a
unit and a `Reading`, both plain enough for JSON, and needs nothing else to read its rows. All cuts end in `make_unit`:
spans with names that hold on every machine, and their digests.
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

from brim.compute.rows.unreadable import UnreadableRow
from brim.errors import SourceChangedError
from brim.records import dataclass
from brim.state.atomic_files import reason

if TYPE_CHECKING:
    from brim.file_set import FileSet
    from brim.sources.file_table import FileTable

Kind = Literal["jsonl", "csv", "parquet", "arrow", "lines", "document"]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one file: rows of Parquet and Arrow, bytes of everything else.

    Of an object (whose path is its address), `version` is the size and the ETag that were planned. `batches` says of
    an Arrow file where the batches with these rows lie: the first one's first row and first byte, and where the last
    one ends.
    """

    path: str
    kind: Kind
    start: int
    end: int
    version: tuple[int, str] | None = None
    batches: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows in their order. `first_row` is the index of the first in the whole source, where that is known.

    `key` is a digest of what decides the rows (names relative to the source, sizes, spans), so that it is the same
    on another machine; `mtimes` one of what else would betray a change. `spooled`: the spans are files that were
    made for this unit and are removed when it is done; `origins` says for each where its rows came from: a name for
    people, and the numbers of rows and of lines (the header of CSV apart) before them there. The spans of a skipped
    unit are never read. `unreadable` are rows that were left out when the unit was made.
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
    """How the spans of a source are read: its schema as settled by the plan, and the options of its kinds."""

    schema: bytes  # pa.Schema.serialize()
    columns: tuple[str, ...] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class RowSource(Protocol):
    """Rows, and how they are cut."""

    name: str  # for people: what was given
    schema: pa.Schema
    facts: dict[str, Any]  # what decides the rows, for the fingerprint: no path or date of this machine
    reading: Reading
    total_bytes: int | None  # None where nobody can tell before the end
    total_rows: int | None
    files: FileSet | None  # that the rows are in, where there are any
    stamp: str  # digest of the dates (or ETags) of the files that are read; empty where there are none
    table: FileTable | None  # whose rows these are, where they were chosen from a dataset
    notes: tuple[str, ...]  # what a user should know of the source

    def units(
        self,
        align: int,
        *,
        indices: bool = False,
        spool: Path | None = None,
        skip: Callable[[int], bool] = lambda number: False,
    ) -> Iterator[Unit]:
        """The units in order, made as they are asked for.

        Where rows can be addressed (Parquet, Arrow) or are counted on the way, every unit but the last has a
        multiple of `align` rows, so that batches of `align` rows are the same as over the source in one piece.
        With `indices`, `first_row` is known for every unit, at the price of a pass that counts.

        What cannot be read from the middle (compressed files, iterators) is read here, in order, and each unit
        written to files in the folder `spool`, unless `skip` says of its number that it is done already.
        """


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


def changed(shown: str, what: str = "was changed or removed") -> SourceChangedError:
    return SourceChangedError(
        f"The source file {shown!r} {what} since the job was planned.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=shown,
    )


def check_unchanged(unit: Unit, number: int, shown: str) -> None:
    """The file of a span is what it was when the unit was made, or SourceChangedError."""
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
