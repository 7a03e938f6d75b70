"""What a user chooses about an embedding job."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal, get_args

from brim.buckets.bucket_address import Access
from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.records import dataclass

Device = str  # auto, cpu, cuda, cuda:1, mps
Dtype = Literal["auto", "float32", "float16", "bfloat16"]
Pooling = Literal["mean", "cls", "last"]
Policy = Literal["error", "keep"]

TEXT_WINDOW = 32
IMAGE_WINDOW = 4


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded and asked. `arguments` are handed to a factory as they are."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    pooling: Pooling | None = None
    projection: bool = True
    max_tokens: int | None = None
    prompt: str | None = None
    revision: str | None = None
    threads: int | None = None
    arguments: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, get_args(Dtype))
        one_of("pooling", self.pooling, (None, *get_args(Pooling)))
        kind, colon, number = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda", "mps") or (colon and not (kind == "cuda" and number.isdigit())):
            raise InputError(f"--device takes auto, cpu, cuda, cuda:1 or mps, not {self.device!r}.")
        at_least("max-tokens", self.max_tokens, 1)
        at_least("threads", self.threads, 1)

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the vectors. The device does not count: a job may go on where there is a better one."""
        return {
            "dtype": self.dtype,
            "pooling": self.pooling,
            "projection": self.projection,
            "max tokens": self.max_tokens,
            "prompt": self.prompt,
            "revision": self.revision,
            "arguments": [[name, value] for name, value in self.arguments],
        }


@dataclass(frozen=True, slots=True)
class EmbedOptions:
    """What is embedded and how rows become batches.

    A window is the rows that are looked at together: `window` batches, sorted by the length of their texts, so that
    little of a batch is padding. Nothing is sorted where there are images; a window of them is small, since it is
    held in memory. `image_root` is where relative paths of images begin: a folder, or a place in a bucket that is
    reached as `image_access` says. `keep_bfloat16` gives such vectors as their
    bits in uint16, for a file that has the type; otherwise they become float32, which changes no value.
    `names` are other names for the vectors than `text`, `vision` and `embedding`.
    """

    model: str
    column: str | None = None
    image: str | None = None
    keep: tuple[str, ...] = ()
    batch_size: int = 32
    window: int | None = None
    normalize: bool = False
    nan: Policy = "error"
    empty: Policy = "error"
    keep_bfloat16: bool = False
    image_root: str | None = None
    image_access: Access = field(default_factory=Access)
    names: tuple[tuple[str, str], ...] = ()
    loading: ModelOptions = field(default_factory=ModelOptions)

    def __post_init__(self) -> None:
        if self.column is None and self.image is None:
            raise InputError("There is nothing to embed.", hint="Name a column: --column=caption, --image=image.")
        at_least("batch-size", self.batch_size, 1)
        at_least("window", self.window, 1)
        one_of("nan", self.nan, get_args(Policy))
        one_of("empty", self.empty, get_args(Policy))
        if twice := {name for name in self.keep if self.keep.count(name) > 1}:
            raise InputError(f"The column {min(twice)!r} is kept twice.")

    @property
    def batches(self) -> int:
        """How many of them are a window."""
        return self.window or (TEXT_WINDOW if self.image is None else IMAGE_WINDOW)

    @property
    def window_rows(self) -> int:
        return self.batch_size * self.batches

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "text column": self.column,
            "image column": self.image,
            "kept columns": list(self.keep),
            "batch size": self.batch_size,
            "batches in a window": self.batches,
            "normalize": self.normalize,
            "nan": self.nan,
            "empty": self.empty,
            "bfloat16 as bits": self.keep_bfloat16,
            "names": [list(pair) for pair in self.names],
            **self.loading.facts,
        }
