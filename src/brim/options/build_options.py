"""The options of plan, build, select and open_plan."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from brim.errors import InputError
from brim.extras import need_extra
from brim.options.declare import Kind, Names, Option, Path, choose_one
from brim.options.groups import (
    DATASET,
    DESTINATION,
    SOURCE,
    BidsOptions,
    CheckFileOptions,
    FileSourceOptions,
    FilterOptions,
    FromOptions,
    JobOptions,
    ProgressOptions,
    RecipeOptions,
    ReportOptions,
    RunOptions,
    ShardOptions,
    WriteOptions,
    column_names,
)
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ReadFilesOptions(FileSourceOptions, RecipeOptions, BidsOptions):
    """How a path is read as a table of files."""


@dataclass(frozen=True, kw_only=True)
class WriteShardsOptions(JobOptions, WriteOptions, ShardOptions, CheckFileOptions):
    """The options for writing rows and files as shards, independent of their source."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReadFilesOptions, WriteShardsOptions):
    """The options of `brim.plan`."""

    source: Annotated[Any, Option(SOURCE, "SOURCE", argument=True)] = field(kw_only=False)
    destination: Annotated[Path | None, Option(DESTINATION, "DEST", argument=True)] = field(default=None, kw_only=False)


@dataclass(frozen=True, kw_only=True)
class BuildOptions(PlanOptions, ReportOptions, ProgressOptions):
    """The options of `brim.build`."""

    destination: Annotated[Path, Option(DESTINATION, "DEST", argument=True)] = field(kw_only=False)


def _concatenated(value: Any) -> tuple[Any, ...]:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _sample(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(value)
    return str(value)


@dataclass(frozen=True, kw_only=True)
class QueryOptions(FilterOptions, panel="Source"):
    """What `select` chooses from a dataset.

    The steps run in this order: concat, where or sql, distinct, sample, sort_by or shuffle, limit, split_into; columns
    and drop come last.
    """

    sql: Annotated[
        str | None, Option("Read only rows for which this SQL expression is true (needs DuckDB).", "EXPR")
    ] = None
    drop: Annotated[Names, Option("Leave out these columns. May be repeated.", "NAMES", from_texts=column_names)] = ()
    sort_by: Annotated[
        Names, Option("Sort by these columns; -NAME sorts descending.", "NAMES", common=True, from_texts=column_names)
    ] = ()
    shuffle: Annotated[int | None, Option("Shuffle the rows with this seed (deterministic).", "SEED", common=True)] = (
        None
    )
    sample: Annotated[
        int | str | None,
        Kind("a number of rows or a share such as 10%", _sample, "N|PERCENT"),
        Option(
            "Take a random sample of N rows or of a share. The seed is that of --shuffle, or 0.",
            common=True,
        ),
    ] = None
    limit: Annotated[int | None, Option("Take only the first rows.", "ROWS", minimum=1, common=True)] = None
    distinct: Annotated[
        str | None,
        Option(
            "Keep the first row of each value of a column; content: of each file's bytes.", "COLUMN", old=("unique",)
        ),
    ] = None
    split_into: Annotated[
        str | Mapping[str, float] | None,
        Option(
            "Assign rows to splits at random, such as train=0.9,test=0.1. The seed is that of --shuffle, or 0.",
            "SHARES",
            common=True,
        ),
    ] = None
    group_by: Annotated[
        str | None, Option("With --split-into: keep rows that share this column's value in one split.", "COLUMN")
    ] = None
    concat: Annotated[
        Any,
        Kind("datasets", _concatenated, "SOURCE", is_list=True),
        Option(
            "Append the rows of another dataset with the same columns. May be repeated.", common=True, old=("also",)
        ),
    ] = ()

    def check_options(self) -> None:
        choose_one(self, "sort_by", "shuffle")
        choose_one(self, "where", "sql")
        if self.group_by and not self.split_into:
            raise InputError("--group-by can only be used with --split-into.")
        if self.sql:
            need_extra("sql", "--sql needs DuckDB.")


@dataclass(frozen=True, kw_only=True)
class SelectOptions(QueryOptions, FromOptions, WriteShardsOptions, ReportOptions, ProgressOptions):
    """The options of `brim.select`."""

    source: Annotated[Any, Option(f"{DATASET} Or a glob of shards, or an https address.", "SOURCE", argument=True)] = (
        field(kw_only=False)
    )
    destination: Annotated[Path, Option(DESTINATION, "DEST", argument=True)] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class OpenPlanOptions(RunOptions):
    """The options of `brim.open_plan`."""

    path: Annotated[Path, Option("The saved plan.")] = field(kw_only=False)
    root: Annotated[Path | None, Option("Folder of the source on this machine.")] = None
    endpoint_url: Annotated[str | None, Option("Address of the object store of the plan.")] = None
