"""From the command line's words to a file table."""

from typing import Any

from brim.cli.options import Bids, Reading
from brim.errors import InputError


def read(source: str, reading: Reading, bids: Bids) -> Any:
    """The file table of SOURCE, read as the options say."""
    from brim.sources import read_source
    from brim.sources.bids.options import BidsOptions
    from brim.sources.options import SourceOptions

    options = SourceOptions(
        files=tuple(reading.files or ()),
        include=tuple(reading.include or ()),
        exclude=tuple(reading.exclude or ()),
        limit=reading.limit,
        label_from=reading.label_from,  # type: ignore[arg-type]  # checked by SourceOptions
        drop=tuple(reading.drop or ()),
        split=reading.split,
        split_by=reading.split_by,
        root=reading.root,
        recipe_text=recipe_text(bids.recipe),
        bids=BidsOptions(
            rows=bids.rows,  # type: ignore[arg-type]  # checked by BidsOptions
            sidecars=bids.sidecars,  # type: ignore[arg-type]  # checked by BidsOptions
            subjects=tuple(bids.subjects or ()),
            sessions=tuple(bids.sessions or ()),
            suffixes=tuple(bids.suffixes or ()),
            derivatives=tuple(bids.derivatives or ()),
            phenotype=bids.phenotype,
            bidsignore=not bids.no_bidsignore,
        ),
    )
    return read_source(source, options)


def recipe_text(recipe: str | None) -> str | None:
    """A recipe's name, or the text of its file: a job remembers what it said, not where it was."""
    if recipe is None or not recipe.endswith(".toml"):
        return recipe
    try:
        with open(recipe, encoding="utf-8") as file:
            return file.read() + "\n"
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The recipe {recipe!r} cannot be read: {error}.") from error
