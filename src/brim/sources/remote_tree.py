"""What lies below a place in a bucket, as a folder: one listing, kept in columns, looked up by bisection.

A bucket has keys and no folders, so these rules make one of the other:

- `a/b` makes a folder `a`. An empty object `a/`, or an empty `a` beside `a/b`, is the mark of a folder and no file.
- Where `a` holds bytes and `a/b` exists, the folder counts, and a walk refuses the object (its reason is "twin"): no
  folder on disk could hold both.

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
from typing import Any, BinaryIO, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from brim.errors import SourceChangedError
from brim.file_set import Ints
from brim.memory.release import give_back_heap
from brim.records import dataclass
from brim.sources.folder_tree import HEAD_BYTES, MAX_POINTER_BYTES, Absent, Folder, LocalTree, Tree
from brim.storage.listing import list_objects, stat_objects
from brim.storage.location import Access, Location, is_bucket_address, parse_bucket_address
from brim.storage.reading import Changed, ObjectPiece, ahead, cut
from brim.storage.storage import ObjectStat

_BLOCK = 65536
_MARK = -1  # the size of what is the mark of a folder
_SMALL_BYTES = 1 << 20  # a larger file is not asked for ahead of others
_BUFFER_BYTES = 32 << 20  # of files that came and were not asked for yet
_REQUESTS = 64  # of small files, at a time
_TO_NORMALISE = re.compile(r"/$|//|(^|/)\.\.?(/|$)")


def tree_of(source: str | Tree, access: Access) -> Tree:
    """The tree at a path or an address."""
    if not isinstance(source, str):
        return source
    if is_bucket_address(source):
        return ObjectTree.listed(parse_bucket_address(source, access))
    return LocalTree(os.path.abspath(source))


class _Texts:
    """The texts of an Arrow array, as bytes."""

    __slots__ = ("_data", "_ends")

    def __init__(self, array: pa.Array) -> None:
        _, offsets, data = array.buffers()
        self._data = memoryview(data if data is not None else b"").cast("B")
        self._ends = memoryview(offsets if offsets is not None else bytes(8)).cast("B").cast("q")

    def __getitem__(self, at: int) -> bytes:
        return bytes(self._data[self._ends[at] : self._ends[at + 1]])


@dataclass(frozen=True, slots=True)
class _Listing:
    """Sorted keys (with zero bytes for slashes), sizes and ETags. Views: a NumPy number takes three times as long."""

    keys: _Texts
    sizes: memoryview
    etags: _Texts

    def __len__(self) -> int:
        return len(self.sizes)

    def key(self, at: int) -> bytes:
        return self.keys[at]

    def find(self, key: bytes, low: int = 0, high: int | None = None) -> int:
        """Where a key is, or would be."""
        return bisect_left(range(len(self)), key, low, len(self) if high is None else high, key=self.key)

    def holds(self, at: int, folder: bytes) -> bool:
        """Whether what is at this place lies in a folder."""
        return at < len(self) and self.key(at).startswith(folder + b"\0")

    def stat(self, at: int) -> ObjectStat:
        return ObjectStat(self.sizes[at], self.etags[at].decode())


class ObjectTree:
    """A folder of objects. The listing is shared by the trees below."""

    def __init__(self, address: Location, listing: _Listing, prefix: str = "") -> None:
        self.bucket: Location | None = address
        self.root = str(address)
        self._address, self._listing = address, listing
        self._prefix = prefix  # with a slash at the end
        self._next = 0  # where the next look probably finds what it wants
        self._coming: set[str] = set()
        self._stream: Iterator[tuple[ObjectPiece, bytes]] = iter(())
        self._came: dict[str, bytes] = {}
        self._came_bytes = 0
        self._last = ("", b"")

    @classmethod
    def listed(cls, address: Location) -> ObjectTree:
        """Everything below an address; nothing if nothing is there."""
        return cls(address, _listing(list_objects(address), address))

    @classmethod
    def of(cls, address: Location, found: Iterable[tuple[str, ObjectStat]]) -> ObjectTree:
        """A folder of which these objects are known, and nothing else."""
        return cls(address, _pack(found))

    def __len__(self) -> int:
        return len(self._listing)

    @property
    def shown(self) -> str:
        return self.root

    def top(self) -> Folder:
        return Folder()

    def look(self, path: str) -> ObjectStat | Folder | Absent:
        at, found = self._find(path)
        if isinstance(found, Folder):
            return found
        return self._listing.stat(at) if found else "missing"

    def _find(self, path: str) -> tuple[int, Folder | bool]:
        """Where in the listing something is; whether it is there, or is a folder."""
        key = self._key(path)
        if key is None:
            return 0, False
        if not key:
            return 0, Folder()
        listing = self._listing
        near = self._next
        at = near if near < len(listing) and listing.key(near) == key else listing.find(key)
        self._next = at + 1
        if at == len(listing) or listing.key(at) != key:
            return at, Folder() if listing.holds(at, key) else False
        if listing.sizes[at] == _MARK or listing.holds(at + 1, key):
            return at, Folder(twin=listing.sizes[at] > 0)
        return at, True

    def _key(self, path: str) -> bytes | None:
        """What a path is called in the listing; None if it leads out of the tree."""
        if path.startswith("/") or "\0" in path:
            return None
        if not path or _TO_NORMALISE.search(path):
            path = posixpath.normpath(path)
            if path == ".." or path.startswith("../"):
                return None
        whole = self._prefix + path if path != "." else self._prefix.rstrip("/")
        return whole.replace("/", "\0").encode("utf-8", "surrogateescape")

    def _children(self, folder: str) -> Iterator[tuple[str, bool]]:
        """(name, whether it is a folder) of what is in a folder, sorted."""
        listing, key = self._listing, self._key(folder)
        if key is None:
            return
        start = key + b"\0" if key else b""
        at = listing.find(start)
        end = listing.find(key + b"\x01", at) if key else len(listing)
        self._next = at
        while at < end:
            name, slash, _ = listing.key(at)[len(start) :].partition(b"\0")
            inside = bool(slash) or listing.holds(at + 1, start + name)
            yield name.decode(), inside or listing.sizes[at] == _MARK
            at = listing.find(start + name + b"\x01", at, end) if inside else at + 1

    def names(self, folder: str) -> list[str]:
        found = [name for name, _ in self._children(folder)]
        if not found and not self.is_folder(folder):
            number = errno.ENOTDIR if self.is_file(folder) else errno.ENOENT
            raise OSError(number, os.strerror(number), folder)
        return found

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        folder = folder.strip("/")
        folders: list[str] = []
        files: list[str] = []
        for name, is_folder in self._children(folder):
            (folders if is_folder else files).append(name)
        yield folder, folders, files
        for name in folders:
            yield from self.walk(f"{folder}/{name}" if folder else name)

    def is_there(self, path: str) -> bool:
        return bool(self._find(path)[1])

    def is_folder(self, path: str) -> bool:
        return isinstance(self._find(path)[1], Folder)

    def is_file(self, path: str) -> bool:
        return self._find(path)[1] is True

    def is_link(self, path: str) -> bool:
        return False

    def may_read(self, path: str) -> bool:
        """Nobody knows before it is tried, and a request for each file would take long."""
        return True

    def size(self, path: str) -> int:
        return self._stat(path).st_size

    def _stat(self, path: str) -> ObjectStat:
        found = self.look(path)
        if isinstance(found, ObjectStat):
            return found
        number = errno.EISDIR if isinstance(found, Folder) else errno.ENOENT
        raise OSError(number, os.strerror(number), path)

    def head(self, path: str) -> bytes:
        stat = self._stat(path)
        if stat.st_size <= MAX_POINTER_BYTES or path in self._coming or path in self._came:
            return self._read(path)[:HEAD_BYTES]
        return self._fetched(path, stat, HEAD_BYTES)

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self._read(path))

    def text(
        self, path: str, encoding: str = "utf-8-sig", errors: str = "strict", newline: str | None = None
    ) -> TextIO:
        return io.TextIOWrapper(self.open(path), encoding=encoding, errors=errors, newline=newline)

    def _read(self, path: str) -> bytes:
        if self._last[0] == path:
            return self._last[1]
        stat = self._stat(path)
        data = self._came.pop(path, None)
        if data is not None:
            self._came_bytes -= len(data)
        else:
            data = self._arrived(path) if path in self._coming else self._fetched(path, stat, stat.st_size)
        self._last = (path, data) if stat.st_size <= _SMALL_BYTES else ("", b"")
        return data

    def _fetched(self, path: str, stat: ObjectStat, size: int) -> bytes:
        pieces = cut(self._address.key(posixpath.normpath(path)), 0, min(size, stat.st_size), stat.etag)
        try:
            return b"".join(data for _, data in ahead(self._address, pieces))
        except Changed:
            raise _changed(path) from None

    def expect(self, paths: Iterable[str]) -> None:
        stats = {path: found for path in dict.fromkeys(paths) if isinstance(found := self.look(path), ObjectStat)}
        few = {path: stat for path, stat in stats.items() if stat.st_size <= _SMALL_BYTES and path not in self._came}
        keys = (ObjectPiece(self._address.key(path), 0, stat.st_size, stat.etag) for path, stat in few.items())
        self._stream = ahead(self._address, keys, requests=_REQUESTS)
        self._coming = set(few)

    def _arrived(self, path: str) -> bytes:
        """What was asked for ahead. What comes before it is kept for a while."""
        skip = len(self._address.key("x")) - 1
        try:
            for piece, data in self._stream:
                came = piece.key[skip:]
                self._coming.discard(came)
                if came == path:
                    return data
                self._came[came] = data
                self._came_bytes += len(data)
                while self._came_bytes > _BUFFER_BYTES:
                    self._came_bytes -= len(self._came.pop(next(iter(self._came))))
        except Changed as error:
            raise _changed(error.facts["path"][skip:]) from None
        raise AssertionError("what is expected comes")

    def below(self, folder: str) -> ObjectTree:
        folder = folder.strip("/")
        return ObjectTree(self._address.below(folder), self._listing, f"{self._prefix}{folder}/") if folder else self

    def place(self, path: str) -> str:
        return posixpath.normpath(path)


def _changed(path: str) -> SourceChangedError:
    return SourceChangedError(
        f"The source file {path!r} was replaced or removed after it was listed.",
        hint="Make sure nothing is modifying the source, then run the same command again.",
        path=path,
    )


def _listing(found: Iterable[tuple[str, ObjectStat]], address: Location) -> _Listing:
    """What the store lists, in order, with marks of folders told from empty files."""
    listing = _pack(found)
    alone = []
    for at in np.flatnonzero(np.asarray(listing.sizes) == 0).tolist():
        if listing.holds(at + 1, listing.key(at)):
            listing.sizes[at] = _MARK
        else:
            alone.append(at)
    # `a/` is listed as `a`, which is there to be asked for only if it is a file.
    names = (listing.key(at).decode().replace("\0", "/") for at in alone)
    for at, stat in zip(alone, stat_objects(address, names), strict=True):
        if stat is None:
            listing.sizes[at] = _MARK
    return listing


def _pack(found: Iterable[tuple[str, ObjectStat]]) -> _Listing:
    keys: list[pa.Array] = [pa.array([], pa.large_string())]
    etags: list[pa.Array] = [pa.array([], pa.large_string())]
    sizes: list[Ints] = [np.zeros(0, np.int64)]
    block: list[tuple[str, ObjectStat]] = []

    def pack() -> None:
        keys.append(pa.array([name.replace("/", "\0") for name, _ in block], pa.large_string()))
        etags.append(pa.array([stat.etag for _, stat in block], pa.large_string()))
        sizes.append(np.array([stat.st_size for _, stat in block], np.int64))
        block.clear()

    for entry in found:
        block.append(entry)
        if len(block) == _BLOCK:
            pack()
    pack()
    all_keys, all_sizes = pa.concat_arrays(keys), np.concatenate(sizes)
    keys.clear()
    by_key: Any = pa.table({"key": all_keys, "size": all_sizes})
    # `a` and the mark `a/` are listed under one name: what has bytes comes first and stays.
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
