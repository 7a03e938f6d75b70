"""Walk a folder: every file below it, in an order that is the same on every machine.

Symbolic links are followed; one that leads back into its own path is reported and not entered. Hidden
files and the droppings of operating systems are passed over, and so is a folder that brim built.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from brim.errors import SourceError
from brim.sources.filetable import Refused
from brim.sources.pointers import is_annex_link

_IGNORED = frozenset(["Thumbs.db", "desktop.ini", "__MACOSX", "@eaDir", "lost+found", "__pycache__"])


@dataclass
class Walk:
    """A walk and what it met: iterate it, then look at `refused`, `loops` and `outputs`."""

    root: str
    refused: list[Refused] = field(default_factory=list)
    loops: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    keep_hidden: Callable[[str], bool] = lambda prefix: False  # whether hidden files of this folder are data

    def __iter__(self) -> Iterator[tuple[str, os.stat_result]]:
        """(root-relative path, stat) of every file."""
        try:
            top = os.stat(self.root)
        except OSError as error:
            raise SourceError(f"The source {self.root!r} cannot be read: {error.strerror}.") from error
        stack: list[tuple[str, Iterator[str], tuple[tuple[int, int], ...]]] = [
            ("", self._names(""), ((top.st_dev, top.st_ino),))
        ]
        while stack:
            prefix, names, above = stack[-1]
            for name in names:
                path = prefix + name
                found = self.look(os.path.join(self.root, path), path)
                if found is None:
                    continue
                if not stat.S_ISDIR(found.st_mode):
                    yield path, found
                    continue
                here = (found.st_dev, found.st_ino)
                if here in above:
                    self.loops.append(path)
                    continue
                stack.append((path + "/", self._names(path + "/"), (*above, here)))
                break
            else:
                stack.pop()

    def _names(self, prefix: str) -> Iterator[str]:
        """What is in a folder and is not to be passed over, sorted."""
        try:
            names = os.listdir(os.path.join(self.root, prefix))
        except OSError:
            self.refused.append(Refused("unreadable", prefix.rstrip("/") + "/"))
            return iter(())
        if prefix and ".brim" in names:
            self.outputs.append(prefix.rstrip("/"))
            return iter(())
        hidden = self.keep_hidden(prefix)
        return iter(sorted(n for n in names if hidden or (not n.startswith(".") and n not in _IGNORED)))

    def look(self, full: str, path: str) -> os.stat_result | None:
        """The stat of what is there, or None after noting why it is refused."""
        try:
            path.encode()
        except UnicodeEncodeError:
            self.refused.append(Refused("name", path.encode("utf-8", "backslashreplace").decode()))
            return None
        try:
            found = os.stat(full)
        except FileNotFoundError:
            self.refused.append(Refused("annex" if is_annex_link(full) else "missing", path))
            return None
        except NotADirectoryError:
            self.refused.append(Refused("missing", path))
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                self.loops.append(path)
            else:
                self.refused.append(Refused("unreadable", path))
            return None
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            self.refused.append(Refused("special", path))
            return None
        return found
