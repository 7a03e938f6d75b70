"""The options of map, filter, tokenize, embed, save_job and open_job.

`brim.map` and `brim.filter` take the arguments of `Dataset.map` and `Dataset.filter` by position, in the same order.
Positional fields are ordered by the base classes from right to left, so these arguments are divided into groups where
the two functions differ. Arguments that mean the same as in `datasets` are not explained in the docstrings of Python.
"""

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Annotated, Any, Literal

from brim.errors import InputError
from brim.options.declare import (
    CHAT,
    PARTS,
    Argument,
    Common,
    Kind,
    Names,
    Option,
    Options,
    Path,
    PythonOnly,
    check_type,
    choose_one,
    parse_pairs,
    text_tuple,
)
from brim.options.groups import (
    DESTINATION,
    ROWS,
    ComputedJobOptions,
    ProgressOptions,
    ReportOptions,
    parse_shares,
)
from brim.records import dataclass

SUFFIX = "_{rank:05d}_of_{num_proc:05d}"
_MATCH = "Name by which the rows of an iterator are found in the cache, together with the code of the iterator."
_ROWS_PER_SHARD = "Number of rows per shard."
_KEEP = "Column to keep next to the {}."
AS_IN_DATASETS = PythonOnly("")


def _mapping(value: Any) -> Any:
    return check_type(value, Mapping)


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
Columns = Annotated[str | Sequence[str] | None, Kind("one or more texts", text_tuple)]


# The arguments of Dataset.map and Dataset.filter.


@dataclass(frozen=True)
class FunctionOptions(Options, panel="Function"):
    """How the function is called."""

    with_indices: Annotated[bool, Option("Pass the row numbers to the function.", python=None)] = False
    with_rank: Annotated[bool, AS_IN_DATASETS] = False
    input_columns: Annotated[
        Columns, Option("Pass this column to the function by position.", "COLUMN", from_texts=tuple, python=None)
    ] = None
    batched: Annotated[bool, Common("Call the function with batches of rows.", python=None)] = False
    batch_size: Annotated[int | None, Option("Number of rows per batch.", "ROWS", python=None)] = 1000
    input: Annotated[
        Literal["python", "arrow", "numpy"],
        Option("Type of a row or batch: a dict, a pyarrow.Table (not copied), or a dict of NumPy arrays."),
    ] = field(default="python", kw_only=True)


@dataclass(frozen=True)
class ColumnOptions(Options, panel="Function"):
    """The arguments of `map` that `filter` does not have, before the cache arguments."""

    drop_last_batch: Annotated[bool, AS_IN_DATASETS] = False
    remove_columns: Annotated[
        Columns, Common("Leave this column out of the output.", "COLUMN", from_texts=tuple, python=None)
    ] = None


@dataclass(frozen=True)
class CacheFileOptions(Options):
    """Where `datasets` keeps results. Only `load_from_cache_file` and `writer_batch_size` have an effect here."""

    keep_in_memory: Annotated[bool, AS_IN_DATASETS] = False
    load_from_cache_file: Annotated[bool | None, AS_IN_DATASETS] = None
    cache_file_name: Annotated[str | None, AS_IN_DATASETS] = None
    writer_batch_size: Annotated[int | None, PythonOnly("", minimum=0)] = 1000


@dataclass(frozen=True)
class FeatureOptions(Options):
    """The arguments of `map` that `filter` does not have, before `fn_kwargs`."""

    features: Annotated[Any, AS_IN_DATASETS] = None
    disable_nullable: Annotated[bool, AS_IN_DATASETS] = False


@dataclass(frozen=True)
class CallOptions(Options):
    """The last arguments that `map` and `filter` share."""

    fn_kwargs: Annotated[dict[str, Any] | None, Kind("a dict", _mapping), AS_IN_DATASETS] = None
    num_proc: Annotated[int | None, PythonOnly("The same as workers.")] = None
    suffix_template: Annotated[str, AS_IN_DATASETS] = SUFFIX
    new_fingerprint: Annotated[str | None, AS_IN_DATASETS] = None
    desc: Annotated[str | None, AS_IN_DATASETS] = None


@dataclass(frozen=True)
class TypeOptions(Options):
    """The last arguments of `map`."""

    try_original_type: Annotated[bool | None, AS_IN_DATASETS] = True
    on_mixed_types: Annotated[Literal["use_json"] | None, AS_IN_DATASETS] = "use_json"


@dataclass(frozen=True, kw_only=True)
class FilterFunctionOptions(CallOptions, CacheFileOptions, FunctionOptions):
    """The arguments of `Dataset.filter` after the function."""


@dataclass(frozen=True, kw_only=True)
class MapFunctionOptions(
    TypeOptions, CallOptions, FeatureOptions, CacheFileOptions, ColumnOptions, FunctionOptions, panel="Function"
):
    """The arguments of `Dataset.map` after the function."""

    splittable: Annotated[
        bool | None,
        Option(
            "Parts of a batch have the same result as the batch: split batches if memory is short or rows fail.",
            flags=("--splittable",),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RowOutputOptions(Options, panel="Output"):
    """How rows are written."""

    format: Annotated[Literal["parquet", "arrow"], Option("Shard format.")] = "parquet"
    rows_per_shard: Annotated[int | None, Option(_ROWS_PER_SHARD, default="one shard per unit", minimum=1)] = None
    split: Annotated[str, Option("Name of the output split.", "NAME")] = "train"


@dataclass(frozen=True, kw_only=True)
class CacheOptions(ReportOptions, ProgressOptions, panel="Run"):
    """What a call from Python has in addition."""

    cache_dir: Annotated[
        Path | None, PythonOnly("Without a destination: folder of the cache.", default="BRIM_CACHE")
    ] = None


@dataclass(frozen=True, kw_only=True)
class NamedRowsOptions(CacheOptions, panel="Source"):
    """How rows that have no name of their own are found in the cache."""

    name: Annotated[str | None, PythonOnly(_MATCH)] = None
    cache_file_names: Annotated[Mapping[str, str | None] | None, AS_IN_DATASETS] = None


@dataclass(frozen=True)
class RowFunctionOptions(Options, panel="Function"):
    """The first two arguments of `map` and `filter`."""

    dataset: Annotated[
        Any,
        Argument(
            ROWS,
            "SOURCE",
            python="Or a Dataset, a DatasetDict, a table of pandas, Polars or Arrow, a list of rows, or a function "
            "that yields rows.",
        ),
    ]
    function: Annotated[
        Callable[..., Any] | str | None,
        Common(
            "Function to apply; also FILE.py:FUNCTION. Without it, the rows are written as they are.",
            "MODULE:FUNCTION",
            flags=("--fn",),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class MapJobOptions(RowOutputOptions, ComputedJobOptions):
    """What `map` and `filter` share with tokenize and embed, and how rows are written."""


@dataclass(frozen=True, kw_only=True)
class MapOptions(MapFunctionOptions, RowFunctionOptions, MapJobOptions, NamedRowsOptions):
    """The options of `brim.map`, without a destination."""

    with_split: Annotated[bool, PythonOnly("For a DatasetDict: pass the name of the split to the function.")] = False


@dataclass(frozen=True, kw_only=True)
class MapToCacheOptions(MapOptions):
    """The options of `brim.map` that returns a dataset."""

    destination: Annotated[None, Option(DESTINATION, "DEST")] = None


@dataclass(frozen=True, kw_only=True)
class MapToDestinationOptions(MapOptions):
    """The options of `brim.map` with a destination, and of `brim map`."""

    destination: Annotated[Path, Argument(DESTINATION, "DEST")]


@dataclass(frozen=True, kw_only=True)
class FilterRowsOptions(FilterFunctionOptions, RowFunctionOptions, MapJobOptions, NamedRowsOptions):
    """The options of `brim.filter`."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options, panel="Tokens"):
    """How texts become tokens."""

    column: Annotated[str, Common("Column of text.", "NAME")] = "text"
    keep_columns: Annotated[Names, Common(_KEEP.format("ids"), "COLUMN", old="keep")] = ()
    eos: Annotated[
        str | None,
        Option("Append this token to every document.", "TOKEN", default="none; with --pack the tokenizer's eos_token"),
    ] = None
    max_length: Annotated[int | None, Option("Truncate documents to N tokens, special tokens included.", minimum=1)] = (
        None
    )
    long_documents: Annotated[
        Literal["cut", "refuse"], Option("Encode texts longer than --long-chars in parts, or refuse them.")
    ] = "cut"
    long_chars: Annotated[int, Option("Number of characters from which a text is long.", minimum=1000)] = 65_536


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(Options, panel="Tokens"):
    """Other options that affect the tokens of a document."""

    no_eos: Annotated[bool, Option("Pack documents without a token at their end.")] = False
    special_tokens: Annotated[
        bool | None, Option("Add the tokenizer's special tokens to every document.", default="yes; no with --pack")
    ] = None
    encoder: Annotated[
        Literal["auto", "reference", "fast"],
        Option("Encoder; all produce the same ids. auto: the fast one if it is installed, checked while it runs."),
    ] = "auto"


def _check_date(value: Any) -> str:
    return datetime.date.fromisoformat(check_type(value, str)).isoformat()


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options, panel=CHAT):
    """How conversations become tokens and labels."""

    chat: Annotated[bool, Common("Tokenize conversations, with labels.")] = False
    prompt: Annotated[str | None, Option("Column of prompts (text or messages), with --completion.", "NAME")] = None
    completion: Annotated[str | None, Option("Column of completions (text or messages).", "NAME")] = None
    train_on: Annotated[
        Literal["assistant", "last", "completion", "all"] | None,
        Option(
            "Tokens that get labels: all answers, the last answer, the completion, or everything.",
            default="assistant; completion with --prompt",
        ),
    ] = None
    overlong: Annotated[
        Literal["drop", "truncate", "error"], Option("What to do with rows longer than --max-length or --pack.")
    ] = "drop"
    chat_template: Annotated[
        Path | None, Option("Jinja template to use.", "FILE", default="the tokenizer's own template")
    ] = None
    template_arg: Annotated[
        Mapping[str, Any] | None,
        Kind("names and values", _mapping, "NAME=VALUE"),
        Option("Argument of the chat template, such as enable_thinking=false.", from_texts=_json_pairs),
    ] = None
    template_date: Annotated[
        str | None,
        Kind("a date such as 2026-01-31", _check_date, "DATE"),
        Option("Date for templates that ask for one.", default="2024-07-26"),
    ] = None
    role: Annotated[
        Mapping[str, str] | None,
        Kind("names and roles", _mapping, "NAME=ROLE"),
        Option("Role of the template for a role of the source, such as expert=assistant.", from_texts=parse_pairs),
    ] = None
    attention_mask: Annotated[bool, Option("Write the column attention_mask, too.")] = False
    position_ids: Annotated[bool, Option("With --pack: write the column position_ids, too.")] = False

    def check_options(self) -> None:
        if (self.prompt is None) != (self.completion is None):
            given, other = ("prompt", "completion") if self.completion is None else ("completion", "prompt")
            raise InputError(f"--{given} needs --{other}.", hint=f"Name the other column: --{other} NAME.")
        if not self.chat:
            for item in self.changed(ChatOptions):
                raise InputError(
                    f"{item.spelling} can only be used with --chat.", hint=f"Add --chat, or leave {item.spelling} out."
                )
        if self.train_on == "completion" and self.chat and self.prompt is None:
            raise InputError(
                "--train-on=completion can only be used with --prompt and --completion.",
                hint="Name both columns, or use --train-on=last.",
            )


@dataclass(frozen=True, kw_only=True)
class TokenFileOptions(Options, panel="Output"):
    """How tokens are packed, ordered and written."""

    pack: Annotated[int | None, Common("Write rows of exactly N tokens, across documents.", minimum=2)] = None
    pack_tail: Annotated[
        Literal["drop", "keep"], Option("What to do with tokens at the end that do not fill a row.")
    ] = "drop"
    format: Annotated[Literal["parquet", "arrow", "bin", "megatron"], Common("Output format.")] = "parquet"
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
        if self.rows_per_shard is not None and self.format in ("bin", "megatron"):
            files = "one file per split" if self.format == "bin" else "cut by its size"
            raise InputError(
                f"--rows-per-shard cannot be used with --format={self.format}, which is {files}.",
                hint="Leave --rows-per-shard out.",
            )
        if self.format == "megatron":
            if self.pack is not None:
                raise InputError(
                    "--pack cannot be used with --format=megatron: Megatron packs documents while it trains.",
                    hint="Leave --pack out.",
                )
            if self.dtype == "uint32":
                raise InputError(
                    "--dtype=uint32 cannot be used with --format=megatron, which has uint16 and int32.",
                    hint="Leave --dtype out.",
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
        Common(
            "Assign documents at random to splits, such as train=0.9,test=0.1; the seed is that of --shuffle, or 0.",
            "SHARES",
            python="Or a dict of splits and shares.",
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
        """The shares if they are written as in earlier versions, such as 0.99/0.01, which `split` accepted too."""
        shares = self.split if self.split_into is None else self.split_into
        return shares if isinstance(shares, str) and "/" in shares else None

    @property
    def deprecated_shares(self) -> tuple[str, str, str] | None:
        """The option, its value and the value to write instead; None unless shares are written like 0.99/0.01."""
        if self._slashed is None or (shares := self.shares) is None:
            return None
        total = sum(shares.values())
        new_text = ",".join(f"{name}={share / total:g}" for name, share in shares.items())
        return "split" if self.split_into is None else "split_into", self._slashed, new_text


@dataclass(frozen=True, kw_only=True)
class TokenizeJobOptions(
    TokenSplitOptions, TokenFileOptions, ChatOptions, EncoderOptions, TextOptions, ComputedJobOptions
):
    """What a plan of tokenize has in addition to its source, tokenizer and destination."""

    def check_options(self) -> None:
        if self.keep_columns and (self.pack is not None or self.format in ("bin", "megatron")):
            conflict = "--pack" if self.pack is not None else f"--format={self.format}"
            raise InputError(
                f"--keep-columns cannot be used with {conflict}: its rows are not documents.",
                hint="Leave out one of them.",
            )
        if self.no_eos and self.eos is not None:
            raise InputError("--eos cannot be used with --no-eos.", hint="Leave out one of them.")
        if self.chat:
            self._check_chat()

    def _check_chat(self) -> None:
        unused = [item for item in self.changed(EncoderOptions, TokenFileOptions) if item.name in _NOT_IN_CHATS]
        if unused or self.encoder == "fast" or self.eos is not None:
            spelling = unused[0].spelling if unused else "--eos" if self.eos is not None else "--encoder=fast"
            raise InputError(
                f"{spelling} cannot be used with --chat: the chat template decides what is around messages.",
                hint=f"Leave {spelling} out.",
            )
        if self.format in ("bin", "megatron"):
            raise InputError(
                f"--format={self.format} cannot be used with --chat: it has no labels.", hint="Use --format=parquet."
            )
        if self.position_ids and self.pack is None:
            raise InputError("--position-ids can only be used with --pack.", hint="Add --pack=N, or leave it out.")
        if self.pack is not None and self.max_length is not None and self.max_length > self.pack:
            raise InputError(
                f"--max-length={self.max_length} is more than --pack={self.pack}: no row holds such a conversation.",
                hint="Use a smaller --max-length, or leave it out.",
            )


_NOT_IN_CHATS = ("no_eos", "pack_tail")


@dataclass(frozen=True)
class TokenizerOptions(Options, panel="Tokens"):
    """The positional arguments of tokenize."""

    source: Annotated[Any, Argument(ROWS, "SOURCE", python="Or a Dataset, a table or a list of rows.")]
    tokenizer: Annotated[
        Any, Common("A tokenizer.json; or a folder or a name on the Hub, as AutoTokenizer loads it.", "FILE|NAME")
    ]


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(TokenizeJobOptions, CacheOptions, TokenizerOptions):
    """The options of `brim.tokenize`, without a destination."""

    name: Annotated[str | None, PythonOnly(_MATCH)] = None


@dataclass(frozen=True, kw_only=True)
class TokenizeToCacheOptions(TokenizeOptions):
    """The options of `brim.tokenize` that returns a dataset."""

    destination: Annotated[None, Option(DESTINATION, "DEST")] = None


@dataclass(frozen=True, kw_only=True)
class TokenizeToDestinationOptions(TokenizeOptions):
    """The options of `brim.tokenize` with a destination, and of `brim tokenize`."""

    destination: Annotated[Path, Argument(DESTINATION, "DEST")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options, panel="Model"):
    """How a model is loaded and called."""

    device: Annotated[str, Option("Device of the model; cuda:1 is the second GPU.", "auto|cpu|cuda|mps")] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"], Option("Type of the weights. auto: as they are stored.")
    ] = "auto"
    pooling: Annotated[Literal["mean", "cls", "last"] | None, Option("Pooling of a transformers model of text.")] = None
    projection: Annotated[bool, Option("Apply the projection of a CLIP model.")] = True
    max_tokens: Annotated[int | None, Option("Truncate texts to N tokens.", minimum=1)] = None
    prompt: Annotated[str | None, Option("Prompt to put before every text.")] = None
    revision: Annotated[str | None, Option("Revision of a model on the Hub.", "REV")] = None
    model_arg: Annotated[
        Mapping[str, Any] | None,
        Kind("names and values", _mapping, "NAME=VALUE"),
        Option("Argument for your own factory; the value may be JSON.", from_texts=_json_pairs, old="argument"),
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

    column: Annotated[str | None, Common("Column of texts.", "NAME")] = None
    image: Annotated[str | None, Common("Column of images.", "NAME")] = None
    keep_columns: Annotated[Names, Common(_KEEP.format("vectors"), "COLUMN", old="keep")] = ()
    batch_size: Annotated[int, Common("Number of rows per call of the model.", "ROWS", minimum=1)] = 32
    normalize: Annotated[bool, Common("Scale every vector to length 1.")] = False
    nan: Annotated[
        Literal["error", "keep"], Option("What to do with vectors that contain NaN: refuse or write them.")
    ] = "error"
    empty: Annotated[
        Literal["error", "keep"], Option("What to do with texts that are missing or empty: refuse or embed them.")
    ] = "error"
    name: Annotated[
        Mapping[str, str] | None,
        Kind("names and new names", _mapping, "OLD=NEW"),
        Option("Rename the vectors of a model.", from_texts=parse_pairs),
    ] = None

    def check_options(self) -> None:
        if self.column is None and self.image is None:
            raise InputError(
                "There is nothing to embed.", hint="Name a column of texts with --column, or of images with --image."
            )
        if twice := {name for name in self.keep_columns if self.keep_columns.count(name) > 1}:
            raise InputError(f"--keep-columns names the column {min(twice)!r} twice.", hint="Leave it out once.")


@dataclass(frozen=True, kw_only=True)
class EmbedJobOptions(VectorOptions, ModelOptions, ComputedJobOptions, panel="Output"):
    """What a plan of embed has in addition to its source, model and destination."""

    split: Annotated[str, Option("Name of the output split.", "NAME")] = "train"


@dataclass(frozen=True, kw_only=True)
class EmbedOptions(EmbedJobOptions, CacheOptions, panel="Model"):
    """The options of `brim.embed`, without a destination."""

    source: Annotated[
        Any, Argument(f"{ROWS} Or a folder of images.", "SOURCE", python="Or a Dataset, a table or a list of rows.")
    ] = field(kw_only=False)
    model: Annotated[
        str | os.PathLike[str] | Callable[..., Any],
        Common(
            "A model of sentence-transformers or transformers, or your own factory (also FILE.py:FACTORY).",
            "NAME|FOLDER|MODULE:FACTORY",
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

    destination: Annotated[Path, Argument(_VECTORS, "DEST")]


@dataclass(frozen=True, kw_only=True)
class SaveOptions(Options, panel=PARTS):
    """How a job is saved, on the command line."""

    save: Annotated[Path | None, Option("Compute nothing yet: save a plan, for --plan PLAN --part I/N.", "PLAN")] = None
