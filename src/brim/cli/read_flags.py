"""From the command line's words to a file table."""

from typing import Any, get_args

from brim.choices import one_of
from brim.cli.flags import BidsFlags, ReadingFlags, StoringFlags
from brim.cli.show import waiting_for


def read(
    source: str,
    reading: ReadingFlags,
    bids: BidsFlags,
    storing: StoringFlags | None = None,
    lenient: bool = False,
    tolerance: float | None = None,
    steps: tuple[Any, ...] = (),
) -> Any:
    """The file table of SOURCE, read as the options say."""
    from brim.plans.file_checks import Oversize
    from brim.sources.open_source import read_source, recipe_text
    from brim.sources.source_options import BidsOptions, SourceOptions

    one_of("oversize", reading.oversize, get_args(Oversize))  # before the source is looked at
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
        lenient=lenient,
        tolerance=tolerance,
        from_config=reading.from_config,
        from_split=reading.from_split,
        steps=steps,
        access=(storing or StoringFlags()).source,
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
    with waiting_for(source):
        return read_source(source, options)
