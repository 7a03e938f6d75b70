"""What rows there are, and which files they name."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import TYPE_CHECKING

from brim.errors import InputError, SourceError
from brim.options.groups import BidsOptions
from brim.sources.file_table import FileTable
from brim.sources.folder_source import folder_source
from brim.sources.folder_tree import LocalTree, Tree
from brim.sources.open_dataset import is_dataset, open_dataset
from brim.sources.remote_tree import ObjectTree
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import table_source
from brim.state.atomic_files import reason, refuse_more_files
from brim.storage.location import is_dataset_address, is_remote, parse_location

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
