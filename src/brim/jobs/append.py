"""Append new rows to an existing dataset: they become new shards of its splits, and existing shards are kept.

The existing dataset is known from its manifest, or for a foreign dataset from its listing and its footers; its source
is not needed. Rows that it has already are removed from the plan (known_rows.py). Each append is recorded as a part of
the dataset, so that every source can be compared with its own rows, and so that the same command again appends nothing.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DestinationError, InputError, VerificationError
from brim.formats.card import CardFacts, SplitFacts
from brim.formats.parquet_reader import ParquetColumns
from brim.jobs.destination import Destination, DestinationChanged, Run
from brim.jobs.destination_paths import DestinationPaths
from brim.jobs.shard_set import PlannedShards, ShardSet
from brim.plans.cut_shards import Shard, shard_name
from brim.plans.fingerprint import digest_items, digest_json
from brim.plans.known_rows import is_class_label, plan_for_rows, with_known_classes, without_known_rows
from brim.plans.plan import EXTENSIONS, Plan
from brim.plans.shard_bytes import PlanSlice, Slice
from brim.records import dataclass
from brim.sizes import plural
from brim.sources.dataset_files import named_files
from brim.state.ledger import Ledger, Receipt, SplitTotal, split_totals
from brim.storage.hub_client import HubClient
from brim.storage.hub_session import explain_hub_errors, hub_session
from brim.verification.published import (
    SHARD_NAME,
    Published,
    PublishedPart,
    Subset,
    narrow_record,
    open_published,
    parts_of,
    record_of,
)

if TYPE_CHECKING:
    from brim.jobs.preflight import JobSettings

_SELECT_HINT = "Write the same rows as shards of brim with `brim select`, then append to those."


@dataclass(frozen=True, slots=True)
class AppendBase:
    """The existing dataset. `receipts` are those of the shards of each split, in order, under their present names."""

    parts: Sequence[Mapping[str, Any]]
    receipts: Mapping[str, Sequence[Receipt]]
    columns: Mapping[str, str]
    features: Mapping[str, Any]
    jobs: frozenset[str]  # fingerprints in the existing manifests
    types: Mapping[str, str]  # of the columns, as Parquet stores them; of tars, as they were planned
    features_digest: str = ""  # of tars, which do not contain their features

    @property
    def names(self) -> list[str]:
        return [receipt.name for receipts in self.receipts.values() for receipt in receipts]

    @property
    def fingerprints(self) -> list[str]:
        return [str(part["fingerprint"]) for part in self.parts]


def find_base(
    published: Published, config: str, ledger: Ledger | None, splits: Sequence[str] | None
) -> AppendBase | None:
    """Return the existing dataset of a config (of these splits, or all), or None. `ledger` is that of a folder.

    Raises DestinationError if it is incomplete, because it must be finished first.
    """
    record = published.record if ledger is None else record_of(ledger)
    record = narrow_record(record, {key for key in record.listed if key[0] == config})
    interrupted = _interrupted_append(ledger)
    subsets = [subset for subset in published.subsets if subset.config == config]
    subsets = [subset for subset in subsets if splits is None or subset.split in splits]
    if interrupted is None:
        for subset in subsets:
            if subset.state in ("unfinished", "incomplete"):
                raise DestinationError(
                    f"{subset.name} is {subset.state_text.rstrip('.')}.", hint="Finish or repair it, then append to it."
                )
    receipts: dict[str, list[Receipt]] = {}
    foreign: list[Subset] = []
    for subset in subsets:
        if subset.state == "not brim's":
            foreign.append(subset)
            receipts[subset.split] = _foreign_receipts(published, subset)
        else:
            names = record.listed.get((config, subset.split), ())
            receipts[subset.split] = sorted((record.receipts[name] for name in names), key=lambda r: _number(r.name))
    if interrupted is not None:
        receipts = {split: items[: interrupted[1].get(split, 0)] for split, items in receipts.items()}
        receipts = {split: items for split, items in receipts.items() if items}
        parts: list[Mapping[str, Any]] = list(interrupted[0])
    else:
        has_split = [part for part in parts_of(record) if any(split in receipts for split in part.names)]
        parts = [_part_record(part, receipts) for part in has_split]
        if foreign:
            parts.append(_foreign_part({subset.split: receipts[subset.split] for subset in foreign}))
    first = next((items[0] for items in receipts.values() if items), None)
    if first is None:
        return None
    jobs = frozenset(job.fingerprint for job in record.jobs)
    if first.name.endswith(".tar"):
        facts = parts[0]["facts"]
        types = dict(facts["columns"])
        return AppendBase(parts, receipts, types, {}, jobs, types, str(facts["features"]))
    with closing(published.open(first.name)) as shard, ParquetColumns(shard) as columns:
        types = {name: str(columns.schema.field(name).type) for name in columns.schema.names}
        return AppendBase(parts, receipts, types, columns.features(), jobs, _stored_types(columns.schema))


def _interrupted_append(ledger: Ledger | None) -> tuple[Sequence[Mapping[str, Any]], dict[str, int]] | None:
    """Return the parts that existed before an unfinished append of this ledger, and their shards per split."""
    if ledger is None or ledger.job is None or ledger.is_finished or "parts" not in ledger.job.facts:
        return None
    parts = ledger.job.facts["parts"][:-1]
    counts: dict[str, int] = {}
    for part in parts:
        for split, count in part["shards"].items():
            counts[split] = counts.get(split, 0) + count
    return parts, counts


def _number(name: str) -> int:
    match = SHARD_NAME.fullmatch(name)
    return int(match["number"]) if match else 0


def _part_record(part: PublishedPart, receipts: Mapping[str, Sequence[Receipt]]) -> dict[str, Any]:
    shards = {split: len(names) for split, names in part.names.items() if split in receipts}
    job = part.job
    facts = {name: value for name, value in job.facts.items() if name != "parts"}
    return {"fingerprint": job.fingerprint, "facts": facts, "versions": dict(job.versions),
            "left_out": list(job.left_out), "shards": shards}  # fmt: skip


def _foreign_part(receipts: Mapping[str, Sequence[Receipt]]) -> dict[str, Any]:
    all_receipts = [receipt for items in receipts.values() for receipt in items]
    facts = {"foreign": True, "rows": sum(receipt.rows for receipt in all_receipts), "recipe": {}}
    content = [[receipt.name, receipt.size, receipt.sha256, receipt.etag] for receipt in all_receipts]
    return {"fingerprint": digest_json(content), "facts": facts, "versions": {}, "left_out": [],
            "shards": {split: len(items) for split, items in receipts.items()}}  # fmt: skip


def _foreign_receipts(published: Published, subset: Subset) -> list[Receipt]:
    """Make receipts of foreign shards from the listing and the footers."""
    receipts = []
    for name in sorted(subset.names, key=_number):
        if name.endswith(".tar"):
            raise DestinationError(
                f"{name} was not written by brim, and a tar does not store the types of its columns.",
                hint=_SELECT_HINT,
            )
        if SHARD_NAME.fullmatch(name) is None:
            raise DestinationError(
                f"{name} is not named like a shard (SPLIT-00000-of-00001.parquet), so brim cannot append to it.",
                hint=_SELECT_HINT,
            )
        with closing(published.open(name)) as shard, ParquetColumns(shard) as columns:
            rows = columns.rows
        sha256, etag = published.listed(name)
        key = digest_json([name, published.sizes[name], sha256, etag])
        receipts.append(Receipt(name, subset.split, rows, published.sizes[name], sha256, key, "", "", 0, etag))
    return receipts


class AppendedShards(ShardSet):
    """The existing shards, and those of a plan after them (None: all of its rows exist already).

    `renames`: all shards get names with the new total (on the Hub, where a name is a pointer). Otherwise existing
    shards keep their names, and the numbers continue.
    """

    def __init__(
        self, base: AppendBase, like: Plan, is_complete: bool, renames: bool, folder: str, extension: str
    ) -> None:
        self.base, self.plan, self._like = base, None if is_complete else like, PlannedShards(like)
        self._renames, self._folder, self._extension = renames, folder, extension
        self._shards: list[Shard] = []
        self._existing: dict[str, Receipt] = {}  # by the name that the shard shall have
        self._new: dict[str, Shard] = {}  # the shards of the plan, likewise
        self._name_shards()

    @property
    def is_complete(self) -> bool:
        """Whether the dataset has all rows of the plan already."""
        return self.plan is None

    def _name_shards(self) -> None:
        new: dict[str, list[Shard]] = {}
        for shard in self.plan.shards if self.plan is not None else ():
            new.setdefault(shard.split, []).append(shard)
        start = 0
        for split in dict.fromkeys([*self.base.receipts, *new]):
            old, added = self.base.receipts.get(split, ()), new.get(split, [])
            total = len(old) + len(added)
            for number, receipt in enumerate(old):
                name = receipt.name
                if self._renames and added:
                    name = shard_name(self._folder, split, number, total, self._extension)
                self._shards.append(Shard(name, split, start, start + receipt.rows, receipt.size))
                self._existing[name] = receipt
                start += receipt.rows
            for number, shard in enumerate(added, len(old)):
                name = shard_name(self._folder, split, number, total, self._extension)
                if old and not self._renames and len(name) != len(old[0].name):
                    raise InputError(
                        f"{total:,} shards need more digits than the names of the existing shards have.",
                        hint="Append larger shards: raise --shard-size.",
                    )
                self._shards.append(replace(shard, name=name, start=start, stop=start + shard.rows))
                self._new[name] = shard
                start += shard.rows

    @property
    def existing_receipts(self) -> Sequence[Receipt]:
        """The receipts of the existing shards as those of this job, under their new names."""
        job = self.fingerprint[:16]
        return [replace(receipt, name=name, job=job) for name, receipt in self._existing.items()]

    @property
    def fingerprint(self) -> str:
        return digest_json({name: value for name, value in self.facts.items() if name not in ("cut", "recipe")})

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    @cached_property
    def _facts(self) -> dict[str, Any]:
        parts = list(self.base.parts)
        if self.plan is not None:
            counts: dict[str, int] = {}
            for shard in self.plan.shards:
                counts[shard.split] = counts.get(shard.split, 0) + 1
            parts.append({"fingerprint": self.plan.fingerprint, "facts": self.plan.facts, "versions": {},
                          "left_out": list(self.plan.table.left_out), "shards": counts})  # fmt: skip
        part_facts = [part["facts"] for part in parts]
        last = self.plan.facts if self.plan is not None else part_facts[-1]
        return {
            "format": last.get("format", ""),
            "rows": self.rows,
            "files": sum(int(facts.get("files", 0)) for facts in part_facts),
            "bytes": sum(int(facts.get("bytes", 0)) for facts in part_facts),
            "columns": dict(self.base.columns),
            "features": self.base.features_digest or digest_json(dict(self.base.features)),
            "cut": dict(last.get("cut", {})),
            "shards": digest_items([shard.name, shard.rows] for shard in self._shards),
            "content": digest_json([part["fingerprint"] for part in parts]),
            "recipe": dict(last.get("recipe", {})),
            "parts": parts,
        }

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self._shards)

    @property
    def source_files(self) -> int:
        return int(self.facts["files"])

    @property
    def skipped_files(self) -> tuple[str, ...]:
        return tuple(path for part in self.facts["parts"] for path in part["left_out"])

    def key(self, shard: Shard) -> str:
        receipt = self._existing.get(shard.name)
        return self._like.key(self._new[shard.name]) if receipt is None else receipt.key

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        for shard in shards:
            receipt = self._existing.get(shard.name)
            yield shard, self._like.mtimes(self._new[shard.name]) if receipt is None else receipt.mtimes

    def size(self, shards: Sequence[Shard]) -> int:
        existing = sum(self._existing[shard.name].size for shard in shards if shard.name in self._existing)
        return existing + self._like.size([self._new[shard.name] for shard in shards if shard.name in self._new])

    def content(self, shard: Shard) -> Slice:
        new = self._new.get(shard.name)
        if new is None:
            raise VerificationError(
                f"{shard.name} is missing or changed, and its source is unknown.",
                hint="Run brim verify for a list of all problems.",
            )
        recipe = self._like.content(new)
        assert isinstance(recipe, PlanSlice)
        earlier_rows = sum(receipt.rows for receipt in self.base.receipts.get(shard.split, ()))
        return replace(recipe, first_row=recipe.first_row + earlier_rows)

    def known_sha256(self, shard: Shard) -> str | None:
        receipt = self._existing.get(shard.name)
        return None if receipt is None else receipt.sha256

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        new = self._new.get(shard.name)
        record = None if new is None else self._like.listing(new)
        return None if record is None else {**record, "name": shard.name}

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        totals, rows = split_totals(receipts), dict[str, int]()
        for shard in self._shards:
            rows[shard.split] = rows.get(shard.split, 0) + shard.rows
        splits = []
        for split, count in rows.items():
            total = totals.get(split, SplitTotal())
            splits.append(SplitFacts(split, count, total.bytes, total.shards))
        return replace(self._like.card(()), splits=splits, left_out=self.skipped_files, appended=True)


def _stored_types(schema: pa.Schema) -> dict[str, str]:
    """Return the types of columns as a Parquet file stores them, with other names in lists and without large types."""
    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file, store_schema=False)
    return {column.name: str(column.type) for column in pq.read_schema(file)}


def check_columns(base: AppendBase, plan: Plan) -> None:
    """Raise InputError with the differences if new rows have other columns or types than the existing ones."""
    expected = dict(base.types)
    types = dict(plan.facts["columns"]) if base.features_digest else _stored_types(plan.schema)
    problems = [f"{name!r} is missing" for name in expected if name not in types]
    problems += [f"{name!r} is new" for name in types if name not in expected]
    problems += [
        f"{name!r} is {types[name]} instead of {expected[name]}"
        for name in expected
        if name in types and types[name] != expected[name]
    ]
    features = dict(plan.table.features or {})
    if not problems and base.features_digest not in ("", plan.facts["features"]):
        problems.append("the features of the columns, such as the names of classes, differ")
    if not problems and base.features:
        for name, feature in base.features.items():
            if digest_json(features.get(name)) != digest_json(feature):
                problems.append(f"{name!r} is {features.get(name)} instead of {feature}")
    if not problems and list(expected) != list(types):
        problems.append(f"the columns are in another order: {', '.join(types)} instead of {', '.join(expected)}")
    if problems:
        hint = "Use a source with the same columns and types."
        added = [name for name in types if name not in expected]
        if plan.table.can_drop or plan.table.verbatim:
            hint += f" --drop={added[0]} leaves a column out." if added else ""
        elif "label" in added and plan.table.recipe.get("label_from"):
            hint = "Leave out --label-from: the dataset has no class labels."
        elif is_class_label(base.features.get("label")) and "label" not in types:
            hint = "Add --label-from=parent to store the folder names as class labels, as the dataset does."
        raise InputError(f"The new rows do not match the existing dataset: {'; '.join(problems)}.", hint=hint)


def appended_shards(
    published: Published | None,
    plan: Plan,
    config: str,
    folder: str,
    ledger: Ledger | None,
    splits: Sequence[str] | None,
    remove_known: Callable[[Plan, AppendBase], Plan | None],
) -> ShardSet:
    """Return the shards that the destination shall have: the existing ones, and the new rows of a plan.

    `remove_known` removes the rows that the dataset has from a plan, and returns None if none are left.
    """
    base = None if published is None else find_base(published, config, ledger, splits)
    if base is None:
        return PlannedShards(plan)
    extension = os.path.splitext(base.names[0])[1]
    if extension != EXTENSIONS[plan.format]:
        raise InputError(
            f"The existing shards are {extension} files, and the new shards would be {EXTENSIONS[plan.format]} files.",
            hint="Use the same --format as the existing dataset.",
        )
    plan = plan_for_rows(plan, with_known_classes(plan.table, base.features))
    check_columns(base, plan)
    renames = ledger is None and published is not None and published.renames
    if base.jobs == {plan.fingerprint}:
        return PlannedShards(plan)  # the dataset has exactly these rows
    is_complete = plan.fingerprint in base.fingerprints or not any(shard.rows for shard in plan.shards)
    if not is_complete:
        new = remove_known(plan, base)
        plan, is_complete = new or plan, new is None or new.fingerprint in base.fingerprints
    return AppendedShards(base, plan, is_complete, renames, folder, extension)


def plan_append(
    plan: Plan, paths: DestinationPaths, settings: JobSettings, run: Run, destination: Destination
) -> ShardSet:
    """Read the existing dataset, and return the shards that it shall have with the new rows of a plan."""
    location, hub, note = paths.location, settings.hub, run.progress.note
    existing = destination.read_existing()
    with ExitStack() as stack:
        published: Published | None = None
        address = ""
        # The card of a folder does not show a dataset: without shards there is nothing to append to.
        if existing.names or (existing.manifests is not None and (existing.manifests or existing.is_unfinished)):
            if location.is_repository:
                with hub_session(note, run.stop.check), explain_hub_errors(location.repo, started=False):
                    location = HubClient(location, hub.token).beginning()
            published = stack.enter_context(
                open_published(str(location), settings.state_dir, note, settings.access, token=hub.token)
            )
            address = published.address

        def remove_known(plan: Plan, base: AppendBase) -> Plan | None:
            if plan.table.files.ranges is not None:
                return plan  # values of another dataset, whose names may be the same for all
            names = {split: [receipt.name for receipt in receipts] for split, receipts in base.receipts.items()}
            try:
                shards = named_files(address, names, hub.config, settings.access)
            except KeyError as error:  # a shard has got another name
                raise DestinationChanged from error
            duplicates = settings.allow_duplicate_paths
            table, known_count = without_known_rows(plan, shards, duplicates, note, run.stop.check)
            if not known_count:
                return plan
            note(f"{plural(known_count, 'row')} of {len(plan.table):,} already in the dataset: skipped")
            return plan_for_rows(plan, table) if len(table) else None

        ledger = run.ledger if location.is_local and run.ledger.job is not None else None
        splits = [hub.split] if hub.split is not None and location.is_repository else None
        shards = appended_shards(published, plan, hub.config, hub.folder, ledger, splits, remove_known)
    if isinstance(shards, AppendedShards) and shards.is_complete:
        note("these rows exist already: nothing is appended")
    return shards
