"""The contract of whatever brings shards to a destination: threads of this process, or a cluster.

An executor moves bytes and nothing else. What is to be done, what is written down and what is published is the
driver's (run.py): a shard is where it belongs before `done` is told of it, and `done` returns when its receipt is on
disk.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from brim.choices import one_of
from brim.errors import InputError
from brim.plans.cut_shards import Shard
from brim.plans.shard_bytes import Slice
from brim.state.ledger import Receipt
from brim.stores.store import Put, Store

Engine = Literal["local", "ray"]


@dataclass(frozen=True, slots=True)
class Scaling:
    """`address` is that of a running Ray: HOST:PORT, or auto for the one that this machine is part of."""

    engine: Engine = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        one_of("engine", self.engine, get_args(Engine))
        if self.address is not None and self.engine != "ray":
            raise InputError("--address is for --engine=ray.", hint="Add --engine=ray, or leave --address out.")
        if self.address in (None, "auto"):
            return
        host, _, port = str(self.address).rpartition(":")
        if "://" in str(self.address) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(
                f"--address takes auto or HOST:PORT, not {self.address!r}.",
                hint="`ray start --head` prints it; auto takes the cluster that this machine is part of.",
            )


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

    def run(self, todo: Sequence[Shard], sink: Store, driver: Driver) -> Generator[tuple[Receipt, Put], None, None]:
        """Each shard as it is done. The first failure drops the others cleanly and is raised; closing does too."""
