"""Describe a plan as text and as JSON, and estimate its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.compute as pc

from brim import partition as cuts
from brim.errors import MemoryLimitError
from brim.formats.parquet_levels import is_list_type
from brim.memory.limit import Limit
from brim.monitor.forecasts.shapes import EMBED_FACTORS
from brim.plans.cut_shards import metadata_bytes
from brim.plans.file_checks import absent_text
from brim.plans.plan import Plan
from brim.records import dataclass
from brim.sizes import format_size
from brim.sources.features import SIZED_BY_PATH
from brim.sources.file_table import FileTable, flat_numbers
from brim.sources.folder_tree import datalad_get
from brim.sources.read_table import BASE_BYTES, COLUMN_BYTES, ROW_BYTES, SPOOLED_BYTES, SPOOLED_WORKER_BYTES
from brim.sources.spools import mapped_columns
from brim.storage.reading import AHEAD_BYTES
from brim.storage.storage import part_bytes
from brim.storage.xet import XET_BYTES
from brim.wording import worded

VIEWER_ROW_BYTES = 300_000_000  # the Hub's viewer refuses larger row groups
# Measured on Python 3.11 with pyarrow 26 (benchmarks/package.py): the buffers of a worker, and a shard's segments,
# paths and skeleton per file. The memory of a table is in read_table.py.
DATASETS_BYTES = 45_000_000  # for `import datasets`
WORKER_BYTES = 4_000_000
HUB_BYTES = 30_000_000  # huggingface_hub and its connections
OBJECTS_BYTES = 25_000_000  # obstore and its connections
OBJECT_READER_BYTES = AHEAD_BYTES + 6_000_000  # requested from a bucket, and the block being read
PER_FILE_BYTES = 160
# Writing values in memory: the number of copies, and the memory per column, by row and at most. Most of both is
# dictionaries, which are abandoned when they are full.
VALUE_FACTOR = 7
WRITER_ROW_BYTES, WRITER_COLUMN_BYTES = 100, 200_000
FULL_BYTES, FULL_FACTOR = 33_000_000, 2.5  # with all dictionaries full
PER_TAR_ROW_BYTES = 2_600
# Writing values by way of the disk: the fixed memory, and the number of copies of a row group. There are more copies
# of a row group of few large values, because a page has complete values.
WRITER_BYTES = 25_000_000
GROUP_FACTOR, LARGE_GROUP_FACTOR = 2.2, 4.0
LARGE_ROW_BYTES = 1_000_000
READ_BYTES = 8 << 20  # read per request of an object with many values


@dataclass(frozen=True, slots=True)
class BuildForecast:
    """Bytes of memory for a build: of the main process, and per worker."""

    base: int
    worker: int
    workers: int

    @property
    def total(self) -> int:
        return self.base + self.worker * self.workers


def forecast_build(
    plan: Plan, limit: Limit, workers: int, *, hub: bool = False, bucket: bool = False, xet: bool = False
) -> BuildForecast:
    """Estimate memory with as many workers as fit; MemoryLimitError if not one does. `xet`: upload by Xet only."""
    table = plan.table
    paths = int(table.files.paths.nbytes)
    base = (
        BASE_BYTES
        + HUB_BYTES * hub
        + XET_BYTES * xet
        + (DATASETS_BYTES if table.verbatim else 0)
        + ROW_BYTES * len(table)
    )
    base += sum(cuts.arrow_bytes(table.rows.column(n)) for n in table.rows.column_names if n not in table.borrowed)
    base += paths + 24 * len(table.files) + COLUMN_BYTES * len(table.rows.column_names)
    spooled = bool(mapped_columns(table.rows))
    base += SPOOLED_BYTES * spooled
    from_bucket = table.files.bucket is not None
    base += OBJECTS_BYTES * (bucket or from_bucket)
    if table.files.ranges is not None:
        base += int(table.files.on_disk.paths.nbytes) + 24 * len(table.files.on_disk)
    reader = 0
    if (ranges := table.files.ranges) is not None and ranges.segments is not None:
        base += 3 * 16 * len(ranges.segments.starts)
    if table.files.on_disk.remotes:
        base += OBJECTS_BYTES
        reader = OBJECT_READER_BYTES
    if table.files.etags is not None:
        base += int(table.files.etags.nbytes)
        reader = OBJECT_READER_BYTES
    most_rows = int(plan.shards.rows.max())
    fraction = most_rows / max(len(table), 1)
    per_row = PER_TAR_ROW_BYTES if plan.format == "webdataset" else 0
    numbers = sum(int(table.rows.column(name).nbytes) for name in (*table.columns, *table.nested))
    in_shard = table.file_count() * PER_FILE_BYTES + 3 * paths + 3 * numbers
    parts = sending_bytes(int(plan.shards.file_bytes.max())) * bucket
    worker = WORKER_BYTES + reader + parts + int(fraction * in_shard) + per_row * most_rows + _values_bytes(plan)
    worker += SPOOLED_WORKER_BYTES * spooled
    fit = max((limit.bytes - base) // worker, 0)
    if fit < 1:
        need = base + worker
        raise MemoryLimitError(
            f"The build needs about {format_size(need)} of memory; the limit is {limit}.",
            hint=f"Raise it with --memory={-(-need // 1_000_000)}MB"
            + (", or cut smaller shards." if worker - reader - sending_bytes(0) * bucket > 2 * WORKER_BYTES else "."),
            need_bytes=need,
            limit_bytes=limit.bytes,
        )
    return BuildForecast(base, worker, int(min(workers, fit, len(plan.shards))))


def sending_bytes(size: int) -> int:
    """Return the memory to send a shard to a bucket: one part being made, one waiting, one being sent."""
    return 3 * part_bytes(size)


def _values_bytes(plan: Plan) -> int:
    """Return the memory to write the value columns of the largest shard."""
    columns, rows = len(plan.table.rows.column_names), int(plan.shards.rows.max())
    values = int(plan.shards.value_bytes.max())
    in_memory = VALUE_FACTOR * values + columns * min(WRITER_COLUMN_BYTES, WRITER_ROW_BYTES * rows)
    in_memory = min(in_memory, int(FULL_BYTES + FULL_FACTOR * values))
    if plan.format != "parquet" or not on_disk_bytes(plan):
        return in_memory
    largest = int(metadata_bytes(plan.table).max())
    factor = GROUP_FACTOR if largest < LARGE_ROW_BYTES else LARGE_GROUP_FACTOR
    return min(in_memory, WRITER_BYTES + int(factor * (cuts.GROUP_VALUE_BYTES + largest)))


def on_disk_bytes(plan: Plan) -> int:
    """Return the uncompressed bytes that a worker writes to a temporary file at most."""
    largest = int(plan.shards.value_bytes.max())
    return largest if plan.format == "parquet" and largest > cuts.HELD_VALUE_BYTES else 0


@dataclass(frozen=True, slots=True)
class Trap:
    """The metadata trap: a library that sizes files by their paths would load this dataset at once."""

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


def plan_facts(plan: Plan, forecast: BuildForecast, limit: Limit) -> dict[str, Any]:
    """Return the facts of a plan for programs."""
    table = plan.table
    row_bytes = table.file_bytes()
    # Shards of a source that is published unchanged may have no files, only values.
    sizes = plan.shards.file_bytes + (plan.shards.value_bytes if table.verbatim else 0)
    trap = metadata_trap(plan)
    spooled_bytes = sum(cuts.arrow_bytes(table.rows.column(name)) for name in mapped_columns(table.rows))
    largest = int(table.files.sizes.argmax()) if len(table.files) else None
    return {
        "rows": len(table),
        "files": table.file_count(),
        "path_bytes": trap.path_bytes,
        "file_bytes": trap.file_bytes,
        "largest_file": None
        if largest is None
        else {"path": table.files.path(largest), "bytes": int(table.files.sizes[largest])},
        "largest_row_bytes": int(row_bytes.max()) if len(table) else 0,
        "columns": {
            name: {"type": column.kind, "list": column.is_list, "guessed": column.guessed, **_took(table, name)}
            for name, column in table.columns.items()
        },
        "values": {
            field.name: {"type": str(field.type), **_took(table, field.name)}
            for field in table.rows.schema
            if field.name not in table.columns
        },
        "splits": {split.name: split.stop - split.start for split in table.splits},
        "format": plan.format,
        "shards": {
            "count": len(sizes),
            "min_bytes": int(sizes.min()),
            "median_bytes": int(np.median(sizes)),
            "max_bytes": int(sizes.max()),
            "why": plan.why,
        },
        "memory": {
            "need_bytes": forecast.total,
            "base_bytes": forecast.base,
            "worker_bytes": forecast.worker,
            "workers": forecast.workers,
            "limit_bytes": limit.bytes,
            "limit_reason": limit.reason,
        },
        "temporary_disk_bytes": forecast.workers * on_disk_bytes(plan) + spooled_bytes,
        "embedding_in_one_go": {
            "low_bytes": trap.embed_bytes[0],
            "high_bytes": trap.embed_bytes[1],
            "sized_by_path": list(trap.kinds),
        },
        "query": [list(line) for line in table.query],
        "reads": _reads(plan),
        "rows_viewer_refuses": int((row_bytes > VIEWER_ROW_BYTES).sum()),
        "left_out": list(table.left_out),
        "warnings": list(table.warnings),
        "expected": [
            {"name": finding.name, "ok": finding.ok, "detail": finding.detail, "skipped": finding.skipped}
            for finding in table.expected
        ],
        "absent": {"files": list(table.absent), "get": datalad_get(table.absent) if table.absent else None},
        "unmatched": None if table.unmatched is None else table.unmatched.facts(),
        "refused": [{"reason": r.reason, "path": r.path} for r in table.refused],
        "fingerprint": plan.fingerprint,
    }


def plan_lines(plan: Plan, forecast: BuildForecast, limit: Limit, remote: bool = False) -> list[tuple[str, str]]:
    """Return the plan as (label, text) lines; `remote` if the destination is remote."""
    facts = plan_facts(plan, forecast, limit)
    table, shards, memory = plan.table, facts["shards"], facts["memory"]
    lines = [
        *table.query,
        ("rows", f"{facts['rows']:,}  ({', '.join(f'{name} {rows:,}' for name, rows in facts['splits'].items())})"),
        ("files", f"{facts['files']:,}" + _columns(plan)),
        *_by_column(plan),
    ]
    if facts["files"]:
        lines.append(("size of the paths", format_size(facts["path_bytes"])))
        lines.append(("size of the files", format_size(facts["file_bytes"])))
    if facts["largest_file"] is not None:
        largest = facts["largest_file"]
        lines.append(("largest file", f"{format_size(largest['bytes'])}  {largest['path']}"))
        lines.append(("largest row", format_size(facts["largest_row_bytes"])))
    if facts["reads"] is not None and table.query:
        reads = facts["reads"]
        requests = f", at most {reads['requests']:,} requests" if reads["requests"] else ""
        lines.append(("reads", f"{format_size(reads['bytes'])} of {reads['shards']:,} shard(s){requests}"))
    spread = f"{format_size(shards['min_bytes'])} / {format_size(shards['median_bytes'])} / "
    spread += format_size(shards["max_bytes"])
    lines.append(("shards", f"{shards['count']:,} {plan.format} ({shards['why']})"))
    lines.append(("shard sizes", f"{spread}  (smallest / median / largest)"))
    workers = f"{memory['workers']} worker" + ("s" if memory["workers"] != 1 else "")
    lines.append(("memory", f"about {format_size(memory['need_bytes'])} with {workers}; limit {limit}"))
    temporary = facts["temporary_disk_bytes"]
    none = f"0 B: shards are {'sent as they are made' if remote else 'written once, in place'}"
    lines.append(
        ("temporary disk", f"up to {format_size(temporary)}: values that do not fit memory" if temporary else none)
    )
    if facts["files"]:
        lines.append(("memory if loaded at once", _memory_at_once(facts)))
    if facts["rows_viewer_refuses"]:
        lines.append(
            (
                "Hub viewer",
                f"will not show {facts['rows_viewer_refuses']:,} row(s) above {format_size(VIEWER_ROW_BYTES)}; "
                "they load all the same",
            )
        )
    if table.left_out:
        shown = ", ".join(table.left_out[:3]) + ("…" if len(table.left_out) > 3 else "")
        lines.append(("skipped", f"{len(table.left_out)} file(s) too large for the format: {shown}"))
    lines += [("expected", f"{finding.name}: {finding.detail}") for finding in table.expected if not finding.ok]
    if table.absent:
        lines.append(("content missing", f"{absent_text(table)}. Before a build: {datalad_get(table.absent)}"))
    lines += [("unmatched", line) for line in (table.unmatched.lines() if table.unmatched is not None else [])]
    lines += [("note", worded(warning)) for warning in table.warnings]
    return lines


def _took(table: FileTable, name: str) -> dict[str, int]:
    rows, values = table.column_counts(name)
    return {"rows": rows, "files" if name in table.columns else "count": values}


def _by_column(plan: Plan) -> list[tuple[str, str]]:
    """Return the rows and files of each column, for authors of recipes."""
    table = plan.table
    if table.recipe.get("recipe_text") in (None, "files", "bids"):
        return []
    lines = []
    for field in table.rows.schema:
        rows, count = table.column_counts(field.name)
        column = table.columns.get(field.name)
        lists = is_list_type(field.type)
        kind = str(field.type.value_type if lists else field.type) if column is None else column.kind
        contents = f", {count:,} {'texts' if column is None else 'files'}" if column is not None or lists else ""
        lines.append(("column", f"{field.name}: {'list of ' if lists else ''}{kind}, {rows:,} rows{contents}"))
    return lines


def _reads(plan: Plan) -> dict[str, int] | None:
    """Return the bytes and shards that will be read of a dataset, and the requests for remote ones."""
    files = plan.table.files
    if files.ranges is None:
        return None
    _, holders, _, sizes = files.places(np.arange(len(files), dtype=np.int64))
    shards = plan.table.shards_read or len(np.unique(holders[holders >= 0]))
    is_remote = np.isin(holders, np.array(list(files.on_disk.remotes), np.int64))
    requests = int(np.maximum(sizes[is_remote] // READ_BYTES, 1).sum()) if is_remote.any() else 0
    return {"bytes": int(sizes.sum()), "shards": shards, "requests": requests}


def _columns(plan: Plan) -> str:
    columns = plan.table.columns
    if len(columns) > 1 and _by_column(plan):
        return ""  # which lists each column
    parts = [f"{name}: {'list of ' if column.is_list else ''}{column.kind}" for name, column in columns.items()]
    guessed = any(column.guessed for column in columns.values())
    return f"  ({'; '.join(parts)}{'; guessed, --files to change' if guessed else ''})" if parts else ""


def _memory_at_once(facts: dict[str, Any]) -> str:
    embed = facts["embedding_in_one_go"]
    low, high = format_size(embed["low_bytes"]), format_size(embed["high_bytes"])
    text = f"{low} to {high} (2 to 3 × {format_size(facts['file_bytes'])})"
    if embed["sized_by_path"]:
        text += f"; `datasets` counts only the paths of {', '.join(embed['sized_by_path'])} columns and makes one shard"
    return text
