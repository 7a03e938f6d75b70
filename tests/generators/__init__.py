"""Copies of the layouts of published datasets, with tiny or sparse files, and the expected rows."""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Layout:
    """The files of a generator: the expected rows in order, and each file's content (None: sparse)."""

    root: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    contents: dict[str, bytes | None] = field(default_factory=dict)
    total_bytes: int = 0

    def write(self, path: str, size: int | None = None) -> str:
        """Write a tiny NIfTI image whose voxels encode its path, or a sparse file of `size`."""
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        if size is None:
            self.contents[path] = tiny_nifti(path)
            full.write_bytes(self.contents[path] or b"")
        else:
            self.contents[path] = None
            with open(full, "wb") as file:
                os.truncate(file.fileno(), size)
        self.total_bytes += os.path.getsize(full)
        return path

    def text(self, path: str, content: str) -> str:
        """Write a text file and return its content, including the last newline."""
        full = self.root / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_text(content, encoding="utf-8", newline="")
        return content

    def count(self, column: str) -> int:
        """Return the number of rows with a value in a column."""
        return sum(row[column] not in (None, []) for row in self.rows)


def tiny_nifti(seed: str) -> bytes:
    """Return a valid .nii.gz of a few hundred bytes."""
    voxels = seed.encode()
    header = bytearray(352)
    struct.pack_into("<i", header, 0, 348)
    struct.pack_into("<8h", header, 40, 3, len(voxels), 1, 1, 1, 1, 1, 1)
    struct.pack_into("<2h", header, 70, 2, 8)  # type code of unsigned bytes
    struct.pack_into("<8f", header, 76, *[1.0] * 8)
    struct.pack_into("<f", header, 108, 352.0)
    header[344:348] = b"n+1\0"
    return gzip.compress(bytes(header) + voxels, mtime=0)


def with_more(present: list[bool], files: int, skip: int = 0) -> list[int]:
    """Return the number of files of each item, `files` in total: after `skip`, the first ones have one more."""
    holders = max(sum(present), 1)
    base, extra = divmod(max(files, sum(present)), holders)
    counts, observed = [], 0
    for existing in present:
        counts.append((base + (skip <= observed < skip + extra)) * existing)
        observed += existing
    return counts


def spread(count: int, total: int) -> list[bool]:
    """Return `count` of `total` positions, evenly spread."""
    return [(i + 1) * count // total > i * count // total for i in range(total)]
