"""A file that is a shard already: its splice is the whole of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from brim.fileset import FileSet
from brim.formats.splice import Splice, SpliceBuilder


class FileSplice(Splice):
    """All of one file, which a folder on the same disk may take as it is instead of a copy."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        stat = path.stat()
        size, mtime, inode = (np.array([value], np.int64) for value in (stat.st_size, stat.st_mtime_ns, stat.st_ino))
        builder = SpliceBuilder(FileSet(str(path.parent), pa.array([path.name]), size, mtime, inode))
        builder.file(0)
        whole = builder.finish()
        super().__init__(whole.files, b"", whole._ends, whole._sources, whole._starts)
        self.path = path
