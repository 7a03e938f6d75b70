"""The groups of options that several commands share. A group is a panel of `--help-all`."""

import ast
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from brim.errors import InputError
from brim.extras import need_extra
from brim.options.declare import (
    BIDS,
    HUB,
    LIVE,
    PARTS,
    STORES,
    Common,
    Kind,
    Names,
    Option,
    Options,
    Path,
    PythonOnly,
    Size,
    choose_one,
    split_commas,
    text_tuple,
)
from brim.records import dataclass
from brim.sizes import format_size, parse_count, parse_size, plural
from brim.state.stop import Stop

DESTINATION = "A folder, hf://datasets/ORG/NAME[@BRANCH], hf://buckets/ORG/NAME/PREFIX, or s3://BUCKET/PREFIX."
DATASET = "A dataset: a folder, hf://datasets/ORG/NAME[@REVISION], hf://buckets/ORG/NAME/PREFIX, or s3://BUCKET/PREFIX."
SOURCE = (
    "A folder of files, a BIDS dataset, a table (CSV, TSV, Parquet, JSONL) that names files, or a dataset; local, at "
    "s3://BUCKET/PREFIX or hf://datasets/ORG/NAME."
)
OPENED_SOURCE = "Or the result of brim.files, bids, table or dataset."
ROWS = "A file, folder or glob of JSONL, CSV, TSV, Parquet, Arrow or text (also .gz and .zst); or s3://BUCKET/PREFIX."
SMALL_SHARD_BYTES = 1_000_000


def join_conditions(texts: list[str]) -> str:
    """Join several --where conditions by `and`. One that cannot be parsed is returned alone, for its own error."""
    for text in texts if len(texts) > 1 else ():
        try:
            ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return text
    return texts[0] if len(texts) == 1 else " and ".join(f"({text.strip()})" for text in texts)


def column_names(texts: list[str]) -> tuple[str, ...]:
    """Split names of columns at commas."""
    names = split_commas(texts)
    if not names:
        raise ValueError("the names of columns")
    return names


def parse_shares(shares: str | Mapping[str, float]) -> dict[str, float]:
    """Parse the shares of --split-into: train=0.9,test=0.1."""
    parsed: dict[str, float] = {}
    items = shares.items() if isinstance(shares, Mapping) else (part.split("=", 1) for part in shares.split(","))
    hint = "Write it like --split-into=train=0.9,test=0.1."
    try:
        for name, share in items:
            if name.strip() in parsed:
                raise InputError(f"--split-into names {name.strip()!r} twice.", hint=hint)
            parsed[name.strip()] = float(share)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"--split-into takes shares such as train=0.9,test=0.1, not {shares!r}.") from error
    if not parsed or not min(parsed.values()) > 0 or not abs(sum(parsed.values()) - 1) <= 1e-6:
        raise InputError("The shares of --split-into must be above zero and add up to 1.", hint=hint)
    return parsed


@dataclass(frozen=True, kw_only=True)
class StateOptions(Options, panel="Run"):
    """Where the ledger is."""

    state_dir: Annotated[
        Path | None,
        Option(
            "Folder of the ledger, by which a job resumes.",
            "DIR",
            default="the folder .brim of the dataset, or the user's state folder if it is remote",
            old="state",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RunOptions(StateOptions, panel="Run"):
    """How a job runs on this machine. None of these options changes the result."""

    memory: Annotated[
        Size, Common("Memory limit for the whole job, such as 2GB.", default="half of the available memory")
    ] = None
    workers: Annotated[
        int | None, Common("Number of shards or units processed at a time.", default="as many as fit", minimum=1)
    ] = None
    stop_file: Annotated[Path | None, Option("Stop cleanly when this file appears.", "FILE")] = None
    stop: Annotated[Stop | None, PythonOnly("A `brim.Stop`, by which another thread can stop the run.")] = None


@dataclass(frozen=True, kw_only=True)
class ProgressOptions(Options, panel="Run"):
    """What a Python caller sees of a run."""

    progress: Annotated[
        Any,
        PythonOnly(
            "True to show progress everywhere, False to show nothing.",
            default="a progress bar in a terminal or notebook, elsewhere only notes",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options, panel="Run"):
    """A page about the run."""

    report: Annotated[
        Path | None, Option("Write an HTML page about the run: memory over time, shards, notes.", "FILE.html")
    ] = None


@dataclass(frozen=True, kw_only=True)
class HubOptions(Options, panel=HUB):
    """How a dataset is published on the Hub."""

    config: Annotated[str, Option("Config (subset) to publish.", "NAME")] = "default"
    commit_message: Annotated[str | None, Option("Message of the last commit.")] = None
    public: Annotated[bool, Option("Create a new repository as public, not private.")] = False
    commit_as_you_go: Annotated[
        bool, Option("Commit groups of shards to the branch while the job runs, the card last.", old="direct")
    ] = False
    upload_with: Annotated[
        Literal["auto", "lfs", "xet"],
        Option(
            "Upload protocol: lfs needs the least memory, xet sends only chunks that the Hub does not have. auto is "
            "lfs, and xet for --update where the Hub and the memory allow it.",
            old="via",
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ReadStorageOptions(Options, panel=STORES):
    """How an object store is reached. Credentials come from the environment, never from an option."""

    endpoint_url: Annotated[
        str | None,
        Option("Address of the object store.", "URL", default="AWS_ENDPOINT_URL and the like, or the provider's own"),
    ] = None
    anonymous: Annotated[bool, Option("Read without credentials, as public archives allow.")] = False


@dataclass(frozen=True, kw_only=True)
class StorageOptions(ReadStorageOptions, panel=STORES):
    """How the object stores of SOURCE and DEST are reached."""

    source_endpoint_url: Annotated[
        str | None, Option("Address of the object store of SOURCE.", "URL", default="that of --endpoint-url")
    ] = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(Options, panel="Run"):
    """Where the work runs."""

    engine: Annotated[
        Literal["local", "ray"],
        Option("Work on this machine, or as tasks of a running Ray cluster; --memory is then the limit per node."),
    ] = "local"
    address: Annotated[str | None, Option("Address of the Ray cluster.", "auto|HOST:PORT", default="auto")] = None
    workspace: Annotated[
        str | None,
        Option(
            "With --engine=ray, location of unfinished units if the nodes do not share a disk.",
            "s3://…",
            default="DEST, if it is a bucket",
        ),
    ] = None

    def check_options(self) -> None:
        for name in ("address", "workspace"):
            if getattr(self, name) is not None and self.engine != "ray":
                raise InputError(
                    f"--{name} can only be used with --engine=ray.", hint=f"Add --engine=ray, or leave --{name} out."
                )
        if self.engine == "ray":
            need_extra("ray", "--engine=ray needs Ray, on every node.")
        if self.address in (None, "auto"):
            return
        host, _, port = str(self.address).rpartition(":")
        if "://" in str(self.address) or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise InputError(
                f"--address takes auto or HOST:PORT, not {self.address!r}.",
                hint="`ray start --head` prints it; auto is the cluster that this machine is part of.",
            )


@dataclass(frozen=True, kw_only=True)
class FreshOptions(Options, panel="Run"):
    """Whether an earlier run counts."""

    fresh: Annotated[bool, Common("Start over: discard the work of an earlier run.")] = False


@dataclass(frozen=True, kw_only=True)
class JobOptions(FreshOptions, EngineOptions, StorageOptions, HubOptions, RunOptions):
    """How and where every job that writes a dataset runs."""


@dataclass(frozen=True, kw_only=True)
class FromOptions(Options, panel="Source"):
    """Which part of a dataset is read."""

    from_config: Annotated[str | None, Option("Config (subset) of the dataset to read.", "NAME")] = None
    from_split: Annotated[str | None, Option("Split of the dataset to read.", "NAME")] = None


@dataclass(frozen=True, kw_only=True)
class FilterOptions(Options, panel="Source"):
    """Which rows and columns are read."""

    where: Annotated[
        str | None,
        Common(
            "Read only rows for which this is true, such as 'age > 40 and sex == \"F\"'.",
            "EXPR",
            from_texts=join_conditions,
        ),
    ] = None
    columns: Annotated[Names, Common("Read only these columns.", "NAME,…", from_texts=column_names)] = ()


@dataclass(frozen=True, kw_only=True)
class CheckFileOptions(Options, panel="Source"):
    """Which files are refused."""

    allow_empty: Annotated[bool, Option("Accept files of zero bytes.")] = False
    strict: Annotated[
        bool,
        Option("Refuse counts that differ from what the recipe expects, and data files that no column contains."),
    ] = False
    oversize: Annotated[
        Literal["error", "skip"], Option("What to do with files too large for the format: stop, or leave them out.")
    ] = "error"


def _file_columns(value: Any) -> tuple[str, ...]:
    """Return COLUMN:TYPE texts, also of a mapping of columns to types."""
    return tuple(f"{name}:{kind}" for name, kind in value.items()) if isinstance(value, Mapping) else text_tuple(value)


@dataclass(frozen=True, kw_only=True)
class PathOptions(Options, panel="Source"):
    """Which files of a folder, or which rows of a table, are read."""

    include: Annotated[Names, Common("Read only files that match this pattern.", "GLOB")] = ()
    exclude: Annotated[Names, Option("Leave out files that match this pattern.", "GLOB")] = ()
    limit: Annotated[int | None, Common("Read only the first rows, for a trial.", "ROWS", minimum=1)] = None


@dataclass(frozen=True, kw_only=True)
class SplitNameOptions(Options, panel="Output"):
    """The name of the split."""

    split: Annotated[str | None, Common("Name of the output split, for all rows.", "NAME")] = None


@dataclass(frozen=True, kw_only=True)
class FileColumnOptions(Options, panel="Source"):
    """The columns of a table that names files."""

    files: Annotated[
        Sequence[str] | Mapping[str, str],
        Kind("names of columns", _file_columns, is_list=True),
        Common(
            "Column of file paths and its type: nifti, image, audio, video, pdf, mesh or file. NAME=COLUMN renames it. "
            "For a folder, the name of the file column.",
            "COLUMN[:TYPE]",
            default="guessed",
            python="Or a dict of columns and types.",
        ),
    ] = ()
    label_from: Annotated[
        str | None,
        Common("Add a class label: parent (the name of the parent folder), or a column of the table.", "parent|COLUMN"),
    ] = None
    root: Annotated[
        Path | None,
        Option("Folder where relative paths of a table start.", "DIR", default="the folder of the table"),
    ] = None
    drop: Annotated[Names, Option("Leave out this column of a table.", "COLUMN")] = ()
    split_by: Annotated[str | None, Option("Column of a table that names the split of each row.", "COLUMN")] = None


@dataclass(frozen=True, kw_only=True)
class FileSourceOptions(FromOptions, PathOptions, SplitNameOptions, FileColumnOptions):
    """How a folder or a table is read."""


@dataclass(frozen=True, kw_only=True)
class BidsOptions(Options, panel=BIDS):
    """How a BIDS dataset is read."""

    rows: Annotated[
        Literal["session", "subject", "file"], Option("Contents of a row: a session, a subject or a file.")
    ] = "session"
    subjects: Annotated[Names, Option("Read only these subjects.", "SUB")] = ()
    sessions: Annotated[Names, Option("Read only these sessions.", "SES")] = ()
    suffixes: Annotated[Names, Option("Read only files with these suffixes, such as T1w.", "SUFFIX")] = ()
    sidecars: Annotated[
        Literal["safe", "full", "none"],
        Option("Which fields of JSON sidecars, events and gradients to store; safe leaves out identifying fields."),
    ] = "safe"
    derivatives: Annotated[Names, Option("Read derivatives/NAME too.", "NAME|all")] = ()
    phenotype: Annotated[bool, Option("Join the tables of phenotype/ to the rows.")] = False
    bidsignore: Annotated[bool, Option("Leave out files that .bidsignore lists.")] = True

    def wants_subject(self, folder: str) -> bool:
        return _matches(folder, self.subjects, "sub-")

    def wants_session(self, folder: str | None) -> bool:
        return not self.sessions or (folder is not None and _matches(folder, self.sessions, "ses-"))

    def wants_suffix(self, suffix: str) -> bool:
        """Whether to read files with this suffix. Photos of people and head shapes are read only if named."""
        if self.suffixes:
            return suffix.lower() in {name.lower() for name in self.suffixes}
        return suffix not in PRIVATE_SUFFIXES


PRIVATE_SUFFIXES = frozenset(["photo", "headshape"])


def _matches(folder: str, names: Names, prefix: str) -> bool:
    return not names or folder in {name if name.startswith(prefix) else prefix + name for name in names}


def _shard_counts(value: Any) -> Any:
    for count in value.values() if isinstance(value, Mapping) else [value]:
        if isinstance(count, bool) or operator.index(count) < 1:
            raise ValueError(count)
    return value


@dataclass(frozen=True, kw_only=True)
class ShardOptions(Options, panel="Output"):
    """How rows become shards: by size, number or rows; --shard-by can be combined with size or number."""

    format: Annotated[Literal["parquet", "webdataset"], Common("Shard format.")] = "parquet"
    shard_size: Annotated[Size, Common("Maximum size of a shard.", default="500MB")] = None
    num_shards: Annotated[
        int | Mapping[str, int] | None,
        Kind("a number above zero", _shard_counts, "N", parse_count),
        Option("Number of shards per split.", python="Or a dict of splits and numbers."),
    ] = None
    rows_per_shard: Annotated[int | None, Option("Number of rows per shard.", minimum=1)] = None
    shard_by: Annotated[str | None, Option("Write one shard for each value of this column.", "COLUMN")] = None

    def check_options(self) -> None:
        if sum(value is not None for value in (self.shard_size, self.num_shards, self.rows_per_shard)) > 1:
            raise InputError(
                "--shard-size, --num-shards and --rows-per-shard exclude each other.", hint="Leave out all but one."
            )
        if self.shard_by is not None and self.rows_per_shard is not None:
            raise InputError(
                "--shard-by cannot be used with --rows-per-shard: all rows of a value go to one shard.",
                hint="Leave out one of them.",
            )

    @property
    def shard_bytes(self) -> int | None:
        return None if self.shard_size is None else parse_size(self.shard_size)

    def shard_count(self, split: str) -> int | None:
        """Return the number of shards asked for in a split."""
        return self.num_shards.get(split) if isinstance(self.num_shards, Mapping) else self.num_shards

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings about small shards. A size without a unit is in bytes, but the user often meant megabytes."""
        size = self.shard_bytes
        if size is None or size >= SMALL_SHARD_BYTES:
            return ()
        text = f"--shard-size={self.shard_size} is {plural(size, 'byte')}."
        if size <= 10_000 and str(self.shard_size).isdigit():
            return (f"{text} Did you mean {size}MB?",)
        return (f"{text} Shards below {format_size(SMALL_SHARD_BYTES)} are slow to read.",)

    def fingerprint_inputs(self) -> dict[str, Any]:
        """Return the shard options under the keys that ledgers and plans use."""
        count = dict(self.num_shards) if isinstance(self.num_shards, Mapping) else self.num_shards
        values: dict[str, Any] = {"shard_bytes": self.shard_bytes, "num_shards": count}
        values |= {"rows_per_shard": self.rows_per_shard, "shard_by": self.shard_by}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ShardOptions":
        """Make the options of `fingerprint_inputs` again."""
        values = dict(record)
        return cls(shard_size=values.pop("shard_bytes", None), **values)


@dataclass(frozen=True, kw_only=True)
class WriteOptions(Options, panel="Run"):
    """What to do with a dataset that exists at DEST."""

    update: Annotated[bool, Common("Update DEST to the source; unchanged shards are kept.")] = False
    append: Annotated[bool, Common("Append rows that DEST does not contain yet.")] = False
    allow_duplicate_paths: Annotated[
        bool, Option("With --append: also append files whose path exists at DEST with other content.")
    ] = False

    def check_options(self) -> None:
        if self.allow_duplicate_paths and not self.append:
            raise InputError("--allow-duplicate-paths can only be used with --append.", hint="Add --append.")
        choose_one(self, "update", "append")


@dataclass(frozen=True, kw_only=True)
class InputOptions(FromOptions, FilterOptions, panel="Source"):
    """How rows are read."""

    input_format: Annotated[
        Literal["jsonl", "csv", "tsv", "parquet", "arrow", "text"] | None,
        Option("Format of the input.", default="by the names of the files"),
    ] = None
    text: Annotated[
        Literal["lines", "document"], Option("Contents of a row of a text file: a line, or the complete file.")
    ] = "lines"
    delimiter: Annotated[str | None, Option("Delimiter of a CSV file.", "C")] = None
    limit: Annotated[int | None, Common("Read only the first rows, for a trial.", "ROWS", minimum=1)] = None
    unit_size: Annotated[Size, Option("Input per unit of work.", default="1/64 of the input, from 8 to 128 MiB")] = None

    def check_options(self) -> None:
        if self.delimiter is not None and (len(self.delimiter.encode()) != 1 or self.delimiter in '"\r\n'):
            raise InputError(
                f"--delimiter must be one character, not {self.delimiter!r}.", hint="Write it like --delimiter=';'."
            )
        if len(set(self.columns)) < len(self.columns):
            raise InputError("--columns names a column twice.", hint="Leave it out once.")

    @property
    def unit_bytes(self) -> int | None:
        return None if self.unit_size is None else parse_size(self.unit_size)


@dataclass(frozen=True, kw_only=True)
class ErrorOptions(Options, panel="Run"):
    """What happens to rows that fail, and to finished units of a function that changed."""

    on_error: Annotated[
        Literal["stop", "skip", "quarantine"],
        Common(
            "What to do with rows that fail or cannot be read: stop, leave them out, or write them to "
            "quarantine.parquet."
        ),
    ] = "stop"
    keep_done: Annotated[bool, Option("Keep finished units although the function has changed since.")] = False


@dataclass(frozen=True, kw_only=True)
class ComputedJobOptions(ErrorOptions, InputOptions, JobOptions):
    """What map, tokenize and embed share."""


# Only on the command line: a command inherits these, the Python function does not have them.


@dataclass(frozen=True, kw_only=True)
class JsonOptions(Options, panel="Run"):
    """How results are printed."""

    json: Annotated[bool, Common("Print only JSON, one object per line, on stdout.")] = False


@dataclass(frozen=True, kw_only=True)
class QuietOptions(JsonOptions, panel="Run"):
    """What a running command prints."""

    quiet: Annotated[bool, Common("Print only errors.", flags=("--quiet", "-q"))] = False


@dataclass(frozen=True, kw_only=True)
class LiveOptions(Options, panel=LIVE):
    """A page about a run while it is running."""

    live: Annotated[bool, Option("Serve a page about the run on this machine, and print its address.")] = False
    live_port: Annotated[
        int | None, Option("Port of the page; implies --live.", "N", default="any", minimum=1, maximum=65535)
    ] = None
    open_page: Annotated[bool, Option("Open the page in a browser; implies --live.", flags=("--open",))] = False

    @property
    def port(self) -> int | None:
        """Return the port of the live page (0: any), or None if no page was asked for."""
        is_live = self.live or self.open_page or self.live_port is not None
        return (self.live_port or 0) if is_live else None


@dataclass(frozen=True, kw_only=True)
class ShowOptions(LiveOptions, QuietOptions):
    """How a running command shows itself."""


@dataclass(frozen=True, kw_only=True)
class SavedPlanOptions(ShowOptions, ReportOptions, RunOptions, panel=PARTS):
    """The options that can be used with a saved plan, which defines all other options."""

    plan: Annotated[Path, Option("Saved plan, in place of SOURCE and DEST.", "PLAN")]
    part: Annotated[str | None, Option("With --plan: process only part I of N.", "I/N")] = None
    finish: Annotated[bool, Option("With --plan: publish what all parts have written.")] = False
    endpoint_url: Annotated[str | None, Option("Address of the object store of PLAN.", "URL")] = None

    def check_options(self) -> None:
        if self.part is not None and self.finish:
            raise InputError(
                "--part (process a part) cannot be used with --finish (publish).", hint="Leave out one of them."
            )
