"""A spool: values that had to be decoded or fetched, on disk until the table that names them is forgotten.

What only pyarrow can decode is written to one a few rows at a time.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.errors import SinkFailed
from brim.file_set import Pieces
from brim.formats.parquet_levels import levels_of
from brim.formats.parquet_values import FoundValues, Leaf, Spooling
from brim.formats.readable import Readable, ReadableFile
from brim.formats.scratch import scratch_folder

_HERE = "/proc/self/fd"


class ValueSpool:
    """A file without a name where the system can open such a one by its number: then a kill leaves nothing behind."""

    name = "the spool"

    def __init__(self, folder: str | None = None) -> None:
        self.descriptor, path = tempfile.mkstemp(prefix="brim-spool-", dir=folder or scratch_folder())
        nameless = os.path.isdir(_HERE)
        self.path = f"{_HERE}/{self.descriptor}" if nameless else path
        self._finalizer = weakref.finalize(self, _remove, self.descriptor, None if nameless else path)
        if nameless:
            os.unlink(path)
        self.size = 0

    def append(self, data: Any) -> int:
        """Where the data begins."""
        start = self.size
        self.write_at(start, data)
        return start

    def write_at(self, offset: int, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.size = max(self.size, offset + len(view))
        with _failures():
            while view:
                step = os.pwrite(self.descriptor, view, offset)
                view, offset = view[step:], offset + step

    def extend(self, size: int) -> None:
        """Make the file at least this large; what is not written takes no disk."""
        with _failures():
            os.ftruncate(self.descriptor, max(size, self.size))
        self.size = max(size, self.size)

    def read_at(self, offset: int, size: int) -> bytes:
        return os.pread(self.descriptor, size, offset)

    def copy_to(self, descriptor: int, offset: int, size: int) -> None:
        raise NotImplementedError  # values of a spool go into splices

    def stat(self, mtime_ns: int) -> os.stat_result:
        """What the spool is, with the date of what was spooled: a job that is run again knows it by that."""
        os.utime(self.descriptor, ns=(mtime_ns, mtime_ns))
        return os.fstat(self.descriptor)

    def close(self) -> None:
        self._finalizer()


def _remove(descriptor: int, path: str | None) -> None:
    os.close(descriptor)
    if path is not None:
        os.unlink(path)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SinkFailed(
            f"{scratch_folder()!r}, the folder for temporary files, cannot take more: {error.strerror}.",
            hint="Make room there, or choose another folder with TMPDIR.",
        ) from error


_ROWS = 16


def decode_chunk(file: Readable, group: int, leaf: Leaf, spool: Spooling) -> FoundValues:
    """All values of one column chunk, as ranges of the spool."""
    rows, definition, starts, sizes = [], [], [], []
    before = 0
    with pq.ParquetFile(ReadableFile(file), pre_buffer=False, buffer_size=1 << 20) as parquet:
        for batch in parquet.reader.iter_batches(_ROWS, [group], [leaf.number], use_threads=False):
            field, array = batch.schema.field(0), batch.column(0)
            levels = levels_of(array, field.nullable, leaf.path[-1])
            rows.append(before + np.cumsum(levels.repetition == 0) - 1)
            definition.append(levels.definition.astype(np.uint8))
            before += len(array)
            for value in _values(array).drop_null():
                data = value.as_buffer()
                starts.append(spool.append(data) if data is not None else 0)
                sizes.append(0 if data is None else data.size)
    none = np.zeros(0, np.int64)
    pieces = Pieces(np.zeros(1, np.int64), none, none)
    return FoundValues(
        np.concatenate([none, *rows]), np.concatenate([none.astype(np.uint8), *definition]),
        np.ones(len(sizes), bool), np.array(starts, np.int64), np.array(sizes, np.int64), pieces,
    )  # fmt: skip


def _values(array: Any) -> Any:
    """The bytes inside of a column, without what is null around them."""
    while not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
        array = array.drop_null()
        array = array.field(0) if pa.types.is_struct(array.type) else array.flatten()
    return array
