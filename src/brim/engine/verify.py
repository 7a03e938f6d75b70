"""Prove that what is at a destination is whole, from what is there and not from memory of writing it."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from brim.engine.destination import state_folder
from brim.engine.hashing import sha256_of
from brim.engine.ledger import Ledger
from brim.engine.progress import Progress, Silent
from brim.engine.shard import locate
from brim.errors import BrimError, DamageFound, InputError, Stopped
from brim.fileset import Ints
from brim.formats.card import CARD, card_rows, card_splits, read_card
from brim.formats.found import Found
from brim.formats.splice import SpliceBuilder
from brim.formats.tar import tar_rows
from brim.memory.cores import usable_cores
from brim.memory.limit import effective_limit
from brim.plans.cut import CutOptions
from brim.plans.plan import make_plan
from brim.sources import read_source
from brim.sources.filetable import FileTable, flat_numbers
from brim.sources.options import SourceOptions

_NAME = re.compile(r"data/(?P<split>.+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})\.(?:parquet|tar)")


@dataclass
class Verified:
    """What was proved, and what could not be."""

    shards: int = 0
    rows: int = 0
    bytes: int = 0
    files_compared: int = 0
    unproved: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def verify(
    destination: str | os.PathLike[str],
    source: str | os.PathLike[str] | FileTable | None = None,
    *,
    state: str | os.PathLike[str] | None = None,
    root: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Read everything at the destination again; raise DamageFound that names whatever is wrong.

    With a source, every source file's bytes are compared with those inside the shards.
    """
    folder = Path(destination)
    if not folder.is_dir():
        raise InputError(f"There is no folder {str(folder)!r} to verify.")
    if not (folder / "data").is_dir():
        raise InputError(
            f"{str(folder)!r} holds no dataset: it has no folder data/.", hint="Give the folder that brim built."
        )
    check = _Verification(folder, Ledger(state_folder(folder, state)), progress or Silent())
    try:
        check.shards()
        check.card()
        if source is not None:
            check.source(source, None if root is None else os.fspath(root))
    finally:
        check.progress.finish()
    if check.result.findings:
        count = len(check.result.findings)
        raise DamageFound(
            f"{count} problem{'s' if count != 1 else ''} found:\n" + "\n".join(f"  {f}" for f in check.result.findings),
            hint="Run the same brim build again: it writes what is missing or of another size. --fresh starts over.",
            findings=check.result.findings,
        )
    return check.result


class _Verification:
    def __init__(self, folder: Path, ledger: Ledger, progress: Progress) -> None:
        self.folder, self.ledger, self.progress = folder, ledger, progress
        self.result = Verified()
        self.rows_of: dict[str, int] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def found(self, what: str) -> None:
        with self._lock:
            self.result.findings.append(what)

    def shards(self) -> None:
        here = {f"data/{name}" for name in os.listdir(self.folder / "data") if not name.startswith(".")}
        receipts = self.ledger.receipts
        if self.ledger.job is None:
            self.result.unproved.append("content: there is no ledger, so there are no checksums to compare with")
            self._complete_by_name(here)
        elif not self.ledger.done:
            self.found("the build is not finished: run the same brim build again")
        if self.ledger.job is not None:
            for name in sorted(here - set(receipts)):
                self.found(f"{name}: is not part of the dataset")
        names = sorted(receipts) if self.ledger.job is not None else sorted(here)
        total = sum((self.folder / name).stat().st_size for name in names if name in here)
        self.progress.start("verify", total, len(names), effective_limit().bytes)
        with ThreadPoolExecutor(usable_cores()) as pool:
            try:
                for name, result in zip(names, pool.map(self._shard, names), strict=True):
                    if result is not None:
                        self.rows_of[name], size = result
                        self.result.rows += self.rows_of[name]
                        self.result.bytes += size
            finally:
                self._stopped.set()  # Ctrl-C: the other threads need not go on
        self.result.shards = len(names)

    def _complete_by_name(self, here: set[str]) -> None:
        """Without a ledger, the names still say how many shards there should be."""
        seen: dict[tuple[str, int, str], set[int]] = {}
        for name in sorted(here):
            match = _NAME.fullmatch(name)
            if match is None:
                self.found(f"{name}: is not part of the dataset")
            else:
                kind = (match["split"], int(match["count"]), Path(name).suffix)
                seen.setdefault(kind, set()).add(int(match["number"]))
        for (split, count, extension), numbers in seen.items():
            for number in sorted(set(range(count)) - numbers):
                self.found(f"data/{split}-{number:05d}-of-{count:05d}{extension}: is missing")

    def _shard(self, name: str) -> tuple[int, int] | None:
        """(rows, size) of a shard that is as its receipt says; None after noting what is wrong."""
        receipt = self.ledger.receipts.get(name)
        path = self.folder / name
        try:
            size = path.stat().st_size
            if receipt is not None and size != receipt.size:
                self.found(f"{name}: has {size:,} bytes instead of {receipt.size:,}")
                return None
            digest = sha256_of(path, self._advance)
        except FileNotFoundError:
            self.found(f"{name}: is missing")
            return None
        except OSError as error:
            self.found(f"{name}: cannot be read ({error.strerror})")
            return None
        if receipt is not None and digest != receipt.sha256:
            self.found(f"{name}: its content changed (SHA-256 {digest[:12]}… instead of {receipt.sha256[:12]}…)")
            return None
        try:
            rows = _count_rows(path)
        except (pa.ArrowException, OSError, DamageFound) as error:
            self.found(f"{name}: cannot be read as {path.suffix[1:]} ({str(error).splitlines()[0]})")
            return None
        if receipt is not None and rows != receipt.rows:
            self.found(f"{name}: holds {rows:,} rows instead of {receipt.rows:,}")
            return None
        self.progress.shard(name, size, digest, "verified")
        return rows, size

    def _advance(self, size: int) -> None:
        if self._stopped.is_set():
            raise Stopped("Stopped.")
        self.progress.advance(size)

    def card(self) -> None:
        """The card says what the shards hold."""
        try:
            text = (self.folder / CARD).read_text(encoding="utf-8")
            fields = read_card(text)
        except FileNotFoundError:
            self.found(f"{CARD}: is missing")
            return
        except (BrimError, UnicodeDecodeError, OSError) as error:
            self.found(f"{CARD}: {error}")
            return
        rows: dict[str, int] = {}
        for name, count in self.rows_of.items():
            match = _NAME.fullmatch(name)
            if match:
                rows[match["split"]] = rows.get(match["split"], 0) + count
        if self.result.findings:
            return  # with shards missing, the card cannot agree
        splits = card_splits(fields)
        if splits is not None and splits != set(rows):
            self.found(f"{CARD}: names the splits {_list(splits)}, the shards are of {_list(set(rows))}")
        for name, said in card_rows(fields).items():
            if name in rows and said != rows[name]:
                self.found(f"{CARD}: says {said:,} rows of {name}, the shards hold {rows[name]:,}")

    def source(self, source: str | os.PathLike[str] | FileTable, root: str | None) -> None:
        """Every source file is inside as often as the source names it, byte for byte."""
        table = source if isinstance(source, FileTable) else self._read(source, root)
        for refused in table.refused:
            self.found(f"source {refused.path}: is {refused.reason}")
        number_of: dict[str, int] = {path.as_py(): number for number, path in enumerate(table.files.paths)}
        expected = np.zeros(len(table.files), np.int64)
        for name in table.columns:
            np.add.at(expected, flat_numbers(table.rows.column(name)), 1)
        seen = np.zeros(len(table.files), np.int64)
        left_out = set(self.ledger.job.left_out) if self.ledger.job else set()
        self.progress.start(
            "compare", int((expected * table.files.sizes).sum()), len(self.rows_of), effective_limit().bytes
        )
        for name in sorted(self.rows_of):
            try:
                self._compare(name, table, number_of, seen)
            except BrimError as error:
                self.found(f"{name}: {error}")
            self.progress.shard(name, 0, "", "compared")
        self.result.files_compared = int(seen.sum())
        if len(self.rows_of) < self.result.shards:
            return  # files of a damaged shard would all be reported once more
        for number in np.flatnonzero(seen != expected).tolist():
            path = table.files.path(number)
            if path not in left_out:
                self.found(
                    f"{path}: is {seen[number]} time(s) in the shards and {expected[number]} time(s) in the source"
                )
        self._metadata(table)

    def _metadata(self, table: FileTable) -> None:
        """The source's values are those that were built: its plan has the same digest of content."""
        job = self.ledger.job
        if job is None or job.left_out or self.result.findings or table.refused:
            self.result.unproved.append("metadata: the values of other columns were not compared with the source")
            return
        plan = make_plan(table, job.facts["format"].split()[0], CutOptions(**job.facts["cut"]))
        if plan.facts["content"] != job.facts["content"]:
            self.found("the values of the source's table are not those that were built (its files are)")

    def _read(self, source: str | os.PathLike[str], root: str | None) -> FileTable:
        recipe: dict[str, Any] = self.ledger.job.facts["recipe"] if self.ledger.job else {}
        return read_source(source, SourceOptions.from_recipe(recipe, root))

    def _compare(self, name: str, table: FileTable, number_of: dict[str, int], seen: Ints) -> None:
        descriptor = os.open(self.folder / name, os.O_RDONLY)
        try:
            for found in locate(self.folder / name):
                number = number_of.get(found.path or "")
                if number is None:
                    self.found(f"{name}: holds {found.path}, which the source does not have")
                elif found.size != table.files.sizes[number]:
                    size = table.files.sizes[number]
                    self.found(f"{found.path}: has {size:,} bytes in the source and {found.size:,} in {name}")
                    seen[number] += 1
                else:
                    if not _same(descriptor, found, table, number, self.progress.advance):
                        self.found(f"{found.path}: differs between the source and {name}")
                    seen[number] += 1
        finally:
            os.close(descriptor)


def _same(shard: int, found: Found, table: FileTable, number: int, advance: Callable[[int], None]) -> bool:
    """Whether the range of the shard and the source's value hold the same bytes."""
    value = SpliceBuilder(table.files)
    value.value(number)
    at = found.offset
    for chunk in value.finish().chunks():
        if os.pread(shard, len(chunk), at) != chunk:
            return False
        at += len(chunk)
        advance(len(chunk))
    return True


def _count_rows(path: Path) -> int:
    return tar_rows(str(path)) if path.suffix == ".tar" else int(pq.read_metadata(path).num_rows)


def _list(names: set[Any]) -> str:
    return ", ".join(sorted(map(str, names))) or "(none)"
