"""`brim.push_to_hub(ds, …)` for `ds.push_to_hub(…)`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim.dropin.progress import bar_or_notes
from brim.engine.build import Build, BuildOptions
from brim.engine.deliver import Built
from brim.errors import InputError, named
from brim.plans.checks import CheckOptions
from brim.plans.cut import CutOptions
from brim.progress import Progress
from brim.sinks.hub.address import SCHEME, Address, parse_address, repo_name_is_valid
from brim.sinks.hub.client import own_name
from brim.sinks.hub.options import HubOptions, Via
from brim.sizes import parse_size
from brim.sources.dataset import dataset_source

_NAMES = {
    "workers": "num-proc",
    "shard-size": "max-shard-size",
    "config": "config-name",
    "public": "private=False",
}


def push_to_hub(
    dataset: Any,
    repo_id: str,
    *,
    config_name: str = "default",
    set_default: bool | None = None,
    split: str | None = None,
    data_dir: str | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    create_pr: bool | None = False,
    max_shard_size: int | str | None = None,
    num_shards: int | Mapping[str, int] | None = None,
    embed_external_files: bool = True,
    num_proc: int | None = None,
    memory: str | int | float | None = None,
    via: Via = "auto",
    state: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Built:
    """Publish a dataset of `datasets` without holding it: the names and meanings of `Dataset.push_to_hub`.

    For a Dataset, IterableDataset, DatasetDict or IterableDatasetDict. Called again after a crash, it goes on
    where it was. Unlike the original, a new repository is private unless you say `private=False`; `num_proc` is
    how many shards are on their way at a time.
    """
    with named(_NAMES):
        options = BuildOptions(
            cut=CutOptions(None if max_shard_size is None else parse_size(max_shard_size), num_shards),
            checks=CheckOptions(allow_empty=True),
            memory=memory,
            workers=num_proc,
            update=True,
            state=None if state is None else os.fspath(state),
            hub=HubOptions(
                config=config_name,
                data_dir=data_dir,
                message=commit_message,
                description=commit_description,
                public=private is False,
                via=via,
                create_pull=bool(create_pr),
                replace=True,
                set_default=bool(set_default),
                token=token,
            ),
        )
        return _push(dataset, repo_id, revision, split, embed_external_files, options, progress or bar_or_notes())


def _push(
    dataset: Any,
    repo_id: str,
    revision: str | None,
    split: str | None,
    embed_external_files: bool,
    options: BuildOptions,
    progress: Progress,
) -> Built:
    destination = str(_address(repo_id, revision, options.hub.token))
    many = hasattr(dataset, "values") and hasattr(dataset, "items")
    with tempfile.TemporaryDirectory(prefix="brim-spill-") as spill:
        table = dataset_source(
            dataset, split=split, embed_external_files=embed_external_files, spill=Path(spill), note=progress.note
        )
        hub = replace(options.hub, split=None if many else table.splits[0].name)
        return Build(table, destination, replace(options, hub=hub)).run(progress)


def _address(repo_id: str, revision: str | None, token: str | None) -> Address:
    if repo_id.startswith(SCHEME):
        found = parse_address(repo_id)
        return Address(found.repo, revision or found.revision)
    if repo_id.startswith("buckets/"):
        raise InputError("brim does not publish to buckets.", hint="Give the name of a dataset, ORG/NAME.")
    repo = repo_id if "/" in repo_id else f"{own_name(token)}/{repo_id}"
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo_id!r} is not the name of a repository on the Hub.", hint="Write ORG/NAME.")
    return Address(repo, revision or "main")
