"""What a card says of a plan that was built."""

from __future__ import annotations

from collections.abc import Iterable

from brim.engine.ledger import Receipt
from brim.engine.packed import Total, totals
from brim.formats.card import CardFacts, SplitFacts
from brim.plans.plan import EXTENSIONS, Plan
from brim.sources.features import as_yaml


def card_facts(plan: Plan, receipts: Iterable[Receipt]) -> CardFacts:
    splits, found = [], totals(receipts)
    for split in plan.table.splits:
        of = found.get(split.name, Total())
        splits.append(SplitFacts(split.name, split.stop - split.start, of.bytes, of.shards))
    columns = []
    for column in plan.schema:
        media = plan.table.columns.get(column.name)
        kind = str(column.type) if media is None else f"{'list of ' if media.is_list else ''}{media.kind}"
        columns.append((column.name, kind))
    features = None if plan.table.features is None else as_yaml(plan.table.features)
    return CardFacts(splits, features, EXTENSIONS[plan.format], columns, plan.table.left_out, plan.table.about)
