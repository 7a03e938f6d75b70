"""The options of caches and clean."""

from dataclasses import field
from typing import Annotated

from brim.options.declare import Option, Options, Path
from brim.records import dataclass

_CACHE_DIR = Option("Folder of the caches.", "DIR", default="BRIM_CACHE, or the user's cache folder")


@dataclass(frozen=True, kw_only=True)
class CachesOptions(Options):
    """The options of `brim.caches`."""

    cache_dir: Annotated[Path | None, _CACHE_DIR] = field(default=None, kw_only=False)


@dataclass(frozen=True, kw_only=True)
class CleanOptions(Options):
    """The options of `brim.clean`."""

    remove: Annotated[bool, Option("Remove the caches that are listed.")] = False
    older_than: Annotated[float, Option("Only caches not used for this many days.", "DAYS", minimum=0)] = 0.0
    unfinished: Annotated[bool, Option("Only caches of jobs that are not finished.")] = False
    cache_dir: Annotated[Path | None, _CACHE_DIR] = None
