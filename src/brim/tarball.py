"""Tar members whose bytes depend on name and content only, and folders packed as one of them.

A recording that is a folder (a CTF `.ds`, an `.ome.zarr`) becomes one value: a tar of its files. Its path
ends in "/", so that whoever unpacks it knows that it was a folder.
"""

from __future__ import annotations

import tarfile

from brim.records import dataclass

BLOCK = 512
END = bytes(2 * BLOCK)


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a folder: names inside it, and file numbers."""

    names: tuple[str, ...]
    numbers: tuple[int, ...]


def member_header(name: str, size: int) -> bytes:
    """A header without time or owner; PAX records where the name or size needs them."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def tar_size(members: list[tuple[str, int]]) -> int:
    """The size of the tar of files with these names and sizes."""
    return len(END) + sum(len(member_header(name, size)) + size + -size % BLOCK for name, size in members)
