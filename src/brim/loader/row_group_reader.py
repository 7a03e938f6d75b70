"""Read stretches of row groups in order, a few megabytes ahead, in a thread.

Small row groups of remote files share one stream of requests, whichever file they are in. Large ones are read page by
page, so that a row group of a gigabyte takes a few megabytes. Every request names the version of the file that was
opened: a file that was replaced or removed is SourceChangedError.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from brim.compute.rows.parquet_rows import column_ranges, parquet_file
from brim.errors import BrimError, StoppedError
from brim.formats.range_readers import FileView
from brim.loader.epoch_order import Stretch
from brim.loader.parquet_groups import RowGroups, read_footers
from brim.sources.dataset_files import DatasetFile, changed_file
from brim.sources.hive_partitions import partition_array
from brim.sources.parquet_shards import BROKEN, broken
from brim.sources.parquet_source import plain_table
from brim.state.retry import interrupted_by
from brim.storage.location import Location
from brim.storage.reading import RangeStream, join_ranges
from brim.storage.storage import ByteRange

_PIECE_BYTES = 4 << 20  # of a row group that is read page by page
_MOST_PIECE_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20
_KNOWN_FOOTERS = 32
_WAIT_S = 0.2


class _FetchedRanges:
    """The bytes of some ranges of a file, for pyarrow to read."""

    def __init__(self, size: int, parts: list[tuple[int, memoryview]]) -> None:
        self.size, self._parts = size, parts

    def read_at(self, offset: int, size: int) -> bytes:
        for start, data in self._parts:
            if start <= offset < start + len(data):
                return bytes(data[offset - start : offset - start + size])
        raise ValueError("a column lies outside of the ranges that its footer names")


class RowGroupReader:
    """Reads columns of row groups. `ahead_bytes` limits requested bytes, and the size of a row group read at once."""

    def __init__(self, groups: RowGroups, ahead_bytes: int, *, threads: bool = False) -> None:
        self._groups, self._ahead_bytes, self._threads = groups, ahead_bytes, threads
        self._most_bytes = max(ahead_bytes // 2, _PIECE_BYTES)
        self._columns = list(groups.schema.names)
        self._footers: dict[int, Any] = {}
        self._opened: tuple[tuple[int, int], Any] | None = None

    def tables(self, stretches: Iterable[Stretch]) -> Iterator[pa.Table]:
        """Yield the rows of stretches in order, in tables of any size."""
        locations = {file.remote.location for file in self._groups.files if file.remote is not None}
        own, *others = itertools.tee(stretches, len(locations) + 1)
        streams = {location: self._requests(location, other) for location, other in zip(locations, others, strict=True)}
        try:
            for stretch in own:
                file = self._groups.files[int(self._groups.file[stretch.block])]
                try:
                    yield from self._stretch(stretch, file, streams)
                except BrimError:
                    raise
                except FileNotFoundError:
                    raise changed_file(file) from None
                except BROKEN as error:
                    raise broken(file, error) from error
        finally:
            for stream in streams.values():
                stream.close()
            self.close()

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def _stretch(self, stretch: Stretch, file: DatasetFile, streams: dict[Location, RangeStream]) -> Iterator[pa.Table]:
        groups, block = self._groups, stretch.block
        number, group = int(groups.file[block]), int(groups.group[block])
        names = [name for name in self._columns if name in self._names(number)]
        chosen = groups.chosen.get(block)
        position = 0
        for table in self._row_group(number, group, block, names, streams):
            start, stop = position, position + len(table)
            position = stop
            if chosen is not None:
                wanted = chosen[stretch.start : stretch.stop]
                wanted = wanted[(wanted >= start) & (wanted < stop)] - start
                part = table.take(pa.array(wanted))
                is_over = stop > chosen[stretch.stop - 1]
            else:
                part = table.slice(max(stretch.start - start, 0), max(stretch.stop - max(start, stretch.start), 0))
                is_over = stop >= stretch.stop
            if len(part):
                yield self._conformed(part, file)
            if is_over:
                return
        raise ValueError("a row group has fewer rows than its footer says")

    def _row_group(
        self, number: int, group: int, block: int, names: list[str], streams: dict[Location, RangeStream]
    ) -> Iterator[pa.Table]:
        """Yield the rows of a row group: all at once if it is small, otherwise a few pages at a time."""
        file, metadata = self._groups.files[number], self._footer(number)
        rows, size = metadata.row_group(group).num_rows, int(self._groups.bytes[block])
        if not names:
            yield pa.table({"": pa.nulls(rows)})
            return
        is_small = size <= self._most_bytes
        piece_rows = max(min(rows * _PIECE_BYTES // max(size, 1), _MOST_PIECE_ROWS), 1)
        if file.remote is None:
            parquet = self._open_local(number, file, metadata, 0 if is_small else _BUFFER_BYTES)
            if is_small:
                yield parquet.read_row_group(group, columns=names, use_threads=self._threads)
            else:
                for batch in parquet.iter_batches(piece_rows, [group], names, use_threads=False):
                    yield pa.Table.from_batches([batch])
        elif is_small:
            parts, stream = list[tuple[int, memoryview]](), streams[file.remote.location]
            for start, stop in self._ranges(number, group, names):
                pieces = [next(stream)[1] for _ in file.remote.ranges(start, stop)]
                parts.append((start, pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))))
            source = pa.PythonFile(FileView(_FetchedRanges(file.remote.size, parts)), "r")
            with pq.ParquetFile(source, metadata=metadata, pre_buffer=False) as parquet:
                yield parquet.read_row_group(group, columns=names, use_threads=False)
        else:
            with parquet_file(file.remote) as opened:
                opened.expect([group], names)
                for batch in opened.batches(group, piece_rows, names):
                    yield pa.Table.from_batches([batch])

    def _open_local(self, number: int, file: DatasetFile, metadata: Any, buffer_bytes: int) -> Any:
        if self._opened is None or self._opened[0] != (number, buffer_bytes):
            self.close()
            found = os.stat(file.path)
            if (found.st_size, found.st_mtime_ns) != (file.stat.st_size, file.stat.st_mtime_ns):
                raise changed_file(file)
            parquet = pq.ParquetFile(file.path, metadata=metadata, pre_buffer=False, buffer_size=buffer_bytes)
            self._opened = (number, buffer_bytes), parquet
        return self._opened[1]

    def _requests(self, location: Location, stretches: Iterator[Stretch]) -> RangeStream:
        """Return the stream of requests for the small row groups that lie in one location."""
        groups = self._groups

        def ranges() -> Iterator[ByteRange]:
            for stretch in stretches:
                number = int(groups.file[stretch.block])
                remote = groups.files[number].remote
                if remote is None or remote.location != location:
                    continue
                if int(groups.bytes[stretch.block]) <= self._most_bytes:
                    names = [name for name in self._columns if name in self._names(number)]
                    for start, stop in self._ranges(number, int(groups.group[stretch.block]), names):
                        yield from remote.ranges(start, stop)

        by_name = {file.remote.name: file for file in groups.files if file.remote is not None}
        return RangeStream(
            location, ranges(), ahead_bytes=self._ahead_bytes, replaced_error=lambda r: changed_file(by_name[r.name])
        )

    def _ranges(self, number: int, group: int, names: list[str]) -> list[tuple[int, int]]:
        return join_ranges(column_ranges(self._footer(number).row_group(group), names)) if names else []

    def _names(self, number: int) -> set[str]:
        schema = self._footer(number).schema
        return {schema.column(leaf).path.partition(".")[0] for leaf in range(len(schema))}

    def _footer(self, number: int) -> Any:
        if number in self._groups.metadata:
            return self._groups.metadata[number]
        if number not in self._footers:
            while len(self._footers) >= _KNOWN_FOOTERS:
                self._footers.pop(next(iter(self._footers)))
            (self._footers[number],) = read_footers([self._groups.files[number]])
        return self._footers[number]

    def _conformed(self, table: pa.Table, file: DatasetFile) -> pa.Table:
        """Return rows with the columns and types of the dataset, and with those columns that folders name."""
        schema = self._groups.schema
        if table.schema.types == schema.types and table.column_names == schema.names:
            return table.replace_schema_metadata(None)
        known, columns = plain_table(table), []
        for field in schema:
            if field.name in known.column_names:
                columns.append(known.column(field.name).cast(field.type))
            else:
                columns.append(pa.chunked_array([partition_array(file.shown, field, len(table))]))
        return pa.Table.from_arrays(columns, schema=schema)


class ReadAhead:
    """Runs an iterator of tables in a thread, up to `most_bytes` ahead of the caller."""

    def __init__(self, tables: Iterator[pa.Table], most_bytes: int) -> None:
        self._tables, self._most_bytes = tables, most_bytes
        self._changed = threading.Condition()
        self._ready: deque[tuple[pa.Table, int]] = deque()
        self._bytes, self._is_closed, self._is_over = 0, False, False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="brim-loader", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self._is_closed:
            raise StoppedError("The loader was closed.")

    def _run(self) -> None:
        try:
            with interrupted_by(self._check):
                for table in self._tables:
                    size = table.nbytes
                    with self._changed:
                        self._ready.append((table, size))
                        self._bytes += size
                        self._changed.notify_all()
                        while self._bytes >= self._most_bytes and not self._is_closed:
                            self._changed.wait()
                    del table
                    self._check()
        except BaseException as error:  # noqa: BLE001  raised in the thread of the caller
            self._error = error
        finally:
            close = getattr(self._tables, "close", None)
            if close is not None:
                close()
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def __iter__(self) -> Iterator[pa.Table]:
        while True:
            with self._changed:
                while not self._ready and not self._is_over:
                    self._changed.wait(_WAIT_S)  # so that Ctrl-C is handled
                if not self._ready:
                    break
                table, size = self._ready.popleft()
                self._bytes -= size
                self._changed.notify_all()
            yield table
            del table
        if self._error is not None and not self._is_closed:
            raise self._error

    def close(self) -> None:
        """End the thread: a request that it waits for is dropped."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=2)
