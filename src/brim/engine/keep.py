"""Bring a dataset up to date: shards whose content is unchanged are kept, whatever their number is now.

A shard that needs another name first moves to `.brim/keep/SHA256`, so that no rename can overwrite
another kept shard, and a crash in the middle leaves every shard either at its name or in `keep`.
"""

from __future__ import annotations

from dataclasses import replace

from brim.engine.ledger import STATE, Ledger, Receipt
from brim.plans.cut import Shard
from brim.plans.plan import Plan
from brim.sinks.folder import FolderSink

_KEEP = f"{STATE}/keep"


def reuse(plan: Plan, sink: FolderSink, ledger: Ledger, job: str) -> None:
    """Give shards of an earlier job that are part of this one their new names and receipts."""
    wanted: dict[str, list[Shard]] = {}
    for shard in plan.shards:
        wanted.setdefault(plan.shard_key(shard), []).append(shard)
    kept: list[tuple[Shard, Receipt]] = []
    for receipt in list(ledger.known.values()):
        places = wanted.get(receipt.key)
        if not places:
            continue
        here = ledger.receipts.get(receipt.name) == receipt and sink.size(receipt.name) == receipt.size
        if not here and sink.size(_stored(receipt)) != receipt.size:
            continue
        same = next((shard for shard in places if here and shard.name == receipt.name), None)
        if here and same is None:
            ledger.forget(receipt.name)
            sink.move(receipt.name, _stored(receipt))
        shard = same or places[0]
        places.remove(shard)
        kept.append((shard, receipt))
    for shard, receipt in kept:
        if ledger.receipts.get(shard.name) != receipt:
            if shard.name in ledger.receipts:
                ledger.forget(shard.name)  # before its file becomes another one
            sink.move(_stored(receipt), shard.name)
        # The dates of its files stay as they were: if they changed, content is compared as in any resumed run.
        ledger.add(replace(receipt, name=shard.name, split=shard.split, job=job))


def forget_others(sink: FolderSink, ledger: Ledger, names: set[str]) -> None:
    """Remove the shards of earlier jobs that are not among `names`."""
    for name in sorted(ledger.names - names):
        if name in ledger.receipts:
            ledger.forget(name)
        sink.remove(name)
    sink.clear(_KEEP)


def _stored(receipt: Receipt) -> str:
    return f"{_KEEP}/{receipt.sha256}"
