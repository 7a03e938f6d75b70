"""The functions of the Python interface: the command line's verbs, with Python's values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from brim.buckets.bucket_address import Access
from brim.choices import one_of
from brim.jobs.build_job import Build, BuildOptions
from brim.jobs.job import Built
from brim.plans.cut_shards import CutOptions
from brim.plans.file_checks import CheckOptions, Oversize
from brim.plans.plan import Format
from brim.progress import Progress
from brim.schedule.scheduler import Engine, Scaling
from brim.sizes import parse_size
from brim.sources.file_table import FileTable
from brim.sources.folder_source import folder_source
from brim.sources.open_dataset import Query, open_dataset, selected
from brim.sources.open_source import read_source, recipe_text
from brim.sources.selection import Selection
from brim.sources.source_options import BidsOptions, SourceOptions
from brim.sources.table_source import table_source
from brim.stores.hub_options import HubOptions, Via

Source = str | os.PathLike[str] | FileTable | Selection


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


def select(
    source: Any,
    destination: str | os.PathLike[str],
    *,
    where: str | None = None,
    sql: str | None = None,
    columns: str | Sequence[str] = (),
    drop: str | Sequence[str] = (),
    sort_by: str | Sequence[str] = (),
    shuffle: int | None = None,
    sample: int | str | None = None,
    limit: int | None = None,
    unique: str | None = None,
    split_into: str | Mapping[str, float] | None = None,
    group_by: str | None = None,
    also: Any = (),
    from_config: str | None = None,
    from_split: str | None = None,
    source_endpoint_url: str | None = None,
    anonymous: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Built:
    """Build what is chosen of a dataset at `destination`; the options are those of `plan` beside these.

    Rows are joined (`also`), chosen (`where`, `sql`), then `unique`, `sample`, `sort_by` or `shuffle`, `limit` and
    `split_into` are done in this order; `columns` and `drop` say what of them is taken.
    """
    access = Access(source_endpoint_url or options.get("endpoint_url"), anonymous)
    chosen = selected(
        source, Query(
            where, sql, _many(columns), _many(drop), _many(sort_by), shuffle, None if sample is None else str(sample),
            limit, unique, split_into, group_by, tuple(also) if isinstance(also, list | tuple) else (also,),
        ), from_config, from_split, access,
    )  # fmt: skip
    return plan(chosen, destination, **options).run(progress)


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
    options = SourceOptions(
        files=(column,) if column else (),
        include=_many(include),
        exclude=_many(exclude),
        limit=limit,
        label_from=label_from,
        split=split,
        access=Access(endpoint_url, anonymous),
    )
    return folder_source(os.fspath(folder), options)


def bids(
    folder: str | os.PathLike[str],
    *,
    recipe: str | os.PathLike[str] | None = None,
    rows: Literal["session", "subject", "file"] = "session",
    sidecars: Literal["safe", "full", "none"] = "safe",
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
    text = None if recipe is None else os.fspath(recipe)
    options = SourceOptions(
        include=_many(include),
        exclude=_many(exclude),
        limit=limit,
        split=split,
        recipe_text=recipe_text(text) or "bids",
        access=Access(endpoint_url, anonymous),
        bids=BidsOptions(
            rows=rows,
            sidecars=sidecars,
            subjects=_many(subjects),
            sessions=_many(sessions),
            suffixes=_many(suffixes),
            derivatives=_many(derivatives),
            phenotype=phenotype,
            bidsignore=bidsignore,
        ),
    )
    return read_source(folder, options)


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
    named = tuple(f"{name}:{kind}" for name, kind in files.items()) if isinstance(files, Mapping) else _many(files)
    options = SourceOptions(
        files=named,
        include=_many(include),
        exclude=_many(exclude),
        limit=limit,
        drop=_many(drop),
        split=split,
        split_by=split_by,
        root=None if root is None else os.fspath(root),
        access=Access(endpoint_url, anonymous),
    )
    return table_source(source, options, features)


def _many(value: str | Sequence[str]) -> tuple[str, ...]:
    """One or several: a text alone means itself, not its letters."""
    return (value,) if isinstance(value, str) else tuple(value)


def plan(
    source: Source,
    destination: str | os.PathLike[str] | None = None,
    *,
    format: Format = "parquet",
    shard_size: str | int | float | None = None,
    num_shards: int | Mapping[str, int] | None = None,
    rows_per_shard: int | None = None,
    shard_by: str | None = None,
    allow_empty: bool = False,
    oversize: Oversize = "error",
    strict: bool = False,
    memory: str | int | float | None = None,
    workers: int | None = None,
    fresh: bool = False,
    update: bool = False,
    state: str | os.PathLike[str] | None = None,
    stop_file: str | os.PathLike[str] | None = None,
    config: str = "default",
    commit_message: str | None = None,
    public: bool = False,
    direct: bool = False,
    via: Via = "auto",
    endpoint_url: str | None = None,
    source_endpoint_url: str | None = None,
    anonymous: bool = False,
    engine: Engine = "local",
    address: str | None = None,
) -> Build:
    """What building `source` at `destination` would do. Print it to see, `run()` it to do it.

    The destination is a folder, hf://datasets/ORG/NAME[@BRANCH] or s3://BUCKET/PREFIX; `config` to `via` are for the
    Hub. With `strict`, counts that are not what the recipe expects and data that no column takes are errors. A bucket
    is reached at `endpoint_url`, one that is the source at `source_endpoint_url` if it is in another store; `anonymous`
    reads it without credentials. With engine="ray" shards are made by a running Ray at `address`.
    """
    one_of("oversize", oversize, get_args(Oversize))
    options = BuildOptions(
        format=format,
        cut=CutOptions(None if shard_size is None else parse_size(shard_size), num_shards, rows_per_shard, shard_by),
        checks=CheckOptions(allow_empty=allow_empty, skip_oversize=oversize == "skip", strict=strict),
        memory=memory,
        workers=workers,
        fresh=fresh,
        update=update,
        state=None if state is None else os.fspath(state),
        stop_file=None if stop_file is None else os.fspath(stop_file),
        hub=HubOptions(config=config, message=commit_message, public=public, direct=direct, via=via),
        access=Access(endpoint_url),
        scaling=Scaling(engine, address),
    )
    from_where = Access(source_endpoint_url or endpoint_url, anonymous)
    if isinstance(source, Selection):
        source = source.table()
    elif not isinstance(source, FileTable):
        source = read_source(source, SourceOptions(access=from_where))
    return Build(source, destination, options)


def build(
    source: Source, destination: str | os.PathLike[str], *, progress: Progress | None = None, **options: Any
) -> Built:
    """Plan and run in one step; the options are those of `plan`."""
    return plan(source, destination, **options).run(progress)
