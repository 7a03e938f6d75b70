"""Units that are done: each a file on disk, and then a receipt in the ledger."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, get_args

from brim.choices import at_least, one_of
from brim.errors import SourceChanged
from brim.outputs.rows_file import EXTENSIONS, Writing
from brim.progress import Progress
from brim.rows.unit import RowSource, Unit
from brim.schedule.messages import Done, OnError
from brim.state.ledger import Ledger, Receipt
from brim.state.stop import Stop
from brim.steps.step import Step


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
    encoders: dict[str, int] = field(default_factory=dict)  # the units that each of them did


class UnitExecutor(Protocol):
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
    ) -> UnitExecutor: ...


class DoneUnits:
    """The units of the job that the ledger holds, and the rows that were left out of them."""

    def __init__(self, ledger: Ledger, folder: Path, format: str) -> None:
        assert ledger.job is not None
        self._ledger, self._folder, self._extension = ledger, folder, EXTENSIONS[format]
        self._job = ledger.job.fingerprint[:16]
        self._receipts: dict[int, Receipt] = {}
        self.bad_rows = 0
        self.encoders: dict[str, int] = {}

    @property
    def receipts(self) -> list[Receipt]:
        """In the order of the input."""
        return [self._receipts[number] for number in sorted(self._receipts)]

    def _name(self, number: int) -> str:
        return f"{number:08d}{self._extension}"

    def has(self, number: int) -> bool:
        """Whether a unit has a receipt, and its file is there with that size."""
        receipt = self._ledger.receipts.get(self._name(number))
        if receipt is None or receipt.job != self._job:
            return False
        try:
            return (self._folder / receipt.name).stat().st_size == receipt.size
        except FileNotFoundError:
            return False

    def keep(self, unit: Unit) -> bool:
        """Whether the unit need not be done again: it was, and of the same rows."""
        receipt = self._ledger.receipts.get(self._name(unit.number))
        if receipt is None:
            return False
        if not self.has(unit.number) or (receipt.key, receipt.mtimes) != (unit.key, unit.mtimes):
            if unit.spooled and not all(os.path.exists(span.path) for span in unit.spans):
                raise SourceChanged(
                    f"The source gives other rows than in the run that is continued (unit {unit.number}).",
                    hint="Start over with --fresh.",
                )
            self._ledger.forget(receipt.name)  # before its file becomes another one
            return False
        encoder = self._ledger.recall(f"encoder {receipt.name}") or ""
        self._take(unit, receipt, self._ledger.recall(f"bad rows {receipt.name}") or 0, encoder)
        return True

    def add(self, unit: Unit, done: Done) -> None:
        """The unit's file is on disk: write that down."""
        name = self._name(unit.number)
        if done.bad_rows or self._ledger.recall(f"bad rows {name}"):
            self._ledger.remember(f"bad rows {name}", done.bad_rows)
        if done.encoder:
            self._ledger.remember(f"encoder {name}", done.encoder)
        receipt = Receipt(name, "", done.rows, done.size, done.sha256, unit.key, unit.mtimes, self._job)
        self._ledger.add(receipt)
        self._take(unit, receipt, done.bad_rows, done.encoder)

    def _take(self, unit: Unit, receipt: Receipt, bad_rows: int, encoder: str) -> None:
        self._receipts[unit.number] = receipt
        self.bad_rows += bad_rows
        if encoder:
            self.encoders[encoder] = self.encoders.get(encoder, 0) + 1


def clear_scratch(folder: Path) -> None:
    """What only a run that is under way needs beside the units, which stay: a killed one leaves it."""
    for path in list(_scratch(folder)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def has_scratch(folder: Path) -> bool:
    return next(_scratch(folder), None) is not None


def _scratch(folder: Path) -> Iterator[Path]:
    patterns = ("spool", "made", "gate", "setup.pickle", ".*.tmp", "worker-*.log")
    return (path for pattern in patterns for path in folder.glob(pattern))
