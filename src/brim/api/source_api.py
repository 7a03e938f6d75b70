"""What is built: the files of a folder, of a BIDS dataset or of a table, and the rows of a dataset."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from brim.api.job_options import Names, SourceGiven, many
from brim.buckets.bucket_address import Access
from brim.sources.file_table import FileTable
from brim.sources.folder_source import folder_source
from brim.sources.open_dataset import Query, open_dataset, selected
from brim.sources.open_source import read_source
from brim.sources.selection import Selection
from brim.sources.source_options import RowsOf, Sidecars
from brim.sources.table_source import table_source

if TYPE_CHECKING:
    from brim.sources.recipe import Recipe

Source = str | os.PathLike[str] | FileTable | Selection


def files(
    folder: str | os.PathLike[str],
    *,
    column: str | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    limit: int | None = None,
    label_from: Literal["parent"] | None = None,
    split: str | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
) -> FileTable:
    """The file table of a folder: a row for each file, or for each row of its metadata.csv.

    `folder` may be s3://BUCKET/PREFIX: `endpoint_url` is then the store to talk to if it is not Amazon's, `anonymous`
    reads without credentials. `column` is the name of the file column, or "NAME:TYPE" to set its type too.
    """
    given = SourceGiven(
        files=column or (), include=include, exclude=exclude, limit=limit, label_from=label_from, split=split
    )
    return folder_source(os.fspath(folder), given.source_options(Access(endpoint_url, anonymous)))


def bids(
    folder: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    rows: RowsOf = "session",
    sidecars: Sidecars = "safe",
    subjects: str | Sequence[str] = (),
    sessions: str | Sequence[str] = (),
    suffixes: str | Sequence[str] = (),
    derivatives: str | Sequence[str] = (),
    phenotype: bool = False,
    bidsignore: bool = True,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    limit: int | None = None,
    split: str | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
) -> FileTable:
    """The file table of a BIDS dataset, or of another folder that a recipe describes.

    `recipe` is the name of a built-in recipe, or a path that ends in .toml. For a folder in a bucket,
    `endpoint_url` and `anonymous` are as for `files`.
    """
    given = SourceGiven(
        recipe=recipe or "bids",
        rows=rows,
        sidecars=sidecars,
        subjects=subjects,
        sessions=sessions,
        suffixes=suffixes,
        derivatives=derivatives,
        phenotype=phenotype,
        bidsignore=bidsignore,
        include=include,
        exclude=exclude,
        limit=limit,
        split=split,
    )
    return read_source(folder, given.source_options(Access(endpoint_url, anonymous)))


def table(
    source: Any,
    *,
    files: str | Sequence[str] | Mapping[str, str] = (),
    features: Any = None,
    root: str | os.PathLike[str] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    limit: int | None = None,
    drop: str | Sequence[str] = (),
    split: str | None = None,
    split_by: str | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
) -> FileTable:
    """The file table of a table that names files: a path, or a pandas, Polars or Arrow table.

    `files` names the file columns ("image" or "image:nifti", or a dict of name to type); without it they
    are guessed. `features` is a `datasets.Features` (or its dict) for some or all columns. Relative paths
    start at the table's folder, or at `root`, or at the current folder for a table in memory. The table or `root` may
    lie in a bucket, or all paths be addresses in one: `endpoint_url` and `anonymous` are as for `files`.
    """
    given = SourceGiven(
        files=files,
        include=include,
        exclude=exclude,
        limit=limit,
        drop=drop,
        split=split,
        split_by=split_by,
        root=root,
    )
    return table_source(source, given.source_options(Access(endpoint_url, anonymous)), features)


def dataset(
    source: Any,
    *,
    from_config: str | None = None,
    from_split: str | None = None,
    endpoint_url: str | None = None,
    anonymous: bool = False,
) -> Selection:
    """The rows of a dataset that is there already, of which some can be chosen: print it to see what it is.

    `source` is a folder or a glob of Parquet shards or of WebDataset tars, hf://datasets/ORG/NAME[@REVISION],
    s3://BUCKET/PREFIX, an https address, or a `datasets.Dataset`. Its methods where, sort, shuffle, sample, split,
    columns, concat, unique and take each give a new one; no value is read before it is built.
    """
    return open_dataset(source, config=from_config, split=from_split, access=Access(endpoint_url, anonymous))


def chosen(
    source: Any,
    access: Access,
    *,
    where: str | None = None,
    sql: str | None = None,
    columns: Names = (),
    drop: Names = (),
    sort_by: Names = (),
    shuffle: int | None = None,
    sample: int | str | None = None,
    limit: int | None = None,
    unique: str | None = None,
    split_into: str | Mapping[str, float] | None = None,
    group_by: str | None = None,
    also: Any = (),
    from_config: str | None = None,
    from_split: str | None = None,
) -> Selection:
    """What the words of `select` choose of a dataset."""
    query = Query(
        where=where,
        sql=sql,
        columns=many(columns),
        drop=many(drop),
        sort_by=many(sort_by),
        shuffle=shuffle,
        sample=None if sample is None else str(sample),
        limit=limit,
        unique=unique,
        split_into=split_into,
        group_by=group_by,
        also=() if also is None else tuple(also) if isinstance(also, list | tuple) else (also,),
    )
    return selected(source, query, from_config, from_split, access)


def recipes(name: str | os.PathLike[str] | None = None) -> list[Recipe]:
    """The built-in recipes; or the one of this name, or of a file that ends in .toml. `toml` is its text."""
    from brim.sources.recipe import builtin_recipes, load_recipe

    return list(builtin_recipes()) if name is None else [load_recipe(os.fspath(name))]
