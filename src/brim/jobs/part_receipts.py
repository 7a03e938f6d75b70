"""`PLAN.parts/` beside a saved plan: which parts it is done in, and a ledger for each of them.

One shared folder is all that the machines need to have in common beside source and destination. Everybody who
does a part shares the lock of the folder and holds the lock of the part; whoever finishes holds the first alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from brim import cuts
from brim.errors import DestinationError, InputError
from brim.file_set import Ints
from brim.plans.cut_shards import Shard
from brim.records import dataclass
from brim.state.durable import reason, sync_folder, write_whole
from brim.state.ledger import LEDGER, Ledger, Receipt
from brim.state.lock import locked

_FOLDER = re.compile(r"(\d{5})-of-(\d{5})")
_MOST = 99_999


@dataclass(frozen=True, slots=True)
class Part:
    """Part `number` of `count`, from 1."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        return f"{self.number:05d}-of-{self.count:05d}"


def parse_part(text: str) -> Part:
    match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    part = Part(int(match[1]), int(match[2])) if match else None
    if part is None or not 1 <= part.number <= part.count <= _MOST:
        raise InputError(f"--part takes I/N, the I-th of N parts from 1, not {text!r}.", hint="Like --part=3/100.")
    return part


def divide(shards: Sequence[Shard], count: int) -> Ints:
    """Where each of `count` parts begins and ends: consecutive shards, about equal bytes.

    It depends on the plan alone, so that every machine divides alike. A part may be empty: if there are more
    parts than shards, or a shard is heavier than a part should be.
    """
    before = cuts.running(np.array([shard.file_bytes + shard.value_bytes + 1 for shard in shards], np.int64))
    middles = (before[:-1] + before[1:]) / 2.0  # a shard belongs to the part that its middle falls into
    edges = np.searchsorted(middles, float(before[-1]) * np.arange(count + 1) / count)
    return np.asarray(edges, np.int64)


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


class PartReceipts:
    """The receipts of all parts of one saved plan."""

    def __init__(self, plan: Path) -> None:
        self.root = plan.with_name(f"{plan.name}.parts")
        self.shown = str(self.root)  # what users know it by

    def count(self) -> int | None:
        """Into how many parts the plan was divided; None if no part has begun."""
        found = {int(match[2]) for match in map(_FOLDER.fullmatch, self._names()) if match}
        if len(found) > 1:
            raise InputError(
                f"{self.shown!r} holds parts of several divisions: {', '.join(map(str, sorted(found)))}.",
                hint="Remove the folders of the one that was a mistake.",
            )
        return next(iter(found), None)

    def _names(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self.root.iterdir() if entry.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._unusable(error) from error

    def ledger(self, part: Part) -> Ledger:
        return Ledger(self.root / part.folder)

    def ledgers(self) -> Iterator[tuple[Part, Ledger]]:
        """Of every part that has begun."""
        for match in filter(None, map(_FOLDER.fullmatch, self._names())):
            part = Part(int(match[1]), int(match[2]))
            yield part, self.ledger(part)

    def check(self, part: Part, ledger: Ledger, fingerprint: str) -> None:
        """Receipts of another plan are an error: nobody may mix the two."""
        if ledger.job is not None and ledger.job.fingerprint != fingerprint:
            raise InputError(
                f"{self.shown!r} holds the receipts of another plan, in part {part}.",
                hint="Save this plan under another name; or remove that folder, if what it did is not needed.",
            )

    def all(self, fingerprint: str) -> dict[str, Receipt]:
        """Every receipt of the plan, by the name of its shard."""
        found: dict[str, Receipt] = {}
        for part, ledger in self.ledgers():
            self.check(part, ledger, fingerprint)
            found |= ledger.receipts
        return found

    @contextmanager
    def part(self, part: Part) -> Iterator[Path]:
        """The folder of a part, for one run alone."""
        self._need_count(part)
        folder = self.root / part.folder
        self._make(folder)
        with (
            locked(self.root, shared=True, busy="This plan is being finished by another brim."),
            locked(folder, busy=f"Part {part} is being done by another brim."),
        ):
            self._need_count(part)  # somebody may have begun another division at the same time
            yield folder

    def _need_count(self, part: Part) -> None:
        count = self.count()
        if count is not None and count != part.count:
            raise InputError(
                f"This plan is done in {count} parts, and --part={part} is of another division.",
                hint=f"Use --part I/{count}; brim build --plan PLAN does the rest on one machine; or remove "
                f"{self.shown!r} to divide anew.",
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While nobody does a part."""
        self._make(self.root)
        with locked(self.root, busy="Parts of this plan are being done, or it is being finished."):
            yield

    def forget(self, names: Iterable[str]) -> None:
        """These shards have to be brought again by their parts. Only for whoever is `alone`."""
        gone = set(names)
        if not gone:
            return
        for _, ledger in self.ledgers():
            for name in sorted(gone & ledger.receipts.keys()):
                ledger.forget(name)
            ledger.close()

    def keep(self, part: Part, folder: Path, name: str) -> None:
        """A unit's file is in the folder of its part: everybody sees it there."""

    def holder(self, part: Part, folder: Path) -> Callable[[Receipt], bool] | None:
        """Whether a unit that has a receipt is there; None: as its file says."""
        return None

    def bring(self, part: Part, name: str, folder: Path) -> None:
        """A file of a part, into a folder of this machine: another name of it where that is possible."""
        source, target = self.root / part.folder / name, folder / name
        try:
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another disk, or a file system without links
                write_whole(target, _blocks(source))
            sync_folder(folder)
        except FileNotFoundError as error:
            raise InputError(
                f"{str(source)!r} is not there, though part {part} has computed it.",
                hint="Run that part again.",
            ) from error

    def _make(self, folder: Path) -> None:
        try:
            self.root.mkdir(exist_ok=True, mode=0o700)
            if folder != self.root:
                folder.mkdir(exist_ok=True)
                (folder / LEDGER).touch()
        except OSError as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError) -> DestinationError:
        return DestinationError(
            f"The folder of the receipts, {str(self.root)!r}, cannot be used: {reason(error)}.",
            hint="Keep the plan in a folder that all machines can write to.",
        )


def listed(numbers: Sequence[int]) -> str:
    """1-3, 7: sorted numbers for people."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
