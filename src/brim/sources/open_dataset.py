"""Open a dataset: Parquet shards, WebDataset tars, a `datasets.Dataset`, local or remote."""

import os
import re
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from brim.options.build_options import QueryOptions
from brim.options.groups import parse_shares
from brim.sources.dataset_files import CITATION, LICENSES, DatasetFiles, find_files
from brim.sources.features import features_in
from brim.sources.file_table import FileTable
from brim.sources.selection import Origin, Selection, TableOrigin
from brim.state.scratch import scratch_folder
from brim.storage.location import Access, is_dataset_address


def open_dataset(
    source: Any, *, config: str | None = None, split: str | None = None, access: Access | None = None
) -> Selection:
    """Return all rows of a dataset, to choose from. `config` and `split` name the part of it that is read."""
    if isinstance(source, Selection):
        return source
    if isinstance(source, FileTable):
        return Selection(TableOrigin(source), name="the table")
    if not isinstance(source, str | os.PathLike):
        return _of_datasets(source, split)
    dataset = find_files(source, config, split, access)
    name = _shown(dataset)
    reading = {key: value for key, value in (("from_config", config), ("from_split", split)) if value}
    reading["dataset"] = True  # type: ignore[assignment]
    about = _about(dataset)
    text = os.fspath(source)
    within = (os.path.abspath(text),) if os.path.isdir(text) else ()
    if dataset.format == ".tar":
        from brim.sources.webdataset_source import webdataset_table

        origin: Origin = TableOrigin(webdataset_table(dataset.files, about), name)
    else:
        from brim.sources.parquet_source import ParquetOrigin  # folders of files are asked whether they are one too

        origin = ParquetOrigin(name, dataset.files, about, features_in(dataset.card, dataset.config))
    return Selection(origin, name=name, reading=reading, within=within)


def _choose(query: QueryOptions, rows: Selection) -> Selection:
    """Return the rows of a query. Columns are dropped last, so that they can be used in it."""
    if query.where is not None:
        rows = rows.where(query.where)
    if query.sql is not None:
        rows = rows.sql(query.sql)
    if query.distinct:
        rows = rows.unique(query.distinct)
    if query.sample is not None:
        rows = rows.sample(query.sample, query.shuffle or 0)
    if query.sort_by:
        rows = rows.sort(query.sort_by)
    if query.shuffle is not None:
        rows = rows.shuffle(query.shuffle)
    if query.limit is not None:
        rows = rows.limit(query.limit)
    if query.split_into:
        rows = rows.split(parse_shares(query.split_into), group_by=query.group_by, seed=query.shuffle or 0)
    return rows


def select_rows(
    source: Any, query: QueryOptions, config: str | None = None, split: str | None = None, access: Access | None = None
) -> Selection:
    """Return the rows that a query chooses of a dataset, or of several with the same columns."""
    parts = [open_dataset(entry, config=config, split=split, access=access) for entry in (source, *query.concat)]
    if not query.concat:
        return _columns(_choose(query, parts[0]), query)
    if not {name for part in parts for name in part.column_names}.issuperset(query.drop):
        return _columns(parts[0], query)  # the error names the missing column
    columns = [[n for n in _columns(p, replace(query, drop=())).column_names if n not in query.drop] for p in parts]
    shared = []
    for name in parts[0].column_names:
        features = [(part.features or {}).get(name) for part in parts]
        if name in columns[0] or (features[0] is not None and all(entry == features[0] for entry in features)):
            shared.append(name)
    if all(sorted(names) == sorted(columns[0]) for names in columns):
        parts = [part.columns(shared) for part in parts]  # a query may use columns that are dropped finally
    else:
        parts = [part.columns(names) for part, names in zip(parts, columns, strict=True)]
    rows = _choose(query, parts[0].concat(*parts[1:]))
    return rows if rows.column_names == columns[0] else rows.columns(columns[0])


def _columns(rows: Selection, query: QueryOptions) -> Selection:
    rows = rows.columns(query.columns) if query.columns else rows
    return rows.drop(query.drop) if query.drop else rows


def _shown(dataset: DatasetFiles) -> str:
    """Return the name that may be published: no path of this machine."""
    text = dataset.name.rstrip("/")
    if "://" not in text:
        return os.path.basename(os.path.abspath(text))
    text = text.partition("?")[0]
    return f"{text.partition('@')[0]}@{dataset.revision}" if dataset.revision else text


def _about(dataset: DatasetFiles) -> Mapping[str, Any]:
    """Return the fields of the card that are published with the rows."""
    card, about = dataset.card, dict[str, Any]()
    if isinstance(card.get("pretty_name"), str):
        about["Name"] = card["pretty_name"]
    if licenses := card.get("license"):
        about["License"] = ", ".join(map(str, licenses)) if isinstance(licenses, list) else str(licenses)
        if about["License"] == "other" and card.get("license_name"):
            about["License"] = str(card["license_name"])
        if card.get(LICENSES):
            about |= {"License": card[LICENSES], "LicensesDiffer": True}
    if isinstance(card.get(CITATION), str):
        about["Citation"] = card[CITATION]
    return about


def _of_datasets(dataset: Any, split: str | None) -> Selection:
    from brim.sources.dataset_source import dataset_source

    spill = tempfile.mkdtemp(prefix="brim-spill-", dir=scratch_folder())
    table = dataset_source(dataset, split=split, spill=Path(spill))
    keeper = _Keeper(spill)
    return Selection(TableOrigin(table.replace(held=(*table.held, keeper)), "the dataset"), name="the dataset")


class _Keeper:
    """A folder that is removed with the last reference to the table."""

    def __init__(self, folder: str) -> None:
        self._finalizer = weakref.finalize(self, _remove, folder)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def is_dataset(path: str) -> bool:
    """Return whether a path leads to a dataset that holds its files, and not to files or to a table that names them."""
    if is_dataset_address(path):
        return True
    if os.path.isdir(path):
        inside = [name for name in os.listdir(path) if not name.startswith(".")]
        data = os.path.join(path, "data")
        if os.path.isdir(os.path.join(path, ".brim")) and os.path.isdir(data):
            return any(name.endswith((".parquet", ".tar")) for name in os.listdir(data))
        shards = [name for name in inside if name.endswith(".parquet")]
        if os.path.isdir(data) and any(name.endswith(".parquet") for name in os.listdir(data)):
            return all(name in ("data", "README.md") for name in inside)
        return (
            bool(shards)
            and len(shards) == len([n for n in inside if n != "README.md"])
            and _has_content(os.path.join(path, sorted(shards)[0]))
        )
    if not os.path.exists(path):
        return bool(re.search(r"[*?\[]", path)) and path.endswith((".parquet", ".tar"))
    return path.endswith(".parquet") and _has_content(path)


def _has_content(path: str) -> bool:
    try:
        schema = pq.read_schema(path)
    except ValueError:
        return False
    except OSError as error:
        if error.errno:  # of the disk, not of the content
            raise
        return False
    from brim.sources.dataset_shard import content_column

    return any(content_column(field) is not None for field in schema)
