"""The shards that a destination shall contain: names whose bytes can be made at any time, always the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from brim.compute.outputs.output import OutputShard
from brim.formats.card import CardFacts, SplitFacts
from brim.formats.shard_listing import MOST_LISTING_BYTES, listing_record
from brim.plans.cut_shards import Shard
from brim.plans.fingerprint import changes_between, digest_json
from brim.plans.plan import EXTENSIONS, Plan
from brim.plans.shard_bytes import FileSlice, Slice, slice_of
from brim.sources.features import as_yaml
from brim.state.ledger import Receipt, SplitTotal, split_totals

MEMORY = "memory_bytes"  # of each split in memory, as `datasets` reports it


class ShardSet:
    """Base class of the shards of a plan, of computed rows, and of rows that are appended to a dataset.

    `is_linked`: the shards are files on the disk of the destination, and need no more space there.
    """

    is_linked = False

    @property
    def fingerprint(self) -> str:
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        """The inputs of the fingerprint, as they are called on disk."""
        raise NotImplementedError

    @property
    def shards(self) -> Sequence[Shard]:
        raise NotImplementedError

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def source_files(self) -> int:
        return 0

    @property
    def skipped_files(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(shard.name for shard in self.shards)

    @property
    def splits(self) -> Sequence[str]:
        return list(dict.fromkeys(shard.split for shard in self.shards))

    @property
    def existing_receipts(self) -> Sequence[Receipt]:
        """The receipts of shards that exist at the destination already, of an append."""
        return ()

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        """Describe the differences to the job with these fingerprint inputs; never empty."""
        return changes_between(facts, self.facts)

    def key(self, shard: Shard) -> str:
        """Return a digest of the content of a shard without its name."""
        raise NotImplementedError

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        """Yield shards, each with a digest of the dates of its source files."""
        return ((shard, "") for shard in shards)

    def mtimes(self, shard: Shard) -> str:
        return next(iter(self.with_mtimes([shard])))[1]

    def size(self, shards: Sequence[Shard]) -> int:
        """Return the approximate size of shards."""
        raise NotImplementedError

    def content(self, shard: Shard) -> Slice:
        """Return a recipe for the bytes of a shard, which can be pickled."""
        raise NotImplementedError

    def known_sha256(self, shard: Shard) -> str | None:
        return None

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        """Return the record of a shard in a manifest: its small columns and the sizes of its values."""
        return None

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        """Return the content of the dataset card. Without receipts it has no sizes."""
        raise NotImplementedError


class PlannedShards(ShardSet):
    """Files packaged by a plan. With `planned`, dates are those of another plan: the source was moved since then."""

    def __init__(self, plan: Plan, previous: Plan | None = None) -> None:
        self.plan, self._previous = plan, previous or plan

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
    def rows(self) -> int:
        return len(self.plan.table)

    @property
    def source_files(self) -> int:
        return self.plan.table.file_count()

    @property
    def skipped_files(self) -> tuple[str, ...]:
        return self.plan.table.left_out

    @property
    def splits(self) -> Sequence[str]:
        return [split.name for split in self.plan.table.splits]

    def key(self, shard: Shard) -> str:
        return self.plan.shard_key(shard)

    def with_mtimes(self, shards: Iterable[Shard]) -> Iterator[tuple[Shard, str]]:
        return self._previous.with_mtimes(shards)

    def size(self, shards: Sequence[Shard]) -> int:
        """Columns without files count only where they may be most of a shard."""
        values = sum(shard.value_bytes for shard in shards) if self.plan.table.verbatim else 0
        return values + sum(shard.file_bytes for shard in shards)

    def content(self, shard: Shard) -> Slice:
        return slice_of(self.plan, shard)

    def listing(self, shard: Shard) -> dict[str, Any] | None:
        plan = self.plan
        has_files = bool(plan.table.columns or plan.table.nested)
        if plan.format != "parquet" or not has_files or shard.value_bytes > MOST_LISTING_BYTES:
            return None
        table, numbers = plan.shard_table(shard)
        return listing_record(shard.name, table, {name: plan.table.files.sizes[own] for name, own in numbers.items()})

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        table, totals, splits = self.plan.table, split_totals(receipts), []
        for split in table.splits:
            total = totals.get(split.name, SplitTotal())
            memory = table.about.get(MEMORY, {}).get(split.name)
            splits.append(SplitFacts(split.name, split.stop - split.start, total.bytes, total.shards, memory))
        columns = []
        for column in self.plan.schema:
            media = table.columns.get(column.name)
            kind = str(column.type) if media is None else f"{'list of ' if media.is_list else ''}{media.kind}"
            columns.append((column.name, kind))
        features = None if table.features is None else as_yaml(table.features)
        extension = EXTENSIONS[self.plan.format]
        return CardFacts(splits, features, extension, columns, table.left_out, table.about)


class ComputedShards(ShardSet):
    """Files of computed rows. `are_columns`: single files next to each other, each with data of every row."""

    def __init__(
        self,
        facts: dict[str, Any],
        card_facts: CardFacts,
        files: Mapping[str, OutputShard],
        *,
        is_linked: bool,
        are_columns: bool,
    ) -> None:
        self._facts, self._fingerprint, self.is_linked = facts, digest_json(facts), is_linked
        self._card_facts, self._files, self._are_columns = card_facts, files, are_columns
        self._shards, start = list[Shard](), 0
        for name, file in files.items():
            self._shards.append(Shard(name, file.split, start, start + file.rows, file.size))
            start += file.rows

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def facts(self) -> dict[str, Any]:
        return self._facts

    @property
    def shards(self) -> Sequence[Shard]:
        return self._shards

    @property
    def rows(self) -> int:
        return count_rows([shard.rows for shard in self._shards], self._are_columns)

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return computed_changes(facts, self.facts)

    def key(self, shard: Shard) -> str:
        # Single files are never kept for another job.
        own = digest_json([self.fingerprint, self._files[shard.name].sha256])
        return self.fingerprint if self._are_columns else own

    def size(self, shards: Sequence[Shard]) -> int:
        return sum(self._files[shard.name].size for shard in shards)

    def content(self, shard: Shard) -> Slice:
        return FileSlice(self._files[shard.name].path)

    def known_sha256(self, shard: Shard) -> str | None:
        return self._files[shard.name].sha256

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        totals, splits = split_totals(receipts), []
        for split in self.splits:
            total = totals.get(split, SplitTotal())
            rows = sum(file.rows for file in self._files.values() if file.split == split)
            splits.append(SplitFacts(split, rows, total.bytes, total.shards))
        return replace(self._card_facts, splits=splits)


def count_rows(rows: Sequence[int], are_columns: bool) -> int:
    """Return the number of rows of several files together."""
    return max(rows, default=0) if are_columns else sum(rows)


_CHANGES = {
    "kind": "it was made by another command",
    "source": "the source changed",
    "function": "the function changed",
    "tokenizer": "the tokenizer changed",
    "model": "the model changed",
    "model files": "the model changed",
}


def without_function(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint inputs that decide the units of a job, whatever its function."""
    step = {name: value for name, value in facts.get("step", {}).items() if name not in ("function", "fn_kwargs")}
    return facts | {"step": step}


def computed_changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the differences between the fingerprint inputs of two computed jobs; never empty."""
    if "step" not in old or old.get("kind") != new.get("kind"):
        return ["it was made by another command"]
    if old.get("version") != new.get("version"):  # that version may describe the same thing differently
        return ["it was begun by an earlier version of brim"]
    changes = []
    for name in sorted({*old, *new} - {"step", "output"}):
        if old.get(name) != new.get(name):
            changes.append(_CHANGES.get(name, f"{name} changed"))
    for group in ("step", "output"):
        old_values, new_values = old.get(group, {}), new.get(group, {})
        for name in sorted({*old_values, *new_values}):
            old_value, new_value = old_values.get(name), new_values.get(name)
            if old_value != new_value:
                is_plain = all(isinstance(v, str | int | float | bool | None) for v in (old_value, new_value))
                label = name.replace("_", " ")
                text = f"{label} was {old_value} and is now {new_value}" if is_plain else f"{name} changed"
                changes.append(_CHANGES.get(name, text))
    return changes or ["its options changed"]
