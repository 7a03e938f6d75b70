"""A cache entry: its unit files are the result, so that nothing is uploaded. Finishing only replaces some of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pyarrow as pa

from brim.compute.outputs.output import OutputShard
from brim.compute.outputs.rows_file import read_rows
from brim.jobs.destination import Destination, Run
from brim.jobs.destination_paths import DestinationPaths
from brim.state.atomic_files import rename, sha256_of, sync_file, sync_folder
from brim.state.ledger import Ledger, Receipt


class CacheDestination(Destination):
    is_in_place = True

    def __init__(self, paths: DestinationPaths, run: Run) -> None:
        self.paths, self._run = paths, run
        self._check_unsynced(run.ledger)

    def _check_unsynced(self, ledger: Ledger) -> None:
        """Read files that version 0.1 did not sync, once: complete ones are synced and keep their receipts."""
        complete, folder = [], self.paths.units_dir
        for receipt in list(ledger.unsynced.values()):
            path = folder / receipt.name
            try:
                if path.stat().st_size != receipt.size or receipt.sha256 not in ("", sha256_of(path, lambda _: None)):
                    continue
                if sum(table.num_rows for table in read_rows(path, "arrow")) == receipt.rows:
                    sync_file(path)
                    complete.append(receipt)
            except (OSError, pa.ArrowException):
                continue  # it is computed again
        if complete:
            sync_folder(folder)
            is_finished = ledger.finished_unsynced and len(complete) == len(ledger.unsynced)
            ledger.add_all(complete)
            if is_finished:
                ledger.finish([ledger.receipts[name] for name in sorted(ledger.receipts)])

    def has_receipt(self, receipt: Receipt) -> bool:
        try:
            return (self.paths.units_dir / receipt.name).stat().st_size == receipt.size
        except FileNotFoundError:
            return False

    def finish_in_place(self, units: Ledger, receipts: Sequence[Receipt], files: Iterable[OutputShard]) -> None:
        """Replace the unit files that were written again with the types of all, and finish the ledger."""
        folder = self.paths.units_dir
        rewritten = {file.path.name: file for file in files if file.path.parent != folder}
        for receipt in receipts:
            file = rewritten.get(receipt.name)
            if file is not None:
                units.forget(receipt.name)  # before its file is replaced
                rename(file.path, folder / receipt.name)
                units.add(replace(receipt, rows=file.rows, size=file.size, sha256=file.sha256))
        units.finish([units.receipts[receipt.name] for receipt in receipts])

    def clear_units(self) -> None:
        shutil.rmtree(self.paths.work_dir, ignore_errors=True)
