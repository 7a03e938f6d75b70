"""The options of plan, build, select and open_plan."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any

from brim.errors import InputError
from brim.extras import need_extra
from brim.options.declare import BIDS, Argument, Common, Kind, Names, Option, Path, choose_one
from brim.options.groups import (
    DATASET,
    DESTINATION,
    OPENED,
    SOURCE,
    BidsOptions,
    CheckFileOptions,
    FileSourceOptions,
    FilterOptions,
    FromOptions,
    JobOptions,
    ProgressOptions,
    ReportOptions,
    RunOptions,
    ShardOptions,
    WriteOptions,
    column_names,
)
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class ReadFilesOptions(FileSourceOptions, BidsOptions, panel=BIDS):
    """How a path is read as a table of files."""

    recipe: Annotated[
        Path | None,
        Common("Recipe that turns a folder into rows (see brim recipes); files: one row per file.", "NAME|FILE"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class WriteShardsOptions(WriteOptions, JobOptions, ShardOptions, CheckFileOptions):
    """The options for writing rows and files as shards, independent of their source."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ReadFilesOptions, WriteShardsOptions):
    """The options of `brim.plan`."""

    source: Annotated[Any, Argument(SOURCE, "SOURCE", python=OPENED)] = field(kw_only=False)
    destination: Annotated[Path | None, Argument(DESTINATION, "DEST")] = field(default=None, kw_only=False)


@dataclass(frozen=True, kw_only=True)
class BuildOptions(PlanOptions, ReportOptions, ProgressOptions):
    """The options of `brim.build`."""

    destination: Annotated[Path, Argument(DESTINATION, "DEST")] = field(kw_only=False)


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
    drop: Annotated[Names, Option("Leave out these columns.", "NAME,…", from_texts=column_names)] = ()
    sort_by: Annotated[
        Names, Common("Sort by these columns; -NAME sorts descending.", "NAME,…", from_texts=column_names)
    ] = ()
    shuffle: Annotated[int | None, Common("Shuffle the rows with this seed (deterministic).", "SEED")] = None
    sample: Annotated[
        int | str | None,
        Kind("a number of rows or a share such as 10%", _sample, "N|PERCENT"),
        Common("Take a random sample of N rows or of a share; the seed is that of --shuffle, or 0."),
    ] = None
    limit: Annotated[int | None, Common("Take only the first rows.", "ROWS", minimum=1)] = None
    distinct: Annotated[
        str | None,
        Option("Keep the first row of each value of a column; content: of each file's bytes.", "COLUMN", old="unique"),
    ] = None
    concat: Annotated[
        Any,
        Kind("datasets", _concatenated, "SOURCE", is_list=True),
        Common("Append the rows of another dataset with the same columns.", old="also"),
    ] = ()
    split_into: Annotated[
        str | Mapping[str, float] | None,
        Common(
            "Assign rows at random to splits, such as train=0.9,test=0.1; the seed is that of --shuffle, or 0.",
            "SHARES",
            python="Or a dict of splits and shares.",
        ),
    ] = None
    group_by: Annotated[
        str | None, Option("With --split-into: keep rows that share this column's value in one split.", "COLUMN")
    ] = None

    def check_options(self) -> None:
        choose_one(self, "sort_by", "shuffle")
        choose_one(self, "where", "sql")
        if self.group_by and not self.split_into:
            raise InputError(
                "--group-by can only be used with --split-into.", hint="Add --split-into=train=0.9,test=0.1."
            )
        if self.sql:
            need_extra("sql", "--sql needs DuckDB.")


@dataclass(frozen=True, kw_only=True)
class SelectOptions(ReportOptions, ProgressOptions, WriteShardsOptions, QueryOptions, FromOptions):
    """The options of `brim.select`."""

    source: Annotated[
        Any,
        Argument(f"{DATASET} Or a glob of shards, or an https address.", "SOURCE", python="Or a `datasets.Dataset`."),
    ] = field(kw_only=False)
    destination: Annotated[Path, Argument(DESTINATION, "DEST")] = field(kw_only=False)


@dataclass(frozen=True, kw_only=True)
class OpenJobOptions(RunOptions):
    """The options of `brim.open_job`."""

    path: Annotated[Path, Option("The saved plan.")] = field(kw_only=False)
    endpoint_url: Annotated[str | None, Option("Address of the object store of the plan.")] = None


@dataclass(frozen=True, kw_only=True)
class OpenPlanOptions(OpenJobOptions):
    """The options of `brim.open_plan`."""

    root: Annotated[Path | None, Option("Folder of the source on this machine.")] = None
