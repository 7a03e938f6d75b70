"""What sources do with a folder, wherever it is: list it, look at a name, read a small file.

`LocalTree` is a folder on disk, `ObjectTree` (remote_tree.py) the files below a prefix of a bucket. Paths are relative
to the top of the tree, with / between names. Errors are those of the operating system: a missing file is a
FileNotFoundError in a bucket too.
"""

from __future__ import annotations

import errno
import io
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import field
from typing import BinaryIO, Literal, TextIO

from brim.errors import SourceError
from brim.file_set import AbsentStat, Stat
from brim.records import dataclass
from brim.sources.file_table import Refused
from brim.state.atomic_files import open_regular, reason
from brim.storage.location import Location


def natural(text: str) -> tuple[object, ...]:
    """Return a key for sorting: numbers by value (then by their digits), everything else by character."""
    parts = (part for part in re.split(r"([0-9]+)", text) if part)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)


MAX_POINTER_BYTES = 1024
HEAD_BYTES = 64  # enough to tell
_LFS = b"version https://git-lfs.github.com/spec/"
_OLD_LFS = b"version https://hawser.github.com/spec/"
_ANNEX = b"/annex/objects/"

COMMANDS = {
    "annex": "datalad get -r .   (or: git annex get .)",
    "lfs": "git lfs pull",
}


def pointer_kind(head: bytes) -> Literal["annex", "lfs"] | None:
    """Return the kind of pointer that a small file with this start is, or None if it is data."""
    if head.startswith((_LFS, _OLD_LFS)):
        return "lfs"
    return "annex" if head.startswith(_ANNEX) else None


def is_annex_link(path: str) -> bool:
    """Return whether a broken link is one of git-annex, whose content is on another machine."""
    try:
        return "annex/objects/" in os.readlink(path)
    except OSError:
        return False


_KEY = re.compile(r"(?:^|/)[A-Z0-9_]+(?:-[a-zA-Z]\d+)*?-s(\d+)(?:-[a-zA-Z]\d+)*--")


def key_size(text: str) -> int | None:
    """Return the size in a key of git-annex (SHA256E-s1048576--…), or None."""
    match = _KEY.search(text)
    return None if match is None else int(match[1])


def annex_size(root: str, path: str) -> int | None:
    """Return the size of the content of a link or pointer of git-annex, or None if its key does not contain it."""
    full = os.path.join(root, path)
    try:
        if os.path.islink(full):
            return key_size(os.readlink(full))
        with open(full, "rb") as file:
            return key_size(file.read(MAX_POINTER_BYTES).decode("utf-8", "replace"))
    except OSError:
        return None


_NAMED_PATHS = 8


def datalad_get(paths: Iterable[str]) -> str:
    """Return the command that fetches these files, by their names or, if they are many, by their folders."""
    names = sorted(set(paths), key=natural)
    if len(names) > _NAMED_PATHS:
        names = list(dict.fromkeys(path.rpartition("/")[0] or path for path in names))
    if len(names) > _NAMED_PATHS:  # the subject, or the derivative, of each path
        parts = (path.split("/") for path in names)
        names = list(dict.fromkeys("/".join(p[:2]) if p[0] == "derivatives" else p[0] for p in parts))
    if len(names) > _NAMED_PATHS:
        names = list(dict.fromkeys(re.sub(r"^([^/]*/)*?(sub-)[^/]*$", r"\1\2*", path) for path in names))
    if len(names) > _NAMED_PATHS:
        return "datalad get -r ."
    return "datalad get " + " ".join(path if path.endswith("*") else shlex.quote(path) for path in names)


IGNORED = frozenset(["Thumbs.db", "desktop.ini", "__MACOSX", "@eaDir", "lost+found", "__pycache__"])


@dataclass
class Walk:
    """A walk through a tree: iterate it, then read `refused`, `loops` and `outputs`."""

    tree: Tree
    refused: list[Refused] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    keep_hidden: Callable[[str], bool] = lambda prefix: False  # whether hidden files of this folder are data
    keys: bool = False  # whether a key of git-annex with a size replaces its file

    def __iter__(self) -> Iterator[tuple[str, Stat]]:
        """Yield (root-relative path, stat) of every file."""
        try:
            top = self.tree.top()
        except OSError as error:
            raise SourceError(f"The source {self.tree.root!r} cannot be read: {reason(error)}.") from error
        stack: list[tuple[str, Iterator[str], tuple[tuple[int, int] | None, ...]]] = [
            ("", self._names(""), (top.identity,))
        ]
        while stack:
            prefix, names, above = stack[-1]
            for name in names:
                path = prefix + name
                entry = self.find(path, path)
                if entry is None:
                    continue
                if not isinstance(entry, Folder):
                    yield path, entry
                    continue
                if entry.is_file_too:
                    self.refused.append(Refused("twin", path))
                if entry.identity is not None and entry.identity in above:
                    self.loops.append(path)
                    continue
                stack.append((path + "/", self._names(path + "/"), (*above, entry.identity)))
                break
            else:
                stack.pop()

    def _names(self, prefix: str) -> Iterator[str]:
        """Return the sorted names in a folder, without those that are ignored."""
        try:
            names = self.tree.names(prefix)
        except OSError as error:
            if not prefix:
                raise SourceError(f"The source {self.tree.root!r} cannot be read: {reason(error)}.") from error
            self.refused.append(Refused("unreadable", prefix.rstrip("/") + "/"))
            return iter(())
        if prefix and ".brim" in names:
            self.outputs.append(prefix.rstrip("/"))
            return iter(())
        keeps_hidden = self.keep_hidden(prefix)
        return iter(sorted(name for name in names if keeps_hidden or not passed_over(name)))

    def find(self, location: str, path: str) -> Stat | Folder | None:
        """Return what a location leads to, or None after noting by its path why it is refused."""
        try:
            path.encode()
        except UnicodeEncodeError:
            self.refused.append(Refused("name", path.encode("utf-8", "backslashreplace").decode()))
            return None
        entry = self.tree.find(location)
        if entry == "annex" and self.keys and self.tree.bucket is None:
            size = annex_size(self.tree.root, location)
            if size is not None:
                return AbsentStat(size)
        if entry == "loop":
            self.loops.append(path)
        elif isinstance(entry, str):
            self.refused.append(Refused(entry, path))
        return None if isinstance(entry, str) else entry


Absent = Literal["missing", "annex", "unreadable", "special", "loop"]


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder under a name. By its identity, a link that leads back into its own path is recognized."""

    identity: tuple[int, int] | None = None
    is_file_too: bool = False  # in a bucket, an object may have the name of a folder


class Tree:
    """A folder of files. `bucket` is its location if it is not a local folder."""

    bucket: Location | None = None

    def __init__(self, root: str) -> None:
        self.root = root

    @property
    def shown(self) -> str:
        """Return its name for messages."""
        return self.root

    def top(self) -> Folder:
        """Return the folder itself; OSError if it cannot be looked at."""
        raise NotImplementedError

    def find(self, path: str) -> Stat | Folder | Absent:
        """Return what a path leads to, or why it has no content."""
        raise NotImplementedError

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, in no particular order."""
        raise NotImplementedError

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield (folder, names of folders, names of files) from the top down, as os.walk does it."""
        raise NotImplementedError

    def open(self, path: str) -> BinaryIO:
        """Open a small file."""
        raise NotImplementedError

    def head(self, path: str) -> bytes:
        """Return the first bytes of a file, enough to recognize a pointer."""
        raise NotImplementedError

    def below(self, folder: str) -> Tree:
        """Return a folder of this one as a separate tree."""
        raise NotImplementedError

    def canonical_path(self, path: str) -> str:
        """Return a name for the file that all spellings of its path share."""
        raise NotImplementedError

    def exists(self, path: str) -> bool:
        """Return whether a path exists, even if it is a link that leads nowhere."""
        return self.find(path) != "missing"

    def is_folder(self, path: str) -> bool:
        return isinstance(self.find(path), Folder)

    def is_file(self, path: str) -> bool:
        return not isinstance(self.find(path), str | Folder)

    def is_link(self, path: str) -> bool:
        return False

    def may_read(self, path: str) -> bool:
        """Return whether a file may be read, as far as it is known before it is tried."""
        return True

    def stat(self, path: str) -> Stat:
        entry = self.find(path)
        if isinstance(entry, str | Folder):
            number = errno.EISDIR if isinstance(entry, Folder) else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        return entry

    def size(self, path: str) -> int:
        return self.stat(path).st_size

    def text(
        self, path: str, encoding: str = "utf-8-sig", errors: str = "strict", newline: str | None = None
    ) -> TextIO:
        return io.TextIOWrapper(self.open(path), encoding=encoding, errors=errors, newline=newline)

    def expect(self, paths: Iterable[str]) -> None:
        """Announce small files that will be read next, in about this order: remote ones are requested ahead."""


class LocalTree(Tree):
    """A folder on disk. Symbolic links are followed."""

    @property
    def shown(self) -> str:
        return os.path.basename(self.root)

    def full_path(self, path: str) -> str:
        return os.path.join(self.root, path)

    def top(self) -> Folder:
        info = os.stat(self.root)
        return Folder((info.st_dev, info.st_ino))

    def find(self, path: str) -> Stat | Folder | Absent:
        full = self.full_path(path)
        try:
            info = os.stat(full)
        except FileNotFoundError:
            return "annex" if is_annex_link(full) else "missing"
        except NotADirectoryError:
            return "missing"
        except OSError as error:
            return "loop" if error.errno == errno.ELOOP else "unreadable"
        if stat.S_ISDIR(info.st_mode):
            return Folder((info.st_dev, info.st_ino))
        return info if stat.S_ISREG(info.st_mode) else "special"

    def names(self, folder: str) -> list[str]:
        return os.listdir(self.full_path(folder))

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for full, folders, files in os.walk(self.full_path(folder)):
            inside = os.path.relpath(full, self.root)
            yield "" if inside == "." else inside, folders, files

    def stat(self, path: str) -> Stat:
        return os.stat(self.full_path(path))

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.full_path(path))

    def is_link(self, path: str) -> bool:
        return os.path.islink(self.full_path(path))

    def may_read(self, path: str) -> bool:
        return os.access(self.full_path(path), os.R_OK)

    def head(self, path: str) -> bytes:
        descriptor = open_regular(self.full_path(path))
        try:
            return os.read(descriptor, HEAD_BYTES)
        finally:
            os.close(descriptor)

    def open(self, path: str) -> BinaryIO:
        return open(open_regular(self.full_path(path)), "rb")

    def below(self, folder: str) -> LocalTree:
        return LocalTree(self.full_path(folder))

    def canonical_path(self, path: str) -> str:
        """Return the absolute path. Where `..` follows a link, only the real folder leads to the same file."""
        full = self.full_path(path)
        if ".." in path.split("/"):
            folder, name = os.path.split(full)
            return os.path.join(os.path.realpath(folder), name)
        return os.path.normpath(full)


def every_file(tree: Tree, top: str = "", above: tuple[object, ...] = ()) -> Iterator[str]:
    """Yield the path of everything in a tree but folders, hidden names and the outputs of brim; broken links too.

    Links to folders are followed, but not back to a folder above.
    """
    for folder, folders, names in tree.walk(top):
        prefix = f"{folder}/" if folder else ""
        if folder and ".brim" in folders:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not passed_over(name))
        for name in sorted(names):
            if not passed_over(name):
                yield prefix + name
        for name in [name for name in folders if tree.is_link(prefix + name)]:
            entry = tree.find(prefix + name)
            if isinstance(entry, Folder) and entry.identity not in above:
                yield from every_file(tree, prefix + name, (*above, entry.identity))


def passed_over(name: str) -> bool:
    return name.startswith(".") or name in IGNORED
