"""A plan in words and as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np

from brim.memory.limit import Limit
from brim.plans.forecast import VIEWER_ROW_BYTES, Forecast, metadata_trap, on_disk_bytes
from brim.plans.plan import Plan
from brim.sizes import format_size


def plan_facts(plan: Plan, forecast: Forecast, limit: Limit) -> dict[str, Any]:
    """Everything a program may want to know about a plan."""
    table = plan.table
    row_bytes = table.file_bytes()
    # What a source publishes as it stands may be all values and no files.
    sizes = plan.shards.file_bytes + (plan.shards.value_bytes if table.verbatim else 0)
    trap = metadata_trap(plan)
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
            name: {"type": column.kind, "list": column.is_list, "guessed": column.guessed}
            for name, column in table.columns.items()
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
        "temporary_disk_bytes": forecast.workers * on_disk_bytes(plan),
        "embedding_in_one_go": {
            "low_bytes": trap.embed_bytes[0],
            "high_bytes": trap.embed_bytes[1],
            "sized_by_path": list(trap.kinds),
        },
        "rows_viewer_refuses": int((row_bytes > VIEWER_ROW_BYTES).sum()),
        "left_out": list(table.left_out),
        "warnings": list(table.warnings),
        "refused": [{"reason": r.reason, "path": r.path} for r in table.refused],
        "fingerprint": plan.fingerprint,
    }


def plan_lines(plan: Plan, forecast: Forecast, limit: Limit, remote: bool = False) -> list[tuple[str, str]]:
    """The plan as (label, text) lines; `remote` if it is sent somewhere."""
    facts = plan_facts(plan, forecast, limit)
    table, shards, memory = plan.table, facts["shards"], facts["memory"]
    lines = [
        ("rows", f"{facts['rows']:,}" + _splits(facts["splits"])),
        ("files", f"{facts['files']:,}" + _columns(plan)),
    ]
    if facts["files"]:
        lines.append(("as paths", f"{format_size(facts['path_bytes'])}, which is what a table of paths looks like"))
        lines.append(("as data", f"{format_size(facts['file_bytes'])}, which is what it is"))
    if facts["largest_file"] is not None:
        largest = facts["largest_file"]
        lines.append(("largest file", f"{format_size(largest['bytes'])}  {largest['path']}"))
        lines.append(("largest row", format_size(facts["largest_row_bytes"])))
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
        lines.append(("in one go", _one_go(facts)))
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
        lines.append(("left out", f"{len(table.left_out)} file(s) too large for the format: {shown}"))
    lines += [("note", warning) for warning in table.warnings]
    return lines


def _splits(splits: dict[str, int]) -> str:
    return f"  ({', '.join(f'{name} {rows:,}' for name, rows in splits.items())})"


def _columns(plan: Plan) -> str:
    columns = plan.table.columns
    parts = [f"{name}: {'list of ' if column.is_list else ''}{column.kind}" for name, column in columns.items()]
    guessed = any(column.guessed for column in columns.values())
    return f"  ({'; '.join(parts)}{'; guessed, --files to change' if guessed else ''})" if parts else ""


def _one_go(facts: dict[str, Any]) -> str:
    embed = facts["embedding_in_one_go"]
    text = (
        f"embedding all files first would hold {format_size(embed['low_bytes'])} to "
        f"{format_size(embed['high_bytes'])} (2 to 3 × {format_size(facts['file_bytes'])})"
    )
    if embed["sized_by_path"]:
        text += f"; `datasets` sizes {', '.join(embed['sized_by_path'])} columns by their paths and makes one shard"
    return text
