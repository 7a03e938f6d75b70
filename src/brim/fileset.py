"""The files a job reads: where they are, and what they were when the job was planned.

Kept in columns, because a million files as Python objects take a gigabyte. A file is its number in the
set. Nothing here reads file content.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from brim.errors import SourceChanged
from brim.tarball import Bundle, tar_size

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]

# How a file stands in a table that is read back: its content and its root-relative path.
FILE_TYPE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@dataclass(frozen=True, slots=True)
class FileSet:
    """`paths` are relative to `root`; sizes, mtimes (ns) and inodes are as seen at planning."""

    root: str
    paths: pa.Array
    sizes: Ints
    mtimes_ns: Ints
    inodes: Ints
    bundles: Mapping[int, Bundle] = field(default_factory=dict)  # folders packed as one value, by number

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, number: int) -> str:
        """The root-relative path: this is what is published and what errors name."""
        return str(self.paths[number].as_py())

    def full_path(self, number: int) -> str:
        return os.path.join(self.root, self.path(number))

    def check(self, number: int, now: os.stat_result) -> None:
        """Raise SourceChanged unless the file is still what was planned."""
        if now.st_size != self.sizes[number]:
            what = f"was {self.sizes[number]} bytes when planned and is {now.st_size} now"
        elif now.st_mtime_ns != self.mtimes_ns[number]:
            what = "was written to since the job was planned"
        elif _inode(now) != self.inodes[number]:
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
        )

    def packed(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which files stand only for a bundle, or are only inside one."""
        mask = np.zeros(len(self), bool)
        for number, bundle in self.bundles.items():
            mask[number] = True
            mask[list(bundle.numbers)] = True
        return mask

    def take(self, numbers: Ints) -> FileSet:
        """Some of the files, numbered anew."""
        if self.bundles:
            raise ValueError("a bundle's files cannot be numbered anew")
        return FileSet(
            self.root,
            self.paths.take(pa.array(numbers)),
            self.sizes[numbers],
            self.mtimes_ns[numbers],
            self.inodes[numbers],
        )


class FileSetBuilder:
    """Collects files in order. Full blocks are packed as they come, so that few Python objects live."""

    _BLOCK = 65536

    def __init__(self, root: str) -> None:
        self.root = root
        self._paths: list[str] = []
        self._stats: list[tuple[int, int, int]] = []
        self._packed_paths: list[pa.Array] = []
        self._packed_stats: list[np.ndarray[tuple[int, int], np.dtype[np.int64]]] = []
        self._count = 0
        self._bundles: dict[int, Bundle] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, path: str, stat: os.stat_result) -> int:
        """Add a file and return its number."""
        return self._append(path, (stat.st_size, stat.st_mtime_ns, _inode(stat)))

    def _append(self, path: str, stat: tuple[int, int, int]) -> int:
        self._paths.append(path)
        self._stats.append(stat)
        self._count += 1
        if len(self._paths) == self._BLOCK:
            self._pack()
        return self._count - 1

    def add_bundle(self, path: str, members: list[tuple[str, str, os.stat_result]]) -> int:
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
        self._paths, self._stats = [], []

    def finish(self) -> FileSet:
        self._pack()
        stats = np.concatenate(self._packed_stats)
        paths = pa.concat_arrays(self._packed_paths)
        self._packed_paths, self._packed_stats = [], []
        sizes, mtimes, inodes = (np.ascontiguousarray(stats[:, i]) for i in range(3))
        return FileSet(self.root, paths, sizes, mtimes, inodes, self._bundles)


def _inode(stat: os.stat_result) -> int:
    return stat.st_ino & 0x7FFF_FFFF_FFFF_FFFF  # some network file systems use all 64 bits
