"""What is tried with a unit, one rung after the other, until it is done or there is nothing left to try."""

from __future__ import annotations

from dataclasses import dataclass, replace

from brim.rows.unit import Unit
from brim.schedule.messages import At

_PARTS = 16
_CRASHES = 3  # a worker may also be killed by somebody who means well


@dataclass(frozen=True, slots=True)
class Attempt:
    """A unit, and how it is tried. `pieces` as in an Order."""

    unit: Unit
    alone: bool = False
    pieces: int = 1
    crashes: int = 0
    held_bytes: int = 0  # what the worker held when the last attempt ended
    at: At | None = None  # and what it was doing

    def after_memory(self, was_alone: bool, splittable: bool, held_bytes: int, at: At | None) -> Attempt | None:
        """What to try after it ran out of memory; None at the end of the road."""
        seen = replace(self, held_bytes=held_bytes, at=at or self.at)
        if not was_alone:
            return replace(seen, alone=True)
        if not splittable or self.pieces == 0:
            return None
        # The rows of a batch in parts, then one by one, so that the row that does not fit can be named.
        return replace(seen, alone=True, pieces=_PARTS if self.pieces == 1 else 0)

    def after_crash(self, at: At | None) -> Attempt | None:
        """What to try after the worker died of something else."""
        crashed = replace(self, crashes=self.crashes + 1, at=at or self.at)
        return crashed if crashed.crashes < _CRASHES else None
