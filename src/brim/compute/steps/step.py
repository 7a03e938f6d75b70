"""What a worker does with rows. Mapping, tokenising and embedding are steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol, runtime_checkable

import pyarrow as pa

from brim.records import dataclass


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive rows. `first_row` is the index in the source of the first one, if the step asked for indices.

    `offset` counts from the first row of the unit. `leave_out` takes a row of this batch and the error of it, if rows
    that fail are left out. `advance` takes the number of rows of this batch that are done, where a step can tell.
    """

    table: pa.Table
    offset: int
    first_row: int | None
    leave_out: Callable[[int, BaseException], None] | None = None
    advance: Callable[[int], None] = lambda rows: None


class Step(Protocol):
    """Work on batches. It travels to workers by pickle: modules and closures by cloudpickle, so keep it small.

    The rows of a batch are fixed by the plan: at most `batch_rows` rows and `batch_bytes` of input; None and 0 set
    no limit. The last batch of a unit may have fewer.
    """

    batch_rows: int | None
    batch_bytes: int
    indices: bool  # whether it wants to know which row of the source a row is

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The input columns that are read; None for all."""

    @property
    def splittable(self) -> bool:
        """Whether a batch in pieces gives the same rows."""

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the output, for the fingerprint: plain values, no path of this machine."""

    def open(self, schema: pa.Schema) -> None:
        """In the worker, once, before the first batch: load what is large. `schema` is that of the source."""

    def apply(self, batch: Batch, small: bool) -> Iterator[pa.Table]:
        """The rows that come of a batch, in order.

        `small`: memory is short; where `splittable`, use as little as possible at a time, a row if need be. The
        concatenation of what is given must be the same. A BadRow tells which row of the batch is to blame; a step
        may also give such rows to `batch.leave_out` and go on with the others.
        """

    def close(self) -> None:
        """In the worker, after its last unit."""

    def smaller(self, rows: int) -> str:
        """What to change where a batch of `rows` rows does not fit; nothing if there is nothing."""


@runtime_checkable
class HasTypeInference(Protocol):
    """A step whose output types follow its first batch, as those of `Dataset.map` do."""

    def settle(self, schema: pa.Schema) -> None:
        """In the worker: columns have these types, where their values can take them."""


class BadRow(Exception):
    """The user's function failed. `row` and `rows` tell where in the batch; the cause is `__cause__`."""

    def __init__(self, row: int, rows: int) -> None:
        super().__init__(row, rows)
        self.row, self.rows = row, rows


class BadBatch(BadRow):
    """The model failed on `rows` rows together, the first of which is `row`, and on none of them alone."""


@runtime_checkable
class HasEncoder(Protocol):
    """A step that has two ways to the same rows, and goes back to the slower one if they should differ."""

    @property
    def encoder(self) -> str:
        """In the worker: what does the work now, for people."""

    @property
    def differed(self) -> str:
        """In the worker: why the fast way was left; nothing as long as it was not."""

    def use_reference(self) -> None:
        """In the parent: workers that are set up from now on do it the slower way."""


class RestartUnit(Exception):
    """The step goes another way from now on: the unit is to be done again from its start."""


def end_forked_child() -> NoReturn:
    """End a process that the user's function has forked and that came back from it: the worker itself goes on.

    It has the worker's connection and files, and must not do the worker's work a second time.
    """
    os.write(2, b"The function forked a process that returned from it, and brim ended it: end it with os._exit().\n")
    os._exit(1)
