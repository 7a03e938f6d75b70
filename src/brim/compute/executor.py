"""The contract of whatever does the units of a computed job: processes of this machine, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, get_args

from brim.choices import at_least, one_of
from brim.compute.setup import OnError, Writing
from brim.compute.step import Step
from brim.engine.ledger import Ledger, Receipt
from brim.engine.stop import Stop
from brim.progress import Progress
from brim.sources.rows.unit import RowSource


@dataclass(frozen=True, slots=True)
class ComputeOptions:
    """How to run, apart from what. `align` is the number of rows that unit boundaries are a multiple of.

    `whole_node`: one worker takes all cores by itself, as a model does.
    """

    limit_bytes: int
    workers: int | None = None
    on_error: OnError = "stop"
    align: int = 1
    what: str = "map"
    whole_node: bool = False

    def __post_init__(self) -> None:
        one_of("on-error", self.on_error, get_args(OnError))
        at_least("workers", self.workers, 1)


@dataclass(slots=True)
class Outcome:
    """What a run did: the receipts of all units in order, and what was counted on the way."""

    receipts: list[Receipt] = field(default_factory=list)
    computed: int = 0
    workers: int = 0
    retries: int = 0
    bad_rows: int = 0
    peak_bytes: int = 0


class Executor(Protocol):
    """Does what is missing. A unit's file is on disk before its receipt is written, whoever made it."""

    def run(self) -> Outcome: ...


class Maker(Protocol):
    """What makes an executor for a job. Whoever calls it holds the lock of `folder`."""

    def __call__(
        self,
        source: RowSource,
        step: Step,
        writing: Writing,
        ledger: Ledger,
        folder: Path,
        options: ComputeOptions,
        progress: Progress,
        stop: Stop,
    ) -> Executor: ...
