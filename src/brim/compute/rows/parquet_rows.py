"""Open Parquet files so that reading a row group of a gigabyte takes little memory.

pyarrow reads the pages of each column through a small buffer, all columns in parallel. For an object, each buffer would
be a request. The footer has the byte ranges of the columns of a row group, so each column is a separate stream with
read-ahead, and adjacent small columns share one request.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from brim.compute.rows.open_files import STREAM_BYTES, AnyFile, FileContent, looked_into, open_forward
from brim.compute.rows.unit import changed
from brim.formats.range_readers import FileView
from brim.records import dataclass
from brim.state.atomic_files import open_regular
from brim.storage.reading import AHEAD_BYTES, ForwardFile, RangeStream, RemoteFile
from brim.storage.storage import ByteRange

_BUFFER_BYTES = 1 << 18
_FOOTER_BYTES = 1 << 16
_JOINED_BYTES = 1 << 20  # columns that are smaller together, with the gaps between them, are read as one
_LEAST_BYTES = 1 << 18


@contextmanager
def parquet_file(file: AnyFile, footer: bytes = b"") -> Iterator[ParquetRows]:
    """Open a file to read rows from. `footer` is the end of a remote file, if it was read before."""
    import pyarrow.parquet as pq

    if not isinstance(file, RemoteFile):
        os.close(open_regular(file))  # pyarrow would wait for a FIFO for ever
        with pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES) as parquet:
            yield ParquetRows(parquet)
        return
    with looked_into(file) as content:
        columns = _Columns(file, content, footer)
        source = pa.PythonFile(FileView(columns, 0, file.size), "r")
        try:
            with pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES) as parquet:
                yield ParquetRows(parquet, columns)
        finally:
            columns.close()


def footers(files: Iterable[AnyFile]) -> Iterator[tuple[AnyFile, bytes]]:
    """Yield files with their last bytes, if they are objects; these are requested in parallel."""
    files = list(files)
    remotes = {file.name: file for file in files if isinstance(file, RemoteFile)}
    ranges = [
        ByteRange(file.name, max(file.size - _FOOTER_BYTES, 0), file.size, file.version)
        for file in files
        if isinstance(file, RemoteFile)
    ]

    def replaced_error(byte_range: ByteRange) -> Exception:
        return changed(remotes[byte_range.name].shown)

    location = next((file.location for file in remotes.values()), None)
    stream = None if location is None else RangeStream(location, ranges, replaced_error=replaced_error)
    for file in files:
        yield file, bytes(next(stream)[1]) if stream is not None and isinstance(file, RemoteFile) else b""


class ParquetRows:
    """An open Parquet file."""

    def __init__(self, file: Any, columns: _Columns | None = None) -> None:
        self._file, self._columns = file, columns
        self.metadata: Any = file.metadata
        self.schema: pa.Schema = file.schema_arrow

    def expect(self, groups: list[int], columns: list[str] | None) -> None:
        """Announce the row groups that will be read, in order."""
        if self._columns is not None:
            self._columns.expect([column_ranges(self.metadata.row_group(number), columns) for number in groups])

    def batches(self, group: int, rows: int, columns: list[str] | None) -> Iterator[pa.RecordBatch]:
        if self._columns is not None:
            self._columns.advance()
        yield from self._file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)


def column_ranges(group: Any, columns: list[str] | None) -> list[tuple[int, int]]:
    """Return the byte ranges of the columns of a row group, in file order."""
    ranges = []
    for number in range(group.num_columns):
        column = group.column(number)
        if columns is not None and column.path_in_schema.split(".")[0] not in columns:
            continue
        start = column.data_page_offset
        if column.dictionary_page_offset:
            start = min(start, column.dictionary_page_offset)
        ranges.append((start, start + column.total_compressed_size))
    return sorted(ranges)


@dataclass(slots=True)
class _Window:
    """A range of an object that is being read: one large column, or several small ones, which are kept in memory."""

    start: int
    stop: int
    content: ForwardFile
    whole: bool


class _Columns:
    """The content of an object: the columns of a row group as streams, anything else by single requests."""

    def __init__(self, file: RemoteFile, content: FileContent, footer: bytes) -> None:
        self._file, self._content = file, content
        self._footer, self._footer_at = footer, file.size - len(footer)
        self._groups: list[list[tuple[int, int]]] = []
        self._windows: list[_Window] = []
        self._coming: list[_Window] | None = None

    def expect(self, groups: list[list[tuple[int, int]]]) -> None:
        self._groups = groups[::-1]

    def advance(self) -> None:
        """Start reading the next row group, and the one after it if both are small."""
        _close(self._windows)
        ranges = self._groups.pop()
        self._windows = self._open_windows(ranges) if self._coming is None else self._coming
        self._coming = None
        if self._groups and _size(ranges) + _size(self._groups[-1]) <= AHEAD_BYTES:
            self._coming = self._open_windows(self._groups[-1])

    def _open_windows(self, ranges: list[tuple[int, int]]) -> list[_Window]:
        windows, total = [], max(_size(ranges), 1)
        parts = list(_merge_ranges(ranges))
        least = max(min(AHEAD_BYTES // len(parts), _JOINED_BYTES), _LEAST_BYTES) if parts else 0
        for start, stop in parts:
            ahead_bytes = max(AHEAD_BYTES * (stop - start) // total, 2 * least)
            # About half of the read-ahead, so that two requests run at once.
            piece_bytes = min(1 << (ahead_bytes * 7 // 10).bit_length() - 1, STREAM_BYTES)
            content = open_forward(self._file, start, stop, piece_bytes, 2 * piece_bytes).start()
            windows.append(_Window(start, stop, content, stop - start <= _JOINED_BYTES))
        return windows

    def read_at(self, offset: int, size: int) -> bytes:
        stop = min(offset + size, self._file.size)
        if offset >= self._footer_at:
            return self._footer[offset - self._footer_at : stop - self._footer_at]
        for window in self._windows:
            if window.start <= offset and stop <= window.stop and offset >= window.content.first:
                data = window.content.read_at(offset, stop - offset)
                if not window.whole:
                    window.content.release(stop)
                return data
        return self._content.read_at(offset, size)

    def close(self) -> None:
        _close(self._windows)
        _close(self._coming or [])
        self._windows, self._coming = [], None


def _merge_ranges(ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    current: tuple[int, int] | None = None
    for start, stop in ranges:
        if current is not None and stop - current[0] <= _JOINED_BYTES:
            current = (current[0], max(stop, current[1]))
            continue
        if current is not None:
            yield current
        current = (start, stop)
    if current is not None:
        yield current


def _size(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _close(windows: list[_Window]) -> None:
    for window in windows:
        window.content.close()
