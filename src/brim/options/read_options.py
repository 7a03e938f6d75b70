"""The options of files, bids, table, dataset and recipes."""

from dataclasses import field
from typing import Annotated, Any

from brim.options.declare import Argument, Option, Options, Path
from brim.options.groups import (
    DATASET,
    BidsOptions,
    FileColumnOptions,
    FromOptions,
    PathOptions,
    ReadStorageOptions,
    SplitNameOptions,
)
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class FilesOptions(ReadStorageOptions, SplitNameOptions, PathOptions):
    """The options of `brim.files`."""

    folder: Annotated[Path, Option("A folder, or s3://BUCKET/PREFIX.")] = field(kw_only=False)
    column: Annotated[str | None, Option('Name of the file column, or "NAME:TYPE".')] = None
    label_from: Annotated[str | None, Option('"parent": add a class label named after the parent folder.')] = None


@dataclass(frozen=True, kw_only=True)
class BidsFolderOptions(ReadStorageOptions, SplitNameOptions, PathOptions, BidsOptions):
    """The options of `brim.bids`."""

    folder: Annotated[Path, Option("A BIDS dataset, or another folder that a recipe describes.")] = field(kw_only=False)
    recipe: Annotated[Path | None, Option("Name of a built-in recipe, or a path that ends in .toml.")] = None


@dataclass(frozen=True, kw_only=True)
class TableOptions(ReadStorageOptions, FileColumnOptions, SplitNameOptions, PathOptions):
    """The options of `brim.table`."""

    source: Annotated[Any, Option("A path, or a pandas, Polars or Arrow table.")] = field(kw_only=False)
    features: Annotated[Any, Option("`datasets.Features`, or its dict, for some or all columns.")] = None


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(ReadStorageOptions, FromOptions):
    """The options of `brim.dataset`."""

    source: Annotated[Any, Option(f"{DATASET} Or a glob of shards, an https address, or a `datasets.Dataset`.")] = (
        field(kw_only=False)
    )


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(Options):
    """The options of `brim.recipes`."""

    name: Annotated[Path | None, Argument("A built-in recipe, or a file that ends in .toml.", "NAME")] = field(
        default=None, kw_only=False
    )
