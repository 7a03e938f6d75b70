"""Read row ranges of Parquet and Arrow files, a little at a time.

A Parquet row group may be a gigabyte: its pages are read through a small buffer and decoded a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.ipc import ArrowFile
from brim.sources.rows.unit import Span

_BUFFER_BYTES = 1 << 18
_MOST_ROWS = 8192


def read_arrow(span: Span, shown: str, columns: list[str] | None) -> Iterator[pa.Table]:
    for batch in ArrowFile(span.path, shown).read(span.start, span.end):
        table = pa.Table.from_batches([batch])
        yield table if columns is None else table.select([name for name in columns if name in table.column_names])


def read_parquet(span: Span, shown: str, columns: list[str] | None, block_bytes: int) -> Iterator[pa.Table]:
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(span.path, pre_buffer=False, buffer_size=_BUFFER_BYTES) as file:
            data = file.metadata
            columns = columns if columns is None else [n for n in columns if n in file.schema_arrow.names]
            first = 0
            for number in range(data.num_row_groups):
                group = data.row_group(number)
                if first + group.num_rows > span.start and first < span.end and group.num_rows:
                    row_bytes = max(1, group.total_byte_size // group.num_rows)
                    batch_rows = min(max(block_bytes // row_bytes, 1), _MOST_ROWS)
                    yield from _group(file, number, first, span, batch_rows, columns)
                first += group.num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(span.path, shown).split("\n")[0].rstrip(".")
        raise InputError(
            f"{shown!r} cannot be read as Parquet (rows {span.start:,} to {span.end:,}): {reason}.",
            hint="Write it again.",
        ) from error


def _group(
    file: object, number: int, first: int, span: Span, batch_rows: int, columns: list[str] | None
) -> Iterator[pa.Table]:
    read = file.iter_batches(batch_rows, row_groups=[number], columns=columns, use_threads=False)  # type: ignore[attr-defined]
    for batch in read:
        if first >= span.end:
            return
        low, high = max(span.start - first, 0), min(span.end - first, len(batch))
        first += len(batch)
        if low < high:
            yield pa.Table.from_batches([batch if high - low == len(batch) else batch.slice(low, high - low)])
