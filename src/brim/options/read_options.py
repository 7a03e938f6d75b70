"""The options of files, bids, table, dataset and recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any

from brim.options.declare import Names, Option, Options, Path
from brim.options.groups import DATASET, BidsOptions, FromOptions, ReadStorageOptions
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class PathOptions(Options):
    """Which files of a folder are read."""

    include: Annotated[Names, Option("Read only files that match.", "GLOB")] = ()
    exclude: Annotated[Names, Option("Leave out files that match.", "GLOB")] = ()
    limit: Annotated[int | None, Option("Read only the first rows.", "ROWS", minimum=1)] = None
    split: Annotated[str | None, Option("Name of the split that all rows go to.", "NAME")] = None


@dataclass(frozen=True, kw_only=True)
class FilesOptions(PathOptions, ReadStorageOptions):
    """The options of `brim.files`."""

    folder: Annotated[Path, Option("A folder, or s3://BUCKET/PREFIX.")] = field(kw_only=False)
    column: Annotated[str | None, Option('Name of the file column, or "NAME:TYPE".')] = None
    label_from: Annotated[str | None, Option('"parent": add a class label named after the parent folder.')] = None


@dataclass(frozen=True, kw_only=True)
class BidsFolderOptions(PathOptions, BidsOptions, ReadStorageOptions):
    """The options of `brim.bids`."""

    folder: Annotated[Path, Option("A BIDS dataset, or another folder that a recipe describes.")] = field(kw_only=False)
    recipe: Annotated[Path | None, Option("Name of a built-in recipe, or a path that ends in .toml.")] = None


@dataclass(frozen=True, kw_only=True)
class TableOptions(PathOptions, ReadStorageOptions):
    """The options of `brim.table`."""

    source: Annotated[Any, Option("A path, or a pandas, Polars or Arrow table.")] = field(kw_only=False)
    files: Annotated[
        Sequence[str] | Mapping[str, str],
        Option('File columns: "image", "image:nifti" or a dict of column to type.', default="guessed"),
    ] = ()
    features: Annotated[Any, Option("`datasets.Features`, or its dict, for some or all columns.")] = None
    root: Annotated[Path | None, Option("Folder where relative paths start.", default="the folder of the table")] = None
    drop: Annotated[Names, Option("Leave out these columns.")] = ()
    label_from: Annotated[str | None, Option("Make a class label of this column.")] = None
    split_by: Annotated[str | None, Option("Column that names the split of each row.")] = None


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(FromOptions, ReadStorageOptions):
    """The options of `brim.dataset`."""

    source: Annotated[Any, Option(f"{DATASET} Or a glob of shards, an https address, or a `datasets.Dataset`.")] = (
        field(kw_only=False)
    )


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(Options):
    """The options of `brim.recipes`."""

    name: Annotated[Path | None, Option("A built-in recipe, or a file that ends in .toml.", "NAME", argument=True)] = (
        field(default=None, kw_only=False)
    )
