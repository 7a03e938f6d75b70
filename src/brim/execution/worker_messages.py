"""What parent and worker say to each other. A worker is set up once, then given units one after the other.

Rows never travel here: a worker reads its unit and writes a file, and what comes back is a few numbers.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.records import dataclass

if TYPE_CHECKING:  # whoever only starts a worker needs none of them
    from brim.compute.outputs.rows_file import Writing
    from brim.compute.rows.unit import Reading, Unit
    from brim.compute.steps.step import Step

OnError = Literal["stop", "skip", "quarantine"]


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a worker needs to know once. `gate` is a file of a byte: while it is 1, memory is short.

    Its path, and that of `folder`, may be relative to where the setup itself is. `lasts`: a unit that is done is on
    disk for good; else whoever hears of it sees to that, while the worker does the next. `whereabouts`: the file in
    which workers note where they are, if there is one. `seed` is what random numbers of the user's code start from.
    """

    step: Step
    reading: Reading
    writing: Writing
    folder: str
    gate: str
    on_error: OnError = "stop"
    threads: int = 1
    lasts: bool = True
    whereabouts: str = ""
    seed: str = ""


@dataclass(frozen=True, slots=True)
class Begin:
    """To a worker that was started without a job: its setup is in this file, and what it prints belongs to that one."""

    setup: str
    log: str


@dataclass(frozen=True, slots=True)
class Order:
    """Do this unit. `pieces`: each batch in that many parts (0: row by row), where that gives the same rows.

    `probe`: only the first batch, to see its types. `types` are those that were seen so, as a serialized schema.
    `slot` is which of the workers that run at a time does it, from 0.
    """

    unit: Unit
    pieces: int = 1
    soft_bytes: int = 0
    probe: bool = False
    types: bytes = b""
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded everything and holds this much."""

    held_bytes: int


@dataclass(frozen=True, slots=True)
class At:
    """The worker begins with these rows of its unit. `seen_bytes` of input are behind it.

    `held_bytes` is what it holds by then, without the results of its batch; 0 if that was not measured.
    """

    offset: int
    rows: int
    seen_bytes: int
    held_bytes: int = 0


_PLACE = struct.Struct("<qqqqq")


class Whereabouts:
    """Where workers are, each in its slot of a file that all have mapped: noted with every batch, which wakes nobody,
    and read when one of them is gone."""

    def __init__(self, path: Path, slots: int = 0) -> None:
        """The file is made, if `slots` are given."""
        self.path = path
        if slots:
            path.write_bytes(bytes(_PLACE.size * slots))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def note(self, slot: int, unit: int, at: At) -> None:
        _PLACE.pack_into(self._map, slot * _PLACE.size, unit, at.offset, at.rows, at.seen_bytes, at.held_bytes)

    def forget(self, slot: int) -> None:
        _PLACE.pack_into(self._map, slot * _PLACE.size, 0, 0, 0, 0, 0)

    def find(self, slot: int, unit: int) -> At | None:
        """None if it came to no batch of the unit."""
        number, *at = _PLACE.unpack_from(self._map, slot * _PLACE.size)
        return At(*at) if number == unit and at[1] else None

    def remove(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Probed:
    """The types of the first batch, as a serialized schema; empty if it gave no rows."""

    types: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """The unit is a file. `held_bytes` is what the worker still holds; `bad_rows` were left out.

    `bad_batches` of them are batches that failed as a whole, of `bad_batch_rows` rows.

    `encoder` did it, where a step has several; `differed` tells why it was not the fast one. `changes` is what a
    callable object has changed in itself, pickled. `source` is the SHA-256 of the source bytes that were read.
    """

    rows: int
    size: int
    sha256: str
    held_bytes: int
    bad_rows: int = 0
    encoder: str = ""
    differed: str = ""
    changes: bytes = b""
    bad_batches: int = 0
    bad_batch_rows: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """The unit cannot be done. `kind` memory: there was too little; error: `error` says what is wrong."""

    kind: Literal["memory", "error"]
    error: Any = None
