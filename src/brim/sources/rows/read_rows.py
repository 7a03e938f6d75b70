"""Read row ranges of Parquet and Arrow files, a little at a time.

A Parquet row group may be a gigabyte: its pages are read through a small buffer and decoded a batch at a time.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from brim.errors import InputError
from brim.sources.rows.ipc import ArrowFile
from brim.sources.rows.opening import AnyFile
from brim.sources.rows.parquet_file import ParquetRows, parquet_file
from brim.sources.rows.unit import Span

_MOST_ROWS = 8192


def read_arrow(file: AnyFile, span: Span, shown: str, columns: list[str] | None) -> Iterator[pa.Table]:
    opened = ArrowFile(file, shown)
    try:
        for batch in opened.read(span.start, span.end, span.batches):
            table = pa.Table.from_batches([batch])
            yield table if columns is None else table.select([name for name in columns if name in table.column_names])
    finally:
        opened.close()


def read_parquet(
    file: AnyFile, span: Span, shown: str, columns: list[str] | None, block_bytes: int
) -> Iterator[pa.Table]:
    try:
        with parquet_file(file) as opened:
            columns = columns if columns is None else [n for n in columns if n in opened.schema.names]
            wanted, first = list[tuple[int, int, int]](), 0  # group, its first row, rows in a batch
            for number in range(opened.metadata.num_row_groups):
                group = opened.metadata.row_group(number)
                if first + group.num_rows > span.start and first < span.end and group.num_rows:
                    row_bytes = max(1, group.total_byte_size // group.num_rows)
                    wanted.append((number, first, min(max(block_bytes // row_bytes, 1), _MOST_ROWS)))
                first += group.num_rows
            opened.expect([number for number, _, _ in wanted], columns)
            for number, first, batch_rows in wanted:
                yield from _group(opened, number, first, span, batch_rows, columns)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).replace(str(file), shown).split("\n")[0].rstrip(".")
        raise InputError(
            f"{shown!r} cannot be read as Parquet (rows {span.start:,} to {span.end:,}): {reason}.",
            hint="Write it again.",
        ) from error


def _group(
    file: ParquetRows, number: int, first: int, span: Span, batch_rows: int, columns: list[str] | None
) -> Iterator[pa.Table]:
    for batch in file.batches(number, batch_rows, columns):
        if first >= span.end:
            return
        low, high = max(span.start - first, 0), min(span.end - first, len(batch))
        first += len(batch)
        if low < high:
            yield pa.Table.from_batches([batch if high - low == len(batch) else batch.slice(low, high - low)])
