"""From a plan's shard to its bytes: the one place where plans and formats meet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from brim.formats.found import Found
from brim.formats.parquet import splice_parquet
from brim.formats.parquet_index import locate_parquet
from brim.formats.splice import Splice
from brim.formats.tar import locate_tar, splice_tar
from brim.plans.cut import Shard
from brim.plans.plan import Plan


def splice_of(plan: Plan, shard: Shard) -> Splice:
    table, numbers = plan.shard_table(shard)
    if plan.format == "parquet":
        return splice_parquet(table, plan.table.files, numbers)
    split = next(split for split in plan.table.splits if split.name == shard.split)
    return splice_tar(table, plan.table.files, numbers, shard.start - split.start)


def locate(path: Path) -> Iterator[Found]:
    """Every file inside a shard on disk."""
    return locate_tar(str(path)) if path.suffix == ".tar" else locate_parquet(str(path))
