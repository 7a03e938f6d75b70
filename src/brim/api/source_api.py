"""files, bids, table and dataset: sources that a build or a selection starts from."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from brim.errors import InputError
from brim.options.declare import Options, shared_values, takes
from brim.options.groups import BidsOptions
from brim.options.read_options import BidsFolderOptions, DatasetOptions, FilesOptions, RecipesOptions, TableOptions
from brim.sources.file_table import FileTable
from brim.sources.folder_source import folder_source
from brim.sources.open_source import open_dataset, read_source, recipe_text
from brim.sources.selection import Selection
from brim.sources.source_options import SourceOptions
from brim.sources.table_source import table_source
from brim.storage.location import Access

if TYPE_CHECKING:
    from brim.sources.recipe import Recipe


def source_options(options: Options, **internal: Any) -> SourceOptions:
    """Take from the options of a function how its source is read."""
    endpoint = getattr(options, "source_endpoint_url", None) or getattr(options, "endpoint_url", None)
    return SourceOptions(
        **shared_values(SourceOptions, options),
        bids=BidsOptions(**shared_values(BidsOptions, options)),
        recipe_text=recipe_text(getattr(options, "recipe", None)),
        access=Access(endpoint, getattr(options, "anonymous", False)),
        memory=getattr(options, "memory", None),
        **internal,
    )


def opened_table(options: Any, *reading: type[Options]) -> FileTable | None:
    """Return the table of a source that Python code has opened, such as `brim.files`; None for a path.

    The options of `reading` apply to a path only, and are refused for an opened source.
    """
    if not isinstance(options.source, FileTable | Selection):
        return None
    if changed := options.changed(*reading):
        raise InputError(
            f"{changed[0].spelling} decides how a path is read, and this source has been read already.",
            hint="Pass it to the function that opened the source: brim.files, brim.bids, brim.table or brim.dataset.",
        )
    return options.source.table() if isinstance(options.source, Selection) else options.source


@takes(FilesOptions)
def files(options: FilesOptions) -> FileTable:
    """Read a folder of files: one row per file, or per row of its metadata.csv.

    Returns:
        The table of files, for `brim.plan`, `brim.build` or `brim.check`.

    Raises:
        SourceError: The folder does not exist or contains no files.

    Examples:
        >>> len(brim.files("photos", label_from="parent"))
        2
    """
    columns = () if options.column is None else (options.column,)
    return folder_source(str(options.folder), source_options(options, files=columns))


@takes(BidsFolderOptions)
def bids(options: BidsFolderOptions) -> FileTable:
    """Read a BIDS dataset, or another folder that a recipe describes.

    Returns:
        The table of files, for `brim.plan`, `brim.build` or `brim.check`.

    Raises:
        SourceError: The folder cannot be read as a BIDS dataset or by the recipe.

    Examples:
        >>> len(brim.bids("study", sidecars="none"))
        3
    """
    reading = source_options(options)
    return read_source(options.folder, replace(reading, recipe_text=reading.recipe_text or "bids"))


@takes(TableOptions)
def table(options: TableOptions) -> FileTable:
    """Read a table that names files in one or more columns.

    Returns:
        The table of files, for `brim.plan`, `brim.build` or `brim.check`.

    Raises:
        SourceError: The table cannot be read, or no column names files.

    Examples:
        >>> len(brim.table("photos.csv", files={"photo": "file"}))
        2
    """
    return table_source(options.source, source_options(options), options.features)


@takes(DatasetOptions)
def dataset(options: DatasetOptions) -> Selection:
    """Open a published dataset to choose rows from it. No value is read before the selection is built.

    Returns:
        A selection. Its methods where, sort, shuffle, sample, split, columns, concat, unique and take each return
        another one.

    Raises:
        SourceError: The source is not a dataset.

    Examples:
        >>> len(brim.dataset("published").where('label == "cat"'))
        1
    """
    access = Access(options.endpoint_url, options.anonymous)
    return open_dataset(options.source, config=options.from_config, split=options.from_split, access=access)


@takes(RecipesOptions)
def recipes(options: RecipesOptions) -> "list[Recipe]":
    """List the built-in recipes, or load one.

    Returns:
        The recipes; `toml` is the text of a recipe.

    Raises:
        InputError: There is no such recipe.

    Examples:
        >>> [recipe.name for recipe in brim.recipes()]
        ['aomic-piop1', 'arc', 'isles24']
    """
    from brim.sources.recipe import builtin_recipes, load_recipe  # most builds need no recipe

    return list(builtin_recipes()) if options.name is None else [load_recipe(str(options.name))]
