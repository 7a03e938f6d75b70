"""How a BIDS dataset becomes rows and columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from brim.choices import one_of

RowsOf = Literal["session", "subject", "file"]
Sidecars = Literal["safe", "full", "none"]


@dataclass(frozen=True, slots=True)
class BidsOptions:
    """What the user asked for."""

    rows: RowsOf = "session"
    sidecars: Sidecars = "safe"
    subjects: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    derivatives: tuple[str, ...] = ()  # names, or "all"
    phenotype: bool = False
    bidsignore: bool = True

    def __post_init__(self) -> None:
        one_of("rows", self.rows, get_args(RowsOf))
        one_of("sidecars", self.sidecars, get_args(Sidecars))

    def wants_subject(self, folder: str) -> bool:
        return _wanted(folder, self.subjects, "sub-")

    def wants_session(self, folder: str | None) -> bool:
        return not self.sessions or (folder is not None and _wanted(folder, self.sessions, "ses-"))

    def wants_suffix(self, suffix: str) -> bool:
        """Photos of people and head shapes only if they are asked for by name."""
        if self.suffixes:
            return suffix.lower() in {s.lower() for s in self.suffixes}
        return suffix not in PRIVATE_SUFFIXES


PRIVATE_SUFFIXES = frozenset(["photo", "headshape"])


def _wanted(folder: str, names: tuple[str, ...], prefix: str) -> bool:
    return not names or folder in {name if name.startswith(prefix) else prefix + name for name in names}
