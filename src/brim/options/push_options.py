"""The options of push_to_hub: the arguments of `Dataset.push_to_hub` in the same order, and those of brim."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from brim.options.declare import Option, Options, PythonOnly, Size
from brim.options.groups import ProgressOptions, StateOptions
from brim.records import dataclass
from brim.state.stop import Stop

_AS_IN_DATASETS = PythonOnly("")


@dataclass(frozen=True)
class DatasetsPushOptions(Options):
    """The arguments of `Dataset.push_to_hub`. One without a help text has the same meaning as in `datasets`."""

    dataset: Annotated[Any, Option("A Dataset, IterableDataset, DatasetDict or IterableDatasetDict.")]
    repo_id: Annotated[str, Option("ORG/NAME, or hf://datasets/ORG/NAME.")]
    config_name: Annotated[str, _AS_IN_DATASETS] = "default"
    set_default: Annotated[bool | None, _AS_IN_DATASETS] = None
    split: Annotated[str | None, _AS_IN_DATASETS] = None
    data_dir: Annotated[str | None, _AS_IN_DATASETS] = None
    commit_message: Annotated[str | None, _AS_IN_DATASETS] = None
    commit_description: Annotated[str | None, _AS_IN_DATASETS] = None
    private: Annotated[bool | None, Option("False: create a new repository as public.", default="private")] = None
    token: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, repr=False)
    revision: Annotated[str | None, _AS_IN_DATASETS] = None
    create_pr: Annotated[bool | None, _AS_IN_DATASETS] = False
    max_shard_size: Annotated[Size, _AS_IN_DATASETS] = None
    num_shards: Annotated[int | Mapping[str, int] | None, _AS_IN_DATASETS] = None
    embed_external_files: Annotated[bool, _AS_IN_DATASETS] = True
    num_proc: Annotated[int | None, Option("Number of shards that are sent at a time.")] = None


@dataclass(frozen=True, kw_only=True)
class PushToHubOptions(DatasetsPushOptions, ProgressOptions, StateOptions):
    """The options of `brim.push_to_hub`."""

    append: Annotated[bool, Option("Append the rows to the split that exists.")] = False
    memory: Annotated[Size, Option("Memory limit.", default="half of the available memory")] = None
    upload_with: Annotated[
        Literal["auto", "lfs", "xet"],
        Option("Upload protocol: lfs needs the least memory, xet sends only new chunks.", old="via"),
    ] = "auto"
    stop: Annotated[Stop | None, Option("A `brim.Stop`, by which another thread can stop the run.")] = None
