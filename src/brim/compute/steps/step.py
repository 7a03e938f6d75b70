"""The interface of steps, which process rows in workers: map, tokenize and embed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, runtime_checkable

import pyarrow as pa

from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows. `first_row` is the index of the first one in the source, if the step needs indices.

    `offset` counts from the first row of the unit. `leave_out` reports a failed row and its error, if failed rows are
    skipped. `advance` reports the number of finished rows of this batch, for steps that know it.
    """

    table: pa.Table
    offset: int
    first_row: int | None
    leave_out: Callable[[int, BaseException], None] | None = None
    advance: Callable[[int], None] = lambda rows: None


class Step(Protocol):
    """Processes batches. It is sent to workers by pickle, modules and closures by cloudpickle, so keep it small.

    The rows of a batch are fixed by the plan: at most `batch_rows` rows and `batch_bytes` of input; None and 0 set
    no limit. The last batch of a unit may have fewer.
    """

    batch_rows: int | None
    batch_bytes: int
    indices: bool  # whether it needs the index of rows in the source

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The input columns to read; None for all."""

    @property
    def splittable(self) -> bool:
        """Whether a divided batch gives the same rows."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs: plain values, no path of this machine."""

    def open(self, schema: pa.Schema) -> None:
        """Load large objects. Called once in the worker, before the first batch. `schema` is that of the source."""

    def apply(self, batch: RowBatch, small: bool) -> Iterator[pa.Table]:
        """Yield the output rows of a batch, in order.

        `small`: memory is short; if `splittable`, use as little as possible at a time, down to one row. The
        concatenated output must be the same. A BadRow names the failed row of the batch; a step may also report such
        rows to `batch.leave_out` and continue with the others.
        """

    def close(self) -> None:
        """Release resources. Called in the worker after its last unit."""

    def smaller(self, rows: int) -> str:
        """Return a hint for a batch of `rows` rows that does not fit into memory, or an empty text."""


@runtime_checkable
class HasTypeInference(Protocol):
    """A step whose output types follow its first batch, as those of `Dataset.map` do."""

    def settle(self, schema: pa.Schema) -> None:
        """Convert columns to these types if their values fit. Called in the worker."""


class BadRow(Exception):
    """The user's function failed on `rows` rows of the batch from `row` on; the cause is `__cause__`."""

    def __init__(self, row: int, rows: int) -> None:
        super().__init__(row, rows)
        self.row, self.rows = row, rows


class BadBatch(BadRow):
    """The model failed on `rows` rows together, the first of which is `row`, and on none of them alone."""


@runtime_checkable
class HasEncoder(Protocol):
    """A step with a fast and a reference encoder, which uses only the reference once their results differ."""

    @property
    def encoder(self) -> str:
        """In the worker: the name of the encoder in use, for messages."""

    @property
    def differed(self) -> str:
        """In the worker: why the fast encoder is no longer used; empty while it is."""

    def use_reference(self) -> None:
        """In the parent: let workers that start from now on use the reference."""


class RestartUnit(Exception):
    """The step switched its encoder: the unit must be repeated from its start."""


def end_forked_child() -> NoReturn:
    """Exit a process that the user's function forked and that returned from the function.

    It has the worker's connection and files, and must not repeat the worker's work. The worker itself continues.
    """
    os.write(2, b"The function forked a process that returned from it, and brim stopped it: exit it with os._exit().\n")
    os._exit(1)
