"""What the caller of `map` may say. The names and meanings are those of `Dataset.map`."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, get_args

import pyarrow as pa

from brim.choices import at_least, one_of, switches
from brim.errors import ArgumentError, InputError
from brim.records import dataclass

InputKind = Literal["python", "arrow", "numpy"]
ALL_ROWS = 2**62  # a batch as long as the dataset
UNCHANGED = "brim_unchanged"  # the one column of what a function gave that returns nothing
NO_COLUMNS = "brim_no_columns"  # and of one that returned rows without columns


@dataclass(frozen=True, slots=True)
class MapOptions:
    """Options of a map.

    `input` is what a row or batch looks like to the function: "python" (a mapping), "arrow" (a pa.Table, nothing
    is copied) or "numpy" (a dict of arrays of the columns' own types). `format_type` and `format_kwargs` are those
    of a dataset with a format of its own, which then decides. `splittable`: a batch in pieces gives the same rows.
    `side_effects`: where the function returns nothing, nothing is written, for whoever asked has the rows.
    """

    batched: bool = False
    batch_size: int | None = 1000
    drop_last_batch: bool = False
    writer_batch_size: int | None = 1000
    remove_columns: str | tuple[str, ...] | list[str] | None = None
    with_indices: bool = False
    with_rank: bool = False
    input_columns: str | tuple[str, ...] | list[str] | None = None
    fn_kwargs: dict[str, Any] = field(default_factory=dict)
    features: Any = None
    input: InputKind = "python"
    splittable: bool | None = None
    format_type: str | None = None
    format_columns: tuple[str, ...] | None = None
    format_kwargs: dict[str, Any] = field(default_factory=dict)
    disable_nullable: bool = False
    try_original_type: bool = True
    on_mixed_types: Literal["use_json"] | None = "use_json"
    side_effects: bool = False

    def __post_init__(self) -> None:
        switches(
            batched=self.batched, drop_last_batch=self.drop_last_batch, with_indices=self.with_indices,
            with_rank=self.with_rank, splittable=self.splittable, disable_nullable=self.disable_nullable,
        )  # fmt: skip
        for name in ("remove_columns", "input_columns"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if self.fn_kwargs is None:
            object.__setattr__(self, "fn_kwargs", {})
        if self.on_mixed_types is not None:
            one_of("on-mixed-types", self.on_mixed_types, ("use_json",))
        one_of("input", self.input, get_args(InputKind))
        at_least("writer-batch-size", self.writer_batch_size, 0)
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
