"""How a source is to be read: which files, which rows, which columns, which splits."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, field
from typing import Any, Literal, get_args

from brim.buckets.bucket_address import Access
from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.records import dataclass
from brim.sources.features import parse_kind

RowsOf = Literal["session", "subject", "file"]
Sidecars = Literal["safe", "full", "none"]


@dataclass(frozen=True, slots=True)
class BidsOptions:
    """What the user asked for."""

    rows: RowsOf = "session"
    sidecars: Sidecars = "safe"
    subjects: tuple[str, ...] = ()
    sessions: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    derivatives: tuple[str, ...] = ()  # names, or "all"
    phenotype: bool = False
    bidsignore: bool = True

    def __post_init__(self) -> None:
        one_of("rows", self.rows, get_args(RowsOf))
        one_of("sidecars", self.sidecars, get_args(Sidecars))

    def wants_subject(self, folder: str) -> bool:
        return _wanted(folder, self.subjects, "sub-")

    def wants_session(self, folder: str | None) -> bool:
        return not self.sessions or (folder is not None and _wanted(folder, self.sessions, "ses-"))

    def wants_suffix(self, suffix: str) -> bool:
        """Photos of people and head shapes only if they are asked for by name."""
        if self.suffixes:
            return suffix.lower() in {s.lower() for s in self.suffixes}
        return suffix not in PRIVATE_SUFFIXES


PRIVATE_SUFFIXES = frozenset(["photo", "headshape"])


def _wanted(folder: str, names: tuple[str, ...], prefix: str) -> bool:
    return not names or folder in {name if name.startswith(prefix) else prefix + name for name in names}


_OF_THE_RUN = ("root", "bids", "lenient", "tolerance", "access", "memory")  # decide no row, or are recorded elsewhere
_SPLIT = re.compile(r"\w+(\.\w+)*")  # what `datasets` accepts as the name of a split


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the user asked for. Nothing here names a place, except `root` and `access`."""

    files: tuple[str, ...] = ()  # COLUMN or COLUMN:TYPE
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = None
    label_from: Literal["parent"] | None = None
    drop: tuple[str, ...] = ()
    split: str | None = None
    split_by: str | None = None
    root: str | None = None
    recipe_text: str | None = None  # a built-in recipe's name, or the TOML of another
    bids: BidsOptions = field(default_factory=BidsOptions)
    lenient: bool = False  # for a check: note what does not fit instead of stopping there
    tolerance: float | None = None  # how far counts may be from what a recipe expects
    access: Access = field(default_factory=Access)  # how a bucket is reached
    dataset: bool = False  # whether it is read as a dataset that holds its files, whatever else it may be
    from_config: str | None = None  # of a dataset
    from_split: str | None = None
    steps: tuple[Any, ...] = ()  # how the rows of a dataset are chosen: see selection.py
    memory: str | int | float | None = None  # the limit of the job, against which a table is compared

    def __post_init__(self) -> None:
        at_least("limit", self.limit, 1)
        one_of("label-from", self.label_from, (None, "parent"))
        if self.split is not None:
            check_split(self.split)
        for glob in (*self.include, *self.exclude):
            if glob.startswith("/"):
                raise InputError(f"{glob!r} starts with /.", hint="Globs are matched against relative paths.")

    def file_columns(self, known: Collection[str] = ()) -> dict[str, str | None]:
        """The file columns the user named, and the types given with them.

        A name may hold a colon: if it is the name of a column as it stands, that column is meant.
        """
        columns: dict[str, str | None] = {}
        for text in self.files:
            name, colon, kind = text.rpartition(":")
            if colon and name and text not in known:
                columns[name] = parse_kind(kind)
            else:
                columns[text] = None
        return columns

    def selects(self) -> Callable[[str], bool]:
        """A test for paths: matched by `include` if there is one, and not by `exclude`."""
        include, exclude = _matcher(self.include), _matcher(self.exclude)
        return lambda path: (include is None or include(path)) and not (exclude is not None and exclude(path))

    def recipe(self) -> dict[str, Any]:
        """What decides the rows, for the ledger."""
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
    """Whether a relative path, or its last part, matches one of the globs. `*` crosses folders."""
    patterns = [re.compile(fnmatch.translate(glob)) for glob in globs]
    if not patterns:
        return None
    return lambda path: any(p.match(path) or p.match(path.rsplit("/", 1)[-1]) for p in patterns)
