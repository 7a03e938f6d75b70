"""What is brought to a destination: shards with names, whose bytes can be had at any time and are always the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from brim.compute.outputs.output import MadeShard
from brim.formats.card import CardFacts, SplitFacts
from brim.formats.shard_listing import MOST_LISTING_BYTES, listing_record
from brim.plans.cut_shards import Shard
from brim.plans.fingerprint import changes_between, digest_json
from brim.plans.plan import EXTENSIONS, Plan
from brim.plans.shard_bytes import FileSlice, Slice, slice_of
from brim.records import dataclass
from brim.sources.features import as_yaml
from brim.state.ledger import Receipt, SplitTotal, split_totals

_WORDS = {
    "kind": "it was made by another command",
    "source": "the source changed",
    "function": "the function changed",
    "tokenizer": "the tokenizer changed",
    "model": "the model changed",
    "model files": "the model changed",
}


_FUNCTION = ("function", "fn_kwargs")  # of the facts of a step


def without_function(facts: dict[str, Any]) -> dict[str, Any]:
    """What decides the units of a job, whichever the function."""
    step = {name: value for name, value in facts.get("step", {}).items() if name not in _FUNCTION}
    return facts | {"step": step}


def computed_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """From the facts of the job that was done to those of another; never empty."""
    if "step" not in old or old.get("kind") != new.get("kind"):
        return ["it was made by another command"]
    if old.get("version") != new.get("version"):  # what else differs may be how that version described the same thing
        return ["it was begun by an earlier version of brim"]
    changes = []
    for name in sorted({*old, *new} - {"step", "output"}):
        if old.get(name) != new.get(name):
            changes.append(_WORDS.get(name, f"{name} changed"))
    for part in ("step", "output"):
        before, after = old.get(part, {}), new.get(part, {})
        for name in sorted({*before, *after}):
            was, now = before.get(name), after.get(name)
            if was != now:
                plain = all(isinstance(value, str | int | float | bool | None) for value in (was, now))
                text = f"{name.replace('_', ' ')} was {was} and is now {now}" if plain else f"{name} changed"
                changes.append(_WORDS.get(name, text))
    return changes or ["its options changed"]


def rows_of(rows: Sequence[int], apart: bool) -> int:
    """How many rows several files have together."""
    return max(rows, default=0) if apart else sum(rows)


class Content(Protocol):
    """Files packaged by a plan, or rows that were computed."""

    @property
    def fingerprint(self) -> str: ...

    @property
    def facts(self) -> dict[str, Any]:
        """What the fingerprint is made of, in pieces."""

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def splits(self) -> Sequence[str]: ...

    @property
    def rows(self) -> int: ...

    @property
    def files(self) -> int:
        """How many source files are inside."""

    @property
    def left_out(self) -> tuple[str, ...]: ...

    @property
    def linked(self) -> bool:
        """Whether the shards lie on the destination's disk already and take no more of it."""

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        """What differs from the content with these facts, in words; never empty."""

    def key(self, shard: Shard) -> str:
        """What a shard's bytes are made of, whatever its name."""

    def mtimes(self, shard: Shard) -> str:
        """A digest of when its sources were last written to."""

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        """Shards, each with its `mtimes`."""

    def size(self, shards: Sequence[Shard]) -> int:
        """What shards will take, about."""

    def slice(self, shard: Shard) -> Slice:
        """What makes the bytes of a shard, here or elsewhere."""

    def sha256(self, shard: Shard) -> str | None:
        """The hash of a shard, where it is known already."""

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        """What a manifest tells of a shard beside its receipt: its small columns, and the sizes of its values."""

    def card(self, receipts: Iterable[Receipt]) -> CardFacts: ...


@dataclass(frozen=True)
class PlanContent:
    """The files of a plan."""

    plan: Plan

    @property
    def fingerprint(self) -> str:
        return self.plan.fingerprint

    @property
    def facts(self) -> dict[str, Any]:
        return self.plan.facts

    @property
    def shards(self) -> Sequence[Shard]:
        return self.plan.shards

    @property
    def splits(self) -> Sequence[str]:
        return [split.name for split in self.plan.table.splits]

    @property
    def rows(self) -> int:
        return len(self.plan.table)

    @property
    def files(self) -> int:
        return self.plan.table.file_count()

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.plan.table.left_out

    @property
    def linked(self) -> bool:
        return False

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return changes_between(facts, self.plan.facts)

    def key(self, shard: Shard) -> str:
        return self.plan.shard_key(shard)

    def mtimes(self, shard: Shard) -> str:
        return self.plan.shard_mtimes(shard)

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        return self.plan.with_mtimes(shards)

    def size(self, shards: Sequence[Shard]) -> int:
        """Other columns than files count where they may be most of it."""
        values = sum(shard.value_bytes for shard in shards) if self.plan.table.verbatim else 0
        return values + sum(shard.file_bytes for shard in shards)

    def slice(self, shard: Shard) -> Slice:
        return slice_of(self.plan, shard)

    def sha256(self, shard: Shard) -> str | None:
        return None

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        plan = self.plan
        if (
            plan.format != "parquet"
            or not (plan.table.columns or plan.table.nested)
            or shard.value_bytes > MOST_LISTING_BYTES
        ):
            return None
        table, numbers = plan.shard_table(shard)
        return listing_record(shard.name, table, {name: plan.table.files.sizes[of] for name, of in numbers.items()})

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        return card_facts(self.plan, receipts)


MEMORY = "memory_bytes"  # of each split, as `datasets` weighs it: beside what else a source says of itself


def card_facts(plan: Plan, receipts: Iterable[Receipt]) -> CardFacts:
    splits, found = [], split_totals(receipts)
    for split in plan.table.splits:
        of = found.get(split.name, SplitTotal())
        held = plan.table.about.get(MEMORY, {}).get(split.name)
        splits.append(SplitFacts(split.name, split.stop - split.start, of.bytes, of.shards, held))
    columns = []
    for column in plan.schema:
        media = plan.table.columns.get(column.name)
        kind = str(column.type) if media is None else f"{'list of ' if media.is_list else ''}{media.kind}"
        columns.append((column.name, kind))
    features = None if plan.table.features is None else as_yaml(plan.table.features)
    return CardFacts(splits, features, EXTENSIONS[plan.format], columns, plan.table.left_out, plan.table.about)


@dataclass(frozen=True)
class ComputedContent:
    """Shards by name, each a file. `apart`: files beside each other, each with something of every row."""

    facts: dict[str, Any]
    card_facts: CardFacts
    made: Mapping[str, MadeShard]
    linked: bool
    apart: bool = False
    left_out: tuple[str, ...] = ()
    files: int = 0

    @cached_property
    def fingerprint(self) -> str:
        return digest_json(self.facts)

    @cached_property
    def shards(self) -> Sequence[Shard]:
        shards, at = [], 0
        for name, one in self.made.items():
            shards.append(Shard(name, one.split, at, at + one.rows, one.size))
            at += one.rows
        return shards

    @property
    def splits(self) -> Sequence[str]:
        return list(dict.fromkeys(one.split for one in self.made.values()))

    @property
    def rows(self) -> int:
        return rows_of([one.rows for one in self.made.values()], self.apart)

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return computed_changes(facts, self.facts)

    def key(self, shard: Shard) -> str:
        # Of files that stand apart none is ever kept for another job.
        return self.fingerprint if self.apart else digest_json([self.fingerprint, self.made[shard.name].sha256])

    def mtimes(self, shard: Shard) -> str:
        return ""

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        return ((shard, "") for shard in shards)

    def size(self, shards: Sequence[Shard]) -> int:
        return sum(self.made[shard.name].size for shard in shards)

    def slice(self, shard: Shard) -> FileSlice:
        return FileSlice(self.made[shard.name].path)

    def sha256(self, shard: Shard) -> str | None:
        return self.made[shard.name].sha256

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        return None

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        splits, found = [], split_totals(receipts)
        for split in self.splits:
            of = found.get(split, SplitTotal())
            rows = sum(one.rows for one in self.made.values() if one.split == split)
            splits.append(SplitFacts(split, rows, of.bytes, of.shards))
        return replace(self.card_facts, splits=splits)
