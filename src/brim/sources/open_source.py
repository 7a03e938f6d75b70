"""Open a source: a folder, a table that names files, or a dataset that contains them, local or remote."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from brim.errors import InputError, SourceError
from brim.options.build_options import QueryOptions
from brim.options.groups import BidsOptions, parse_shares
from brim.sources.dataset_files import CITATION, LICENSES, DatasetFiles, find_files
from brim.sources.features import features_in
from brim.sources.file_table import FileTable
from brim.sources.folder_source import folder_source
from brim.sources.folder_tree import LocalTree, Tree
from brim.sources.remote_tree import ObjectTree
from brim.sources.selection import Origin, Selection, TableOrigin
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import table_source
from brim.state.atomic_files import reason, refuse_more_files
from brim.state.scratch import scratch_folder
from brim.storage.location import Access, is_dataset_address, is_remote, parse_location

if TYPE_CHECKING:  # BIDS and recipes are loaded for folders that have to do with them
    from brim.sources.recipe import Recipe

_SCHEMA = "bids"  # the recipe that finds the columns itself
_PLAIN = "files"  # the recipe that takes a folder as it is


def read_source(source: str | os.PathLike[str], options: SourceOptions) -> FileTable:
    """Read the dataset, BIDS folder, folder of files, or table that names files at a path."""
    path = os.fspath(source)
    try:
        return _read(path, options)
    except OSError as error:
        refuse_more_files(error)
        shown = os.fspath(error.filename).rstrip("/") if error.filename else path
        raise SourceError(f"The source {shown!r} cannot be read: {reason(error)}.", path=path) from error


def _read(path: str, options: SourceOptions) -> FileTable:
    is_selected = options.dataset or options.from_config or options.from_split or options.steps
    # Options that only files, or a table that names them, have.
    of_files = [options.files, options.include, options.exclude, options.label_from, options.root, options.split_by]
    is_for_files = any(of_files) or options.recipe_text is not None or options.bids != BidsOptions()
    if is_selected or is_dataset_address(path) or (is_dataset(path) and not is_for_files):
        return _read_dataset(path, options)
    if is_remote(path):
        objects = ObjectTree.listed(parse_location(path, options.access))
        return _read_folder(objects, options) if len(objects) else _read_table(path, options)
    if "://" in path:
        raise SourceError(
            f"brim cannot read {path.partition('://')[0]}:// as a source.",
            hint="Use a folder, a table that names files, or s3://BUCKET/PREFIX.",
        )
    if not os.path.lexists(path):
        raise SourceError(f"The source {path!r} does not exist.", hint="Use a folder, or a table that names files.")
    if os.path.isdir(path):
        return _read_folder(LocalTree(os.path.abspath(path)), options)
    return _read_table(path, options)


def _read_dataset(path: str, options: SourceOptions) -> FileTable:
    plain = SourceOptions(
        access=options.access, root=options.root, lenient=options.lenient, dataset=options.dataset,
        from_config=options.from_config, from_split=options.from_split, steps=options.steps,
        limit=options.limit, drop=options.drop, split=options.split, memory=options.memory,
    )  # fmt: skip
    if plain != options:
        raise InputError(
            f"{path!r} is already a dataset, so options for files or tables cannot be used.",
            hint="Datasets take --from-config, --from-split, --limit, --drop and --split; brim select takes more.",
        )
    selection = open_dataset(path, config=options.from_config, split=options.from_split, access=options.access)
    selection = selection.apply(options.steps)
    if options.drop:
        selection = selection.drop(options.drop)
    if options.limit:
        selection = selection.limit(options.limit)
    if options.split:
        selection = selection.split({options.split: 1.0})
    return selection.table()


def _read_table(path: str, options: SourceOptions) -> FileTable:
    if options.recipe_text or options.bids != BidsOptions():
        raise InputError("Recipes and BIDS options can only be used with a folder, not with a table.")
    return table_source(path, options)


def _read_folder(folder: Tree, options: SourceOptions) -> FileTable:
    text = options.recipe_text
    if text == _PLAIN or (text is None and not _looks_like_bids(folder)):
        if options.bids != BidsOptions():
            raise InputError("This folder is not a BIDS dataset, so BIDS options cannot be used.")
        return folder_source(folder, options)
    from brim.sources.bids_recipe import bids_source, read_bids_recipe
    from brim.sources.recipe_rows import recipe_source

    if text in (None, _SCHEMA):
        return bids_source(folder, options)
    recipe = find_recipe(text)
    return (
        bids_source(folder, options, read_bids_recipe(str(text)))
        if recipe is None
        else recipe_source(folder, recipe, options)
    )


def _looks_like_bids(folder: Tree) -> bool:
    if not folder.is_file("dataset_description.json") and not any(n.startswith("sub-") for n in folder.names("")):
        return False
    from brim.sources.bids_recipe import is_bids

    return is_bids(folder)


def find_recipe(text: str | None) -> Recipe | None:
    """Return the recipe of a name or a TOML text.

    None if the text is only an option for reading a folder: "files", "bids", or the saved columns of a BIDS dataset.
    """
    if text in (None, _PLAIN, _SCHEMA):
        return None
    import tomllib

    from brim.sources.recipe import load_recipe, parse_recipe

    if "\n" not in str(text):
        return load_recipe(str(text))
    try:
        kind = tomllib.loads(str(text)).get("kind")
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"The recipe is not TOML: {error}.") from error
    return None if kind == _SCHEMA else parse_recipe(str(text))


_BIDS_EXTRAS = ("json", "events", "bval", "bvec", "entities", "scans")


def aligned_columns(recipe: str | None, names: Collection[str]) -> dict[str, str]:
    """Return the columns of a dataset whose lists match those of another column, by the recipe it was made with.

    Of a BIDS dataset these are the columns that are named after another one.
    """
    recipe_found = find_recipe(recipe)
    if recipe_found is not None:
        return recipe_found.aligned_columns()
    pairs = {f"{name}_{extra}": name for name in names for extra in _BIDS_EXTRAS if recipe != _PLAIN}
    return {name: base for name, base in pairs.items() if name in names}


def recipe_text(recipe: str | None) -> str | None:
    """Return the name of a recipe, or the text of its file: a job records the content of a recipe, not its path."""
    if recipe is None or not recipe.endswith(".toml"):
        return recipe
    from brim.sources.recipe import recipe_file_text

    return recipe_file_text(recipe) + "\n"


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
        from brim.sources.parquet_source import ParquetOrigin  # imported here: folders of files do not need it

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
        self._finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)


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
    from brim.sources.parquet_shards import content_column

    return any(content_column(field) is not None for field in schema)
