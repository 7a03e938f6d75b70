"""The options of map, filter, tokenize, embed, save_job and open_job.

`brim.map` and `brim.filter` take the arguments of `Dataset.map` and `Dataset.filter` by position, in the same order.
Positional fields are ordered by the base classes from right to left, so these arguments are divided into groups where
the two functions differ. An argument without a help text has the same meaning as in `datasets`.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from brim.errors import InputError
from brim.options.declare import Kind, Names, Option, Options, Path, choose_one, parse_pairs
from brim.options.groups import (
    DESTINATION,
    PARTS,
    ROWS,
    ComputedJobOptions,
    ProgressOptions,
    ReportOptions,
    RunOptions,
    parse_shares,
)
from brim.records import dataclass

SUFFIX = "_{rank:05d}_of_{num_proc:05d}"
_CACHE = "Without a destination: folder of the cache."
_MATCH = "Name by which the rows of an iterator are found in the cache again, together with the code that makes it."
_ROWS_PER_SHARD = "Number of rows per shard."
_KEEP = "Column to keep next to the {}. May be repeated."
AS_IN_DATASETS = Option("", cli=False)


def _columns(value: Any) -> tuple[str, ...] | None:
    names = None if value is None else (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(name, str) for name in names or ()):
        raise TypeError(value)
    return names


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return value


def _json_pairs(texts: list[str]) -> dict[str, Any]:
    """Parse NAME=VALUE texts; a value that is not JSON is a text."""
    values: dict[str, Any] = {}
    for name, text in parse_pairs(texts).items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


# None is not the same as no columns: without input_columns, the function takes the row.
Columns = Annotated[str | Sequence[str] | None, Kind("one or more texts", _columns)]


# The arguments of Dataset.map and Dataset.filter.


@dataclass(frozen=True)
class FunctionOptions(Options, panel="Function"):
    """How the function is called."""

    with_indices: Annotated[bool, Option("Pass the row numbers to the function.")] = False
    with_rank: Annotated[bool, Option("Pass the number of the worker, from 0, to the function.", cli=False)] = False
    input_columns: Annotated[
        Columns,
        Option("Pass this column to the function by position. May be repeated.", "COLUMN", from_texts=tuple),
    ] = None
    batched: Annotated[bool, Option("Call the function with batches of rows.", common=True)] = False
    batch_size: Annotated[int | None, Option("Number of rows per batch.", "ROWS")] = 1000


@dataclass(frozen=True)
class ColumnOptions(Options, panel="Function"):
    """What `map` has and `filter` has not, before the cache arguments."""

    drop_last_batch: Annotated[bool, AS_IN_DATASETS] = False
    remove_columns: Annotated[
        Columns,
        Option("Leave this column out of the output. May be repeated.", "COLUMN", common=True, from_texts=tuple),
    ] = None


@dataclass(frozen=True)
class CacheFileOptions(Options):
    """Where `datasets` keeps results. Only `load_from_cache_file` and `writer_batch_size` have an effect here."""

    keep_in_memory: Annotated[bool, AS_IN_DATASETS] = False
    load_from_cache_file: Annotated[
        bool | None, Option("False: compute the result again.", default="as `datasets` is configured", cli=False)
    ] = None
    cache_file_name: Annotated[str | None, AS_IN_DATASETS] = None
    writer_batch_size: Annotated[int | None, Option("", minimum=0, cli=False)] = 1000


@dataclass(frozen=True)
class FeatureOptions(Options):
    """What `map` has and `filter` has not, before `fn_kwargs`."""

    features: Annotated[Any, AS_IN_DATASETS] = None
    disable_nullable: Annotated[bool, AS_IN_DATASETS] = False


@dataclass(frozen=True)
class CallOptions(Options):
    """The last arguments that `map` and `filter` share."""

    fn_kwargs: Annotated[dict[str, Any] | None, Kind("a dict", _mapping), AS_IN_DATASETS] = None
    num_proc: Annotated[int | None, Option("Another name for workers.", cli=False)] = None
    suffix_template: Annotated[str, AS_IN_DATASETS] = SUFFIX
    new_fingerprint: Annotated[str | None, AS_IN_DATASETS] = None
    desc: Annotated[str | None, AS_IN_DATASETS] = None


@dataclass(frozen=True)
class TypeOptions(Options):
    """The last arguments of `map`."""

    try_original_type: Annotated[bool | None, AS_IN_DATASETS] = True
    on_mixed_types: Annotated[Literal["use_json"] | None, AS_IN_DATASETS] = "use_json"


@dataclass(frozen=True, kw_only=True)
class InputKindOptions(Options, panel="Function"):
    """What a row or batch looks like to the function."""

    input: Annotated[
        Literal["python", "arrow", "numpy"],
        Option("Type of a row or batch: a dict, a pyarrow.Table (not copied), or a dict of NumPy arrays."),
    ] = "python"


@dataclass(frozen=True, kw_only=True)
class FilterFunctionOptions(CallOptions, CacheFileOptions, FunctionOptions, InputKindOptions):
    """The arguments of `Dataset.filter` after the function."""


@dataclass(frozen=True, kw_only=True)
class MapFunctionOptions(
    TypeOptions,
    CallOptions,
    FeatureOptions,
    CacheFileOptions,
    ColumnOptions,
    FunctionOptions,
    InputKindOptions,
    panel="Function",
):
    """The arguments of `Dataset.map` after the function."""

    splittable: Annotated[
        bool | None,
        Option(
            "A batch in parts gives the same rows: split batches if memory is short or rows fail.",
            flags=("--splittable",),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RowOutputOptions(Options, panel="Output"):
    """How rows are written."""

    format: Annotated[Literal["parquet", "arrow"], Option("Shard format.")] = "parquet"
    rows_per_shard: Annotated[int | None, Option(_ROWS_PER_SHARD, default="one shard per unit", minimum=1)] = None
    split: Annotated[str, Option("Name of the split that the rows become.", "NAME")] = "train"


@dataclass(frozen=True, kw_only=True)
class CacheOptions(ReportOptions, ProgressOptions):
    """What a call from Python has besides."""

    cache_dir: Annotated[Path | None, Option(_CACHE, default="BRIM_CACHE", cli=False)] = None


@dataclass(frozen=True, kw_only=True)
class NamedRowsOptions(CacheOptions):
    """How rows that have no name of their own are found in the cache."""

    name: Annotated[str | None, Option(_MATCH, cli=False)] = None
    cache_file_names: Annotated[Mapping[str, str | None] | None, AS_IN_DATASETS] = None


@dataclass(frozen=True)
class RowFunctionOptions(Options, panel="Function"):
    """The first two arguments of `map` and `filter`."""

    dataset: Annotated[Any, Option(ROWS, "SOURCE", argument=True)]
    function: Annotated[
        Callable[..., Any] | str | None,
        Option(
            "The function, or FILE.py:FUNCTION. Without it, the rows are written as they are.",
            "MODULE:FUNCTION",
            flags=("--fn",),
            common=True,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MapJobOptions(ComputedJobOptions, RowOutputOptions):
    """What `map` and `filter` share with tokenize and embed, and how rows are written."""


@dataclass(frozen=True, kw_only=True)
class MapOptions(MapFunctionOptions, RowFunctionOptions, MapJobOptions, NamedRowsOptions):
    """The options of `brim.map`, without a destination."""

    with_split: Annotated[bool, Option("Of a DatasetDict: pass the name of the split to the function.", cli=False)] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class MapToCacheOptions(MapOptions):
    """The options of `brim.map` that returns a dataset."""

    destination: Annotated[None, Option(DESTINATION, "DEST")] = None


@dataclass(frozen=True, kw_only=True)
class MapToDestinationOptions(MapOptions):
    """The options of `brim.map` with a destination, and of `brim map`."""

    destination: Annotated[Path, Option(DESTINATION, "DEST", argument=True)]


@dataclass(frozen=True, kw_only=True)
class FilterRowsOptions(FilterFunctionOptions, RowFunctionOptions, MapJobOptions, NamedRowsOptions):
    """The options of `brim.filter`."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options, panel="Tokens"):
    """How texts become tokens."""

    column: Annotated[str, Option("Column of text.", "NAME", common=True)] = "text"
    keep_columns: Annotated[Names, Option(_KEEP.format("ids"), "COLUMN", common=True, old=("keep",))] = ()
    eos: Annotated[
        str | None,
        Option(
            "Append this token to every document.",
            "TOKEN",
            default="none; with --pack the tokenizer's eos_token",
            common=True,
        ),
    ] = None
    max_length: Annotated[int | None, Option("Truncate documents to N tokens, special tokens included.", minimum=1)] = (
        None
    )
    long_documents: Annotated[
        Literal["cut", "refuse"], Option("Encode texts longer than --long-chars in parts, or refuse them.")
    ] = "cut"
    long_chars: Annotated[int, Option("Number of characters of a long text.", minimum=1000)] = 65_536


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(Options, panel="Tokens"):
    """What else decides the tokens of a document."""

    no_eos: Annotated[bool, Option("Pack documents without a token at their end.")] = False
    special_tokens: Annotated[
        bool | None, Option("Add the tokenizer's special tokens to every document.", default="yes; no with --pack")
    ] = None
    encoder: Annotated[
        Literal["auto", "reference", "fast"],
        Option("Encoder; the ids are the same. auto: the fast one if it is installed, checked while it runs."),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class TokenFileOptions(Options, panel="Output"):
    """How tokens are packed, ordered and written."""

    pack: Annotated[int | None, Option("Write rows of exactly N tokens, across documents.", minimum=2, common=True)] = (
        None
    )
    pack_tail: Annotated[
        Literal["drop", "keep"], Option("What to do with tokens at the end that do not fill a row.")
    ] = "drop"
    format: Annotated[Literal["parquet", "arrow", "bin"], Option("Output format.", common=True)] = "parquet"
    dtype: Annotated[
        Literal["auto", "int32", "uint16", "uint32"],
        Option("Type of the ids. auto: int32; for bin the smallest type that fits."),
    ] = "auto"
    shuffle: Annotated[int | None, Option("Shuffle the documents with this seed, on disk (deterministic).", "SEED")] = (
        None
    )
    rows_per_shard: Annotated[int | None, Option(_ROWS_PER_SHARD, default="about 256 MB of ids", minimum=1)] = None

    def check_options(self) -> None:
        if self.pack is None and self.pack_tail != "drop":
            raise InputError(
                "--pack-tail can only be used with --pack.", hint="Add --pack=N, or leave --pack-tail out."
            )
        if self.rows_per_shard is not None and self.format == "bin":
            raise InputError(
                "--rows-per-shard cannot be used with --format=bin, which is one file per split.",
                hint="Leave --rows-per-shard out.",
            )

    @property
    def seed(self) -> int:
        """The seed of the order and of the splits."""
        return self.shuffle or 0


@dataclass(frozen=True, kw_only=True)
class TokenSplitOptions(Options, panel="Output"):
    """Which splits the documents go to."""

    split: Annotated[str | None, Option("Name of the output split.", "NAME", default="train")] = None
    split_into: Annotated[
        str | Mapping[str, float] | None,
        Option(
            "Assign documents to splits at random, such as train=0.9,test=0.1. The seed is that of --shuffle, or 0.",
            "SHARES",
            common=True,
        ),
    ] = None

    def check_options(self) -> None:
        choose_one(self, "split", "split_into")

    @property
    def shares(self) -> dict[str, float] | None:
        """The share of every split, by name; None if all documents go to one."""
        if (old := self._slashed) is None:
            return None if self.split_into is None else parse_shares(self.split_into)
        try:
            shares = [float(part) for part in old.split("/")]
        except ValueError:
            shares = []
        total, names = sum(shares), ("train", "validation", "test")
        right = len(shares) in (2, 3) and all(share > 0 for share in shares)
        if not right or not (abs(total - 1) < 1e-6 or abs(total - 100) < 1e-4):
            raise InputError(
                f"--split-into takes the shares of splits, which add up to 1, not {old!r}.",
                hint="Write them like train=0.9,test=0.1.",
            )
        return dict(zip(names, shares, strict=False))

    @property
    def _slashed(self) -> str | None:
        """Shares as earlier versions wrote them, such as 0.99/0.01; they had the name `split` too."""
        given = self.split if self.split_into is None else self.split_into
        return given if isinstance(given, str) and "/" in given else None

    @property
    def deprecated_shares(self) -> tuple[str, str, str] | None:
        """The option, its value and the one to write instead, if shares were written like 0.99/0.01."""
        if self._slashed is None or (shares := self.shares) is None:
            return None
        total = sum(shares.values())
        named = ",".join(f"{name}={share / total:g}" for name, share in shares.items())
        return "split" if self.split_into is None else "split_into", self._slashed, named


@dataclass(frozen=True, kw_only=True)
class TokenizeJobOptions(ComputedJobOptions, TextOptions, EncoderOptions, TokenFileOptions, TokenSplitOptions):
    """What a plan of tokenize has besides its source, tokenizer and destination."""

    def check_options(self) -> None:
        if self.keep_columns and (self.pack is not None or self.format == "bin"):
            other = "--pack" if self.pack is not None else "--format=bin"
            raise InputError(
                f"--keep-columns cannot be used with {other}: its rows are not documents.",
                hint="Leave out one of them.",
            )
        if self.no_eos and self.eos is not None:
            raise InputError("--eos cannot be used with --no-eos.", hint="Leave out one of them.")


@dataclass(frozen=True)
class TokenizerOptions(Options, panel="Tokens"):
    """The positional arguments of tokenize."""

    source: Annotated[Any, Option(ROWS, "SOURCE", argument=True)]
    tokenizer: Annotated[
        Any,
        Option(
            "A tokenizer.json; or a folder or a name on the Hub, as AutoTokenizer loads it.", "FILE|NAME", common=True
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(TokenizeJobOptions, CacheOptions, TokenizerOptions):
    """The options of `brim.tokenize`, without a destination."""

    name: Annotated[str | None, Option(_MATCH, cli=False)] = None


@dataclass(frozen=True, kw_only=True)
class TokenizeToCacheOptions(TokenizeOptions):
    """The options of `brim.tokenize` that returns a dataset."""

    destination: Annotated[None, Option(DESTINATION, "DEST")] = None


@dataclass(frozen=True, kw_only=True)
class TokenizeToDestinationOptions(TokenizeOptions):
    """The options of `brim.tokenize` with a destination, and of `brim tokenize`."""

    destination: Annotated[Path, Option(DESTINATION, "DEST", argument=True)]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options, panel="Model"):
    """How a model is loaded and called."""

    device: Annotated[str, Option("Device of the model; cuda:1 is the second GPU.", "auto|cpu|cuda|mps")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], Option("Type of the weights. auto: as they are stored.")
    ] = "auto"
    pooling: Annotated[Literal["mean", "cls", "last"] | None, Option("Pooling of a transformers model of text.")] = None
    projection: Annotated[bool, Option("CLIP: write the vectors before the projection.")] = True
    max_tokens: Annotated[int | None, Option("Truncate texts to N tokens.", minimum=1)] = None
    prompt: Annotated[str | None, Option("Put this before every text.")] = None
    revision: Annotated[str | None, Option("Revision of a model on the Hub.", "REV")] = None
    model_arg: Annotated[
        Mapping[str, Any] | None,
        Kind("names and values", _mapping, "NAME=VALUE"),
        Option(
            "Argument for your own factory; the value may be JSON. May be repeated.",
            from_texts=_json_pairs,
            old=("argument",),
        ),
    ] = None

    def check_options(self) -> None:
        kind, colon, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda", "mps") or (colon and not (kind == "cuda" and number.isdigit())):
            raise InputError(f"--device takes auto, cpu, cuda, cuda:1 or mps, not {self.device!r}.")

    def fingerprint_inputs(self) -> dict[str, Any]:
        """Return what decides the vectors. The device does not: a job may resume on another one."""
        return {
            "dtype": self.dtype,
            "pooling": self.pooling,
            "projection": self.projection,
            "max tokens": self.max_tokens,
            "prompt": self.prompt,
            "revision": self.revision,
            "arguments": [[name, value] for name, value in (self.model_arg or {}).items()],
        }


@dataclass(frozen=True, kw_only=True)
class VectorOptions(Options, panel="Vectors"):
    """The columns to embed, and how the vectors are written."""

    column: Annotated[str | None, Option("Column of texts.", "NAME", common=True)] = None
    image: Annotated[str | None, Option("Column of images.", "NAME", common=True)] = None
    keep_columns: Annotated[Names, Option(_KEEP.format("vectors"), "COLUMN", common=True, old=("keep",))] = ()
    batch_size: Annotated[int, Option("Number of rows per call of the model.", "ROWS", minimum=1, common=True)] = 32
    normalize: Annotated[bool, Option("Scale every vector to length 1.", common=True)] = False
    nan: Annotated[
        Literal["error", "keep"], Option("What to do with vectors that contain NaN: refuse or write them.")
    ] = "error"
    empty: Annotated[
        Literal["error", "keep"], Option("What to do with texts that are missing or empty: refuse or embed them.")
    ] = "error"
    name: Annotated[
        Mapping[str, str] | None,
        Kind("names and new names", _mapping, "OLD=NEW"),
        Option("Rename the vectors of a model. May be repeated.", from_texts=parse_pairs),
    ] = None

    def check_options(self) -> None:
        if self.column is None and self.image is None:
            raise InputError(
                "There is nothing to embed.", hint="Name a column of texts with --column, or of images with --image."
            )
        if twice := {name for name in self.keep_columns if self.keep_columns.count(name) > 1}:
            raise InputError(f"--keep-columns names the column {min(twice)!r} twice.")


@dataclass(frozen=True, kw_only=True)
class EmbedJobOptions(ComputedJobOptions, ModelOptions, VectorOptions, panel="Vectors"):
    """What a plan of embed has besides its source, model and destination."""

    split: Annotated[str, Option("Name of the split that the shards become.", "NAME")] = "train"


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbedJobOptions, CacheOptions, panel="Model"):
    """The options of `brim.embed`, without a destination."""

    source: Annotated[Any, Option(f"{ROWS} Or a folder of images.", "SOURCE", argument=True)] = field(kw_only=False)
    model: Annotated[
        str | os.PathLike[str] | Callable[..., Any],
        Option(
            "A model of sentence-transformers or transformers, or your own factory (also FILE.py:FACTORY).",
            "NAME|FOLDER|MODULE:FACTORY",
            common=True,
        ),
    ] = field(kw_only=False)


_VECTORS = "A file (.safetensors, .npy or .parquet); or for Parquet shards a folder, hf://datasets/ORG/NAME or s3://BUCKET/PREFIX."


@dataclass(frozen=True, kw_only=True)
class EmbedToCacheOptions(EmbedOptions):
    """The options of `brim.embed` that returns vectors."""

    destination: Annotated[None, Option(_VECTORS, "DEST")] = None


@dataclass(frozen=True, kw_only=True)
class EmbedToDestinationOptions(EmbedOptions):
    """The options of `brim.embed` with a destination, and of `brim embed`."""

    destination: Annotated[Path, Option(_VECTORS, "DEST", argument=True)]


@dataclass(frozen=True, kw_only=True)
class OpenJobOptions(RunOptions):
    """The options of `brim.open_job`."""

    path: Annotated[Path, Option("The saved plan.")] = field(kw_only=False)
    endpoint_url: Annotated[str | None, Option("Address of the object store of the plan.")] = None


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options, panel=PARTS):
    """How a job is saved, on the command line."""

    save: Annotated[Path | None, Option("Compute nothing yet: save a plan, for --plan PLAN --part I/N.", "PLAN")] = None
