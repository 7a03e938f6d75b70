"""Rows that were computed, as content for a destination."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from brim.compute.changes import changes_between
from brim.compute.made import Made
from brim.engine.ledger import Receipt
from brim.engine.packed import Total, totals
from brim.engine.shard import FileSlice
from brim.formats.card import CardFacts, SplitFacts
from brim.plans.cut import Shard, shard_name
from brim.plans.fingerprint import digest_json


@dataclass(frozen=True)
class ComputedContent:
    """Shards by name, each a file."""

    facts: dict[str, Any]
    card_facts: CardFacts
    made: Mapping[str, Made]
    linked: bool
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
        return sum(one.rows for one in self.made.values())

    def changes_from(self, facts: dict[str, Any]) -> list[str]:
        return changes_between(facts, self.facts)

    def key(self, shard: Shard) -> str:
        return digest_json([self.fingerprint, self.made[shard.name].sha256])

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

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        splits, found = [], totals(receipts)
        for split in self.splits:
            of = found.get(split, Total())
            rows = sum(one.rows for one in self.made.values() if one.split == split)
            splits.append(SplitFacts(split, rows, of.bytes, of.shards))
        return replace(self.card_facts, splits=splits)


def named(made: Sequence[Made], folder: str, extension: str) -> dict[str, Made]:
    """Shards under the names that the Hub's convention gives them."""
    counts: dict[str, int] = {}
    for one in made:
        counts[one.split] = counts.get(one.split, 0) + 1
    numbers: dict[str, int] = {}
    names = {}
    for one in made:
        number = numbers[one.split] = numbers.get(one.split, -1) + 1
        names[shard_name(folder, one.split, number, counts[one.split], extension)] = one
    return names
