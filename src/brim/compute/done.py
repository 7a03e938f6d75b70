"""Units that are done: each a file on disk, and then a receipt in the ledger."""

from __future__ import annotations

import os
from pathlib import Path

from brim.compute.outfile import EXTENSIONS
from brim.compute.setup import Done
from brim.engine.ledger import Ledger, Receipt
from brim.errors import SourceChanged
from brim.sources.rows.unit import Unit


class DoneUnits:
    """The units of the job that the ledger holds, and the rows that were left out of them."""

    def __init__(self, ledger: Ledger, folder: Path, format: str) -> None:
        assert ledger.job is not None
        self._ledger, self._folder, self._extension = ledger, folder, EXTENSIONS[format]
        self._job = ledger.job.fingerprint[:16]
        self._receipts: dict[int, Receipt] = {}
        self.bad_rows = 0

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
        self._take(unit, receipt, self._ledger.recall(f"bad rows {receipt.name}") or 0)
        return True

    def add(self, unit: Unit, done: Done) -> None:
        """The unit's file is on disk: write that down."""
        name = self._name(unit.number)
        if done.bad_rows or self._ledger.recall(f"bad rows {name}"):
            self._ledger.remember(f"bad rows {name}", done.bad_rows)
        receipt = Receipt(name, "", done.rows, done.size, done.sha256, unit.key, unit.mtimes, self._job)
        self._ledger.add(receipt)
        self._take(unit, receipt, done.bad_rows)

    def _take(self, unit: Unit, receipt: Receipt, bad_rows: int) -> None:
        self._receipts[unit.number] = receipt
        self.bad_rows += bad_rows
