"""What can be said about a source of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal

from brim.buckets.bucket_address import Access
from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.records import dataclass

FORMATS = ("jsonl", "csv", "tsv", "parquet", "arrow", "text")


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How a source is read and cut. What may decide the rows is part of the fingerprint.

    That is all but `name` and `code`, which count for iterators alone, `access`, and `leave_out_unreadable`, which the
    job's `on_error` decides.
    """

    format: str | None = None  # one of FORMATS; None goes by the names of the files
    text: Literal["lines", "document"] = "lines"  # a row of a text file: a line, or the whole file
    columns: tuple[str, ...] | None = None
    delimiter: str | None = None  # of CSV; None goes by the name: a tab for .tsv
    as_text: tuple[str, ...] = ()  # columns of CSV that are text whatever they look like
    limit: int | None = None  # the first rows only
    split: str | None = None  # of a folder saved by `datasets`
    config: str | None = None
    where: str | None = None  # only rows for which this is true: see sources/where.py
    unit_bytes: int | None = None  # None: a 64th of the source, between `least_unit_bytes` and 128 MiB
    least_unit_bytes: int = 8 << 20
    name: str | None = None  # of an iterator, which has none of its own
    code: str | None = None  # digest of the function that makes the iterator
    access: Access = field(default_factory=Access)  # how a bucket is reached
    leave_out_unreadable: bool = False  # rows of text that cannot be read, instead of an error

    def __post_init__(self) -> None:
        one_of("input-format", self.format, (None, *FORMATS))
        one_of("text", self.text, ("lines", "document"))
        if self.delimiter is not None and (len(self.delimiter.encode()) != 1 or self.delimiter in '"\r\n'):
            raise InputError(
                f"{self.delimiter!r} cannot separate the values of a CSV file.", hint="Give one character."
            )
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise InputError("--columns names a column twice.")
        at_least("limit", self.limit, 1)
        at_least("unit-size", self.unit_bytes, 1)

    @property
    def facts(self) -> dict[str, Any]:
        """What was said, without what only names things, as it comes back from JSON."""
        said = {name: getattr(self, name) for name in self.__slots__ if name not in _NOT_IN_FINGERPRINT}
        said = {name: value for name, value in said.items() if value != getattr(_PLAIN, name)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in said.items()}


_NOT_IN_FINGERPRINT = ("name", "code", "access", "leave_out_unreadable")
_PLAIN = RowOptions()

Skip = Callable[[int], bool]


def never(number: int) -> bool:
    """Skip no unit."""
    return False
