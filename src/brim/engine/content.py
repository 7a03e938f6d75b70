"""What is brought to a destination: shards with names, whose bytes can be had at any time and are always the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from brim.engine.card import card_facts
from brim.engine.ledger import Receipt
from brim.engine.shard import Slice, slice_of
from brim.formats.card import CardFacts
from brim.plans.changes import changes_between
from brim.plans.cut import Shard
from brim.plans.plan import Plan


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

    def card(self, receipts: Iterable[Receipt]) -> CardFacts:
        return card_facts(self.plan, receipts)
