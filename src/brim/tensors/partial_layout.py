"""Decide where values are written while a tensor file is unfinished, and make the final files from them.

If the number of rows is known, the final file has its size and offsets from the start: values are written to their
final offsets, and finishing the file means writing its header. Otherwise each tensor grows in a separate file, and the
kernel copies the header and these files together (`copy_file_range`). A file that is finished with fewer rows than
promised is copied in the same way. Parquet files are written by pyarrow from the grown files.

Bytes put into a stream count only when they are committed: a write that failed half-way is repeated at the same offset.
The checksum is computed on a second thread during the write, because both take about as long.

Receipts and renames: partial_file.py. Headers and offsets of each format: tensor_files.py.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from brim.errors import InputError
from brim.formats.range_readers import copy_range
from brim.records import dataclass
from brim.state.atomic_files import BUFFER_BYTES, write_all
from brim.tensors.tensor_files import RAW_BITS, Body, NpyLayout, SafetensorsLayout, Tensor, npy_path, write_parquet
from brim.tensors.tensor_reader import index_path

_OPEN_FILES = 64
_THREAD_BYTES = 128 * 1024  # the checksum of a smaller block takes less time than handing it to a thread


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A range of a file in the folder. `file_bytes` is the size that the file has from the start, 0 if it grows."""

    file: str
    offset: int
    size: int
    file_bytes: int = 0


FindSpans = Callable[[int, int], Iterator[FileSpan]]  # (start in the stream, size) -> ranges of files


class Files:
    """The files of an unfinished job. Keeps at most 64 of them open and remembers which must be synced."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, int] = {}
        self.changed: set[str] = set()  # files that must be synced

    def descriptor(self, name: str, file_bytes: int = 0) -> int:
        """Open a file for reading and writing; a new file gets its final size immediately."""
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self.close()
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._open[name] = descriptor
            if file_bytes and os.fstat(descriptor).st_size != file_bytes:
                os.ftruncate(descriptor, file_bytes)
        return self._open[name]

    def write(self, span: FileSpan, data: memoryview) -> None:
        descriptor = self.descriptor(span.file, span.file_bytes)
        self.changed.add(span.file)
        write_all(descriptor, data, span.offset)

    def crc(self, span: FileSpan, crc: int) -> int | None:
        """Extend a CRC-32 by a range of a file; return None if the file is too short."""
        buffer = memoryview(bytearray(min(BUFFER_BYTES, span.size)))
        descriptor, offset, remaining = self.descriptor(span.file, span.file_bytes), span.offset, span.size
        while remaining:
            step = os.preadv(descriptor, [buffer[: min(remaining, len(buffer))]], offset)
            if step == 0:
                return None
            crc = zlib.crc32(buffer[:step], crc)
            offset, remaining = offset + step, remaining - step
        return crc

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


def sync_file(path: Path) -> None:
    """Sync a file through a separate descriptor, so that another thread can write at the same time."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Stream:
    """One sequence of bytes. `end` is the number of committed bytes, `crc` their CRC-32 since the last receipt."""

    def __init__(self, files: Files, checksums: ThreadPoolExecutor, find_spans: FindSpans) -> None:
        self.end = 0
        self.crc = 0
        self._files = files
        self._checksums = checksums
        self._find_spans = find_spans
        self._uncommitted = (0, 0)

    def put(self, blocks: Iterable[memoryview]) -> None:
        """Write after the committed bytes."""
        end, crc = self.end, self.crc
        for block in blocks:
            # zlib and the kernel both release Python's lock.
            is_large = len(block) >= _THREAD_BYTES
            checksum: Future[int] | None = self._checksums.submit(zlib.crc32, block, crc) if is_large else None
            try:
                written = 0
                for span in self._find_spans(end, len(block)):
                    self._files.write(span, block[written : written + span.size])
                    written += span.size
            finally:
                crc = zlib.crc32(block, crc) if checksum is None else checksum.result()
            end += len(block)
        self._uncommitted = (end, crc)

    def commit(self) -> None:
        self.end, self.crc = self._uncommitted

    def start_block(self, end: int) -> None:
        """Continue at `end`: the bytes before it have a receipt, and any after it are ignored."""
        self.end, self.crc = end, 0

    def has_checksum(self, start: int, end: int, crc: int) -> bool:
        """Compare a range on disk with its CRC-32."""
        actual = 0
        for span in self._find_spans(start, end - start):
            extended = self._files.crc(span, actual)
            if extended is None:
                return False
            actual = extended
        return actual == crc


SUFFIXES = (".safetensors", ".npy", ".parquet")


@dataclass(frozen=True, slots=True)
class Request:
    """Describe the file to write. `rows` is None if the number of rows is not known."""

    path: Path
    tensors: tuple[Tensor, ...]
    rows: Mapping[str, int] | None
    metadata: Mapping[str, str] | None = None
    shard_bytes: int | None = None

    @property
    def row_bytes(self) -> int:
        return sum(tensor.row_bytes for tensor in self.tensors)

    @property
    def shard_rows(self) -> int | None:
        return None if self.shard_bytes is None else max(1, self.shard_bytes // self.row_bytes)

    def facts(self) -> dict[str, Any]:
        """Return everything that decides the bytes of the result and the layout of the partial folder."""
        return {
            "tensors": [f"{tensor.name}={tensor}" for tensor in self.tensors],
            "rows": None if self.rows is None else dict(self.rows),
            "metadata": None if self.metadata is None else dict(self.metadata),
            "rows in a shard": self.shard_rows,
        }


class BinaryLayout:
    """Lay out .safetensors and .npy files: `layouts` maps each final file to its format.

    `find_spans` has, for each tensor, one function per stream of bytes. `targets` are the files that must not exist
    yet. `need_bytes` is the disk space of the result, None if the number of rows is not known. `checksum` is that of a
    header, so that a header written by another version of the libraries is noticed.
    """

    def __init__(self, request: Request, layouts: Mapping[Path, SafetensorsLayout | NpyLayout]) -> None:
        rows, shard_rows = request.rows, request.shard_rows
        self._request = request
        self._layouts = list(layouts.values())
        self._names = [target.name for target in layouts]
        self._is_direct = rows is not None or shard_rows is not None
        self._bodies: dict[tuple[int, tuple[int, ...]], Body] = {}
        self.targets = list(layouts) if shard_rows is None else [index_path(request.path), request.path]
        self.need_bytes = None if rows is None else sum(each.row_bytes * rows[each.name] for each in request.tensors)
        self.checksum = zlib.crc32(self._body(0, self._planned_rows(0)).header)
        self.find_spans: dict[str, tuple[FindSpans, ...]] = {}
        for number, layout in enumerate(self._layouts):
            for tensor in layout.tensors:
                growing = partial(_growing_spans, f"{len(self.find_spans)}.rows")
                find = partial(self._direct_spans, number, tensor) if self._is_direct else growing
                self.find_spans[tensor.name] = (find,)

    def prepare(self, files: Files, rows: Mapping[str, int]) -> list[tuple[str, str]]:
        """Complete every file inside the folder; return (name in the folder, final name) of each."""
        shard_rows, path = self._request.shard_rows, self._request.path
        count = 1 if shard_rows is None else max(1, -(-max(rows.values()) // shard_rows))
        moves, shards = [], []
        for shard in range(count):
            own_rows = {name: _rows_in_shard(total, shard, shard_rows) for name, total in rows.items()}
            for number, target in enumerate(self._names):
                name = target if shard_rows is None else shard_name(path, shard, count)
                moves.append((self._complete(files, shard, number, own_rows), name))
                shards.append({"file": name, "rows": next(iter(own_rows.values()))})
        if shard_rows is not None:
            index = {"format": "brim row shards", "rows": max(rows.values()), "shards": shards}
            with open(files.folder / "index", "wb", buffering=0) as file:
                write_all(file.fileno(), json.dumps(index, indent=1).encode() + b"\n")
                os.fsync(file.fileno())
            moves.append(("index", index_path(path).name))
        return moves

    def _complete(self, files: Files, shard: int, number: int, rows: Mapping[str, int]) -> str:
        """Write the header before the values, or copy header and values to a new file; return its name."""
        body = self._body(number, rows)
        part = _part_name(shard, number)
        if self._is_direct and self._body(number, self._planned_rows(shard)) == body:
            descriptor = files.descriptor(part, body.size)
            write_all(descriptor, body.header, 0)
            os.fsync(descriptor)
            return part
        copy = f"{part}.whole"
        row_bytes = {tensor.name: tensor.row_bytes for tensor in self._layouts[number].tensors}
        rows_before = shard * (self._request.shard_rows or 0)
        with open(files.folder / copy, "wb", buffering=0) as file:
            write_all(file.fileno(), body.header)
            for name in body.starts:
                find = self.find_spans[name][0]
                for span in find(rows_before * row_bytes[name], rows[name] * row_bytes[name]):
                    source = files.descriptor(span.file, span.file_bytes)
                    copy_range(source, span.offset, span.size, file.fileno())
            os.fsync(file.fileno())
        return copy

    def _planned_rows(self, shard: int) -> dict[str, int]:
        """Return the rows that fit into a part file of known size."""
        rows, shard_rows = self._request.rows, self._request.shard_rows
        return {
            tensor.name: _rows_in_shard(rows[tensor.name], shard, shard_rows) if rows is not None else shard_rows or 0
            for tensor in self._request.tensors
        }

    def _body(self, number: int, rows: Mapping[str, int]) -> Body:
        key = (number, tuple(rows.values()))
        if key not in self._bodies:
            self._bodies[key] = self._layouts[number].body(rows)
        return self._bodies[key]

    def _direct_spans(self, number: int, tensor: Tensor, start: int, size: int) -> Iterator[FileSpan]:
        shard_rows = self._request.shard_rows
        while size > 0:
            shard, offset = (0, start) if shard_rows is None else divmod(start, shard_rows * tensor.row_bytes)
            planned_rows = self._planned_rows(shard)
            body = self._body(number, planned_rows)
            step = min(size, planned_rows[tensor.name] * tensor.row_bytes - offset)
            yield FileSpan(_part_name(shard, number), body.starts[tensor.name] + offset, step, body.size)
            start, size = start + step, size - step


class ParquetLayout:
    """Lay out a Parquet file: each column grows in a separate file, strings in two. Attributes as in BinaryLayout."""

    def __init__(self, request: Request) -> None:
        for tensor in request.tensors:
            if tensor.dtype in RAW_BITS or tensor.dtype == "complex64":
                raise InputError(
                    f"A Parquet file cannot hold {tensor.name!r}: it has no {tensor.dtype}.",
                    hint="Convert it to float16 or float32, or write a .safetensors file.",
                )
        self._request = request
        self._files: dict[str, tuple[str, ...]] = {}
        for number, tensor in enumerate(request.tensors):
            streams = ("lengths", "text") if tensor.is_text else ("rows",)
            self._files[tensor.name] = tuple(f"{number}.{stream}" for stream in streams)
        self.find_spans: dict[str, tuple[FindSpans, ...]] = {
            name: tuple(partial(_growing_spans, file) for file in files) for name, files in self._files.items()
        }
        self.targets = [request.path]
        self.need_bytes = None if request.rows is None else 2 * max(request.rows.values()) * request.row_bytes
        self.checksum = 0

    def prepare(self, files: Files, rows: Mapping[str, int]) -> list[tuple[str, str]]:
        """Write the Parquet file inside the folder; return its name there and its final name."""
        counts = set(rows.values())
        if len(counts) != 1:
            raise InputError("The columns of a Parquet file have the same rows.", hint="Write a .safetensors file.")
        columns = []
        for tensor in self._request.tensors:
            for name in self._files[tensor.name]:
                files.descriptor(name)  # creates the file of a column without rows
            columns.append((tensor, [files.folder / name for name in self._files[tensor.name]]))
        complete = files.folder / "whole"
        write_parquet(complete, columns, counts.pop(), self._request.metadata)
        sync_file(complete)
        return [(complete.name, self._request.path.name)]


def layout_for(request: Request) -> BinaryLayout | ParquetLayout:
    """Choose the format by the suffix of the file name."""
    path, suffix = request.path, request.path.suffix
    if suffix not in SUFFIXES:
        raise InputError(f"{path.name!r} does not end in {', '.join(SUFFIXES)}.", hint="The ending chooses the format.")
    if request.shard_bytes is not None and suffix != ".safetensors":
        raise InputError(f"A {suffix} file is not cut into shards.", hint="Leave shard_size out, or use .safetensors.")
    if request.metadata is not None and suffix == ".npy":
        raise InputError("A .npy file has no room for metadata.", hint="Leave it out, or use .safetensors.")
    if suffix == ".parquet":
        return ParquetLayout(request)
    if suffix == ".safetensors":
        return BinaryLayout(request, {path: SafetensorsLayout(request.tensors, request.metadata)})
    is_single = len(request.tensors) == 1
    return BinaryLayout(request, {npy_path(path, each.name, is_single): NpyLayout(each) for each in request.tensors})


def shard_name(path: Path, shard: int, count: int) -> str:
    return f"{path.stem}-{shard + 1:05d}-of-{count:05d}{path.suffix}"


def _part_name(shard: int, number: int) -> str:
    return f"{shard:05d}.{number}.part"


def _rows_in_shard(rows: int, shard: int, shard_rows: int | None) -> int:
    return rows if shard_rows is None else max(0, min(shard_rows, rows - shard * shard_rows))


def _growing_spans(file: str, start: int, size: int) -> Iterator[FileSpan]:
    if size:
        yield FileSpan(file, start, size)
