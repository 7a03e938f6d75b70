"""How a source of rows is read and cut into units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from brim.options.groups import InputOptions
from brim.records import dataclass
from brim.storage.location import Access

LEAST_UNIT_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class RowOptions(InputOptions):
    """How a source is read and cut. Options that may decide the rows are part of the fingerprint.

    `name` and `code` are only part of it for iterators; `access` and `leave_out_unreadable` (decided by the job's
    `on_error`) never are.
    """

    as_text: tuple[str, ...] = ()  # columns of CSV that are read as text
    json_columns: tuple[str, ...] = ()  # columns of JSONL and of dicts that are read as JSON texts
    other_columns: tuple[str, ...] | None = None  # of JSONL with json_columns: the only other columns that are read
    least_unit_bytes: int = LEAST_UNIT_BYTES
    name: str | None = None  # of an iterator
    code: str | None = None  # digest of the function that makes the iterator
    access: Access = field(default_factory=Access)  # to the object store of the source
    leave_out_unreadable: bool = False  # rows of text that cannot be read, instead of an error

    @property
    def facts(self) -> dict[str, Any]:
        """The fingerprint inputs that are not the default, under the keys that ledgers have, as JSON returns them."""
        values: dict[str, Any] = {
            "format": self.input_format,
            "text": None if self.text == "lines" else self.text,
            "columns": list(self.columns),
            "delimiter": self.delimiter,
            "as_text": list(self.as_text),
            "json_columns": list(self.json_columns),
            "limit": self.limit,
            "split": self.from_split,
            "config": self.from_config,
            "where": self.where,
            "unit_bytes": self.unit_bytes,
            "least_unit_bytes": None if self.least_unit_bytes == LEAST_UNIT_BYTES else self.least_unit_bytes,
        }
        return {name: value for name, value in values.items() if value not in (None, [])}


Skip = Callable[[int], bool]


def never(number: int) -> bool:
    """Skip no unit."""
    return False
