"""Bring a dataset up to date: shards whose content is unchanged are kept, whatever their number is now.

A shard that needs another name is first set aside by its content, so that no rename can overwrite another
kept shard, and a crash in the middle leaves every shard either at its name or aside.
"""

from __future__ import annotations

from dataclasses import replace

from brim.engine.content import Content
from brim.engine.ledger import Ledger, Receipt
from brim.plans.cut import Shard
from brim.sinks.sink import Sink


def reuse(content: Content, sink: Sink, ledger: Ledger, job: str) -> None:
    """Give shards of an earlier job that are part of this one their new names and receipts."""
    wanted: dict[str, list[Shard]] = {}
    for shard in content.shards:
        wanted.setdefault(content.key(shard), []).append(shard)
    kept: list[tuple[Shard, Receipt]] = []
    for receipt in ledger.known().values():
        places = wanted.get(receipt.key)
        if not places:
            continue
        here = ledger.receipts.get(receipt.name) == receipt and sink.holds(receipt.piece)
        if not here and not sink.holds_aside(receipt.piece):
            continue
        same = next((shard for shard in places if here and shard.name == receipt.name), None)
        if here and same is None:
            ledger.forget(receipt.name)
            sink.set_aside(receipt.piece)
        shard = same or places[0]
        places.remove(shard)
        kept.append((shard, receipt))
    for shard, receipt in kept:
        if ledger.receipts.get(shard.name) != receipt:
            if shard.name in ledger.receipts:
                ledger.forget(shard.name)  # before its file becomes another one
            receipt = replace(receipt, etag=sink.bring_back(receipt.piece, shard.name))
        # The dates of its files stay as they were: if they changed, content is compared as in any resumed run.
        ledger.add(replace(receipt, name=shard.name, split=shard.split, job=job))
