"""The options of verify, unpack, check and info."""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any

from brim.options.build_options import ReadFilesOptions
from brim.options.declare import Argument, Common, Kind, Option, Path, PythonOnly, check_type
from brim.options.groups import (
    DATASET,
    OPENED_SOURCE,
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

    destination: Annotated[Path, Argument(DATASET, "DATASET")] = field(kw_only=False)
    source: Annotated[
        Any, Argument("Source of the build, to compare the dataset with.", "SOURCE", python=OPENED_SOURCE)
    ] = field(default=None, kw_only=False)
    deep: Annotated[bool, Common("Read every byte back, also from the Hub or an object store.")] = False
    repair: Annotated[bool, Common("Write damaged shards of a local dataset again from SOURCE.")] = False
    root: Annotated[
        Path | None,
        Common("Folder where relative paths of a table start.", "DIR", default="the folder of the table"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(FilterOptions, FromOptions, StateOptions, ReadStorageOptions, ProgressOptions):
    """The options of `brim.unpack`."""

    destination: Annotated[Any, Argument(DATASET, "DATASET", python="Or a selection.")] = field(kw_only=False)
    out: Annotated[Path, Argument("Folder to write the files to.", "FOLDER")] = field(kw_only=False)


def _bytes_or_none(value: Any) -> Any:
    if value is not None and check_type(value, int) < 1:
        raise ValueError(value)
    return value


@dataclass(frozen=True, kw_only=True)
class CheckOptions(ReadFilesOptions, CheckFileOptions, FilterOptions, StateOptions, StorageOptions, ProgressOptions):
    """The options of `brim.check`."""

    source: Annotated[Any, Argument(SOURCE, "SOURCE|DATASET", python=OPENED_SOURCE)] = field(kw_only=False)
    sample_size: Annotated[int, Common("Number of files per column whose headers are read.", minimum=0)] = 10
    everything: Annotated[
        bool, Common("Read every header, and every gzip stream to its end.", flags=("--all", "--deep"))
    ] = False
    deep: Annotated[bool, PythonOnly("The same as everything.")] = False
    max_cell_bytes: Annotated[
        int | None,
        Kind("a number of bytes, or None", _bytes_or_none),
        PythonOnly("Largest file that fits the format; None if it has no limit."),
    ] = 2_147_483_630  # MAX_CELL_BYTES of formats/parquet_writer.py, which needs numpy
    tolerance: Annotated[
        float | None,
        Option(
            "Largest accepted difference from the numbers that the recipe expects, as a share such as 0.1.",
            "SHARE",
            default="that of the recipe, or 0.1",
            minimum=0,
            maximum=1,
        ),
    ] = None
    bids_validator: Annotated[bool, Common("Run the official BIDS validator too (bids-validator-deno).")] = False
    extra: Annotated[Sequence[Any], PythonOnly("Checks (`brim.Check`) to add to the report.")] = ()


@dataclass(frozen=True, kw_only=True)
class InfoOptions(FromOptions, StateOptions, ReadStorageOptions):
    """The options of `brim.info`."""

    dataset: Annotated[Path, Argument(DATASET, "DATASET")] = field(kw_only=False)
    head: Annotated[int, Common("Number of first rows to show.", minimum=0)] = 0
