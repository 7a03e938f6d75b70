"""What sources do with a folder, wherever it is: list it, look at a name, read a small file.

`LocalTree` is a folder on disk, `ObjectTree` (object_tree.py) what lies below a place in a bucket. Paths are relative
to the top of the tree, with / between names. Errors are those of the operating system: a missing file is a
FileNotFoundError in a bucket too.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal, Protocol, TextIO

from brim.fileset import Stat
from brim.objects.address import ObjectAddress
from brim.sources.pointers import HEAD_BYTES, is_annex_link

Absent = Literal["missing", "annex", "unreadable", "special", "loop"]


@dataclass(frozen=True, slots=True)
class Folder:
    """What a name may be instead of a file. `identity` tells a link that leads back into its own path."""

    identity: tuple[int, int] | None = None
    twin: bool = False  # in a bucket, an object may have the name of a folder


class Tree(Protocol):
    """A folder of files. `bucket` is where it is if that is no local folder."""

    root: str
    bucket: ObjectAddress | None

    @property
    def shown(self) -> str:
        """The last part of its name, for messages."""

    def top(self) -> Folder:
        """The folder itself; OSError if it cannot be looked at."""

    def look(self, path: str) -> Stat | Folder | Absent:
        """What is there, or why there is nothing to take."""

    def names(self, folder: str) -> list[str]:
        """What is in a folder, in no particular order."""

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """(folder, names of folders, names of files) from the top down, as os.walk does it."""

    def is_there(self, path: str) -> bool:
        """Whether there is anything by this name, be it a link that leads nowhere."""

    def is_folder(self, path: str) -> bool: ...
    def is_file(self, path: str) -> bool: ...
    def is_link(self, path: str) -> bool: ...
    def may_read(self, path: str) -> bool: ...
    def size(self, path: str) -> int: ...

    def head(self, path: str) -> bytes:
        """The first bytes of a file, enough to tell a pointer from data."""

    def open(self, path: str) -> BinaryIO:
        """A small file, to read."""

    def text(
        self, path: str, encoding: str = "utf-8-sig", errors: str = "strict", newline: str | None = None
    ) -> TextIO: ...

    def expect(self, paths: Iterable[str]) -> None:
        """These small files will be read next, in about this order: where that helps, they are asked for ahead."""

    def below(self, folder: str) -> Tree:
        """A folder of this one as a tree of its own."""

    def place(self, path: str) -> str:
        """A name for the file that all spellings of its path share."""


class LocalTree:
    """A folder on disk. Symbolic links are followed."""

    bucket: ObjectAddress | None = None

    def __init__(self, root: str) -> None:
        self.root = root

    @property
    def shown(self) -> str:
        return os.path.basename(self.root)

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path)

    def top(self) -> Folder:
        found = os.stat(self.root)
        return Folder((found.st_dev, found.st_ino))

    def look(self, path: str) -> Stat | Folder | Absent:
        full = self._full(path)
        try:
            found = os.stat(full)
        except FileNotFoundError:
            return "annex" if is_annex_link(full) else "missing"
        except NotADirectoryError:
            return "missing"
        except OSError as error:
            return "loop" if error.errno == errno.ELOOP else "unreadable"
        if stat.S_ISDIR(found.st_mode):
            return Folder((found.st_dev, found.st_ino))
        return found if stat.S_ISREG(found.st_mode) else "special"

    def names(self, folder: str) -> list[str]:
        return os.listdir(self._full(folder))

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for full, folders, files in os.walk(self._full(folder)):
            inside = os.path.relpath(full, self.root)
            yield "" if inside == "." else inside, folders, files

    def is_there(self, path: str) -> bool:
        return os.path.lexists(self._full(path))

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(self._full(path))

    def is_file(self, path: str) -> bool:
        return os.path.isfile(self._full(path))

    def is_link(self, path: str) -> bool:
        return os.path.islink(self._full(path))

    def may_read(self, path: str) -> bool:
        return os.access(self._full(path), os.R_OK)

    def size(self, path: str) -> int:
        return os.path.getsize(self._full(path))

    def head(self, path: str) -> bytes:
        descriptor = os.open(self._full(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, HEAD_BYTES)
        finally:
            os.close(descriptor)

    def open(self, path: str) -> BinaryIO:
        return open(self._full(path), "rb")

    def text(
        self, path: str, encoding: str = "utf-8-sig", errors: str = "strict", newline: str | None = None
    ) -> TextIO:
        return open(self._full(path), encoding=encoding, errors=errors, newline=newline)

    def expect(self, paths: Iterable[str]) -> None:
        """The kernel reads ahead by itself."""

    def below(self, folder: str) -> LocalTree:
        return LocalTree(self._full(folder))

    def place(self, path: str) -> str:
        """The absolute path. Where `..` follows a link, only the real folder leads to the same file."""
        full = self._full(path)
        if ".." in path.split("/"):
            folder, name = os.path.split(full)
            return os.path.join(os.path.realpath(folder), name)
        return os.path.normpath(full)
