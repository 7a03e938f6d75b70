"""The source files of a job: their locations, sizes and dates at the time of planning.

Kept in columns, because a million files as Python objects take a gigabyte. A file is its number in the set. A value of
a dataset may also be a range of a file that holds many (a memory-mapped Arrow file, a Parquet shard), or several ranges
of it, its segments. Nothing here reads file content.

A recording that is a folder (a CTF `.ds`, an `.ome.zarr`) becomes one value: a tar of its files, whose bytes depend on
names and content only. Its path ends in "/", so that it is unpacked as a folder.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import field, replace

import numpy as np
import pyarrow as pa

from brim.errors import SourceChangedError, SourceError
from brim.records import dataclass
from brim.storage.location import Location
from brim.storage.reading import RemoteFile
from brim.storage.storage import FileInfo

BLOCK = 512
END = bytes(2 * BLOCK)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a folder: names inside it, and file numbers."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]


def member_header(name: str, size: int) -> bytes:
    """Return a header without time or owner; PAX records where the name or size needs them."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def tar_size(members: list[tuple[str, int]]) -> int:
    """Return the size of the tar of files with these names and sizes."""
    return len(END) + sum(len(member_header(name, size)) + size + -size % BLOCK for name, size in members)


Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


@dataclass(frozen=True, slots=True)
class AbsentStat:
    """A file without content on this machine, whose size is known from its key of git-annex."""

    st_size: int
    st_mtime_ns: int = 0
    st_ino: int = 0


Stat = os.stat_result | FileInfo | AbsentStat

NO_CONTENT = -1  # the container of a value that may have a path, and no bytes: not the same as an empty one

# The type of a file in a table that is read back: its content and its root-relative path.
FILE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, slots=True)
class FileSet:
    """`paths` are relative to `root`; sizes, mtimes (ns) and inodes are as seen at planning.

    With `ranges`, a value is a part of another file: its path is the published one and may be null, its
    size that of the part; dates and inodes are kept with the file it is part of.

    With `bucket`, the files are below that remote location, and `etags` are their versions in place of dates.

    Files that hold the values of `ranges` may be local or remote: `remotes` has the remote ones, by number.
    """

    root: str
    paths: pa.Array
    sizes: Ints
    mtimes_ns: Ints
    inodes: Ints
    bundles: Mapping[int, Bundle] = field(default_factory=dict)  # folders packed as one value, by number
    ranges: Ranges | None = None
    bucket: Location | None = None
    etags: pa.Array | None = None
    holding: bool = False  # whether these are files that hold many values
    remotes: Mapping[int, RemoteFile] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, number: int) -> str:
        """Return the root-relative path, which is published and named in errors."""
        path = self.paths[number].as_py()
        return self.full_path(number) if path is None else str(path)

    def full_path(self, number: int) -> str:
        """Return the path or address of the bytes."""
        if self.bucket is not None:
            return str(self.bucket.child(self.path(number)))
        if self.ranges is None:
            return os.path.join(self.root, self.path(number))
        holder = int(self.ranges.holders[number])
        return "" if holder == NO_CONTENT else self.ranges.containers.full_path(holder)

    @property
    def on_disk(self) -> FileSet:
        """Return the files that are opened: the values themselves, or their containers."""
        return self if self.ranges is None else self.ranges.containers

    def has_content(self, numbers: Ints) -> Bools:
        """Return which values have content, even if it is empty."""
        if self.ranges is None:
            return np.ones(len(numbers), bool)
        return np.asarray(self.ranges.holders[numbers] != NO_CONTENT)

    def places(self, numbers: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return how many segments each value has; then of each segment the file in `on_disk`, its start, its size."""
        ones = np.ones(len(numbers), np.int64)
        if self.ranges is None:
            return ones, numbers, np.zeros(len(numbers), np.int64), self.sizes[numbers]
        holders, starts = self.ranges.holders[numbers], self.ranges.starts[numbers]
        segments = self.ranges.segments
        if segments is None or not (starts < 0).any():
            return ones, holders, starts, self.sizes[numbers]
        chosen, counts = segments.of(starts)
        holders = np.repeat(holders, counts)
        several = np.repeat(starts < 0, counts)
        single = np.repeat(np.arange(len(numbers)), counts)[~several]
        out_starts, out_sizes = np.empty(len(holders), np.int64), np.empty(len(holders), np.int64)
        out_starts[several], out_sizes[several] = segments.starts[chosen], segments.sizes[chosen]
        out_starts[~several], out_sizes[~several] = starts[single], self.sizes[numbers][single]
        return counts, holders, out_starts, out_sizes

    def dates(self, numbers: Ints) -> list[Ints]:
        """Return numbers that change when the content of values may have changed under the same paths and sizes."""
        if self.ranges is None:
            return [self.mtimes_ns[numbers]]
        return [self.ranges.mtimes_ns[self.ranges.holders[numbers]], self.ranges.first_bytes(numbers)]

    def check(self, number: int, now: os.stat_result) -> None:
        """Raise SourceChangedError if the file is not the planned one."""
        if now.st_size != self.sizes[number]:
            change = f"was {self.sizes[number]} bytes when planned and is {now.st_size} now"
        elif now.st_mtime_ns != self.mtimes_ns[number]:
            change = "was written to since the job was planned"
        elif inode_of(now) != self.inodes[number]:
            change = "was replaced by another file since the job was planned"
        else:
            return
        raise self.changed(number, change)

    def changed(self, number: int, change: str) -> SourceChangedError:
        path = self.path(number)
        return SourceChangedError(
            f"The source file {path!r} {change}; its shard was not written.",
            hint="Make sure nothing is modifying the source, then run the same command again.",
            path=path,
            what=change,
        )

    def packed(self) -> Bools:
        """Return which files are a bundle, or inside one."""
        mask = np.zeros(len(self), bool)
        for number, bundle in self.bundles.items():
            mask[number] = True
            mask[list(bundle.numbers)] = True
        return mask

    def anywhere(self) -> FileSet:
        """Return the same files for a process with another working folder."""
        return self if "://" in self.root else replace(self, root=os.path.abspath(self.root))

    def take(self, numbers: Ints) -> FileSet:
        """Return some of the files, renumbered in this order; the files inside of their bundles follow them."""
        packed = {number: self.bundles[number] for number in numbers.tolist() if number in self.bundles}
        inside = [member for bundle in packed.values() for member in bundle.numbers]
        numbers = np.concatenate([numbers, np.array(inside, np.int64)])
        new = {old: number for number, old in enumerate(numbers.tolist())} if packed else {}
        bundles = {new[n]: Bundle(b.names, tuple(new[member] for member in b.numbers)) for n, b in packed.items()}
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
            holding=self.holding,
            remotes={n: self.remotes[old] for n, old in enumerate(numbers.tolist()) if old in self.remotes},
        )


@dataclass(frozen=True, slots=True)
class Segments:
    """Values in several segments: the n-th is segments `edges[n]` to `edges[n + 1]`, each a range of its container."""

    edges: Ints
    starts: Ints
    sizes: Ints

    def of(self, starts: Ints) -> tuple[Ints, Ints]:
        """Return the segments of the values that have any, in order; and how many each value has, 1 for a range."""
        several = starts < 0
        numbers = -1 - starts[several]
        first, counts = self.edges[numbers], self.edges[numbers + 1] - self.edges[numbers]
        every = np.ones(len(starts), np.int64)
        every[several] = counts
        before = np.cumsum(counts) - counts
        return np.repeat(first - before, counts) + np.arange(int(counts.sum())), every

    def take(self, starts: Ints) -> tuple[Segments, Ints]:
        """Return the segments of some values, and the starts of these, renumbered."""
        chosen, counts = self.of(starts)
        several = starts < 0
        edges = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[several])])
        renumbered = starts.copy()
        renumbered[several] = -1 - np.arange(int(several.sum()))
        return Segments(edges, self.starts[chosen], self.sizes[chosen]), renumbered


@dataclass(frozen=True, slots=True)
class Ranges:
    """Value i starts at byte `starts[i]` of the container `holders[i]`, which may be NO_CONTENT.

    A start below zero, -1 - n, means the n-th of `segments`.
    """

    containers: FileSet
    holders: Ints
    starts: Ints
    segments: Segments | None = None

    def first_bytes(self, numbers: Ints) -> Ints:
        """Return the offset of the first byte of each value in its container."""
        starts = self.starts[numbers]
        if self.segments is None or not (starts < 0).any():
            return starts
        several = starts < 0
        first = np.minimum(self.segments.edges[-1 - starts[several]], len(self.segments.starts) - 1)
        starts = starts.copy()
        starts[several] = self.segments.starts[first]
        return starts

    @property
    def mtimes_ns(self) -> Ints:
        """Return the date of each container, with one more at the end for NO_CONTENT."""
        return np.append(self.containers.mtimes_ns, 0)

    def take(self, numbers: Ints) -> Ranges:
        """Return some of the values, and of the containers only those that hold one."""
        holders = self.holders[numbers]
        used = np.unique(holders[holders != NO_CONTENT]).astype(np.int64)
        renumbered = np.searchsorted(used, holders).astype(holders.dtype)
        renumbered[holders == NO_CONTENT] = NO_CONTENT
        segments, starts = self.segments, self.starts[numbers]
        if segments is not None:
            segments, starts = segments.take(starts)
        return Ranges(self.containers.take(used), renumbered, starts, segments)


class FileSetBuilder:
    """Collects files in order. Each full block is packed at once, so that few Python objects live."""

    _BLOCK = 65536

    def __init__(self, root: str, bucket: Location | None = None) -> None:
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
        etag = stat.etag if isinstance(stat, FileInfo) else ""
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
        """Add a folder as one value: (name in the folder, path, stat) of each of its files."""
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
        self._remotes: dict[int, RemoteFile] = {}
        self._promised: list[int | None] = []
        self._paths: list[pa.Array] = []
        self._values: list[tuple[Ints, Ints, Ints]] = []
        self._columns: list[Segments] = []
        self._segmented = 0
        self._count = 0

    def container(self, path: str, stat: Stat, remote: RemoteFile | None = None) -> int:
        """Add a container, or a file that is a value, by its absolute path or its address."""
        number = self._containers.add(path, stat)
        if remote is not None:
            self._remotes[number] = remote
        return number

    def add_container(self, path: str, files: FileSet, number: int, remote: RemoteFile | None) -> int:
        """Add a container of another set."""
        stat = (int(files.sizes[number]), int(files.mtimes_ns[number]), int(files.inodes[number]))
        added = self._containers._append(path, stat)
        if remote is not None:
            self._remotes[added] = remote
        return added

    def promised(self) -> int:
        """Return a number for a container that is being written; `keep` adds it when it is complete."""
        self._promised.append(None)
        return NO_CONTENT - len(self._promised)

    def keep(self, promise: int, path: str, stat: Stat) -> None:
        self._promised[NO_CONTENT - promise - 1] = self.container(path, stat)

    def add(self, paths: pa.Array, holders: Ints, starts: Ints, sizes: Ints, segments: Segments | None = None) -> Ints:
        """Add values by their published paths and their ranges; return their numbers.

        A start below zero means one of `segments`, as in Ranges.
        """
        first = self._count
        self._count += len(paths)
        self._paths.append(paths.cast(pa.large_string()))
        if segments is not None and len(segments.edges) > 1:
            starts = np.where(starts < 0, starts - self._segmented, starts)
            self._segmented += len(segments.edges) - 1
            self._columns.append(segments)
        self._values.append((holders.astype(np.int32), starts, sizes))
        return np.arange(first, self._count, dtype=np.int64)

    def finish(self) -> FileSet:
        none = np.zeros(0, np.int64)
        self._values.append((none.astype(np.int32), none, none))
        holders, starts, sizes = (np.concatenate(parts) for parts in zip(*self._values, strict=True))
        for number, container in enumerate(self._promised):
            if container is not None:
                holders[holders == NO_CONTENT - number - 1] = container
        paths = pa.concat_arrays([pa.array([], pa.large_string()), *self._paths])
        # Dates and inodes are kept once per container; those of the values are views of one zero.
        unused = np.broadcast_to(np.zeros(1, np.int64), len(sizes))
        containers = replace(self._containers.finish(), holding=True, remotes=self._remotes)
        ranges = Ranges(containers, holders, starts, _concatenate(self._columns))
        return FileSet("/", paths, sizes, unused, unused, ranges=ranges)


def join_sets(sets: Sequence[FileSet]) -> FileSet:
    """Concatenate sets: the numbers of each follow those of the previous ones."""
    builder = RangeSetBuilder()
    for files in sets:
        if files.bundles:
            raise SourceError("Folders that are packed as one value cannot be joined with another source.")
        opened = files.on_disk
        numbers = []
        for number in range(len(opened)):
            path = opened.full_path(number)
            remote = opened.remotes.get(number)
            if opened.bucket is not None:
                etag = "" if opened.etags is None else str(opened.etags[number].as_py())
                remote = RemoteFile(opened.bucket, opened.path(number), int(opened.sizes[number]), etag)
            elif remote is None:
                path = path if path.startswith("/") else os.path.abspath(path)
            numbers.append(builder.add_container(path, opened, number, remote))
        holders = np.array([*numbers, NO_CONTENT], np.int64)  # NO_CONTENT, -1, refers to the last
        if files.ranges is None:
            builder.add(files.paths, holders[:-1], np.zeros(len(files), np.int64), files.sizes)
        else:
            ranges = files.ranges
            builder.add(files.paths, holders[ranges.holders], ranges.starts, files.sizes, ranges.segments)
    return builder.finish()


def _concatenate(columns: list[Segments]) -> Segments | None:
    """Return the segments of columns that were added one after the other."""
    if not columns:
        return None
    edges, before = [np.zeros(1, np.int64)], 0
    for column in columns:
        edges.append(column.edges[1:] + before)
        before += len(column.starts)
    starts, sizes = ([getattr(column, name) for column in columns] for name in ("starts", "sizes"))
    return Segments(np.concatenate(edges), np.concatenate(starts), np.concatenate(sizes))


def inode_of(stat: Stat) -> int:
    """Return the inode as a FileSet keeps it."""
    return stat.st_ino & 0x7FFF_FFFF_FFFF_FFFF  # some network file systems use all 64 bits
