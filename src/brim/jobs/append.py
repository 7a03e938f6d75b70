"""New rows for a dataset that is there: they become new shards of its splits, and what is there is kept as it is.

What is there is known from its manifest, or for a dataset of others from its listing and the footers, and never from
the source that it was made of. Rows that it holds already are taken out of the plan (known_rows.py). What was appended
is written down part by part, so that each source proves its own rows and the same command again appends nothing twice.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import DestinationError, InputError, VerificationError
from brim.formats.card import CardFacts, SplitFacts
from brim.formats.parquet_columns import ParquetColumns
from brim.jobs.content import PlanContent
from brim.plans.cut_shards import Shard, shard_name
from brim.plans.fingerprint import changes_between, digest_items, digest_json
from brim.plans.known_rows import is_class_label, planned_again, with_known_classes
from brim.plans.plan import EXTENSIONS, Plan
from brim.plans.shard_bytes import PlanSlice, Slice
from brim.records import dataclass
from brim.state.ledger import Ledger, Receipt, Total, totals
from brim.verification.published import SHARD_NAME, Published, PublishedPart, Subset, narrow_record, parts_of, record_of


@dataclass(frozen=True, slots=True)
class AppendBase:
    """What new rows come behind. `receipts` are those of the shards of each split, in order, under their names now."""

    parts: Sequence[Mapping[str, Any]]
    receipts: Mapping[str, Sequence[Receipt]]
    columns: Mapping[str, str]
    features: Mapping[str, Any]
    jobs: frozenset[str]  # what the manifests there are of
    types: Mapping[str, str]  # of the columns, as Parquet keeps them; of tars, as they were planned
    features_digest: str = ""  # of tars, which do not say their features themselves

    @property
    def names(self) -> list[str]:
        return [receipt.name for of in self.receipts.values() for receipt in of]

    @property
    def fingerprints(self) -> list[str]:
        return [str(part["fingerprint"]) for part in self.parts]


def base_of(
    published: Published, config: str, ledger: Ledger | None, splits: Sequence[str] | None
) -> AppendBase | None:
    """What is there of a config (of these splits, or all); None if there is nothing. `ledger` is that of a folder.

    DestinationError if it is not whole: then it is to be finished first.
    """
    told = published.record if ledger is None else record_of(ledger)
    told = narrow_record(told, {key for key in told.listed if key[0] == config})
    before = _before_append(ledger)
    subsets = [subset for subset in published.subsets if subset.config == config]
    subsets = [subset for subset in subsets if splits is None or subset.split in splits]
    if before is None:
        for subset in subsets:
            if subset.state in ("unfinished", "incomplete"):
                raise DestinationError(
                    f"{subset.name} is {subset.words.rstrip('.')}.", hint="Finish or repair it, then append to it."
                )
    receipts: dict[str, list[Receipt]] = {}
    foreign: list[Subset] = []
    for subset in subsets:
        if subset.state == "not brim's":
            foreign.append(subset)
            receipts[subset.split] = _found(published, subset)
        else:
            names = told.listed.get((config, subset.split), ())
            receipts[subset.split] = sorted((told.receipts[name] for name in names), key=lambda one: _number(one.name))
    if before is not None:
        receipts = {split: of[: before[1].get(split, 0)] for split, of in receipts.items()}
        receipts = {split: of for split, of in receipts.items() if of}
        parts: list[Mapping[str, Any]] = list(before[0])
    else:
        parts = [_part(build, receipts) for build in parts_of(told) if _touches(build, receipts)]
        if foreign:
            parts.append(_foreign_part({subset.split: receipts[subset.split] for subset in foreign}))
    first = next((of[0] for of in receipts.values() if of), None)
    if first is None:
        return None
    jobs = frozenset(job.fingerprint for job in told.jobs)
    if first.name.endswith(".tar"):
        facts = parts[0]["facts"]
        columns_of = dict(facts["columns"])
        return AppendBase(parts, receipts, columns_of, {}, jobs, columns_of, str(facts["features"]))
    with closing(published.open(first.name)) as shard, ParquetColumns(shard) as columns:
        types = {name: str(columns.schema.field(name).type) for name in columns.schema.names}
        return AppendBase(parts, receipts, types, columns.features(), jobs, _stored(columns.schema))


def _before_append(ledger: Ledger | None) -> tuple[Sequence[Mapping[str, Any]], dict[str, int]] | None:
    """The parts that an append which was begun here, and not ended, came behind; and their shards by split."""
    if ledger is None or ledger.job is None or ledger.done or "parts" not in ledger.job.facts:
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


def _touches(build: PublishedPart, receipts: Mapping[str, Sequence[Receipt]]) -> bool:
    return any(split in receipts for split in build.names)


def _part(build: PublishedPart, receipts: Mapping[str, Sequence[Receipt]]) -> dict[str, Any]:
    shards = {split: len(names) for split, names in build.names.items() if split in receipts}
    job = build.job
    facts = {name: fact for name, fact in job.facts.items() if name != "parts"}
    return {"fingerprint": job.fingerprint, "facts": facts, "versions": dict(job.versions),
            "left_out": list(job.left_out), "shards": shards}  # fmt: skip


def _foreign_part(receipts: Mapping[str, Sequence[Receipt]]) -> dict[str, Any]:
    every = [receipt for of in receipts.values() for receipt in of]
    facts = {"foreign": True, "rows": sum(receipt.rows for receipt in every), "recipe": {}}
    content = [[receipt.name, receipt.size, receipt.sha256, receipt.etag] for receipt in every]
    return {"fingerprint": digest_json(content), "facts": facts, "versions": {}, "left_out": [],
            "shards": {split: len(of) for split, of in receipts.items()}}  # fmt: skip


def _found(published: Published, subset: Subset) -> list[Receipt]:
    """Receipts of shards that others wrote: what the listing and the footers tell."""
    found = []
    for name in sorted(subset.names, key=_number):
        if name.endswith(".tar"):
            raise DestinationError(
                f"{name} was not written by brim, and a tar does not store the types of its columns.",
                hint="Write the same rows as shards of brim with `brim select`, then append to those.",
            )
        if SHARD_NAME.fullmatch(name) is None:
            raise DestinationError(
                f"{name} is not named like a shard (SPLIT-00000-of-00001.parquet), so brim cannot append to it.",
                hint="Write the same rows as shards with `brim select`, then append to those.",
            )
        with closing(published.open(name)) as shard, ParquetColumns(shard) as columns:
            rows = columns.rows
        sha256, etag = published.listed(name)
        key = digest_json([name, published.sizes[name], sha256, etag])
        found.append(Receipt(name, subset.split, rows, published.sizes[name], sha256, key, "", "", 0, etag))
    return found


@dataclass(frozen=True)
class AppendedContent:
    """What is there, and the shards of a plan behind it. `renamed`: all shards get the number of all (on the Hub, where
    that is a pointer); else what is there keeps its name and the numbers go on."""

    base: AppendBase
    like: Plan
    is_there: bool  # the rows of the plan: then nothing comes behind
    renamed: bool
    folder: str
    extension: str

    @property
    def plan(self) -> Plan | None:
        return None if self.is_there else self.like

    @cached_property
    def own(self) -> PlanContent:
        return PlanContent(self.like)

    @cached_property
    def _names(self) -> tuple[list[Shard], dict[str, Receipt], dict[str, Shard]]:
        """All shards, and by name the receipts of those there and the plan's own."""
        new: dict[str, list[Shard]] = {}
        for shard in self.plan.shards if self.plan is not None else ():
            new.setdefault(shard.split, []).append(shard)
        shards, kept, own, at = [], {}, {}, 0
        for split in dict.fromkeys([*self.base.receipts, *new]):
            old, added = self.base.receipts.get(split, ()), new.get(split, [])
            total = len(old) + len(added)
            for number, receipt in enumerate(old):
                name = receipt.name
                if self.renamed and added:
                    name = shard_name(self.folder, split, number, total, self.extension)
                shards.append(Shard(name, split, at, at + receipt.rows, receipt.size))
                kept[name] = receipt
                at += receipt.rows
            for number, shard in enumerate(added, len(old)):
                name = shard_name(self.folder, split, number, total, self.extension)
                if old and not self.renamed and len(name) != len(old[0].name):
                    raise InputError(
                        f"{total:,} shards need more digits than the names of the existing shards have.",
                        hint="Append larger shards: raise --shard-size.",
                    )
                shards.append(replace(shard, name=name, start=at, stop=at + shard.rows))
                own[name] = shard
                at += shard.rows
        return shards, kept, own

    @property
    def kept(self) -> list[Receipt]:
        """Receipts of what is there, under the names that it shall have, as those of this job."""
        mark = self.fingerprint[:16]
        return [replace(receipt, name=name, job=mark) for name, receipt in self._names[1].items()]

    @property
    def fingerprint(self) -> str:
        return digest_json({name: fact for name, fact in self.facts.items() if name not in ("cut", "recipe")})

    @cached_property
    def facts(self) -> dict[str, Any]:
        parts = list(self.base.parts)
        if self.plan is not None:
            shards: dict[str, int] = {}
            for shard in self.plan.shards:
                shards[shard.split] = shards.get(shard.split, 0) + 1
            parts.append({"fingerprint": self.plan.fingerprint, "facts": self.plan.facts, "versions": {},
                          "left_out": list(self.plan.table.left_out), "shards": shards})  # fmt: skip
        told = [part["facts"] for part in parts]
        last = self.plan.facts if self.plan is not None else told[-1]
        return {
            "format": last.get("format", ""),
            "rows": self.rows,
            "files": sum(int(facts.get("files", 0)) for facts in told),
            "bytes": sum(int(facts.get("bytes", 0)) for facts in told),
            "columns": dict(self.base.columns),
            "features": self.base.features_digest or digest_json(dict(self.base.features)),
            "cut": dict(last.get("cut", {})),
            "shards": digest_items([shard.name, shard.rows] for shard in self.shards),
            "content": digest_json([part["fingerprint"] for part in parts]),
            "recipe": dict(last.get("recipe", {})),
            "parts": parts,
        }

    @property
    def shards(self) -> Sequence[Shard]:
        return self._names[0]

    @property
    def splits(self) -> Sequence[str]:
        return list(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def files(self) -> int:
        return int(self.facts["files"])

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(path for part in self.facts["parts"] for path in part["left_out"])

    @property
    def linked(self) -> bool:
        return False

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return changes_between(facts, self.facts)

    def key(self, shard: Shard) -> str:
        receipt = self._names[1].get(shard.name)
        if receipt is not None:
            return receipt.key
        return self.own.key(self._names[2][shard.name])

    def mtimes(self, shard: Shard) -> str:
        return next(self.with_mtimes([shard]))[1]

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        _, kept, own = self._names
        for shard in shards:
            if shard.name in kept:
                yield shard, kept[shard.name].mtimes
            else:
                yield shard, self.own.mtimes(own[shard.name])

    def size(self, shards: Sequence[Shard]) -> int:
        _, kept, own = self._names
        there = sum(kept[shard.name].size for shard in shards if shard.name in kept)
        return there + self.own.size([own[shard.name] for shard in shards if shard.name in own])

    def slice(self, shard: Shard) -> Slice:
        own = self._names[2].get(shard.name)
        if own is None:
            raise VerificationError(
                f"{shard.name} is missing or changed, and its source is not known here.",
                hint="Run brim verify for a list of all problems.",
            )
        made = self.own.slice(own)
        assert isinstance(made, PlanSlice)
        before = sum(receipt.rows for receipt in self.base.receipts.get(shard.split, ()))
        return replace(made, first_row=made.first_row + before)

    def sha256(self, shard: Shard) -> str | None:
        receipt = self._names[1].get(shard.name)
        return None if receipt is None else receipt.sha256

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        own = self._names[2].get(shard.name)
        found = None if own is None else self.own.listing(own)
        return None if found is None else {**found, "name": shard.name}

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        found = totals(receipts)
        rows: dict[str, int] = {}
        for shard in self.shards:
            rows[shard.split] = rows.get(shard.split, 0) + shard.rows
        splits = []
        for split, count in rows.items():
            of = found.get(split, Total())
            splits.append(SplitFacts(split, count, of.bytes, of.shards))
        return replace(self.own.card(()), splits=splits, left_out=self.left_out, appended=True)


def _stored(schema: pa.Schema) -> dict[str, str]:
    """The types of columns as they come back from a Parquet file, which has other names inside of lists and knows
    nothing of large ones."""
    file = io.BytesIO()
    pq.write_table(schema.empty_table(), file, store_schema=False)
    return {column.name: str(column.type) for column in pq.read_schema(file)}


def check_agrees(base: AppendBase, plan: Plan) -> None:
    """InputError with the difference if new rows have other columns or types than those that are there."""
    wanted = dict(base.types)
    found = dict(plan.facts["columns"]) if base.features_digest else _stored(plan.schema)
    said = [f"{name!r} is missing" for name in wanted if name not in found]
    said += [f"{name!r} is new" for name in found if name not in wanted]
    said += [f"{n!r} is {found[n]} instead of {wanted[n]}" for n in wanted if n in found and found[n] != wanted[n]]
    features = dict(plan.table.features or {})
    if not said and base.features_digest not in ("", plan.facts["features"]):
        said.append("the features of the columns, such as the names of classes, are others")
    if not said and base.features:
        for name, feature in base.features.items():
            if digest_json(features.get(name)) != digest_json(feature):
                said.append(f"{name!r} is {features.get(name)} instead of {feature}")
    if not said and list(wanted) != list(found):
        said.append(f"the columns are in another order: {', '.join(found)} instead of {', '.join(wanted)}")
    if said:
        hint = "Use a source with the same columns and types."
        added = [name for name in found if name not in wanted]
        if plan.table.can_drop or plan.table.verbatim:
            hint += f" --drop={added[0]} leaves a column out." if added else ""
        elif "label" in added and plan.table.recipe.get("label_from"):
            hint = "Leave out --label-from: the dataset has no class labels."
        elif is_class_label(base.features.get("label")) and "label" not in found:
            hint = "Add --label-from=parent to store the folder names as class labels, as the dataset does."
        raise InputError(f"The new rows do not match the existing dataset: {'; '.join(said)}.", hint=hint)


def appended_content(
    published: Published | None,
    plan: Plan,
    config: str,
    folder: str,
    ledger: Ledger | None,
    splits: Sequence[str] | None,
    without_known: Callable[[Plan, AppendBase], Plan | None] = lambda plan, base: plan,
) -> AppendedContent | PlanContent:
    """What a destination shall hold: what is there, and the rows of the plan behind it, once.

    `without_known` takes the rows out of a plan that the dataset holds, and gives None if that are all of them.
    """
    base = None if published is None else base_of(published, config, ledger, splits)
    if base is None:
        return PlanContent(plan)
    extension = os.path.splitext(base.names[0])[1]
    if extension != EXTENSIONS[plan.format]:
        raise InputError(
            f"The existing shards are {extension} files, and the new shards would be {EXTENSIONS[plan.format]} files.",
            hint="Use the same --format as the existing dataset.",
        )
    plan = planned_again(plan, with_known_classes(plan.table, base.features))
    check_agrees(base, plan)
    renamed = ledger is None and published is not None and published.renames
    if base.jobs == {plan.fingerprint}:
        return PlanContent(plan)  # these rows are all there is
    nothing = not any(shard.rows for shard in plan.shards)
    is_there = plan.fingerprint in base.fingerprints or nothing
    if not is_there:
        new = without_known(plan, base)
        plan, is_there = new or plan, new is None or new.fingerprint in base.fingerprints
    return AppendedContent(base, plan, is_there, renamed, folder, extension)
