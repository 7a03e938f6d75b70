"""A unit: the rows that one worker does and one receipt records. Where units end is part of the plan.

Boundaries depend on the input and the batch size alone, never on memory or the number of workers. A worker is
given a unit and a `Reading`, both plain enough for JSON, and needs nothing else to read its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import pyarrow as pa

from brim.records import dataclass

if TYPE_CHECKING:  # of the source; units and workers have none
    from brim.file_set import FileSet

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
    people, and the number of rows before them there. The spans of a skipped unit are never read.
    """

    number: int
    spans: tuple[Span, ...]
    bytes: int
    key: str
    mtimes: str = ""
    first_row: int | None = None
    rows: int | None = None
    spooled: bool = False
    origins: tuple[tuple[str, int], ...] = ()


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
