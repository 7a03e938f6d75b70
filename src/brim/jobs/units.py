"""Which job the units of a destination belong to: continue it, adopt it, or refuse to mix it with another."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.errors import PlanChanged
from brim.jobs.bring import refuse_strangers, versions
from brim.jobs.content import computed_changes
from brim.plans.fingerprint import digest_json
from brim.records import dataclass
from brim.state.ledger import JobRecord, Ledger
from brim.stores.store import PublishedThere

_FUNCTION = ("function", "fn_kwargs")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The job that shall be done. `fresh`: what was there goes; `keep_done`: units stay though the function changed."""

    fingerprint: str
    facts: dict[str, Any]
    fresh: bool = False
    keep_done: bool = False


def agree_with_published(there: PublishedThere, wanted: Wanted, finished: Ledger, *, staged: bool) -> None:
    """What is published counts, and not what this machine remembers. Refused before hours of work.

    `staged`: readers keep what they have, so that --fresh may replace what brim did not write.
    """
    published = b"".join(there.manifests)
    theirs, ours = Ledger.of(published).job, finished.job
    under_way = ours is not None and not finished.done
    if theirs is not None and not wanted.fresh and not under_way:
        known = {wanted.fingerprint, *([] if ours is None else [ours.fingerprint])}
        if theirs.fingerprint not in known:  # somebody else's, since
            raise _another(theirs, wanted)
    finished.agree_with(published)
    if finished.job is None and not there.unfinished and not (staged and wanted.fresh):
        refuse_strangers(there.shards, staged)


def open_units(folder: Path, wanted: Wanted, finished: Ledger) -> Ledger:
    """The receipts of the units that are done. `finished` is the ledger of what the destination holds."""
    if wanted.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    units = Ledger(folder)
    if units.job is None:
        if finished.job is not None and finished.job.fingerprint != wanted.fingerprint and not wanted.fresh:
            raise _another(finished.job, wanted)
        folder.mkdir(exist_ok=True)
        units.begin(JobRecord(wanted.fingerprint, wanted.facts, versions()))
    elif units.job.fingerprint != wanted.fingerprint:
        _adopt(units, units.job, wanted)
    return units


def _adopt(units: Ledger, before: JobRecord, wanted: Wanted) -> None:
    """Take over the units of a job that differs in its function alone, if that was asked for."""
    if not wanted.keep_done or not _same_units(before.facts, wanted.facts):
        hint = "--fresh starts over"
        if _same_units(before.facts, wanted.facts):
            hint += "; --keep-done keeps the units that are done and does the others with the function as it is now"
        raise _changed("an unfinished job", before, wanted, f"{hint}.")
    receipts = [replace(receipt, job=wanted.fingerprint[:16]) for receipt in units.receipts.values()]
    names = ["types", *(f"bad rows {receipt.name}" for receipt in receipts)]
    notes = {name: units.recall(name) for name in names}
    units.begin(JobRecord(wanted.fingerprint, wanted.facts, versions()))
    for name, note in notes.items():
        if note is not None:
            units.remember(name, note)
    for receipt in receipts:
        units.add(receipt)


def _same_units(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether two jobs differ in nothing but the function."""
    return digest_json(without_function(before)) == digest_json(without_function(now))


def without_function(facts: dict[str, Any]) -> dict[str, Any]:
    """What decides the units of a job, whichever the function."""
    step = {name: value for name, value in facts.get("step", {}).items() if name not in _FUNCTION}
    return facts | {"step": step}


def _another(before: JobRecord, wanted: Wanted) -> PlanChanged:
    return _changed("another dataset", before, wanted, "--fresh starts over; or choose another destination.")


def _changed(what: str, before: JobRecord, wanted: Wanted, hint: str) -> PlanChanged:
    changes = computed_changes(before.facts, wanted.facts)
    return PlanChanged(f"The destination holds {what}: {'; '.join(changes)}.", hint=hint, changes=changes)
