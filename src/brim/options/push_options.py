"""The options of push_to_hub: the arguments of `Dataset.push_to_hub` in the same order, and those of brim."""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from brim.options.declare import Option, Options, Path, Size
from brim.records import dataclass
from brim.state.stop import Stop

_AS_IN_DATASETS = Option("", cli=False)


@dataclass(frozen=True, kw_only=True)
class PushToHubOptions(Options):
    """The options of `brim.push_to_hub`. An argument without a help text has the same meaning as in `datasets`."""

    dataset: Annotated[Any, Option("A Dataset, IterableDataset, DatasetDict or IterableDatasetDict.")] = field(
        kw_only=False
    )
    repo_id: Annotated[str, Option("ORG/NAME, or hf://datasets/ORG/NAME.")] = field(kw_only=False)
    config_name: Annotated[str, _AS_IN_DATASETS] = field(default="default", kw_only=False)
    set_default: Annotated[bool | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    split: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    data_dir: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    commit_message: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    commit_description: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    private: Annotated[bool | None, Option("False: create a new repository as public.", default="private")] = field(
        default=None, kw_only=False
    )
    token: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False, repr=False)
    revision: Annotated[str | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    create_pr: Annotated[bool | None, _AS_IN_DATASETS] = field(default=False, kw_only=False)
    max_shard_size: Annotated[Size, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    num_shards: Annotated[int | Mapping[str, int] | None, _AS_IN_DATASETS] = field(default=None, kw_only=False)
    embed_external_files: Annotated[bool, _AS_IN_DATASETS] = field(default=True, kw_only=False)
    num_proc: Annotated[int | None, Option("Number of shards that are sent at a time.")] = field(
        default=None, kw_only=False
    )
    append: Annotated[bool, Option("Append the rows to the split that exists.")] = False
    memory: Annotated[Size, Option("Memory limit.", default="half of the available memory")] = None
    upload_with: Annotated[
        Literal["auto", "lfs", "xet"],
        Option("Upload protocol: lfs needs the least memory, xet sends only new chunks.", old=("via",)),
    ] = "auto"
    state_dir: Annotated[
        Path | None, Option("Folder of the ledger.", default="the user's state folder", old=("state",))
    ] = None
    stop: Annotated[Stop | None, Option("A `brim.Stop`, by which another thread can stop the run.")] = None
    progress: Annotated[Any, Option("True or False to show progress or nothing.")] = None
