"""Open what is a dataset already: Parquet shards, WebDataset tars, a `datasets.Dataset`, here or far away."""

from __future__ import annotations

import os
import re
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from brim.buckets.bucket_address import Access, is_web_address
from brim.formats.scratch import scratch_folder
from brim.sources.dataset_files import DatasetFiles, find_files
from brim.sources.dataset_source import dataset_source
from brim.sources.file_table import FileTable
from brim.sources.parquet_source import ParquetOrigin, content_column
from brim.sources.selection import Selection, TableOrigin
from brim.sources.webdataset_source import webdataset_table

_BIBTEX = re.compile(r"```bibtex\s*\n(.*?)```", re.DOTALL)


def open_dataset(
    source: Any, *, config: str | None = None, split: str | None = None, access: Access | None = None
) -> Selection:
    """All rows of a dataset, of which some can be chosen. `config` and `split` name what is read of it."""
    if isinstance(source, Selection):
        return source
    if isinstance(source, FileTable):
        return Selection(TableOrigin(source), name="the table")
    if not isinstance(source, str | os.PathLike):
        return _of_datasets(source, split)
    found = find_files(source, config, split, access)
    name = _shown(found)
    reading = {key: value for key, value in (("from_config", config), ("from_split", split)) if value}
    reading["dataset"] = True  # type: ignore[assignment]
    about = _about(found)
    if found.format == ".tar":
        return Selection(TableOrigin(webdataset_table(found.files, about), name), name=name, reading=reading)
    origin = ParquetOrigin(name, found.files, about, None)
    return Selection(origin, name=name, reading=reading)


def _shown(found: DatasetFiles) -> str:
    """What may be published: no path of this machine."""
    text = found.name.rstrip("/")
    if "://" not in text:
        return os.path.basename(os.path.abspath(text))
    text = text.partition("?")[0]
    return f"{text.partition('@')[0]}@{found.revision}" if found.revision else text


def _about(found: DatasetFiles) -> Mapping[str, Any]:
    """What the card says that goes along with the rows."""
    card, about = found.card, {}
    if isinstance(card.get("pretty_name"), str):
        about["Name"] = card["pretty_name"]
    said = card.get("license")
    if said:
        about["License"] = ", ".join(map(str, said)) if isinstance(said, list) else str(said)
        if about["License"] == "other" and card.get("license_name"):
            about["License"] = str(card["license_name"])
    if isinstance(card.get("__citation__"), str):
        about["Citation"] = card["__citation__"]
    return about


def _of_datasets(dataset: Any, split: str | None) -> Selection:
    spill = tempfile.mkdtemp(prefix="brim-spill-", dir=scratch_folder())
    table = dataset_source(dataset, split=split, spill=Path(spill))
    keeper = _Keeper(spill)
    return Selection(TableOrigin(table.replace(held=(*table.held, keeper)), "the dataset"), name="the dataset")


class _Keeper:
    """A folder that goes when nobody wants the table any more."""

    def __init__(self, folder: str) -> None:
        self._finalizer = weakref.finalize(self, _remove, folder)


def _remove(folder: str) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def is_dataset(path: str) -> bool:
    """Whether a path leads to a dataset that holds its files, and not to files or to a table that names them."""
    if is_web_address(path):
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
    except (OSError, ValueError):
        return False
    return any(content_column(field) is not None for field in schema)
