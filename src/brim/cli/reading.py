"""From the command line's words to a file table."""

from typing import Any

from brim.cli.options import Reading


def read(source: str, reading: Reading) -> Any:
    """The file table of SOURCE, read as the options say."""
    from brim.sources import read_source
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
    )
    return read_source(source, options)
