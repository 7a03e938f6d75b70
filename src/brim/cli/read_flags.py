"""The file table of SOURCE, for the verbs that look at one and build nothing."""

from typing import Any

from brim.cli.flags import BidsFlags, ReadingFlags, StoringFlags
from brim.cli.show import waiting_for


def read(source: str, reading: ReadingFlags, bids: BidsFlags, storing: StoringFlags | None = None, **more: Any) -> Any:
    """The file table of SOURCE, read as the options say."""
    from brim.api.job_options import BuildGiven
    from brim.sources.open_source import read_source

    given = BuildGiven(**vars(reading), **bids.words, **vars(storing or StoringFlags()))
    with waiting_for(source):
        return read_source(source, given.source_options(given.source_access, **more))
