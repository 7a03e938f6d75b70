"""In place of `ds.push_to_hub`: the same words, within a limit, and it goes on after a crash.

And what `map` and its siblings have kept on the way. `map` and `filter` themselves are in map_api.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from brim import cuts
from brim.api.recorded_run import shown
from brim.errors import ArgumentError, DestinationError, InputError, named
from brim.jobs.build_job import Build, BuildOptions
from brim.jobs.caches import Cached, cache_home, list_caches, remove_cache
from brim.jobs.content import MEMORY
from brim.jobs.job import Built
from brim.plans.cut_shards import DEFAULT_SHARD_BYTES, CutOptions, metadata_bytes
from brim.plans.file_checks import CheckOptions
from brim.progress import Progress
from brim.sizes import parse_size
from brim.sources.dataset_source import dataset_source
from brim.sources.file_table import FileTable
from brim.state.stop import Stop
from brim.stores.destination import SCHEME, HubAddress, HubOptions, Via, parse_hub_address, repo_name_is_valid
from brim.stores.hub_client import own_name

_PUSH_NAMES = {
    "workers": "num-proc",
    "shard-size": "max-shard-size",
    "config": "config-name",
    "public": "private=False",
}


def push_to_hub(
    dataset: Any,
    repo_id: str,
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
    *,
    append: bool = False,
    memory: str | int | float | None = None,
    via: Via = "auto",
    state: str | os.PathLike[str] | None = None,
    stop: Stop | None = None,
    progress: Progress | bool | None = None,
) -> Built:
    """Publish a dataset of `datasets` without holding it: the arguments of `Dataset.push_to_hub`, in their order.

    For a Dataset, IterableDataset, DatasetDict or IterableDatasetDict. Called again after a crash, it goes on
    where it was. Unlike the original, a new repository is private unless you say `private=False`; `num_proc` is
    how many shards are on their way at a time. With `append` the rows come behind those of the split that are there.
    `stop` is a `brim.Stop` by which another thread can end it.
    """
    if set_default and config_name == "default":
        set_default = None  # it is
    with named(_PUSH_NAMES), _as_values():
        options = BuildOptions(
            cut=CutOptions(None if max_shard_size is None else parse_size(max_shard_size), num_shards),
            checks=CheckOptions(allow_empty=True),
            memory=memory,
            workers=num_proc,
            update=not append,
            append=append,
            state=None if state is None else os.fspath(state),
            stop=stop,
            hub=HubOptions(
                config=config_name,
                data_dir=data_dir,
                message=commit_message or "Upload dataset",
                description=commit_description,
                public=private is False,
                via=via,
                create_pull=bool(create_pr),
                replace=True,
                set_default=bool(set_default),
                bare=True,
                token=token,
            ),
        )
        return _push(dataset, repo_id, revision, split, embed_external_files, options, shown(progress))


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
        parts = dict(zip((one.name for one in table.splits), dataset.values() if many else [dataset], strict=True))
        weights = {name: weight for name, one in parts.items() if (weight := _weight(one)) is not None}
        table = table.replace(about={**table.about, MEMORY: weights}) if weights else table
        cut = _cut(table, parts, weights, options.cut, options.workers)
        return Build(table, destination, replace(options, hub=hub, cut=cut)).run(progress)


@contextmanager
def _as_values() -> Iterator[None]:
    """What `push_to_hub` of `datasets` raises ValueError for is one here too."""
    try:
        yield
    except InputError as error:
        if type(error) not in (InputError, DestinationError):
            raise  # it is not about what was said, or is a ValueError already
        raise ArgumentError(error.words[0], hint=error.words[1], **error.facts) from error


def _weight(dataset: Any) -> int | None:
    """What `datasets` says that a dataset takes in memory: the size that its cards and its number of shards go by.

    None where it cannot be said without reading: of a stream, and of media, whose first thousand it would hold.
    """
    from datasets.features.features import require_decoding

    data, features = getattr(dataset, "data", None), getattr(dataset, "features", None)
    if data is None or features is None:
        return None
    if any(require_decoding(feature, ignore_decode_attribute=True) for feature in features.values()):
        return None
    return int(data.nbytes) * len(dataset) // max(len(data), 1)


def _cut(
    table: FileTable, parts: Mapping[str, Any], weights: Mapping[str, int], asked: CutOptions, num_proc: int | None
) -> CutOptions:
    """As many shards as the original makes, but none without rows; media are cut by their true size."""
    import datasets

    rows = {split.name: max(split.stop - split.start, 1) for split in table.splits}
    if (number := asked.num_shards) is not None:
        wanted = number if isinstance(number, Mapping) else dict.fromkeys(rows, number)
        most = {name: min(count, rows.get(name, count)) for name, count in wanted.items()}
        return asked if most == dict(wanted) else CutOptions(None, most)
    size = asked.shard_bytes or parse_size(datasets.config.MAX_SHARD_SIZE)
    as_read = asked.shard_bytes is None and all(isinstance(part, datasets.IterableDataset) for part in parts.values())
    true_bytes = cuts.running(table.file_bytes() + metadata_bytes(table))
    counts, by_size = {}, True
    for split in table.splits:
        weight = weights.get(split.name, int(true_bytes[split.stop] - true_bytes[split.start]))
        count = int(weight / size) + 1
        # Of a stream the original makes as many as it is read in, however large they are.
        least = parts[split.name].num_shards if as_read else num_proc or 1
        by_size = by_size and least <= count
        counts[split.name] = min(max(count, least), rows[split.name])
    if by_size and (as_read or table.columns):
        return asked if size in (asked.shard_bytes, DEFAULT_SHARD_BYTES) else CutOptions(size)
    return asked if asked == CutOptions() and set(counts.values()) == {1} else CutOptions(None, counts)


def _address(repo_id: str, revision: str | None, token: str | None) -> HubAddress:
    if repo_id.startswith(SCHEME):
        found = parse_hub_address(repo_id)
        return HubAddress(found.repo, revision or found.revision)
    if repo_id.startswith("buckets/"):
        raise InputError(
            "push_to_hub publishes to repositories, and this is a bucket.",
            hint=f"Write brim.map(ds, None, destination={SCHEME + repo_id!r}).",
        )
    repo = repo_id if "/" in repo_id else f"{own_name(token)}/{repo_id}"
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo_id!r} is not the name of a repository on the Hub.", hint="Write ORG/NAME.")
    return HubAddress(repo, revision or "main")


def caches(cache_dir: str | os.PathLike[str] | None = None) -> list[Cached]:
    """What map, tokenize and embed keep that had no destination, the one used longest ago first."""
    return list_caches(cache_home(cache_dir))


def clean(
    *,
    remove: bool = False,
    older_than: float = 0.0,
    unfinished: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> list[Cached]:
    """The caches not used for `older_than` days, or only those of unfinished jobs; with `remove`, they go.

    One that a running job uses stays: `removed` tells. A dataset that is open stays readable until it is closed.
    """
    if not isinstance(older_than, int | float) or not older_than >= 0:
        raise InputError(f"--older-than takes a number of days, not {older_than!r}.")
    chosen = [one for one in caches(cache_dir) if one.age_days >= older_than and not (unfinished and one.done)]
    return [replace(one, removed=remove and remove_cache(one)) for one in chosen]
