"""The contract of whatever brings shards to a destination: threads of this process, or a cluster.

An executor moves bytes and nothing else. What is to be done, what is written down and what is published is the
driver's (run.py): a shard is where it belongs before `done` is told of it, and `done` returns when its receipt is on
disk.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from brim.engine.ledger import Receipt
from brim.engine.shard import Slice
from brim.plans.cut import Shard
from brim.sinks.sink import Put, Sink


class Driver(Protocol):
    """Whoever runs a job, as an executor sees it. Threads may call it at the same time."""

    def slice(self, shard: Shard) -> Slice:
        """What makes a shard's bytes."""

    def known(self, shard: Shard) -> str | None:
        """Its SHA-256, if that is known."""

    def begin(self, shard: Shard) -> None:
        """The shard will be written. Called by the thread that asked for the run, before its bytes move."""

    def done(self, shard: Shard, size: int, put: Put) -> Receipt:
        """The shard is there. As soon as possible, so that a stop loses nothing that is finished."""

    def hashed(self, size: int) -> None:
        """Bytes are hashed; raises to drop the shard."""

    def sent(self, size: int) -> None:
        """Bytes are on their way; raises to drop the shard."""

    def look(self) -> None:
        """Raises if somebody asked to stop."""

    def note(self, text: str) -> None:
        """For whoever watches."""

    def nodes(self, held: dict[str, int]) -> None:
        """What machines hold, by their names."""


class Executor(Protocol):
    """Brings shards, several at a time."""

    def run(self, todo: Sequence[Shard], sink: Sink, driver: Driver) -> Generator[tuple[Receipt, Put], None, None]:
        """Each shard as it is done. The first failure drops the others cleanly and is raised; closing does too."""
