"""A run from Python with a page about it, if one is asked for; and what shows it to whoever waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from brim.memory.limit import Limit
from brim.progress import Progress, Silent
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


def bar_or_notes() -> Progress:
    """A bar in a terminal; elsewhere only what one should know."""
    from brim.report.bars import Bar, NotesOnly

    return Bar() if sys.stderr.isatty() else NotesOnly()
