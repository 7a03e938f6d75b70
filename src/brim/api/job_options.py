"""The words of the verbs in Python: those of the command line, with underscores.

For each verb there is a TypedDict, which editors and type checkers see, and a dataclass of the same names with the
defaults, which turns what was given into what jobs take. `spelled_out` puts the words into a function's signature.
What a word means and which values it takes is checked by whoever it is for; here, only that a switch or a text is one.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Literal, TypedDict, TypeVar, cast, get_type_hints

from brim.buckets.bucket_address import Access
from brim.choices import one_of, switches
from brim.errors import ArgumentError, InputError
from brim.jobs.build_job import BuildOptions
from brim.jobs.spec import How
from brim.outputs.output import RowFormat
from brim.plans.cut_shards import CutOptions
from brim.plans.file_checks import CheckOptions, Oversize
from brim.plans.plan import Format
from brim.records import dataclass
from brim.rows.row_options import RowOptions
from brim.schedule.messages import OnError
from brim.schedule.scheduler import Engine, Scaling
from brim.sizes import parse_size
from brim.sources.open_source import recipe_text
from brim.sources.source_options import BidsOptions, RowsOf, Sidecars, SourceOptions
from brim.state.stop import Stop
from brim.steps.embed_options import Dtype, Policy, Pooling
from brim.stores.destination import HubOptions, Via

Bytes = str | int | float | None
Place = str | os.PathLike[str]
Names = str | Sequence[str] | None
_F = TypeVar("_F", bound=Callable[..., Any])


class Running(TypedDict, total=False):
    """What a job may take, where its books are, and who may stop it."""

    memory: Bytes
    workers: int | None
    state: Place | None
    stop_file: Place | None
    stop: Stop | None


class PublishKeywords(TypedDict, total=False):
    """How it is published on the Hub."""

    config: str
    commit_message: str | None
    public: bool
    direct: bool
    via: Via


class StoreKeywords(TypedDict, total=False):
    """How buckets are reached: the destination's, and the source's if that is another."""

    endpoint_url: str | None
    source_endpoint_url: str | None
    anonymous: bool


class PlaceKeywords(Running, PublishKeywords, StoreKeywords, total=False):
    """Where a job runs and where its result goes."""

    fresh: bool
    engine: Engine
    address: str | None
    workspace: str | None


class SelectKeywords(PlaceKeywords, total=False):
    """How shards are made of rows and files, whatever they come from."""

    format: Format
    shard_size: Bytes
    num_shards: int | Mapping[str, int] | None
    rows_per_shard: int | None
    shard_by: str | None
    allow_empty: bool
    oversize: Oversize
    strict: bool
    update: bool
    append: bool
    allow_duplicate_paths: bool


class SourceKeywords(TypedDict, total=False):
    """How a folder, a BIDS dataset or a table is read."""

    files: Names | Mapping[str, str]
    include: Names
    exclude: Names
    limit: int | None
    label_from: Literal["parent"] | None
    root: Place | None
    drop: Names
    split: str | None
    split_by: str | None
    from_config: str | None
    from_split: str | None
    recipe: Place | None
    rows: RowsOf
    subjects: Names
    sessions: Names
    suffixes: Names
    sidecars: Sidecars
    derivatives: Names
    phenotype: bool
    bidsignore: bool


class BuildKeywords(SelectKeywords, SourceKeywords, total=False):
    """What `plan` and `build` take."""


class ComputeKeywords(PlaceKeywords, total=False):
    """What map, tokenize and embed share: how rows are read, and what happens when one fails."""

    input_format: str | None
    text: Literal["lines", "document"]
    delimiter: str | None
    limit: int | None
    from_config: str | None
    from_split: str | None
    where: str | None
    columns: Names
    unit_size: Bytes
    on_error: OnError
    keep_done: bool


class MapKeywords(ComputeKeywords, total=False):
    """What `map` takes beside the arguments of `Dataset.map`."""

    format: RowFormat
    rows_per_shard: int | None
    split: str


class TokenizeKeywords(ComputeKeywords, total=False):
    """What `tokenize` takes."""

    keep: Names
    eos: str | None
    no_eos: bool
    special_tokens: bool | None
    max_length: int | None
    encoder: Literal["auto", "reference", "fast"]
    long_documents: Literal["cut", "refuse"]
    long_chars: int
    pack: int | None
    pack_tail: Literal["drop", "keep"]
    format: Literal["parquet", "arrow", "bin"]
    dtype: Literal["auto", "int32", "uint16", "uint32"]
    split: str | None
    shuffle: int | None
    rows_per_shard: int | None


class EmbedKeywords(ComputeKeywords, total=False):
    """What `embed` takes."""

    keep: Names
    batch_size: int
    normalize: bool
    nan: Policy
    empty: Policy
    name: Mapping[str, str] | None
    device: str
    dtype: Dtype
    pooling: Pooling | None
    projection: bool
    max_tokens: int | None
    prompt: str | None
    revision: str | None
    argument: Mapping[str, Any] | None
    split: str


class _Words:
    """Words that were given: each is of the kind that its field says, before anybody makes something of it."""

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.type in ("bool", "bool | None"):
                switches(**{field.name: value})
            elif field.type in _KINDS and not (value is None and field.default is None):
                kind, what = _KINDS[field.type]
                if not isinstance(value, kind):
                    raise ArgumentError(f"{field.name}= takes {what}, not {value!r}.", option=field.name)


_KINDS: dict[Any, tuple[type, str]] = {
    "str": (str, "a text"),
    "str | None": (str, "a text"),
    "Stop | None": (Stop, "a brim.Stop"),
}


@dataclass(frozen=True, kw_only=True)
class RunningGiven(_Words):
    """`Running`, with its defaults."""

    memory: Bytes = None
    workers: int | None = None
    state: Place | None = None
    stop_file: Place | None = None
    stop: Stop | None = None

    @property
    def running(self) -> dict[str, Any]:
        """As `How` has it."""
        return {
            "memory": self.memory,
            "workers": self.workers,
            "state": as_text(self.state),
            "stop_file": as_text(self.stop_file),
            "stop": self.stop,
        }


@dataclass(frozen=True, kw_only=True)
class PlaceGiven(RunningGiven):
    """`PlaceKeywords`, with their defaults."""

    config: str = "default"
    commit_message: str | None = None
    public: bool = False
    direct: bool = False
    via: Via = "auto"
    endpoint_url: str | None = None
    source_endpoint_url: str | None = None
    anonymous: bool = False
    fresh: bool = False
    engine: Engine = "local"
    address: str | None = None
    workspace: str | None = None

    @property
    def source_access(self) -> Access:
        return Access(self.source_endpoint_url or self.endpoint_url, self.anonymous)

    @property
    def placed(self) -> dict[str, Any]:
        """As `How` has it. What is written to is never reached without credentials."""
        hub = HubOptions(
            config=self.config, message=self.commit_message, public=self.public, direct=self.direct, via=self.via
        )
        scaling = Scaling(self.engine, self.address, self.workspace)
        access = Access(self.endpoint_url)
        return {**self.running, "fresh": self.fresh, "hub": hub, "scaling": scaling, "access": access}


@dataclass(frozen=True, kw_only=True)
class SelectGiven(PlaceGiven):
    """`SelectKeywords`, with their defaults."""

    format: Format = "parquet"
    shard_size: Bytes = None
    num_shards: int | Mapping[str, int] | None = None
    rows_per_shard: int | None = None
    shard_by: str | None = None
    allow_empty: bool = False
    oversize: Oversize = "error"
    strict: bool = False
    update: bool = False
    append: bool = False
    allow_duplicate_paths: bool = False

    @property
    def options(self) -> BuildOptions:
        one_of("oversize", self.oversize, ("error", "skip"))
        size = None if self.shard_size is None else parse_size(self.shard_size)
        return BuildOptions(
            **self.placed,
            update=self.update,
            append=self.append,
            allow_duplicate_paths=self.allow_duplicate_paths,
            format=self.format,
            cut=CutOptions(size, self.num_shards, self.rows_per_shard, self.shard_by),
            checks=CheckOptions(self.allow_empty, self.oversize == "skip", self.strict),
        )


@dataclass(frozen=True, kw_only=True)
class SourceGiven(_Words):
    """`SourceKeywords`, with their defaults."""

    files: Names | Mapping[str, str] = ()
    include: Names = ()
    exclude: Names = ()
    limit: int | None = None
    label_from: Literal["parent"] | None = None
    root: Place | None = None
    drop: Names = ()
    split: str | None = None
    split_by: str | None = None
    from_config: str | None = None
    from_split: str | None = None
    recipe: Place | None = None
    rows: RowsOf = "session"
    subjects: Names = ()
    sessions: Names = ()
    suffixes: Names = ()
    sidecars: Sidecars = "safe"
    derivatives: Names = ()
    phenotype: bool = False
    bidsignore: bool = True

    def source_options(self, access: Access, **more: Any) -> SourceOptions:
        """As sources have it."""
        named = [f"{name}:{kind}" for name, kind in self.files.items()] if isinstance(self.files, Mapping) else None
        return SourceOptions(
            files=many(self.files if named is None else named),  # type: ignore[arg-type]
            include=many(self.include),
            exclude=many(self.exclude),
            limit=self.limit,
            label_from=self.label_from,
            drop=many(self.drop),
            split=self.split,
            split_by=self.split_by,
            from_config=self.from_config,
            from_split=self.from_split,
            root=as_text(self.root),
            recipe_text=recipe_text(as_text(self.recipe)),
            access=access,
            memory=getattr(self, "memory", None),
            bids=BidsOptions(
                rows=self.rows,
                sidecars=self.sidecars,
                subjects=many(self.subjects),
                sessions=many(self.sessions),
                suffixes=many(self.suffixes),
                derivatives=many(self.derivatives),
                phenotype=self.phenotype,
                bidsignore=self.bidsignore,
            ),
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class BuildGiven(SelectGiven, SourceGiven):
    """`BuildKeywords`, with their defaults."""


@dataclass(frozen=True, kw_only=True)
class ComputeGiven(PlaceGiven):
    """`ComputeKeywords`, with their defaults."""

    input_format: str | None = None
    text: Literal["lines", "document"] = "lines"
    delimiter: str | None = None
    limit: int | None = None
    from_config: str | None = None
    from_split: str | None = None
    where: str | None = None
    columns: Names = ()
    unit_size: Bytes = None
    on_error: OnError = "stop"
    keep_done: bool = False

    def how(self, held_bytes: int) -> How:
        """How to run. `held_bytes` is what this process holds for its caller: the limit is for the job. The command
        line has no caller."""
        return How(**self.placed, on_error=self.on_error, keep_done=self.keep_done, held_bytes=held_bytes)

    def row_options(self, source: Any = None, name: str | None = None, **more: Any) -> RowOptions:
        """How rows are read. With a `name`, the code that makes an iterator counts, too."""
        code = None
        if name is not None:
            from brim.steps.function_digest import iterator_digest  # builds have no use for it

            code = iterator_digest(source)
        return RowOptions(
            name=name,
            code=code,
            format=self.input_format,
            text=self.text,
            delimiter=self.delimiter,
            limit=self.limit,
            config=self.from_config,
            split=self.from_split,
            where=self.where,
            columns=many(self.columns) or None,
            unit_bytes=None if self.unit_size is None else parse_size(self.unit_size),
            access=self.source_access,
            leave_out_unreadable=self.on_error != "stop",
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class MapGiven(ComputeGiven):
    """`MapKeywords`, with their defaults."""

    format: RowFormat = "parquet"
    rows_per_shard: int | None = None
    split: str = "train"


@dataclass(frozen=True, kw_only=True)
class TokenizeGiven(ComputeGiven):
    """`TokenizeKeywords`, with their defaults."""

    keep: Names = ()
    eos: str | None = None
    no_eos: bool = False
    special_tokens: bool | None = None
    max_length: int | None = None
    encoder: Literal["auto", "reference", "fast"] = "auto"
    long_documents: Literal["cut", "refuse"] = "cut"
    long_chars: int = 65_536
    pack: int | None = None
    pack_tail: Literal["drop", "keep"] = "drop"
    format: Literal["parquet", "arrow", "bin"] = "parquet"
    dtype: Literal["auto", "int32", "uint16", "uint32"] = "auto"
    split: str | None = None
    shuffle: int | None = None
    rows_per_shard: int | None = None


@dataclass(frozen=True, kw_only=True)
class EmbedGiven(ComputeGiven):
    """`EmbedKeywords`, with their defaults."""

    keep: Names = ()
    batch_size: int = 32
    normalize: bool = False
    nan: Policy = "error"
    empty: Policy = "error"
    name: Mapping[str, str] | None = None
    device: str = "auto"
    dtype: Dtype = "auto"
    pooling: Pooling | None = None
    projection: bool = True
    max_tokens: int | None = None
    prompt: str | None = None
    revision: str | None = None
    argument: Mapping[str, Any] | None = None
    split: str = "train"


def many(value: Names) -> tuple[str, ...]:
    """One or several: a text alone means itself, not its letters."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def as_text(path: Place | None) -> str | None:
    return None if path is None else os.fspath(path)


def changed(given: Any, kind: type) -> list[str]:
    """Which words of `kind` were given another value than their default."""
    return [field.name for field in fields(kind) if getattr(given, field.name) != field.default]


_FOR_A_PLACE = ("config", "commit_message", "public", "direct", "via", "state", "engine", "address", "workspace")


def refuse_without_place(given: PlaceGiven, *more: str) -> None:
    """InputError for words that say how something is published, where the result stays in the cache."""
    for name in changed(given, type(given)):
        if name in (*_FOR_A_PLACE, *more):
            raise InputError(
                f"--{name.replace('_', '-')} needs a destination: without one, the result stays in brim's cache.",
                hint="Add destination=, or leave it out.",
            )


def spelled_out(words: type) -> Callable[[_F], _F]:
    """Show the words of a dataclass in the signature of a function that takes them as `**`, for help() and editors.

    A word that is not among them is a TypeError as Python's own, with the one that may have been meant.
    """

    def spell(function: _F) -> _F:
        signature = inspect.signature(function)
        kinds = get_type_hints(words)
        plain = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        taken = {parameter.name for parameter in plain}
        more = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=kinds[field.name],
            )
            for field in fields(words)
            if field.name not in taken
        ]
        known = [parameter.name for parameter in (*plain, *more)]

        @functools.wraps(function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            for name in keywords:
                if name not in known:
                    import difflib

                    near = difflib.get_close_matches(name, known, 1)
                    meant = f". Did you mean {near[0]!r}?" if near else ""
                    raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{meant}")
            return function(*arguments, **keywords)

        checked.__signature__ = signature.replace(parameters=[*plain, *more])  # type: ignore[attr-defined]
        return cast(_F, checked)

    return spell
