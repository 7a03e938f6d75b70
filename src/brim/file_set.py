"""The files a job reads: where they are, and what they were when the job was planned.

Kept in columns, because a million files as Python objects take a gigabyte. A file is its number in the
set. A value of a dataset may also be a range of a file that holds many (a memory-mapped Arrow file).
Nothing here reads file content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from brim.buckets.bucket_address import BucketAddress
from brim.buckets.listing import ObjectStat
from brim.errors import SourceChanged
from brim.tarball import Bundle, tar_size

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class AbsentStat:
    """A file whose content is not here, but whose size is known: a key of git-annex tells it."""

    st_size: int
    st_mtime_ns: int = 0
    st_ino: int = 0


Stat = os.stat_result | ObjectStat | AbsentStat

NO_CONTENT = -1  # the holder of a value that has a path perhaps, and no bytes: not the same as an empty one

# How a file stands in a table that is read back: its content and its root-relative path.
FILE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, slots=True)
class FileSet:
    """`paths` are relative to `root`; sizes, mtimes (ns) and inodes are as seen at planning.

    With `ranges`, a value is a part of another file: its path is what is published and may be null, its
    size that of the part; dates and inodes are kept with the file it is part of.

    With `bucket`, the files are objects below that address, and `etags` says which: an ETag takes the place of a date.
    """

    root: str
    paths: pa.Array
    sizes: Ints
    mtimes_ns: Ints
    inodes: Ints
    bundles: Mapping[int, Bundle] = field(default_factory=dict)  # folders packed as one value, by number
    ranges: Ranges | None = None
    bucket: BucketAddress | None = None
    etags: pa.Array | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, number: int) -> str:
        """The root-relative path: this is what is published and what errors name."""
        path = self.paths[number].as_py()
        return self.full_path(number) if path is None else str(path)

    def full_path(self, number: int) -> str:
        """Where the bytes are."""
        if self.bucket is not None:
            return f"{self.bucket}/{self.path(number)}"
        if self.ranges is None:
            return os.path.join(self.root, self.path(number))
        holder = int(self.ranges.holders[number])
        return "" if holder == NO_CONTENT else self.ranges.containers.full_path(holder)

    @property
    def on_disk(self) -> FileSet:
        """The files that are opened: the values themselves, or those that hold them."""
        return self if self.ranges is None else self.ranges.containers

    def has_content(self, numbers: Ints) -> Bools:
        """Which values have bytes, be they none."""
        if self.ranges is None:
            return np.ones(len(numbers), bool)
        return np.asarray(self.ranges.holders[numbers] != NO_CONTENT)

    def places(self, numbers: Ints) -> tuple[Ints, Ints]:
        """The number in `on_disk` of the file that holds each value, and where in it the value starts."""
        if self.ranges is None:
            return numbers, np.zeros(len(numbers), np.int64)
        return self.ranges.holders[numbers], self.ranges.starts[numbers]

    def dates(self, numbers: Ints) -> list[Ints]:
        """What changes when the content of values may have changed although their paths and sizes did not."""
        if self.ranges is None:
            return [self.mtimes_ns[numbers]]
        return [self.ranges.mtimes_ns[self.ranges.holders[numbers]], self.ranges.starts[numbers]]

    def check(self, number: int, now: os.stat_result) -> None:
        """Raise SourceChanged unless the file is still what was planned."""
        if now.st_size != self.sizes[number]:
            what = f"was {self.sizes[number]} bytes when planned and is {now.st_size} now"
        elif now.st_mtime_ns != self.mtimes_ns[number]:
            what = "was written to since the job was planned"
        elif inode_of(now) != self.inodes[number]:
            what = "was replaced by another file since the job was planned"
        else:
            return
        raise self.changed(number, what)

    def changed(self, number: int, what: str) -> SourceChanged:
        path = self.path(number)
        return SourceChanged(
            f"The source file {path!r} {what}; its shard was not written.",
            hint="Let the source come to rest, then run the same command again.",
            path=path,
            what=what,
        )

    def packed(self) -> Bools:
        """Which files stand only for a bundle, or are only inside one."""
        mask = np.zeros(len(self), bool)
        for number, bundle in self.bundles.items():
            mask[number] = True
            mask[list(bundle.numbers)] = True
        return mask

    def anywhere(self) -> FileSet:
        """The same files for a process that works in another folder."""
        return self if "://" in self.root else replace(self, root=os.path.abspath(self.root))

    def take(self, numbers: Ints) -> FileSet:
        """Some of the files, numbered anew in this order; the files inside of their bundles come after them."""
        packed = {number: self.bundles[number] for number in numbers.tolist() if number in self.bundles}
        inside = [member for bundle in packed.values() for member in bundle.numbers]
        numbers = np.concatenate([numbers, np.array(inside, np.int64)])
        place = {number: new for new, number in enumerate(numbers.tolist())} if packed else {}
        bundles = {place[n]: Bundle(b.names, tuple(place[member] for member in b.numbers)) for n, b in packed.items()}
        return FileSet(
            self.root,
            self.paths.take(pa.array(numbers)),
            self.sizes[numbers],
            self.mtimes_ns[numbers],
            self.inodes[numbers],
            bundles,
            ranges=None if self.ranges is None else self.ranges.take(numbers),
            bucket=self.bucket,
            etags=None if self.etags is None else self.etags.take(pa.array(numbers)),
        )


@dataclass(frozen=True, slots=True)
class Ranges:
    """Value i starts at byte `starts[i]` of the container `holders[i]`, which may be NO_CONTENT."""

    containers: FileSet
    holders: Ints
    starts: Ints

    @property
    def mtimes_ns(self) -> Ints:
        """Of each container, with one more at the end for NO_CONTENT."""
        return np.append(self.containers.mtimes_ns, 0)

    def take(self, numbers: Ints) -> Ranges:
        """Some of the values, and of the containers only those that hold one."""
        holders = self.holders[numbers]
        used = np.unique(holders[holders != NO_CONTENT]).astype(np.int64)
        anew = np.searchsorted(used, holders).astype(holders.dtype)
        anew[holders == NO_CONTENT] = NO_CONTENT
        return Ranges(self.containers.take(used), anew, self.starts[numbers])


class FileSetBuilder:
    """Collects files in order. Full blocks are packed as they come, so that few Python objects live."""

    _BLOCK = 65536

    def __init__(self, root: str, bucket: BucketAddress | None = None) -> None:
        self.root = root
        self._bucket = bucket
        self._etags: list[str] = []
        self._packed_etags: list[pa.Array] = []
        self._paths: list[str] = []
        self._stats: list[tuple[int, int, int]] = []
        self._packed_paths: list[pa.Array] = []
        self._packed_stats: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
        self._count = 0
        self._bundles: dict[int, Bundle] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, path: str, stat: Stat) -> int:
        """Add a file and return its number."""
        etag = stat.etag if isinstance(stat, ObjectStat) else ""
        return self._append(path, (stat.st_size, stat.st_mtime_ns, inode_of(stat)), etag)

    def _append(self, path: str, stat: tuple[int, int, int], etag: str = "") -> int:
        self._paths.append(path)
        if self._bucket is not None:
            self._etags.append(etag)
        self._stats.append(stat)
        self._count += 1
        if len(self._paths) == self._BLOCK:
            self._pack()
        return self._count - 1

    def add_bundle(self, path: str, members: list[tuple[str, str, Stat]]) -> int:
        """Add a folder as one value: (name inside, path, stat) of each of its files."""
        numbers = tuple(self.add(member, stat) for _, member, stat in members)
        size = tar_size([(name, stat.st_size) for name, _, stat in members])
        newest = max((stat.st_mtime_ns for _, _, stat in members), default=0)
        number = self._append(path, (size, newest, 0))
        self._bundles[number] = Bundle(tuple(name for name, _, _ in members), numbers)
        return number

    def _pack(self) -> None:
        self._packed_paths.append(pa.array(self._paths, pa.large_string()))
        self._packed_stats.append(np.array(self._stats, np.int64).reshape(-1, 3))
        self._packed_etags.append(pa.array(self._etags, pa.large_string()))
        self._paths, self._stats, self._etags = [], [], []

    def finish(self) -> FileSet:
        self._pack()
        stats = np.concatenate(self._packed_stats)
        paths = pa.concat_arrays(self._packed_paths)
        etags = None if self._bucket is None else pa.concat_arrays(self._packed_etags)
        self._packed_paths, self._packed_stats, self._packed_etags = [], [], []
        sizes, mtimes, inodes = (np.ascontiguousarray(stats[:, i]) for i in range(3))
        return FileSet(self.root, paths, sizes, mtimes, inodes, self._bundles, bucket=self._bucket, etags=etags)


class RangeSetBuilder:
    """Collects values that are parts of other files, a column of them at a time."""

    def __init__(self) -> None:
        self._containers = FileSetBuilder("")
        self._paths: list[pa.Array] = []
        self._places: list[tuple[Ints, Ints, Ints]] = []
        self._count = 0

    def container(self, path: str, stat: Stat) -> int:
        """Add a file, by its absolute path, that holds values or is one."""
        return self._containers.add(path, stat)

    def add(self, paths: pa.Array, holders: Ints, starts: Ints, sizes: Ints) -> Ints:
        """Add values by what is published as their paths and where they lie; their numbers."""
        first = self._count
        self._count += len(paths)
        self._paths.append(paths.cast(pa.large_string()))
        self._places.append((holders.astype(np.int32), starts, sizes))
        return np.arange(first, self._count, dtype=np.int64)

    def finish(self) -> FileSet:
        none = np.zeros(0, np.int64)
        self._places.append((none.astype(np.int32), none, none))
        holders, starts, sizes = (np.concatenate(parts) for parts in zip(*self._places, strict=True))
        paths = pa.concat_arrays([pa.array([], pa.large_string()), *self._paths])
        # Dates and inodes are kept once for each container; a view of one zero stands for those of the values.
        unused = np.broadcast_to(np.zeros(1, np.int64), len(sizes))
        ranges = Ranges(self._containers.finish(), holders, starts)
        return FileSet("/", paths, sizes, unused, unused, ranges=ranges)


def inode_of(stat: Stat) -> int:
    """As it is kept in a FileSet."""
    return stat.st_ino & 0x7FFF_FFFF_FFFF_FFFF  # some network file systems use all 64 bits
