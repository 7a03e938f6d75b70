"""Make the files that are published next to the shards: the dataset card, and per split a manifest, its ledger."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from brim.formats.card import CardFacts, write_card, write_unfinished_card, write_waiting_card
from brim.formats.shard_listing import LISTING, MOST_LISTING_BYTES
from brim.jobs.shard_set import ShardSet
from brim.records import dataclass
from brim.state.ledger import Ledger, Receipt, SourceRecord, finished_ledger, source_line
from brim.state.record_log import records_of


@dataclass(frozen=True, slots=True)
class DatasetCard:
    """The card of a dataset, which is written into the card that exists at the destination.

    With `existing_shards`, by split, readers keep these while rows are appended.
    """

    facts: CardFacts
    config: str = "default"
    split: str | None = None
    folder: str = "data"
    existing_shards: Mapping[str, Sequence[str]] | None = None

    def final(self, existing: str | None, files: Mapping[str, int]) -> str:
        """Write the card of the finished dataset. `files` are existing files with their sizes, as far as known."""
        return write_card(self.facts, existing, files)

    def unfinished(self, existing: str | None, files: Mapping[str, int]) -> str:
        """Write the card that makes loading fail, or that lists only the existing shards of an append."""
        if self.existing_shards is not None:
            return write_waiting_card(existing, self.config, self.folder, self.existing_shards)
        return write_unfinished_card(existing, self.config, self.split, files)


def make_manifests(
    shards: ShardSet,
    ledger: Ledger,
    receipts: Sequence[Receipt],
    existing: Sequence[bytes],
    manifest_name: Callable[[str], str],
    source: SourceRecord | None,
) -> dict[str, bytes]:
    """Return the manifest of each split. Dates of local files are left out.

    `existing` are the manifests at the destination: one of an earlier version without listings stays as it is, and
    listings of shards that stay are kept.
    """
    manifests: dict[str, bytes] = {}
    assert ledger.job is not None
    listings = _existing_listings(existing)
    for split in shards.splits:

        def of_split(split: str = split) -> Iterator[Receipt]:
            return (replace(receipt, mtimes="") for receipt in receipts if receipt.split == split)

        data = finished_ledger(ledger.job, of_split(), [] if source is None else [source_line(source)])
        if data not in existing and (records := _listings(shards, split, ledger, listings)):
            data = finished_ledger(ledger.job, of_split(), records)
        manifests[manifest_name(split)] = data
    return manifests


def _listings(
    shards: ShardSet, split: str, ledger: Ledger, existing: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the listings of a split, from which rows are selected without reading shards; none if they are large."""
    records, size = [], 0
    for shard in shards.shards:
        if shard.split != split:
            continue
        record = shards.listing(shard)
        if record is None and existing:
            record = existing.get(ledger.receipts[shard.name].sha256)
        if record is not None:
            record = {**record, "name": shard.name}
            size += sum(len(str(value)) for value in record.values())
            if size > MOST_LISTING_BYTES:
                return []
            records.append(record)
    return records


def _existing_listings(manifests: Sequence[bytes]) -> dict[str, dict[str, Any]]:
    """Return the listings of existing manifests by the SHA-256 of their shards."""
    listings: dict[str, dict[str, Any]] = {}
    for data in manifests:
        records = list(records_of(io.BytesIO(data)))
        content = {record["name"]: record["sha256"] for record in records if record.get("type") == "shard"}
        for record in records:
            if record.get("type") == LISTING and record.get("name") in content:
                listings[content[record["name"]]] = record
    return listings
