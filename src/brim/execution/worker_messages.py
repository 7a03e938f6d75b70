"""Messages between a process and its workers. A worker is set up once per job, then computes one unit after another.

Rows never travel in messages: a worker reads its unit and writes a file, and its answer is a few numbers.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from brim.records import dataclass

if TYPE_CHECKING:  # a process that only starts workers needs none of them
    from brim.compute.outputs.rows_file import Writing
    from brim.compute.rows.unit import Reading, Unit
    from brim.compute.steps.step import Step

OnError = Literal["stop", "skip", "quarantine"]


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """Everything that a worker needs once. `pause` is a file of one byte: 1 while memory is low.

    Its path, and that of `folder`, may be relative to the folder of the setup file. `syncs`: the worker makes its files
    durable itself; otherwise the receiver of the answer does, while the worker computes the next unit. `positions` is
    the file in which workers note their rows, if there is one. `seed` is the seed of random numbers in the user's code.
    """

    step: Step
    reading: Reading
    writing: Writing
    folder: str
    pause: str
    on_error: OnError = "stop"
    threads: int = 1
    syncs: bool = True
    positions: str = ""
    seed: str = ""


@dataclass(frozen=True, slots=True)
class JobStart:
    """A job for a worker that was started without one: the paths of its setup file and of its log."""

    setup: str
    log: str


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The job is over: wait so long for the next one, then exit."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class UnitOrder:
    """A unit to compute. `parts`: each batch in so many parts (0: row by row), where that gives the same rows.

    `probe`: only the first batch, for its types. `types` are those of a probe, as a serialized schema. `slot` is the
    number of the worker among those that run at the same time, from 0.
    """

    unit: Unit
    parts: int = 1
    release_bytes: int = 0  # above this, the worker releases memory between batches
    probe: bool = False
    types: bytes = b""
    slot: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The worker has loaded everything and holds this much memory."""

    held_bytes: int


@dataclass(frozen=True, slots=True)
class RowRange:
    """The rows of its unit that a worker begins now, after `seen_bytes` of input.

    `held_bytes` is the memory of the worker without the results of its batch; 0 if it was not measured.
    """

    offset: int
    rows: int
    seen_bytes: int
    held_bytes: int = 0


_POSITION = struct.Struct("<qqqqq")


class WorkerPositions:
    """A memory-mapped file with a slot per worker, in which it notes the rows that it begins.

    Noting wakes no other process. The file is read when a worker has died.
    """

    def __init__(self, path: Path, slots: int = 0) -> None:
        """Open the file; with `slots`, create it."""
        self.path = path
        if slots:
            path.write_bytes(bytes(_POSITION.size * slots))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def note(self, slot: int, unit: int, rows: RowRange) -> None:
        values = (unit, rows.offset, rows.rows, rows.seen_bytes, rows.held_bytes)
        _POSITION.pack_into(self._map, slot * _POSITION.size, *values)

    def clear(self, slot: int) -> None:
        _POSITION.pack_into(self._map, slot * _POSITION.size, 0, 0, 0, 0, 0)

    def find(self, slot: int, unit: int) -> RowRange | None:
        """Return the last rows of a unit; None if the worker has begun none of them."""
        number, *values = _POSITION.unpack_from(self._map, slot * _POSITION.size)
        return RowRange(*values) if number == unit and values[1] else None

    def remove(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class ProbeDone:
    """The types of the first batch, as a serialized schema; empty if it gave no rows."""

    types: bytes


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit is a file. `held_bytes` is the memory that the worker still holds; `bad_rows` were skipped.

    `bad_batches` of `bad_batch_rows` rows failed as a unit. `encoder` names the one that was used, where a step has
    several; `differed` is the reason why the fast one was not. `source` is the SHA-256 of the source bytes.
    """

    rows: int
    size: int
    sha256: str
    held_bytes: int
    bad_rows: int = 0
    encoder: str = ""
    differed: str = ""
    bad_batches: int = 0
    bad_batch_rows: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """The unit cannot be computed: not enough memory, or `error`."""

    kind: Literal["memory", "error"]
    error: Any = None
