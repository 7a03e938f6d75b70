"""How a call from Python shows its progress."""

from __future__ import annotations

import sys

from brim.progress import Progress


def bar_or_notes() -> Progress:
    """A bar in a terminal; elsewhere only what one should know."""
    from brim.report.progress import Bar, NotesOnly

    return Bar() if sys.stderr.isatty() else NotesOnly()
