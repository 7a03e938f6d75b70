"""Compare the memory that a table needs apart from its values with the limit, before the table is read."""

from __future__ import annotations

from brim.errors import MemoryLimitError
from brim.memory.limit import effective_limit
from brim.sizes import format_size

# Measured on Python 3.11 with pyarrow 26: the interpreter with the imports of a build, and what a column and a row take
# apart from their values (types, readers, writers and the footer; running sums and numbers of files).
BASE_BYTES = 48_000_000
COLUMN_BYTES = 26_000
ROW_BYTES = 48
SPOOLED_BYTES = 5_000_000  # what reading a table to disk took, and the allocator keeps
SPOOLED_WORKER_BYTES = 24_000_000  # what Arrow's allocator keeps for each thread that writes shards of such a table
_WRITER_BYTES = 130_000_000  # at most, for writing the values of a shard
_MANY_COLUMNS, _MANY_ROWS = 1_000, 500_000


def check_table_fits(name: str, memory: str | int | float | None, columns: int, rows: int = 0) -> None:
    """Raise MemoryLimitError if a table of this shape cannot be built within the limit of a job.

    The error names memory that is enough for the whole job, and not only for the part of the table that was read.
    """
    if columns < _MANY_COLUMNS and rows < _MANY_ROWS:
        return
    limit = effective_limit(memory)
    least = BASE_BYTES + COLUMN_BYTES * columns + ROW_BYTES * rows
    if least <= limit.bytes:
        return
    need = least + SPOOLED_BYTES + SPOOLED_WORKER_BYTES + _WRITER_BYTES
    shape = f"has {columns:,} columns" + (f" and {rows:,} rows" if rows else "")
    raise MemoryLimitError(
        f"The table {name!r} {shape}: it needs about {format_size(need)} of memory and the limit is {limit}.",
        hint=f"Raise it with --memory={-(-need // 1_000_000)}MB"
        + (", or leave columns out of the table." if COLUMN_BYTES * columns > least // 2 else "."),
        need_bytes=need,
        limit_bytes=limit.bytes,
    )
