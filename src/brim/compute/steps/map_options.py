"""The options of a map step: the arguments of `Dataset.map` that decide the rows, and what the dataset adds."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import pyarrow as pa

from brim.errors import ArgumentError, InputError
from brim.options.compute_options import MapFunctionOptions
from brim.records import dataclass

ALL_ROWS = 2**62  # a batch as long as the dataset
UNCHANGED = "brim_unchanged"  # the only column of the output of a function that returns None
NO_COLUMNS = "brim_no_columns"  # the only column of the output of a function that returns rows without columns


@dataclass(frozen=True, kw_only=True)
class MapStepOptions(MapFunctionOptions):
    """Options of a map, as workers take them.

    `format_type`, `format_columns` and `format_kwargs` are those of a dataset that has a format, which then decides
    what the function is called with. `side_effects`: if the function returns nothing, nothing is written, because the
    caller has the rows.
    """

    format_type: str | None = None
    format_columns: tuple[str, ...] | None = None
    format_kwargs: dict[str, Any] = field(default_factory=dict)
    side_effects: bool = False

    def check_options(self) -> None:
        if self.fn_kwargs is None:
            object.__setattr__(self, "fn_kwargs", {})
        if self.input != "python" and self.format_type is not None:
            raise InputError(
                f"The dataset has the format {self.format_type!r} and input={self.input!r} was asked for.",
                hint="Give one of them: ds.with_format(None), or leave input= out.",
            )
        if self.splittable and not self.batched:
            object.__setattr__(self, "splittable", None)

    @property
    def batch_rows(self) -> int:
        """Rows per batch. Row functions take as many at a time as `datasets` writes together: types follow them."""
        if not self.batched:
            return self.writer_batch_size or 1000
        return self.batch_size if self.batch_size is not None and self.batch_size > 0 else ALL_ROWS

    def check(self, schema: pa.Schema) -> None:
        """Refuse columns that the source does not have."""
        for option in ("input_columns", "remove_columns"):
            missing = [name for name in getattr(self, option) or () if name not in schema.names]
            if missing:
                raise ArgumentError(
                    f"{option} names {missing[0]!r}, which is not a column.",
                    hint=f"The columns are: {', '.join(schema.names)}.",
                )
