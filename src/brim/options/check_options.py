"""The options of verify, unpack, check and info."""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from brim.options.build_options import ReadFilesOptions
from brim.options.declare import Kind, Option, Path
from brim.options.groups import (
    DATASET,
    SOURCE,
    CheckFileOptions,
    FilterOptions,
    FromOptions,
    ProgressOptions,
    ReadStorageOptions,
    StateOptions,
    StorageOptions,
)
from brim.records import dataclass


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(FromOptions, StateOptions, StorageOptions, ProgressOptions):
    """The options of `brim.verify`."""

    destination: Annotated[Path, Option(DATASET, "DATASET", argument=True)] = field(kw_only=False)
    source: Annotated[Any, Option("What the dataset was built from, to compare it with.", "SOURCE", argument=True)] = (
        field(default=None, kw_only=False)
    )
    deep: Annotated[bool, Option("Read every byte back, also from the Hub or an object store.", common=True)] = False
    repair: Annotated[bool, Option("Write damaged shards of a local dataset again from SOURCE.", common=True)] = False
    root: Annotated[
        Path | None,
        Option("Folder where relative paths of a table start.", "DIR", default="the folder of the table", common=True),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(FilterOptions, FromOptions, StateOptions, ReadStorageOptions, ProgressOptions):
    """The options of `brim.unpack`."""

    destination: Annotated[Any, Option(DATASET, "DATASET", argument=True)] = field(kw_only=False)
    out: Annotated[Path, Option("Folder that the files are written to.", "FOLDER", argument=True)] = field(
        kw_only=False
    )


def _bytes_or_none(value: Any) -> Any:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise TypeError(value)
    return value


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ReadFilesOptions, CheckFileOptions, FilterOptions, StateOptions, StorageOptions, ProgressOptions):
    """The options of `brim.check`."""

    source: Annotated[Any, Option(SOURCE, "SOURCE|DATASET", argument=True)] = field(kw_only=False)
    sample_size: Annotated[
        int, Option("Number of files per column whose headers are read.", minimum=0, common=True)
    ] = 10
    everything: Annotated[
        bool,
        Option("Read every header, and every gzip stream to its end.", flags=("--all", "--deep"), common=True),
    ] = False
    deep: Annotated[bool, Option("The same as everything.", cli=False)] = False
    max_cell_bytes: Annotated[
        int | None,
        Kind("a number of bytes, or None", _bytes_or_none),
        Option("Largest file that fits the format; None if it has no limit.", cli=False),
    ] = 2_147_483_630  # MAX_CELL_BYTES of formats/parquet_writer.py, which needs numpy
    tolerance: Annotated[
        float | None,
        Option(
            "How far counts may be from what the recipe expects, such as 0.1.",
            "SHARE",
            default="that of the recipe, or 0.1",
            minimum=0,
            maximum=1,
        ),
    ] = None
    bids_validator: Annotated[
        bool, Option("Run the official BIDS validator too (bids-validator-deno).", common=True)
    ] = False
    extra: Annotated[Sequence[Any], Option("Checks (`brim.Check`) to add to the report.", cli=False)] = ()


@dataclass(frozen=True, kw_only=True)
class InfoOptions(FromOptions, StateOptions, ReadStorageOptions):
    """The options of `brim.info`."""

    dataset: Annotated[Path, Option(DATASET, "DATASET", argument=True)] = field(kw_only=False)
    head: Annotated[int, Option("Show the first rows too.", minimum=0, common=True)] = 0
