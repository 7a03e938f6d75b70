"""A file inside a shard, as the readers of shards report it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """`row` counts within the shard; `offset` and `size` are the bytes of the shard that are the file."""

    column: str
    row: int
    path: str | None
    offset: int
    size: int
