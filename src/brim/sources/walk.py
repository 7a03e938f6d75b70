"""Walk a folder: every file below it, in an order that is the same on every machine.

Symbolic links are followed; one that leads back into its own path is reported and not entered. Hidden
files and the droppings of operating systems are passed over, and so is a folder that brim built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from brim.durable import reason
from brim.errors import SourceError
from brim.fileset import Stat
from brim.sources.filetable import Refused
from brim.sources.tree import Folder, LocalTree, Tree

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

    def __post_init__(self) -> None:
        self._tree: Tree = self.tree or LocalTree(self.root)

    @classmethod
    def through(cls, tree: Tree) -> Walk:
        return cls(tree.root, tree=tree)

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
        if found == "loop":
            self.loops.append(path)
        elif isinstance(found, str):
            self.refused.append(Refused(found, path))
        return None if isinstance(found, str) else found
