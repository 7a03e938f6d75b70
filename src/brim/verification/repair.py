"""Record damaged shards, so that the next build writes them again, or write them again from their source.

`verify` finds damage. A shard that has a receipt is recorded in the ledger (of a remote destination, in the user's
state folder), and the same build command writes exactly the recorded shards. `verify DEST SOURCE --repair` writes them
at once. It also works without a ledger: the source must then give every intact shard byte for byte.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from brim.errors import BrimError, DestinationError, InputError, VerificationError
from brim.formats.card import CARD
from brim.options.groups import ShardOptions
from brim.plans.cut_shards import Shard
from brim.plans.plan import EXTENSIONS, Plan, make_plan
from brim.plans.shard_bytes import PlanSlice, slice_of
from brim.progress import Progress
from brim.sources.file_table import FileTable
from brim.state.atomic_files import sha256_of
from brim.state.ledger import JobRecord, Ledger, Receipt
from brim.state.lock import locked
from brim.storage.destination_address import make_state_folder, state_folder
from brim.storage.local import LocalStorage
from brim.storage.location import Location, folder_location
from brim.verification.published import (
    SHARD_NAME,
    DatasetRecord,
    PublishedPart,
    is_computed,
    is_foreign,
    ledger_fault,
    parts_of,
)


def record_damage(
    location: Location, state: str | os.PathLike[str] | None, record: DatasetRecord, damaged: Collection[str]
) -> bool:
    """Record damaged files in the ledger that the next build reads; False if it is not writable, or a build runs.

    For a remote destination, a build of all splits of a config and one of a single split have separate ledgers.
    """
    folders: dict[Path, dict[str, str]] = {}
    for (config, split), names in record.listed.items():
        hashes = {name: record.receipts[name].sha256 for name in names if name in damaged}
        if not location.is_local:
            for scope in (f"{config}/*", f"{config}/{split}") if hashes else ():
                folders.setdefault(state_folder(location, state, scope), {}).update(hashes)
        else:
            card_hashes = {name: "" for name in damaged if name not in record.receipts}  # the card
            folders.setdefault(state_folder(location, state), {}).update(hashes | card_hashes)
    try:
        for folder, hashes in folders.items():
            make_state_folder(location, folder)
            with locked(folder):
                ledger = Ledger(folder)
                ledger.record_damage(hashes)
                ledger.close()
    except (BrimError, OSError):
        return False
    return bool(folders)


class _Watcher:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def hashed(self, size: int) -> None:
        self._progress.advance(size)

    def sent(self, size: int) -> None:
        self._progress.advance(size)


def repair_shards(
    folder: Path,
    state: str | os.PathLike[str] | None,
    record: DatasetRecord,
    tables: Mapping[str, FileTable],
    damaged: Collection[str],
    rows: Mapping[str, int],
    progress: Progress,
) -> list[str]:
    """Write damaged or missing shards of a folder again; return the names of the written ones.

    `tables` has the source of each part by the fingerprint of its job; without a ledger, by "". `rows` are those of
    shards whose footers can be read.
    """
    watcher, storage, written = _Watcher(progress), LocalStorage(folder_location(folder)), []
    damaged = {name for name in damaged if name != CARD}
    with ExitStack() as stack:
        ledger = None
        if record.jobs:
            stack.enter_context(locked(state_folder(folder_location(folder), state)))
            ledger = Ledger(state_folder(folder_location(folder), state))
            stack.callback(ledger.close)
        slices = _from_ledger(record, tables) if record.jobs else _from_names(folder, tables[""], damaged, rows)
        for name, plan_slice, receipt in slices:
            if name not in damaged:
                continue
            with plan_slice.splice() as splice:
                if receipt is not None and splice.sha256(watcher.hashed) != receipt.sha256:
                    continue  # the source changed: the next verification reports it
                storage.put(name, splice, None, watcher)
            if ledger is not None and receipt is not None:
                ledger.add(receipt)
            progress.shard(name, 0, "", "repaired")
            written.append(name)
    return written


def _from_ledger(
    record: DatasetRecord, tables: Mapping[str, FileTable]
) -> Iterator[tuple[str, PlanSlice, Receipt | None]]:
    """Yield (name, slice, receipt) of every shard of the source, part by part."""
    before: dict[str, int] = {}  # rows of each split before the current part
    for part in parts_of(record):
        table = tables.get(part.job.fingerprint)
        plan = None if table is None else plan_of_part(table, part)
        names = {split: iter(shard_names) for split, shard_names in part.names.items()}
        for shard in () if plan is None else plan.shards:
            name = next(names.get(shard.split, iter(())), None)
            if plan is not None and name is not None:
                part_slice = slice_of(plan, shard)
                first_row = part_slice.first_row + before.get(shard.split, 0)
                yield name, replace(part_slice, first_row=first_row), record.receipts[name]
        for split, shard_names in part.names.items():
            before[split] = before.get(split, 0) + sum(record.receipts[name].rows for name in shard_names)


def plan_of_part(table: FileTable, part: PublishedPart) -> Plan | None:
    """Plan this source like a part of the dataset; None if the part has another source."""
    job = part.job
    if is_computed(job) or is_foreign(job) or table.refused:
        return None
    plan = plan_like(table, job)
    return plan if plan.facts["content"] == job.facts["content"] else None


def plan_like(table: FileTable, job: JobRecord, folder: str = "data") -> Plan:
    """Plan a source with the format and the shard options of a job."""
    try:
        format, cut = job.facts["format"].split()[0], ShardOptions.from_record(job.facts["cut"])
        if format not in EXTENSIONS:
            raise ValueError(format)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise VerificationError("The ledger has no valid shard options.") from error
    return make_plan(table, format, cut, folder)


def _from_names(
    folder: Path, table: FileTable, damaged: Collection[str], rows: Mapping[str, int]
) -> Iterator[tuple[str, PlanSlice, Receipt | None]]:
    """Yield slices of a folder without a ledger, by guessing how rows were cut into shards.

    A guess is right if it gives the same names, and every intact shard byte for byte. A single shard must have the size
    that the source gives.
    """
    paths = {f"data/{name}": folder / "data" / name for name in os.listdir(folder / "data") if name[0] != "."}
    expected = {*paths, *damaged}
    counts = {match["split"]: int(match["count"]) for name in expected if (match := SHARD_NAME.fullmatch(name))}
    formats = {suffix: format for format, suffix in EXTENSIONS.items()}
    format = formats.get(Path(min(expected)).suffix)
    if counts and format is not None:
        plan = make_plan(table, format, ShardOptions())
        cuts = [
            _cut_by_rows(plan, expected, rows),
            plan.shards,
            make_plan(table, format, ShardOptions(num_shards=counts)).shards,
        ]
        for shards in cuts:
            intact = [shard for shard in shards if shard.name not in damaged]
            if (
                {shard.name for shard in shards} == expected
                and all(_is_equal(plan, shard, paths[shard.name]) for shard in intact)
                and (intact or (len(shards) == 1 and _is_equal(plan, shards[0], paths.get(shards[0].name), deep=False)))
            ):
                yield from ((shard.name, slice_of(plan, shard), None) for shard in shards)
                return
    raise InputError(
        "The damaged shards cannot be written again: without a ledger, the source must also give the other "
        "shards, and it does not.",
        hint=f"Build it at another destination: brim build SOURCE {folder}-new",
    )


def _cut_by_rows(plan: Plan, names: Collection[str], rows: Mapping[str, int]) -> list[Shard]:
    """Return shards with the rows of their footers; one shard per split may be unreadable, and gets the rest."""
    shards = []
    for split in plan.table.splits:
        own = sorted(name for name in names if (match := SHARD_NAME.fullmatch(name)) and match["split"] == split.name)
        remaining = split.stop - split.start - sum(rows.get(name, 0) for name in own)
        if sum(name not in rows for name in own) > 1 or remaining < 0:
            return []
        start = split.start
        for name in own:
            shards.append(Shard(name, split.name, start, start + rows.get(name, remaining), 0))
            start += rows.get(name, remaining)
    return shards


def _is_equal(plan: Plan, shard: Shard, path: Path | None, deep: bool = True) -> bool:
    """Return whether a file has the size, and with `deep` the bytes, that a plan gives."""
    with slice_of(plan, shard).splice() as splice:
        if path is None or not path.exists() or splice.size != path.stat().st_size:
            return False
        return not deep or splice.sha256(lambda _: None) == sha256_of(path, lambda _: None)


def refuse_append_to_damaged(ledger: Ledger, destination: str) -> None:
    """Refuse to append to a damaged dataset: to repair it, brim needs the source of its shards, not the new rows."""
    fault = ledger_fault(ledger)
    if fault is not None:
        raise DestinationError(
            f"The ledger of {destination} is damaged: {fault}. Nothing is appended.",
            hint=f"Run brim verify {destination} for a list of all problems.",
        )
    if ledger.damaged:
        raise DestinationError(
            f"{destination} has {len(ledger.damaged)} damaged file(s), such as {min(ledger.damaged)}: nothing is "
            "appended.",
            hint=f"Repair it first: brim verify {destination} SOURCE --repair",
        )
