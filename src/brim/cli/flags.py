"""Options that several verbs share, each a dataclass: what to read, how to cut it, how to run.

A verb takes the dataclasses as parameters; `flat` spreads their fields out for the parser and packs them
again for the verb, so that twenty options travel as three values.

The Tab key offers verbs, the words that an option takes, recipes. Nothing here asks the network.
Files need no words of ours: where there are none, shells complete file names themselves.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, cast

import typer

from brim.buckets.bucket_address import Access
from brim.cli.show import say_nothing, waiting_for
from brim.errors import InputError
from brim.records import dataclass

Completion = Callable[[str], list[str]]
_WORDS = re.compile(r"[a-z0-9-]+(\|[a-z0-9-]+)+")


def complete_words(words: Iterable[str]) -> Completion:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def completion_of(metavar: str | None) -> Completion | None:
    """For an option that takes one of some words (`error|skip`), or a recipe. None: whatever the shell does."""
    if metavar is None:
        return None
    if metavar.startswith("NAME|FILE"):
        return complete_recipes
    return complete_words(metavar.split("|")) if _WORDS.fullmatch(metavar) else None


def complete_recipes(incomplete: str) -> list[str]:
    from brim.sources.recipe import builtin_recipes

    return [recipe.name for recipe in builtin_recipes() if recipe.name.startswith(incomplete)]


DESTINATIONS = "A folder, hf://datasets/ORG/NAME\\[@BRANCH], hf://buckets/ORG/NAME/PREFIX, or s3://BUCKET/PREFIX."
BUILT = "What brim built: a folder, hf://datasets/ORG/NAME, hf://buckets/ORG/NAME/PREFIX, or s3://BUCKET/PREFIX."
_SOURCE = typer.Argument(
    metavar="SOURCE",
    help="A folder of files, a BIDS dataset, or a table (CSV, TSV, Parquet, JSONL) that names files; on this machine "
    "or at s3://BUCKET/PREFIX, hf://buckets/ORG/NAME/PREFIX. Or a dataset: Parquet shards, WebDataset tars, "
    "hf://datasets/ORG/NAME.",
)
SourceArgument = Annotated[str, _SOURCE]
MaybeSource = Annotated[str | None, _SOURCE]


def _option(*names: str, panel: str, metavar: str | None = None, help: str) -> Any:
    tab = completion_of(metavar)
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, autocompletion=tab)


_source = functools.partial(_option, panel="Source")
_bids = functools.partial(_option, panel="BIDS datasets and recipes")
_shards = functools.partial(_option, panel="Shards")
_hub = functools.partial(_option, panel="Hugging Face Hub")
_objects = functools.partial(_option, panel="Object stores (s3://, gs://, az://)")
_run = functools.partial(_option, panel="Run")
_parts = functools.partial(_option, panel="In parts, on many machines")
Many = list[str] | None


@dataclass(frozen=True)
class ReadingFlags:
    """How the source is read."""

    files: Annotated[
        Many,
        _source(
            "--files",
            metavar="COLUMN[:TYPE]",
            help="A column that names files, and what they are: nifti, image, audio, video, pdf, mesh or file. "
            "May be repeated. Guessed otherwise; for a folder, the name of the file column.",
        ),
    ] = None
    include: Annotated[
        Many, _source("--include", metavar="GLOB", help="Only files (rows with files) that match. May be repeated.")
    ] = None
    exclude: Annotated[
        Many, _source("--exclude", metavar="GLOB", help="Not files (rows with files) that match. May be repeated.")
    ] = None
    limit: Annotated[int | None, _source("--limit", metavar="ROWS", help="Only the first rows: a pilot.")] = None
    label_from: Annotated[
        str | None, _source("--label-from", metavar="parent", help="Add a class label from the parent folder.")
    ] = None
    root: Annotated[
        str | None,
        _source(
            "--root",
            metavar="DIR",
            help="Where a table's relative paths start (default: its folder); with --plan, where the source is here.",
        ),
    ] = None
    drop: Annotated[Many, _source("--drop", metavar="COLUMN", help="Leave a table's column out. May be repeated.")] = (
        None
    )
    split: Annotated[str | None, _source("--split", metavar="NAME", help="Put all rows into this split.")] = None
    from_config: Annotated[
        str | None, _source("--from-config", metavar="NAME", help="The config (subset) of a dataset that is read.")
    ] = None
    from_split: Annotated[
        str | None, _source("--from-split", metavar="NAME", help="The split of a dataset that is read.")
    ] = None
    split_by: Annotated[
        str | None, _source("--split-by", metavar="COLUMN", help="The table's column that names each row's split.")
    ] = None
    allow_empty: Annotated[bool, _source("--allow-empty", help="Take files of zero bytes.")] = False
    strict: Annotated[
        bool,
        _source("--strict", help="Counts that are not what the recipe expects, and data that no column takes: errors."),
    ] = False
    oversize: Annotated[
        str, _source("--oversize", metavar="error|skip", help="Files too large for the format: refuse or leave out.")
    ] = "error"


@dataclass(frozen=True)
class FromFlags:
    """Which part of a dataset is read."""

    from_config: Annotated[
        str | None, _source("--from-config", metavar="NAME", help="The config (subset) of a dataset that is read.")
    ] = None
    from_split: Annotated[
        str | None, _source("--from-split", metavar="NAME", help="The split of a dataset that is read.")
    ] = None


_WHERE = _source(
    "--where",
    metavar="EXPR",
    help="Only rows for which this is true, like 'age > 40 and sex == \"F\"'. Of several, all must be.",
)


@dataclass(frozen=True)
class ChoosingFlags:
    """Which rows and columns of a dataset are taken."""

    where: Annotated[Many, _WHERE] = None
    columns: Annotated[
        Many, _source("--columns", metavar="NAMES", help="Only these columns, separated by commas. May be repeated.")
    ] = None


@dataclass(frozen=True)
class SelectingFlags(ChoosingFlags):
    """What is done with the rows of a dataset."""

    sql: Annotated[
        str | None,
        _source("--sql", metavar="EXPR", help="Only rows for which this SQL expression is true. (needs DuckDB)"),
    ] = None
    drop: Annotated[Many, _source("--drop", metavar="NAMES", help="Leave these columns out.")] = None
    sort_by: Annotated[
        Many, _source("--sort-by", metavar="NAMES", help="In the order of these columns; -NAME goes down.")
    ] = None
    shuffle: Annotated[
        int | None, _source("--shuffle", metavar="SEED", help="In an order that looks random, the same for ever.")
    ] = None
    sample: Annotated[
        str | None, _source("--sample", metavar="N|PERCENT", help="So many rows, or 10% of them, in their order.")
    ] = None
    limit: Annotated[int | None, _source("--limit", metavar="ROWS", help="Only the first rows.")] = None
    unique: Annotated[
        str | None,
        _source("--unique", metavar="COLUMN", help="The first row of each value; content: of each file's bytes."),
    ] = None
    split_into: Annotated[
        str | None, _source("--split-into", metavar="SHARES", help="Splits like train=0.9,test=0.1.")
    ] = None
    group_by: Annotated[
        str | None, _source("--group-by", metavar="COLUMN", help="Rows that share its value go into one split.")
    ] = None
    also: Annotated[
        Many, _source("--also", metavar="SOURCE", help="Join the rows of another dataset below. May be repeated.")
    ] = None


def split_names(said: Many) -> tuple[str, ...]:
    """Names that were separated by commas, given by several options, or both."""
    names = tuple(name.strip() for text in said or () for name in text.split(",") if name.strip())
    if said and not names:
        raise InputError("An option that takes names of columns was given none.", hint="Leave it out, or name some.")
    return names


def all_true(said: Many) -> str | None:
    """One condition for all that were given. One that cannot be parsed is handed on alone, to whoever says why."""
    if not said or len(said) == 1:
        return said[0] if said else None
    import ast  # for what is rare

    for text in said:
        try:
            ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return text
    return " and ".join(f"({text.strip()})" for text in said)


@dataclass(frozen=True)
class BidsFlags:
    """What is particular to BIDS datasets, and to recipes."""

    recipe: Annotated[
        str | None,
        _bids("--recipe", metavar="NAME|FILE", help="How a folder becomes rows: see brim recipes. files: plain files."),
    ] = None
    rows: Annotated[str, _bids("--rows", metavar="session|subject|file", help="What a row is.")] = "session"
    subjects: Annotated[Many, _bids("--subjects", metavar="SUB", help="Only these subjects. May be repeated.")] = None
    sessions: Annotated[Many, _bids("--sessions", metavar="SES", help="Only these sessions. May be repeated.")] = None
    suffixes: Annotated[
        Many, _bids("--suffixes", metavar="SUFFIX", help="Only these, like T1w or bold. May be repeated.")
    ] = None
    sidecars: Annotated[
        str, _bids("--sidecars", metavar="safe|full|none", help="JSON, events and gradients beside each file.")
    ] = "safe"
    derivatives: Annotated[
        Many, _bids("--derivatives", metavar="NAME|all", help="Take derivatives/NAME too. May be repeated.")
    ] = None
    phenotype: Annotated[bool, _bids("--phenotype", help="Join the tables of phenotype/.")] = False
    no_bidsignore: Annotated[bool, _bids("--no-bidsignore", help="Take what .bidsignore excludes.")] = False

    @property
    def words(self) -> dict[str, Any]:
        """As Python has them."""
        said = dict(vars(self))
        said["bidsignore"] = not said.pop("no_bidsignore")
        return said


@dataclass(frozen=True)
class CuttingFlags:
    """What the shards are."""

    format: Annotated[str, _shards("--format", metavar="parquet|webdataset", help="What a shard is.")] = "parquet"
    shard_size: Annotated[
        str | None, _shards("--shard-size", metavar="SIZE", help="Rows up to this many bytes a shard. (default: 500MB)")
    ] = None
    num_shards: Annotated[int | None, _shards("--num-shards", metavar="N", help="This many shards for each split.")] = (
        None
    )
    rows_per_shard: Annotated[
        int | None, _shards("--rows-per-shard", metavar="N", help="This many rows a shard; 1: one shard per row.")
    ] = None
    shard_by: Annotated[
        str | None,
        _shards("--shard-by", metavar="COLUMN", help="Keep rows that share a value together: a shard for each value."),
    ] = None


@dataclass(frozen=True)
class RowFlags:
    """How rows are read."""

    input_format: Annotated[
        str | None,
        _source(
            "--input-format",
            metavar="FORMAT",
            help="jsonl, csv, tsv, parquet, arrow or text. (default: by the names of the files)",
        ),
    ] = None
    text: Annotated[
        str, _source("--text", metavar="lines|document", help="A row of a text file: a line, or the whole file.")
    ] = "lines"
    delimiter: Annotated[str | None, _source("--delimiter", metavar="C", help="Between the values of a CSV.")] = None
    limit: Annotated[int | None, _source("--limit", metavar="ROWS", help="Only the first rows: a pilot.")] = None
    from_split: Annotated[
        str | None,
        _source("--from-split", metavar="NAME", help="The split of a dataset, or of a folder that `datasets` saved."),
    ] = None
    from_config: Annotated[
        str | None, _source("--from-config", metavar="NAME", help="The config (subset) of a dataset that is read.")
    ] = None
    where: Annotated[Many, _WHERE] = None
    columns: Annotated[
        Many, _source("--columns", metavar="NAMES", help="Only these columns, separated by commas. May be repeated.")
    ] = None
    unit_size: Annotated[
        str | None,
        _source("--unit-size", metavar="SIZE", help="Input for one unit of work. (default: 1/64 of it, 8 to 128 MiB)"),
    ] = None


@dataclass(frozen=True)
class ComputingFlags:
    """How a computed job goes on when something goes wrong, and where it was."""

    on_error: Annotated[
        str,
        _run(
            "--on-error",
            metavar="stop|skip|quarantine",
            help="Rows that fail or cannot be read: stop, leave them out, or leave them out and keep them in "
            "quarantine.parquet.",
        ),
    ] = "stop"
    fresh: Annotated[bool, _run("--fresh", help="Start over: remove what an earlier run left.")] = False
    keep_done: Annotated[
        bool, _run("--keep-done", help="Keep finished units although the function has changed since.")
    ] = False
    stop_file: Annotated[
        str | None, _run("--stop-file", metavar="FILE", help="Stop cleanly when this file appears.")
    ] = None
    report: Annotated[
        str | None, _run("--report", metavar="FILE.html", help="A page about the run: memory over time, units, notes.")
    ] = None


@dataclass(frozen=True)
class RunningFlags:
    """What it may take and how it shows itself."""

    memory: Annotated[
        str | None, _run("--memory", metavar="SIZE", help="The limit, like 2GB. (default: half of what is available)")
    ] = None
    workers: Annotated[
        int | None, _run("--workers", metavar="N", help="Shards or units at a time. (default: as many as help and fit)")
    ] = None


@dataclass(frozen=True)
class ScalingFlags:
    """Where it runs."""

    engine: Annotated[
        str,
        _run(
            "--engine",
            metavar="local|ray",
            help="Work here, or by the tasks of a running Ray; --memory is then the limit on every node.",
        ),
    ] = "local"
    address: Annotated[
        str | None, _run("--address", metavar="auto|HOST:PORT", help="Of the Ray cluster. (default: auto)")
    ] = None
    workspace: Annotated[
        str | None,
        _run(
            "--workspace",
            metavar="s3://…",
            help="With --engine ray, where map, tokenize and embed keep what is half done, if the nodes share no disk. "
            "(default: DEST, if it is a bucket)",
        ),
    ] = None


@dataclass(frozen=True)
class PartFlags:
    """A computed job in parts, on many machines."""

    save: Annotated[
        str | None, _parts("--save", metavar="PLAN", help="Compute nothing yet: write a plan, for --plan and --part.")
    ] = None
    plan: Annotated[
        str | None, _parts("--plan", metavar="PLAN", help="A plan that was saved, in place of SOURCE and DEST.")
    ] = None
    part: Annotated[str | None, _parts("--part", metavar="I/N", help="With --plan: only the I-th of N parts.")] = None
    finish: Annotated[bool, _parts("--finish", help="With --plan: publish what all parts computed.")] = False


@dataclass(frozen=True)
class PublishingFlags:
    """How it is published on the Hub."""

    config: Annotated[str, _hub("--config", metavar="NAME", help="The config (subset) that is published.")] = "default"
    commit_message: Annotated[str | None, _hub("--commit-message", metavar="TEXT", help="For the last commit.")] = None
    public: Annotated[bool, _hub("--public", help="Make a new repository public. (default: private)")] = False
    direct: Annotated[
        bool, _hub("--direct", help="Commit groups of shards to the branch as they come, the card last.")
    ] = False
    via: Annotated[
        str,
        _hub(
            "--via",
            metavar="auto|lfs|xet",
            help="How the bytes go: lfs takes the least memory, xet sends only chunks that the Hub does not have. "
            "(auto: lfs; xet for --update, if the Hub has it and memory allows it)",
        ),
    ] = "auto"


@dataclass(frozen=True)
class FetchingFlags:
    """How the bucket of DEST is reached. Credentials come from the environment, never from an option."""

    endpoint_url: Annotated[
        str | None,
        _objects(
            "--endpoint-url",
            metavar="URL",
            help="The store, if it is not Amazon's, Google's or Azure's own. (default: AWS_ENDPOINT_URL and the like)",
        ),
    ] = None
    anonymous: Annotated[bool, _objects("--anonymous", help="Read without credentials, as public archives allow.")] = (
        False
    )


@dataclass(frozen=True)
class StoringFlags(FetchingFlags):
    """How the buckets of SOURCE and DEST are reached."""

    source_endpoint_url: Annotated[
        str | None,
        _objects("--source-endpoint-url", metavar="URL", help="That of SOURCE, if it is not that of DEST."),
    ] = None

    @property
    def source(self) -> Access:
        return Access(self.source_endpoint_url or self.endpoint_url, self.anonymous)


@dataclass(frozen=True)
class KeepingFlags:
    """Where the ledger is."""

    state: Annotated[
        str | None,
        _run("--state", metavar="DIR", help="Where the ledger is. (default: DEST/.brim, or the user's state folder)"),
    ] = None


@dataclass(frozen=True)
class ShowingFlags:
    """How results are shown."""

    json: Annotated[bool, _run("--json", help="One JSON object per line on stdout, nothing else.")] = False


@dataclass(frozen=True)
class WatchingFlags:
    """How a running job shows itself."""

    quiet: Annotated[bool, _run("--quiet", "-q", help="Print nothing but errors.")] = False


_live = functools.partial(_option, panel="Live page")


@dataclass(frozen=True)
class LiveFlags:
    """A page about the run while it goes on."""

    live: Annotated[
        bool, _live("--live", help="Show it live: a page on this machine alone, whose address is printed.")
    ] = False
    live_port: Annotated[
        int | None, _live("--live-port", metavar="N", help="The page's port, and --live. (default: any)")
    ] = None
    open_page: Annotated[bool, _live("--open", help="Open the page in a browser, and --live.")] = False

    @property
    def port(self) -> int | None:
        """None if no page was asked for."""
        if self.live_port is not None and not 0 < self.live_port < 65_536:
            raise InputError(f"--live-port takes a port between 1 and 65535, not {self.live_port}.")
        return (self.live_port or 0) if self.live or self.open_page or self.live_port is not None else None


def help_text(text: str) -> str:
    """Paragraphs as long lines, which typer then wraps; indented lines stay lines."""
    return re.sub(r"(?<=\S)\n(?=[^\n ])", " ", text)


def flat(verb: Callable[..., None]) -> Callable[..., None]:
    """A function for typer whose parameters are those of `verb`, its dataclasses spread out."""
    packed: dict[str, type] = {}
    parameters = []
    for parameter in inspect.signature(verb).parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        packed[parameter.name] = cast("type", parameter.annotation)
        for field in fields(parameter.annotation):
            assert field.default is not MISSING
            parameters.append(
                inspect.Parameter(
                    field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
                )
            )

    @functools.wraps(verb)
    def spread(*positional: Any, **given: Any) -> None:
        if given.get("quiet") and not given.get("json"):
            say_nothing()
        for name, kind in packed.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        verb(*positional, **given)

    parameters.sort(key=lambda p: p.kind)
    spread.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del spread.__wrapped__
    return spread


def read(source: str, reading: ReadingFlags, bids: BidsFlags, storing: StoringFlags | None = None, **more: Any) -> Any:
    """The file table of SOURCE, read as the options say."""
    from brim.api.job_options import BuildGiven
    from brim.sources.open_source import read_source

    given = BuildGiven(**vars(reading), **bids.words, **vars(storing or StoringFlags()))
    with waiting_for(source):
        return read_source(source, given.source_options(given.source_access, **more))
