"""Unreadable rows of text files, which --on-error can skip."""

from __future__ import annotations

from collections.abc import Callable

from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class UnreadableRow:
    """An unreadable line or record. `offset` counts the rows of its unit, unreadable ones included, from 0.

    `line` counts from 1 and is None if counting would take too long; `byte` is where the row starts, None in a
    compressed file. Both are None for a file that is one row.
    """

    offset: int
    file: str
    line: int | None
    byte: int | None
    content: bytes
    reason: str


OnUnreadable = Callable[[UnreadableRow], None]
