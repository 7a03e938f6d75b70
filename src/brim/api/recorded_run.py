"""A run from Python with a page about it, if one is asked for; and what shows it to whoever waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType

from brim.errors import InputError
from brim.memory.limit import Limit
from brim.progress import Progress, Silent, tell_again, tell_begin
from brim.redact import redact_command


def recorded_run(
    progress: Progress | None,
    report: str | os.PathLike[str] | None,
    limit: Limit,
    takes: Mapping[str, int] | None = None,
) -> AbstractContextManager[Progress]:
    """Progress that is written down too, with what the job was forecast to take."""
    if report is None:
        return nullcontext(progress or Silent())
    from brim.report.recording import recorded

    return recorded(progress or Silent(), Path(os.path.abspath(report)), redact_command(sys.argv), limit, takes)


def shown(progress: Progress | bool | None) -> Progress:
    """What the caller watches with; if nothing was said, a bar in a terminal or a notebook, elsewhere only what one
    should know. False: nothing at all."""
    if progress is False:
        return Silent()
    if progress is not None and progress is not True:
        if not hasattr(progress, "advance"):
            raise InputError(f"progress={progress!r} is not a brim.Progress.", hint="Give True, False or nothing.")
        return progress
    from brim.report.bars import Bar, NotebookBar, NotesOnly, PlainLines, in_notebook

    if in_notebook():
        return NotebookBar()
    if sys.stderr.isatty():
        return Bar()
    return PlainLines() if progress else NotesOnly()


class Together:
    """Several jobs under one bar: it begins once, with what all of them have to do, and ends with the last."""

    def __init__(self, inner: Progress, what: str, total_bytes: Iterable[int | None]) -> None:
        known = list(total_bytes)
        self._inner, self._what = inner, what
        self._total = 0 if None in known else sum(one or 0 for one in known)
        self._began = self._counts = False

    def __enter__(self) -> Together:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inner.finish()

    def start(self, what: str, total_bytes: int, shards: int, limit_bytes: int) -> None:
        self._counts = what == self._what  # what comes after the rows is small, and not in the total
        if not self._began:
            self._began = True
            self._inner.start(self._what, self._total, 0, limit_bytes)

    def advance(self, size: int) -> None:
        self._inner.advance(size if self._counts else 0)

    def hashed(self, size: int) -> None:
        self._inner.hashed(size)

    def committed(self) -> None:
        self._inner.committed()

    def shard(self, name: str, size: int, sha256: str, how: str) -> None:
        self._inner.shard(name, size, sha256, how)

    def begin(self, name: str, size: int) -> None:
        tell_begin(self._inner, name, size)

    def again(self, name: str) -> None:
        tell_again(self._inner, name)

    def note(self, text: str) -> None:
        self._inner.note(text)

    def nodes(self, held: Mapping[str, int]) -> None:
        self._inner.nodes(held)

    def finish(self) -> None:
        """The next job goes on."""
