"""What a build will take, and what embedding the files in one go would have taken."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc

from brim import cuts
from brim.errors import DoesNotFit
from brim.memory.forecast.shapes import EMBED_FACTORS
from brim.memory.limit import Limit
from brim.objects.reading import AHEAD_BYTES
from brim.objects.sending import part_bytes
from brim.plans.plan import Plan
from brim.plans.weights import metadata_bytes
from brim.sizes import format_size
from brim.sources.filetable import flat_numbers
from brim.sources.kinds import SIZED_BY_PATH

VIEWER_ROW_BYTES = 300_000_000  # the Hub's viewer refuses larger row groups
# Measured on Python 3.11 with pyarrow 26 (benchmarks/package.py): the interpreter with what a build
# imports, the buffers of a worker, and a shard's segments, paths and skeleton for each file in it.
BASE_BYTES = 48_000_000
DATASETS_BYTES = 45_000_000  # what `import datasets` adds
WORKER_BYTES = 4_000_000
HUB_BYTES = 30_000_000  # huggingface_hub and its connections
OBJECTS_BYTES = 25_000_000  # obstore and its connections
OBJECT_READER_BYTES = AHEAD_BYTES + 6_000_000  # what a worker has asked a bucket for, and the piece it reads
PER_FILE_BYTES = 160
PER_ROW_BYTES = 48
PER_TAR_ROW_BYTES = 2_600
# Writing values by way of the disk: what it takes whatever they are, and how often a row group is held. A
# row group of few large values is held more often, because a page takes whole values.
WRITER_BYTES = 25_000_000
GROUP_FACTOR, LARGE_GROUP_FACTOR = 2.2, 4.0
LARGE_ROW_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Forecast:
    """Bytes of memory for a build, by what they are for."""

    base: int
    worker: int
    workers: int

    @property
    def total(self) -> int:
        return self.base + self.worker * self.workers


def forecast_build(plan: Plan, limit: Limit, workers: int, *, hub: bool = False, bucket: bool = False) -> Forecast:
    """As many workers as asked for and as fit; DoesNotFit if not even one does."""
    table = plan.table
    paths = int(table.files.paths.nbytes)
    base = BASE_BYTES + HUB_BYTES * hub + (DATASETS_BYTES if table.verbatim else 0) + PER_ROW_BYTES * len(table)
    base += sum(int(table.rows.column(n).nbytes) for n in table.rows.column_names if n not in table.borrowed)
    base += paths + 24 * len(table.files)
    from_bucket = table.files.bucket is not None
    base += OBJECTS_BYTES * (bucket or from_bucket)
    if table.files.ranges is not None:
        base += int(table.files.on_disk.paths.nbytes) + 24 * len(table.files.on_disk)
    reader = 0
    if table.files.etags is not None:
        base += int(table.files.etags.nbytes)
        reader = OBJECT_READER_BYTES
    most_rows = int(plan.shards.rows.max())
    share = most_rows / max(len(table), 1)
    per_row = PER_TAR_ROW_BYTES if plan.format == "webdataset" else 0
    numbers = sum(int(table.rows.column(name).nbytes) for name in table.columns)
    in_shard = table.file_count() * PER_FILE_BYTES + 3 * paths + 3 * numbers
    parts = sending_bytes(int(plan.shards.file_bytes.max())) * bucket
    worker = WORKER_BYTES + reader + parts + int(share * in_shard) + per_row * most_rows + _values_bytes(plan)
    fit = max((limit.bytes - base) // worker, 0)
    if fit < 1:
        need = base + worker
        raise DoesNotFit(
            f"The build needs about {format_size(need)} of memory and may take {limit}.",
            hint=f"Raise it with --memory={-(-need // 1_000_000)}MB"
            + (", or cut smaller shards." if worker - reader - sending_bytes(0) * bucket > 2 * WORKER_BYTES else "."),
            need_bytes=need,
            limit_bytes=limit.bytes,
        )
    return Forecast(base, worker, int(min(workers, fit, len(plan.shards))))


def sending_bytes(size: int) -> int:
    """Of a shard of this size to a bucket: a part that is made, one that waits and one on its way."""
    return 3 * part_bytes(size)


def _values_bytes(plan: Plan) -> int:
    """What writing the columns that are not of files takes, for the largest shard."""
    held = 3 * int(plan.shards.value_bytes.max())
    if plan.format != "parquet" or not on_disk_bytes(plan):
        return held
    largest = int(metadata_bytes(plan.table).max())
    factor = GROUP_FACTOR if largest < LARGE_ROW_BYTES else LARGE_GROUP_FACTOR
    return min(held, WRITER_BYTES + int(factor * (cuts.GROUP_VALUE_BYTES + largest)))


def on_disk_bytes(plan: Plan) -> int:
    """The most that a worker writes to a temporary file, before it is compressed."""
    most = int(plan.shards.value_bytes.max())
    return most if plan.format == "parquet" and most > cuts.HELD_VALUE_BYTES else 0


@dataclass(frozen=True, slots=True)
class Trap:
    """The metadata trap: what a library that sizes files by their paths would do with this dataset."""

    path_bytes: int
    file_bytes: int
    embed_bytes: tuple[int, int]
    kinds: tuple[str, ...]  # columns' kinds that `datasets` sizes by path


def metadata_trap(plan: Plan) -> Trap:
    table = plan.table
    lengths = np.asarray(pc.binary_length(table.files.paths).fill_null(0).to_numpy(zero_copy_only=False))
    path_bytes = sum(int(lengths[flat_numbers(table.rows.column(name))].sum()) for name in table.columns)
    file_bytes = int(table.file_bytes().sum())
    low, high = (factor * file_bytes for factor in EMBED_FACTORS)
    kinds = tuple(sorted({column.kind for column in table.columns.values()} & SIZED_BY_PATH))
    return Trap(path_bytes, file_bytes, (low, high), kinds)
