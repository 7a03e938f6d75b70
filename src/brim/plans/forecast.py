"""What a build will take, and what embedding the files in one go would have taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from brim.errors import DoesNotFit
from brim.memory.limit import Limit
from brim.plans.plan import Plan
from brim.sizes import format_size
from brim.sources.filetable import flat_numbers
from brim.sources.kinds import SIZED_BY_PATH

VIEWER_ROW_BYTES = 300_000_000  # the Hub's viewer refuses larger row groups
# Measured on Python 3.11 with pyarrow 26 (benchmarks/package.py): the interpreter with what a build
# imports, the buffers of a worker, and a shard's segments, paths and skeleton for each file in it.
BASE_BYTES = 48_000_000
WORKER_BYTES = 4_000_000
HUB_BYTES = 30_000_000  # huggingface_hub and its connections
PER_FILE_BYTES = 160
PER_TAR_ROW_BYTES = 2_600
# Embedding holds a shard's bytes two to three times (measured with datasets 5.2).
EMBED_FACTORS = (2, 3)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of memory for a build, by what they are for."""

    base: int
    worker: int
    workers: int

    @property
    def total(self) -> int:
        return self.base + self.worker * self.workers


def forecast_build(plan: Plan, limit: Limit, workers: int, *, hub: bool = False) -> Forecast:
    """As many workers as asked for and as fit; DoesNotFit if not even one does."""
    table = plan.table
    paths = int(table.files.paths.nbytes)
    base = BASE_BYTES + HUB_BYTES * hub + int(table.rows.nbytes) + paths + 24 * len(table.files)
    most_rows = max(shard.rows for shard in plan.shards)
    share = most_rows / max(len(table), 1)
    per_row = PER_TAR_ROW_BYTES if plan.format == "webdataset" else 0
    in_shard = table.file_count() * PER_FILE_BYTES + 3 * paths + 3 * int(table.rows.nbytes)
    worker = WORKER_BYTES + int(share * in_shard) + per_row * most_rows
    fit = max((limit.bytes - base) // worker, 0)
    if fit < 1:
        need = base + worker
        raise DoesNotFit(
            f"The build needs about {format_size(need)} of memory and may take {limit}.",
            hint=f"Raise it with --memory {-(-need // 1_000_000)}MB"
            + (", or cut smaller shards." if worker > 2 * WORKER_BYTES else "."),
            need_bytes=need,
            limit_bytes=limit.bytes,
        )
    return Forecast(base, worker, int(min(workers, fit, len(plan.shards))))


@dataclass(frozen=True, slots=True)
class Trap:
    """The metadata trap: what a library that sizes files by their paths would do with this dataset."""

    path_bytes: int
    file_bytes: int
    embed_bytes: tuple[int, int]
    kinds: tuple[str, ...]  # columns' kinds that `datasets` sizes by path


def metadata_trap(plan: Plan) -> Trap:
    table = plan.table
    lengths = np.diff(np.frombuffer(table.files.paths.buffers()[1], np.int64)[: len(table.files) + 1])
    path_bytes = sum(int(lengths[flat_numbers(table.rows.column(name))].sum()) for name in table.columns)
    file_bytes = int(table.file_bytes().sum())
    low, high = (factor * file_bytes for factor in EMBED_FACTORS)
    kinds = tuple(sorted({column.kind for column in table.columns.values()} & SIZED_BY_PATH))
    return Trap(path_bytes, file_bytes, (low, high), kinds)
