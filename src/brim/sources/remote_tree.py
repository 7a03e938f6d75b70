"""The files below a prefix of a bucket, as a folder: one listing, kept in columns, with lookup by bisection.

A bucket has keys and no folders, so these rules map one to the other:

- `a/b` makes a folder `a`. An empty object `a/`, or an empty `a` if `a/b` exists, is the mark of a folder and no file.
- Where `a` has bytes and `a/b` exists, the folder counts, and a walk refuses the object with the reason "twin": a local
  folder could not hold both.

Keys are sorted with a zero byte in place of /, which is the order of a walk that sorts the names of each folder.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import SourceChangedError
from brim.file_set import Ints, Stat
from brim.memory.release import give_back_heap
from brim.records import dataclass
from brim.sources.folder_tree import HEAD_BYTES, MAX_POINTER_BYTES, Absent, Folder, LocalTree, Tree
from brim.storage.listing import list_files, stat_files
from brim.storage.location import Access, Location, is_remote, parse_location
from brim.storage.reading import RangeStream, RemoteFile
from brim.storage.storage import ByteRange, FileInfo

_BLOCK = 65536
_MARK = -1  # the size of the mark of a folder
_SMALL_BYTES = 1 << 20  # a larger file is not asked for ahead of others
_BUFFER_BYTES = 32 << 20  # of received files that were not read yet
_REQUESTS = 64  # for small files, at a time
_TO_NORMALISE = re.compile(r"/$|//|(^|/)\.\.?(/|$)")


def tree_of(source: str | Tree, access: Access) -> Tree:
    """Return the tree at a path or an address."""
    if not isinstance(source, str):
        return source
    if is_remote(source):
        return ObjectTree.listed(parse_location(source, access))
    return LocalTree(os.path.abspath(source))


class _Texts:
    """The texts of an Arrow array, as bytes."""

    __slots__ = ("_data", "_ends")

    def __init__(self, array: pa.Array) -> None:
        _, offsets, data = array.buffers()
        self._data = memoryview(data if data is not None else b"").cast("B")
        self._ends = memoryview(offsets if offsets is not None else bytes(8)).cast("B").cast("q")

    def __getitem__(self, index: int) -> bytes:
        return bytes(self._data[self._ends[index] : self._ends[index + 1]])


@dataclass(frozen=True, slots=True)
class _Listing:
    """Sorted keys (with zero bytes for slashes), sizes and ETags. Views: a NumPy number takes three times as long."""

    keys: _Texts
    sizes: memoryview
    etags: _Texts

    def __len__(self) -> int:
        return len(self.sizes)

    def key(self, index: int) -> bytes:
        return self.keys[index]

    def find(self, key: bytes, low: int = 0, high: int | None = None) -> int:
        """Return the index of a key, or the index to insert it."""
        return bisect_left(range(len(self)), key, low, len(self) if high is None else high, key=self.key)

    def is_inside(self, index: int, folder: bytes) -> bool:
        """Return whether the key at an index lies in a folder."""
        return index < len(self) and self.key(index).startswith(folder + b"\0")

    def stat(self, index: int) -> FileInfo:
        return FileInfo(self.sizes[index], self.etags[index].decode())


class ObjectTree(Tree):
    """A folder of objects. The listing is shared by the trees below."""

    def __init__(self, address: Location, listing: _Listing, prefix: str = "") -> None:
        super().__init__(str(address))
        self.bucket, self._address, self._listing = address, address, listing
        self._prefix = prefix  # with a slash at the end
        self._next = 0  # where the next look probably finds its path
        self._expected: set[str] = set()
        self._stream: RangeStream | None = None
        self._contents: dict[str, bytes] = {}
        self._received_bytes = 0
        self._last = ("", b"")

    @classmethod
    def listed(cls, address: Location) -> ObjectTree:
        """List everything below an address; it may be empty."""
        return cls(address, _listing(list_files(address), address))

    @classmethod
    def of(cls, address: Location, files: Iterable[tuple[str, FileInfo]]) -> ObjectTree:
        """Return a folder with these objects."""
        return cls(address, _pack(files))

    def __len__(self) -> int:
        return len(self._listing)

    def top(self) -> Folder:
        return Folder()

    def find(self, path: str) -> FileInfo | Folder | Absent:
        index, entry = self._find(path)
        if isinstance(entry, Folder):
            return entry
        return self._listing.stat(index) if entry else "missing"

    def _find(self, path: str) -> tuple[int, Folder | bool]:
        """Return the index of a path in the listing, and the folder, or whether it is a file."""
        key = self._key(path)
        if key is None:
            return 0, False
        if not key:
            return 0, Folder()
        listing = self._listing
        index = self._next
        if index >= len(listing) or listing.key(index) != key:
            index = listing.find(key)
        self._next = index + 1
        if index == len(listing) or listing.key(index) != key:
            return index, Folder() if listing.is_inside(index, key) else False
        if listing.sizes[index] == _MARK or listing.is_inside(index + 1, key):
            return index, Folder(is_file_too=listing.sizes[index] > 0)
        return index, True

    def _key(self, path: str) -> bytes | None:
        """Return the key of a path in the listing; None if it leads out of the tree."""
        if path.startswith("/") or "\0" in path:
            return None
        if not path or _TO_NORMALISE.search(path):
            path = posixpath.normpath(path)
            if path == ".." or path.startswith("../"):
                return None
        full = self._prefix + path if path != "." else self._prefix.rstrip("/")
        return full.replace("/", "\0").encode("utf-8", "surrogateescape")

    def _children(self, folder: str) -> Iterator[tuple[str, bool]]:
        """Yield (name, whether it is a folder) of the entries of a folder, sorted."""
        listing, key = self._listing, self._key(folder)
        if key is None:
            return
        start = key + b"\0" if key else b""
        index = listing.find(start)
        end = listing.find(key + b"\x01", index) if key else len(listing)
        self._next = index
        while index < end:
            name, slash, _ = listing.key(index)[len(start) :].partition(b"\0")
            inside = bool(slash) or listing.is_inside(index + 1, start + name)
            yield name.decode(), inside or listing.sizes[index] == _MARK
            index = listing.find(start + name + b"\x01", index, end) if inside else index + 1

    def names(self, folder: str) -> list[str]:
        names = [name for name, _ in self._children(folder)]
        if not names and not self.is_folder(folder):
            number = errno.ENOTDIR if self.is_file(folder) else errno.ENOENT
            raise OSError(number, os.strerror(number), folder)
        return names

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        folder = folder.strip("/")
        folders: list[str] = []
        files: list[str] = []
        for name, is_folder in self._children(folder):
            (folders if is_folder else files).append(name)
        yield folder, folders, files
        for name in folders:
            yield from self.walk(f"{folder}/{name}" if folder else name)

    def head(self, path: str) -> bytes:
        info = self.stat(path)
        if info.st_size <= MAX_POINTER_BYTES or path in self._expected or path in self._contents:
            return self._read(path)[:HEAD_BYTES]
        return self._fetch(path, HEAD_BYTES)

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self._read(path))

    def _read(self, path: str) -> bytes:
        if self._last[0] == path:
            return self._last[1]
        size = self.size(path)
        data = self._contents.pop(path, None)
        if data is not None:
            self._received_bytes -= len(data)
        else:
            data = self._receive(path) if path in self._expected else self._fetch(path, size)
        self._last = (path, data) if size <= _SMALL_BYTES else ("", b"")
        return data

    def _fetch(self, path: str, size: int) -> bytes:
        file = self._file(posixpath.normpath(path), self.stat(path))
        ranges = file.ranges(0, min(size, file.size))
        return b"".join(view for _, view in RangeStream(self._address, ranges, replaced_error=_replaced_error))

    def _file(self, path: str, info: Stat) -> RemoteFile:
        return RemoteFile(self._address, path, info.st_size, getattr(info, "etag", ""))

    def expect(self, paths: Iterable[str]) -> None:
        infos = {path: info for path in dict.fromkeys(paths) if isinstance(info := self.find(path), FileInfo)}
        small = [path for path, info in infos.items() if info.st_size <= _SMALL_BYTES and path not in self._contents]
        files = [self._file(path, infos[path]) for path in small]
        if self._stream is not None:
            self._stream.close()
        ranges = (ByteRange(file.name, 0, file.size, file.version) for file in files)
        self._stream = RangeStream(self._address, ranges, requests=_REQUESTS, replaced_error=_replaced_error)
        self._expected = {file.name for file in files}

    def _receive(self, path: str) -> bytes:
        """Return a file that was requested ahead. Those that precede it are kept for a while."""
        for byte_range, view in self._stream or ():
            self._expected.discard(byte_range.name)
            if byte_range.name == path:
                return bytes(view)
            self._contents[byte_range.name] = bytes(view)
            self._received_bytes += len(view)
            while self._received_bytes > _BUFFER_BYTES:
                self._received_bytes -= len(self._contents.pop(next(iter(self._contents))))
        raise AssertionError("an expected file is received")

    def below(self, folder: str) -> ObjectTree:
        folder = folder.strip("/")
        return ObjectTree(self._address.child(folder), self._listing, f"{self._prefix}{folder}/") if folder else self

    def canonical_path(self, path: str) -> str:
        return posixpath.normpath(path)


def _replaced_error(byte_range: ByteRange) -> SourceChangedError:
    path = byte_range.name
    return SourceChangedError(
        f"The source file {path!r} was replaced or removed after it was listed.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=path,
    )


def _listing(files: Iterable[tuple[str, FileInfo]], address: Location) -> _Listing:
    """Sort the listing of a store, and mark the empty objects that are marks of folders."""
    listing = _pack(files)
    empty = []
    for index in np.flatnonzero(np.asarray(listing.sizes) == 0).tolist():
        if listing.is_inside(index + 1, listing.key(index)):
            listing.sizes[index] = _MARK
        else:
            empty.append(index)
    # `a/` is listed as `a`, which exists only if it is a file.
    names = (listing.key(index).decode().replace("\0", "/") for index in empty)
    for index, info in zip(empty, stat_files(address, names), strict=True):
        if info is None:
            listing.sizes[index] = _MARK
    return listing


def _pack(files: Iterable[tuple[str, FileInfo]]) -> _Listing:
    keys: list[pa.Array] = [pa.array([], pa.large_string())]
    etags: list[pa.Array] = [pa.array([], pa.large_string())]
    sizes: list[Ints] = [np.zeros(0, np.int64)]
    block: list[tuple[str, FileInfo]] = []

    def pack() -> None:
        keys.append(pa.array([name.replace("/", "\0") for name, _ in block], pa.large_string()))
        etags.append(pa.array([info.etag for _, info in block], pa.large_string()))
        sizes.append(np.array([info.st_size for _, info in block], np.int64))
        block.clear()

    for entry in files:
        block.append(entry)
        if len(block) == _BLOCK:
            pack()
    pack()
    all_keys, all_sizes = pa.concat_arrays(keys), np.concatenate(sizes)
    keys.clear()
    by_key: Any = pa.table({"key": all_keys, "size": all_sizes})
    # `a` and the mark `a/` are listed under one name: the one with bytes comes first and stays.
    order = pc.sort_indices(by_key, sort_keys=[("key", "ascending"), ("size", "descending")])
    sorted_keys = all_keys.take(order)
    fresh = np.ones(len(sorted_keys), bool)
    if len(sorted_keys) > 1:
        fresh[1:] = ~np.array(pc.equal(sorted_keys.slice(1), sorted_keys.slice(0, len(sorted_keys) - 1)), bool)
    if not fresh.all():
        order, sorted_keys = order.filter(pa.array(fresh)), sorted_keys.filter(pa.array(fresh))
    sorted_etags = pa.concat_arrays(etags).take(order)
    listing = _Listing(_Texts(sorted_keys), memoryview(all_sizes[order.to_numpy()]), _Texts(sorted_etags))
    del by_key, all_keys, order, fresh
    etags.clear()
    pa.default_memory_pool().release_unused()
    give_back_heap()
    return listing
