"""What is left of the memory limit for whoever sends shards."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What is left of the memory limit, how many shards are on their way at a time, and whether a user chose it."""

    bytes: int
    workers: int
    asked_for: bool = True
