"""Show the progress of a job that Python started, and record it for a report."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from brim.errors import InputError
from brim.memory.limit import Limit
from brim.progress import Progress, as_progress
from brim.redact import redact_command


def recorded_run(
    progress: Progress | None,
    report: str | os.PathLike[str] | None,
    limit: Limit,
    takes: Mapping[str, int] | None = None,
) -> AbstractContextManager[Progress]:
    """Return a context with the progress of a job, which is also recorded with its estimate if there is a report."""
    if report is None:
        return nullcontext(progress or Progress())
    from brim.monitor.report.recording import recorded

    return recorded(progress or Progress(), Path(os.path.abspath(report)), redact_command(sys.argv), limit, takes)


def shown(progress: Progress | bool | None) -> Progress:
    """Return the progress to report to.

    True shows progress everywhere, False nothing. None shows a bar in a terminal or a notebook, elsewhere only notes.
    """
    if progress is False:
        return Progress()
    if progress is not None and progress is not True:
        if not hasattr(progress, "advance"):
            raise InputError(
                f"progress={progress!r} is not a brim.Progress.", hint="Pass True or False, or leave it out."
            )
        return as_progress(progress)
    from brim.monitor.report.progress_renderers import NotebookBar, NotesOnly, PlainLines, TerminalBar, in_notebook

    if in_notebook():
        return Progress(NotebookBar())
    if sys.stderr.isatty():
        return Progress(TerminalBar())
    return Progress(PlainLines() if progress else NotesOnly())
