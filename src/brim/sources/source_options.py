"""How a source is read: which files, which rows, which columns, which splits."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, field
from typing import Any

from brim.errors import InputError
from brim.options.groups import BidsOptions, FileSourceOptions
from brim.records import dataclass
from brim.sources.features import parse_kind
from brim.storage.location import Access

_OF_THE_RUN = ("root", "bids", "lenient", "tolerance", "access", "memory")  # decide no row, or are recorded elsewhere
_SPLIT = re.compile(r"\w+(\.\w+)*")  # what `datasets` accepts as the name of a split


@dataclass(frozen=True, kw_only=True)
class SourceOptions(FileSourceOptions):
    """How a source is read: what the user asked for, and what its callers know besides."""

    recipe_text: str | None = None  # the name of a built-in recipe, or the TOML of another
    bids: BidsOptions = field(default_factory=BidsOptions)
    lenient: bool = False  # for a check: report faults instead of raising
    tolerance: float | None = None  # how far counts may be from what a recipe expects
    access: Access = field(default_factory=Access)  # to an object store
    dataset: bool = False  # read it as a dataset that contains its files, whatever else it may be
    steps: tuple[Any, ...] = ()  # how the rows of a dataset are chosen: see selection.py
    memory: str | int | float | None = None  # the limit of the job, with which the size of a table is compared

    def check_options(self) -> None:
        if self.split is not None:
            check_split(self.split)
        for glob in (*self.include, *self.exclude):
            if glob.startswith("/"):
                raise InputError(f"{glob!r} starts with /.", hint="Globs are matched against relative paths.")

    def file_columns(self, existing: Collection[str] = ()) -> dict[str, str | None]:
        """Return the file columns that --files names, and the type given with each."""
        return {column: kind for column, _, kind in self._parse_files(existing)}

    def renamed_columns(self, existing: Collection[str] = ()) -> dict[str, str]:
        """Return the new names that --files NAME=COLUMN gives to columns."""
        return {column: name for column, name, _ in self._parse_files(existing) if name}

    def _parse_files(self, existing: Collection[str]) -> Iterator[tuple[str, str | None, str | None]]:
        """Yield column, new name and type of each --files. A column in `existing` may have ':' or '=' in its name."""
        for text in self.files:
            column, colon, typed = text.rpartition(":")
            kind = parse_kind(typed) if colon and column and text not in existing else None
            column = text if kind is None else column
            name, _, source = column.partition("=")
            is_renamed = name and source and column not in existing
            yield (source, name, kind) if is_renamed else (column, None, kind)

    def selects(self) -> Callable[[str], bool]:
        """Return a test for paths: matched by `include` if it is set, and not by `exclude`."""
        include, exclude = _matcher(self.include), _matcher(self.exclude)
        return lambda path: (include is None or include(path)) and not (exclude is not None and exclude(path))

    def recipe(self) -> dict[str, Any]:
        """Return the fingerprint inputs, for the ledger."""
        values = {name: value for name, value in asdict(self).items() if value and name not in _OF_THE_RUN}
        if self.bids != BidsOptions():
            values["bids"] = asdict(self.bids)
        recorded: dict[str, Any] = json.loads(json.dumps(values))
        return recorded

    @classmethod
    def from_recipe(
        cls, recipe: Mapping[str, Any], root: str | None = None, access: Access | None = None
    ) -> SourceOptions:
        values = _tuples(recipe)
        bids = values.pop("bids", None)
        options = BidsOptions(**_tuples(bids)) if bids else BidsOptions()
        return cls(**values, root=root, bids=options, access=access or Access())


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def check_split(name: str) -> None:
    if not _SPLIT.fullmatch(name) or name == "all":  # which `datasets` keeps for itself
        raise InputError(f"{name!r} is not the name of a split.", hint="Use letters, digits and _, like train or test.")


def _matcher(globs: Iterable[str]) -> Callable[[str], bool] | None:
    """Return whether a relative path, or its last part, matches one of the globs. `*` crosses folders."""
    patterns = [re.compile(fnmatch.translate(glob)) for glob in globs]
    if not patterns:
        return None
    return lambda path: any(p.match(path) or p.match(path.rsplit("/", 1)[-1]) for p in patterns)
