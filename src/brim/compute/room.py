"""How much room there is: how many workers fit, and where the lines are. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

_MARGIN_BYTES, _MARGIN = 32 << 20, 0.03  # what a worker may take between two looks
_SOFT = 0.85
_WORK_BYTES = 48 << 20  # what the first batches are given before any was seen


@dataclass(frozen=True, slots=True)
class Room:
    """The limit, and what of it is gone before any work: the parent, and every worker at rest."""

    limit_bytes: int
    parent_bytes: int
    worker_bytes: int

    @property
    def hard_bytes(self) -> int:
        """Above this a worker is ended."""
        return self.limit_bytes - max(_MARGIN_BYTES, round(_MARGIN * self.limit_bytes))

    @property
    def soft_bytes(self) -> int:
        """Above this nobody begins another batch."""
        return round(_SOFT * self.hard_bytes)

    @property
    def smallest_bytes(self) -> int:
        """The limit that one worker needs to do anything at all, rounded up to ten megabytes."""
        need = self.parent_bytes + self.worker_bytes + _WORK_BYTES // 2
        with_margin = max(need + _MARGIN_BYTES, round(need / (1 - _MARGIN)))
        return -(-with_margin // 10**7) * 10**7

    def workers(self, work_bytes: int, most: int) -> int:
        """How many fit if each takes so much for its work (0: none was seen yet); one always tries."""
        left = self.hard_bytes - self.parent_bytes
        return max(min(left // (self.worker_bytes + (work_bytes or _WORK_BYTES)), most), 1)

    def share_bytes(self, workers: int) -> int:
        """What one of so many may hold."""
        return (self.hard_bytes - self.parent_bytes) // max(workers, 1)
