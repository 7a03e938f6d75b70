"""Whether the source of a computed job still has the content that its units were made of.

Dates (or ETags) are compared first: a digest of all of them, then those of each unit. Only units whose dates differ are
read again and hashed. Nothing is decided here about what happens to units that changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from pathlib import Path

from brim.compute.rows.read_unit import name_of_span
from brim.compute.rows.source_hash import hash_unit
from brim.compute.rows.unit import RowSource, Unit
from brim.compute.steps.step import Step
from brim.progress import Progress
from brim.records import dataclass
from brim.state.ledger import Receipt, SourceRecord
from brim.state.stop import Stop

_DATES_LENGTH = 64
UnitRecord = tuple[str, str, str]  # key, dates, SHA-256 of the source bytes


@dataclass(slots=True)
class Comparison:
    """The units of a source as they are cut now: how many, the dates of each, and which have changed."""

    units: int = 0
    dates: dict[int, str] = field(default_factory=dict)
    changed: set[int] = field(default_factory=set)


def unit_number(name: str) -> int:
    return int(Path(name).stem)


def unit_record(receipt: Receipt) -> UnitRecord:
    return receipt.key, short_dates(receipt.mtimes), receipt.source


def source_record(source: RowSource, receipts: Iterable[Receipt]) -> SourceRecord | None:
    """Return the record of a source for a finished job; None if the source cannot be compared."""
    return SourceRecord(source.stamp, tuple(map(unit_record, receipts))) if source.stamp else None


def published_record(source: RowSource, record: SourceRecord | None) -> SourceRecord | None:
    """Return a record without the dates of local files. The ETags of objects are the same on every machine."""
    if record is None or (source.files is not None and source.files.bucket is not None):
        return record
    return SourceRecord("", tuple((key, "", content) for key, _, content in record.units))


def compare_units(
    source: RowSource, step: Step, records: Mapping[int, UnitRecord], spool: Path, progress: Progress, stop: Stop
) -> Comparison:
    """Compare the units of a source with their records. Units without a record are only counted."""
    reading = source.reading if step.columns is None else replace(source.reading, columns=step.columns)
    comparison = Comparison()

    def read(size: int) -> None:
        stop.check()
        progress.advance(size)

    def is_same(unit: Unit, record: UnitRecord) -> bool:
        key, dates, content = record
        if unit.key != key or unit.spooled:
            return unit.key == key
        if dates == short_dates(unit.mtimes):
            return True
        return bool(content) and content == hash_unit(reading, unit, lambda n: name_of_span(unit, reading, n), read)

    progress.note("dates of source files have changed: comparing their content")
    progress.start("compare", source.total_bytes or 0, 0, 0)
    for unit in source.units(step.batch_rows or 1, indices=step.indices, spool=spool, skip=lambda number: True):
        stop.check()
        comparison.units += 1
        comparison.dates[unit.number] = unit.mtimes
        record = records.get(unit.number)
        if record is not None and not is_same(unit, record):
            comparison.changed.add(unit.number)
    comparison.changed |= records.keys() - comparison.dates.keys()
    return comparison


def short_dates(dates: str) -> str:
    return dates if len(dates) <= _DATES_LENGTH else hashlib.sha256(dates.encode()).hexdigest()[:32]
