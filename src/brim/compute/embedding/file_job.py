"""An embedding job that ends in one file (or one for each tensor) instead of a dataset.

Its books lie beside the file, in a hidden folder on the same disk: `.NAME.brim`. When it is done, a small ledger stays
there, so that the same command knows that there is nothing to do.
"""

from __future__ import annotations

import os
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from brim.compute.books import Wanted, open_units
from brim.compute.computation import Computation, ComputeOptions, Outcome
from brim.compute.embedding.finish import check_target, finish_vectors
from brim.compute.embedding.step import EmbedStep
from brim.compute.job import Computed, JobOptions
from brim.compute.setup import Writing
from brim.durable import failures
from brim.engine.deliver import Built
from brim.engine.hashing import sha256_of
from brim.engine.ledger import Job, Ledger, Receipt
from brim.engine.lock import locked
from brim.engine.run import versions
from brim.engine.stop import Stop, stoppable
from brim.errors import DestinationError
from brim.memory.limit import Limit, effective_limit
from brim.plans.fingerprint import digest_json
from brim.progress import Progress, Silent
from brim.sources.rows.unit import RowSource

_VERSION = 1  # raise it when the same job would give other bytes


class VectorFileJob:
    """Rows through the model, and their vectors to `target`."""

    def __init__(self, source: RowSource, step: EmbedStep, target: Path, options: JobOptions) -> None:
        check_target(target)
        self.source, self.step, self.options = source, step, options
        self.target = Path(os.path.abspath(target))
        self.limit: Limit = effective_limit(options.memory)
        if self.target.is_dir():
            raise DestinationError(f"{str(target)!r} is a folder.", hint="Give the name of a file.")

    @cached_property
    def facts(self) -> dict[str, Any]:
        output = {"file": self.target.suffix, "on_error": self.options.on_error}
        return {
            "kind": "embed",
            "version": _VERSION,
            "source": self.source.facts,
            "step": self.step.facts,
            "output": output,
        }

    def run(self, progress: Progress | None = None) -> Computed:
        progress, options = progress or Silent(), self.options
        state = Path(options.state) if options.state else self.target.with_name(f".{self.target.name}.brim")
        with failures(self.target.parent):
            state.mkdir(parents=True, exist_ok=True)
        stop_files = (state / "stop", *([Path(options.stop_file)] if options.stop_file else []))
        with locked(state), stoppable(*stop_files) as stop, failures(self.target.parent):
            ledger = Ledger(state)
            try:
                return self._run(ledger, state, progress, stop)
            finally:
                ledger.close()
                progress.finish()

    def _run(self, ledger: Ledger, state: Path, progress: Progress, stop: Stop) -> Computed:
        fingerprint = digest_json(self.facts)
        known = ledger.job is not None and ledger.job.fingerprint == fingerprint
        if known and ledger.done and not self.options.fresh and self._is_there(ledger):
            return Computed(self._built(list(ledger.receipts.values()), written=0), Outcome())
        if self.target.exists() and ledger.job is None and not self.options.fresh:
            raise DestinationError(
                f"{str(self.target)!r} exists, and brim did not write it.", hint="--fresh replaces it at the end."
            )
        folder = state / "units"
        wanted = Wanted(fingerprint, self.facts, self.options.fresh, self.options.keep_done)
        units = open_units(folder, wanted, ledger)
        try:
            compute = ComputeOptions(
                self.limit.bytes, self.options.workers or 1, self.options.on_error, self.step.batch_rows or 1, "embed"
            )
            writing = Writing("arrow", self.step.batch_rows or 1000)
            outcome = Computation(self.source, self.step, writing, units, folder, compute, progress, stop).run()
            receipts = [receipt for receipt in outcome.receipts if receipt.rows]
            progress.start("finish", sum(receipt.size for receipt in receipts), 0, self.limit.bytes)
            finished = finish_vectors(
                [folder / receipt.name for receipt in receipts],
                self.target,
                state / "work",
                rows=[receipt.rows for receipt in receipts],
            )
        finally:
            units.close()
        made = [self._receipt(path, finished.rows, fingerprint, progress) for path in finished.files]
        ledger.begin(Job(fingerprint, self.facts, versions()))
        ledger.finish(made)
        for left in (folder, state / "work"):
            shutil.rmtree(left, ignore_errors=True)
        return Computed(self._built(made, written=len(made)), outcome, counts={"rows": finished.rows})

    def _receipt(self, path: Path, rows: int, fingerprint: str, progress: Progress) -> Receipt:
        sha256 = sha256_of(path, progress.advance)
        return Receipt(path.name, "", rows, path.stat().st_size, sha256, fingerprint, "", fingerprint[:16])

    def _is_there(self, ledger: Ledger) -> bool:
        paths = [(self.target.parent / name, receipt.size) for name, receipt in ledger.receipts.items()]
        return bool(paths) and all(path.is_file() and path.stat().st_size == size for path, size in paths)

    def _built(self, receipts: list[Receipt], written: int) -> Built:
        return Built(
            destination=str(self.target),
            rows=max((receipt.rows for receipt in receipts), default=0),
            files=0,
            bytes=sum(receipt.size for receipt in receipts),
            shards=len(receipts),
            written=written,
            kept=len(receipts) - written,
            left_out=(),
        )
