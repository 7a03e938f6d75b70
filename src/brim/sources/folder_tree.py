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
    """A key for sorting: numbers by value (then by how they are written), everything else by character."""
    pieces = (piece for piece in re.split(r"([0-9]+)", text) if piece)
    return tuple((0, int(piece), piece) if piece[0] in "0123456789" else (1, 0, piece) for piece in pieces)


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
    """What a small file that begins with these bytes stands for, or None if it is data."""
    if head.startswith((_LFS, _OLD_LFS)):
        return "lfs"
    return "annex" if head.startswith(_ANNEX) else None


def is_annex_link(path: str) -> bool:
    """Whether a link that leads nowhere is one of git-annex: its content is not here."""
    try:
        return "annex/objects/" in os.readlink(path)
    except OSError:
        return False


_KEY = re.compile(r"(?:^|/)[A-Z0-9_]+(?:-[a-zA-Z]\d+)*?-s(\d+)(?:-[a-zA-Z]\d+)*--")


def key_size(text: str) -> int | None:
    """The size that a key of git-annex tells (SHA256E-s1048576--…), or None."""
    match = _KEY.search(text)
    return None if match is None else int(match[1])


def annex_size(root: str, path: str) -> int | None:
    """The size of the content that a link or pointer of git-annex stands for, or None if its key does not tell."""
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
    """The command that fetches these files, by their names or, if they are many, by the folders they are in."""
    named = sorted(set(paths), key=natural)
    if len(named) > _NAMED_PATHS:
        named = list(dict.fromkeys(path.rpartition("/")[0] or path for path in named))
    if len(named) > _NAMED_PATHS:
        named = list(dict.fromkeys(_top(path) for path in named))
    if len(named) > _NAMED_PATHS:
        starred = dict.fromkeys(re.sub(r"^([^/]*/)*?(sub-)[^/]*$", r"\1\2*", path) for path in named)
        named = list(starred)
    if len(named) > _NAMED_PATHS:
        return "datalad get -r ."
    return "datalad get " + " ".join(path if path.endswith("*") else shlex.quote(path) for path in named)


def _top(path: str) -> str:
    """The subject, or the derivative, that a path lies in."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] == "derivatives" else parts[0]


IGNORED = frozenset(["Thumbs.db", "desktop.ini", "__MACOSX", "@eaDir", "lost+found", "__pycache__"])


@dataclass
class Walk:
    """A walk and what it met: iterate it, then look at `refused`, `loops` and `outputs`.

    It goes through `tree`, which is the folder `root` unless another is given.
    """

    root: str
    refused: list[Refused] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    keep_hidden: Callable[[str], bool] = lambda prefix: False  # whether hidden files of this folder are data
    tree: Tree | None = None
    keys: bool = False  # whether a key of git-annex that tells a size stands for its file

    def __post_init__(self) -> None:
        self._tree: Tree = self.tree or LocalTree(self.root)

    @classmethod
    def through(cls, tree: Tree, keys: bool = False) -> Walk:
        return cls(tree.root, tree=tree, keys=keys)

    def __iter__(self) -> Iterator[tuple[str, Stat]]:
        """(root-relative path, stat) of every file."""
        try:
            top = self._tree.top()
        except OSError as error:
            raise SourceError(f"The source {self.root!r} cannot be read: {reason(error)}.") from error
        stack: list[tuple[str, Iterator[str], tuple[tuple[int, int] | None, ...]]] = [
            ("", self._names(""), (top.identity,))
        ]
        while stack:
            prefix, names, above = stack[-1]
            for name in names:
                path = prefix + name
                found = self.look(path, path)
                if found is None:
                    continue
                if not isinstance(found, Folder):
                    yield path, found
                    continue
                if found.twin:
                    self.refused.append(Refused("twin", path))
                here = found.identity
                if here is not None and here in above:
                    self.loops.append(path)
                    continue
                stack.append((path + "/", self._names(path + "/"), (*above, here)))
                break
            else:
                stack.pop()

    def _names(self, prefix: str) -> Iterator[str]:
        """What is in a folder and is not to be passed over, sorted."""
        try:
            names = self._tree.names(prefix)
        except OSError as error:
            if not prefix:
                raise SourceError(f"The source {self.root!r} cannot be read: {reason(error)}.") from error
            self.refused.append(Refused("unreadable", prefix.rstrip("/") + "/"))
            return iter(())
        if prefix and ".brim" in names:
            self.outputs.append(prefix.rstrip("/"))
            return iter(())
        hidden = self.keep_hidden(prefix)
        return iter(sorted(n for n in names if hidden or (not n.startswith(".") and n not in IGNORED)))

    def look(self, at: str, path: str) -> Stat | Folder | None:
        """What is at a place, or None after noting by its path why it is refused."""
        try:
            path.encode()
        except UnicodeEncodeError:
            self.refused.append(Refused("name", path.encode("utf-8", "backslashreplace").decode()))
            return None
        found = self._tree.look(at)
        if found == "annex" and self.keys and self._tree.bucket is None:
            size = annex_size(self._tree.root, at)
            if size is not None:
                return AbsentStat(size)
        if found == "loop":
            self.loops.append(path)
        elif isinstance(found, str):
            self.refused.append(Refused(found, path))
        return None if isinstance(found, str) else found


Absent = Literal["missing", "annex", "unreadable", "special", "loop"]


@dataclass(frozen=True, slots=True)
class Folder:
    """What a name may be instead of a file. `identity` tells a link that leads back into its own path."""

    identity: tuple[int, int] | None = None
    twin: bool = False  # in a bucket, an object may have the name of a folder


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

    def look(self, path: str) -> Stat | Folder | Absent:
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
        """Return the first bytes of a file, enough to tell a pointer from data."""
        raise NotImplementedError

    def below(self, folder: str) -> Tree:
        """Return a folder of this one as a separate tree."""
        raise NotImplementedError

    def place(self, path: str) -> str:
        """Return a name for the file that all spellings of its path share."""
        raise NotImplementedError

    def is_there(self, path: str) -> bool:
        """Return whether a path exists, even if it is a link that leads nowhere."""
        return self.look(path) != "missing"

    def is_folder(self, path: str) -> bool:
        return isinstance(self.look(path), Folder)

    def is_file(self, path: str) -> bool:
        return not isinstance(self.look(path), str | Folder)

    def is_link(self, path: str) -> bool:
        return False

    def may_read(self, path: str) -> bool:
        """Return whether a file may be read, as far as it is known before it is tried."""
        return True

    def stat(self, path: str) -> Stat:
        found = self.look(path)
        if isinstance(found, str | Folder):
            number = errno.EISDIR if isinstance(found, Folder) else errno.ENOENT
            raise OSError(number, os.strerror(number), path)
        return found

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
        found = os.stat(self.root)
        return Folder((found.st_dev, found.st_ino))

    def look(self, path: str) -> Stat | Folder | Absent:
        full = self.full_path(path)
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
        return os.listdir(self.full_path(folder))

    def walk(self, folder: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for full, folders, files in os.walk(self.full_path(folder)):
            inside = os.path.relpath(full, self.root)
            yield "" if inside == "." else inside, folders, files

    def stat(self, path: str) -> Stat:
        return os.stat(self.full_path(path))

    def is_there(self, path: str) -> bool:
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

    def place(self, path: str) -> str:
        """Return the absolute path. Where `..` follows a link, only the real folder leads to the same file."""
        full = self.full_path(path)
        if ".." in path.split("/"):
            folder, name = os.path.split(full)
            return os.path.join(os.path.realpath(folder), name)
        return os.path.normpath(full)


def every_file(tree: Tree) -> Iterator[str]:
    """The path of everything in a tree that is no folder, links that lead nowhere too; hidden names are passed over.

    What brim built inside of it is passed over as well. Links to folders are followed, but not back to where they are.
    """
    yield from _below(tree, "", ())


def _below(tree: Tree, top: str, above: tuple[object, ...]) -> Iterator[str]:
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
            found = tree.look(prefix + name)
            if isinstance(found, Folder) and found.identity not in above:
                yield from _below(tree, prefix + name, (*above, found.identity))


def passed_over(name: str) -> bool:
    return name.startswith(".") or name in IGNORED
