"""Replacements for methods of `datasets`: the same arguments, with a memory limit and resume.

This module has `push_to_hub`, and the functions that write rows in another order with constant memory. `map` and
`filter` are in map_api.

`sort`, `shuffle` and similar functions have the names, arguments, rows and order of `datasets`, which computes the
order. `datasets` keeps a list of indices into the old rows. brim writes new rows instead, a few megabytes at a time,
and maps them from disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from brim import partition as cuts
from brim.api.recorded_run import shown
from brim.compute.rows.open_rows import dataset_tables
from brim.compute.steps.row_features import import_datasets
from brim.errors import ArgumentError, DestinationError, DestinationUnavailableError, InputError, named
from brim.jobs.build_job import BuildPlan, BuildSettings
from brim.jobs.cache_entries import cache_home, open_cache, open_dataset
from brim.jobs.publish_options import PublishOptions
from brim.jobs.results import BuildResult
from brim.jobs.shard_set import MEMORY
from brim.memory.limit import effective_limit
from brim.options.declare import takes
from brim.options.groups import ShardOptions
from brim.options.push_options import PushToHubOptions
from brim.plans.cut_shards import DEFAULT_SHARD_BYTES, metadata_bytes
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.sizes import parse_size
from brim.sources.dataset_source import dataset_source
from brim.sources.datasets_private import fingerprint_of
from brim.sources.file_table import FileTable
from brim.state.atomic_files import reason
from brim.state.scratch import scratch_folder
from brim.storage.hub_client import own_name
from brim.storage.location import HUB_SCHEME, MAIN, Location, parse_repository, repo_name_is_valid

if TYPE_CHECKING:
    from datasets import DatasetDict

_PUSH_NAMES = {
    "workers": "num-proc",
    "shard-size": "max-shard-size",
    "config": "config-name",
    "public": "private=False",
}


@takes(PushToHubOptions)
def push_to_hub(options: PushToHubOptions) -> BuildResult:
    """Publish a dataset of `datasets` without loading it: `Dataset.push_to_hub` within a memory limit, with resume.

    The arguments are those of `Dataset.push_to_hub`; below are those that differ from it. Unlike there, a new
    repository is private unless `private=False`.

    Returns:
        The shards, rows and bytes that were written; print it for a summary.

    Raises:
        ArgumentError: An argument is wrong (a ValueError, as in `datasets`).
        DestinationUnavailableError: The Hub cannot be reached.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.push_to_hub(dataset, "ada/numbers", memory="500MB", progress=False).rows
        3
    """
    progress = shown(options.progress)
    with named(_PUSH_NAMES), _as_values():
        settings = BuildSettings(
            shard_size=options.max_shard_size,
            num_shards=options.num_shards,
            allow_empty=True,
            memory=options.memory,
            workers=options.num_proc,
            update=not options.append,
            append=options.append,
            state_dir=options.state_dir,
            stop=options.stop,
            hub=PublishOptions(
                config=options.config_name,
                data_dir=options.data_dir,
                commit_message=options.commit_message or "Upload dataset",
                description=options.commit_description,
                public=options.private is False,
                upload_with=options.upload_with,
                create_pr=bool(options.create_pr),
                replace_foreign=True,
                set_default=bool(options.set_default)
                and options.config_name != "default",  # "default" is the default anyway
                bare=True,
                token=options.token,
            ),
        )
        destination = str(_address(options.repo_id, options.revision, options.token))
        dataset = options.dataset
        has_splits = hasattr(dataset, "values") and hasattr(dataset, "items")
        with tempfile.TemporaryDirectory(prefix="brim-spill-") as spill:
            table = dataset_source(
                dataset,
                split=options.split,
                embed_external_files=options.embed_external_files,
                spill=Path(spill),
                note=progress.note,
            )
            hub = replace(settings.hub, split=None if has_splits else table.splits[0].name)
            datasets = dataset.values() if has_splits else [dataset]
            parts = dict(zip((split.name for split in table.splits), datasets, strict=True))
            weights = {name: weight for name, part in parts.items() if (weight := _weight(part)) is not None}
            table = table.replace(about={**table.about, MEMORY: weights}) if weights else table
            cut = _cut(table, parts, weights, settings.only(ShardOptions), settings.workers)
            return BuildPlan(table, destination, replace(settings, hub=hub, **cut.values())).run(progress)


@contextmanager
def _as_values() -> Iterator[None]:
    """Turn an InputError into an ArgumentError, because `push_to_hub` of `datasets` raises ValueError for it."""
    try:
        yield
    except InputError as error:
        if type(error) not in (InputError, DestinationError):
            raise  # it is not about an argument, or is a ValueError already
        raise ArgumentError(error.words[0], hint=error.words[1], **error.facts) from error


def _weight(dataset: Any) -> int | None:
    """Return the size in memory that `datasets` reports, from which it computes the number of shards and the card.

    Return None where the size is unknown without reading: for a stream, and for media, of which `datasets` would load
    the first thousand rows.
    """
    from datasets.features.features import require_decoding

    data, features = getattr(dataset, "data", None), getattr(dataset, "features", None)
    if data is None or features is None:
        return None
    if any(require_decoding(feature, ignore_decode_attribute=True) for feature in features.values()):
        return None
    return int(data.nbytes) * len(dataset) // max(len(data), 1)


def _cut(
    table: FileTable,
    parts: Mapping[str, Any],
    weights: Mapping[str, int],
    requested: ShardOptions,
    num_proc: int | None,
) -> ShardOptions:
    """Return as many shards as `datasets` makes, but none without rows; media are divided by their true size."""
    import datasets

    rows = {split.name: max(split.stop - split.start, 1) for split in table.splits}
    if (number := requested.num_shards) is not None:
        requested_counts = number if isinstance(number, Mapping) else dict.fromkeys(rows, number)
        capped = {name: min(count, rows.get(name, count)) for name, count in requested_counts.items()}
        return requested if capped == dict(requested_counts) else ShardOptions(num_shards=capped)
    size = requested.shard_bytes or parse_size(datasets.config.MAX_SHARD_SIZE)
    as_read = requested.shard_bytes is None and all(
        isinstance(part, datasets.IterableDataset) for part in parts.values()
    )
    true_bytes = cuts.running(table.file_bytes() + metadata_bytes(table))
    counts, by_size = {}, True
    for split in table.splits:
        weight = weights.get(split.name, int(true_bytes[split.stop] - true_bytes[split.start]))
        count = int(weight / size) + 1
        # For a stream, `datasets` writes as many shards as it reads, regardless of their size.
        least = parts[split.name].num_shards if as_read else num_proc or 1
        by_size = by_size and least <= count
        counts[split.name] = min(max(count, least), rows[split.name])
    if by_size and (as_read or table.columns):
        return requested if size in (requested.shard_bytes, DEFAULT_SHARD_BYTES) else ShardOptions(shard_size=size)
    return requested if requested == ShardOptions() and set(counts.values()) == {1} else ShardOptions(num_shards=counts)


def _address(repo_id: str, revision: str | None, token: str | None) -> Location:
    if repo_id.startswith(HUB_SCHEME):
        address = parse_repository(repo_id)
        return replace(address, revision=revision or address.revision)
    if repo_id.startswith("buckets/"):
        raise InputError(
            "push_to_hub publishes to repositories, and this is a bucket.",
            hint=f"Write brim.map(ds, None, destination={HUB_SCHEME + repo_id!r}).",
        )
    repo = repo_id if "/" in repo_id else f"{own_name(token)}/{repo_id}"
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo_id!r} is not the name of a repository on the Hub.", hint="Write ORG/NAME.")
    return Location("hf", f"datasets/{repo}", "", revision=revision or MAIN)


_D = TypeVar("_D")  # a Dataset stays a Dataset, a DatasetDict a DatasetDict
_ROWS = "rows.arrow"
CacheDir = str | os.PathLike[str] | None


# The arguments of `datasets` about caching that have no effect here, with their defaults: one note lists them.
_WITHOUT_EFFECT: dict[str, Any] = {
    "keep_in_memory": False,
    **dict.fromkeys(("cache_file_name", "cache_file_names", "indices_cache_file_name", "indices_cache_file_names")),
    **dict.fromkeys(("train_indices_cache_file_name", "test_indices_cache_file_name")),
    "writer_batch_size": 1000,
    "disable_nullable": False,
    "num_proc": None,
}


def flatten_indices(
    dataset: _D,
    keep_in_memory: bool = False,
    cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    features: Any = None,
    disable_nullable: bool = False,
    num_proc: int | None = None,
    new_fingerprint: str | None = None,
    *,
    cache_file_names: Mapping[str, str | None] | None = None,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """Write the rows of a Dataset or DatasetDict in their present order, as `Dataset.flatten_indices` does.

    The other arguments are those of `datasets`.

    Args:
        cache_dir: Folder of the result. (default: BRIM_CACHE, or the user's cache folder)
        progress: True to show progress everywhere, False to show nothing. (default: in a terminal or notebook)

    Returns:
        The dataset, memory-mapped from the cache; the same call finds it there.

    Raises:
        InputError: The argument is not a Dataset or a DatasetDict.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.flatten_indices(dataset.select([2, 0]), progress=False)["n"][:]
        [3, 1]
    """
    result: _D = _rewritten(dataset, "flatten", locals(), features)
    return result


def _rewritten(dataset: Any, label: str, arguments: Mapping[str, Any], features: Any = None) -> Any:
    """Write the rows of the splits that are not in the cache, with one progress bar, and return the new dataset.

    `arguments` are those of the function that was called: where and how to cache. They do not change the rows.
    """
    datasets, watched = import_datasets("brim.flatten_indices"), shown(arguments["progress"])
    has_splits = isinstance(dataset, datasets.DatasetDict)
    parts = dict(dataset) if has_splits else {"": dataset}
    for part in parts.values():
        if not isinstance(part, datasets.Dataset):
            raise _wrong_type(part)
    if useless := [name for name, usual in _WITHOUT_EFFECT.items() if arguments.get(name, usual) != usual]:
        predicate = "has no effect" if len(useless) == 1 else "have no effect"
        watched.note(f"{' and '.join(useless)} {predicate}: the rows are mapped from brim's cache (cache_dir=)")
    home, description = cache_home(arguments["cache_dir"]), {"what": "rows", "source": "a dataset"}
    kinds = "" if features is None else f"-{digest_json(features.to_dict())[:12]}"
    names = {name: f"rows-{fingerprint_of(part)}{kinds}" for name, part in parts.items()}
    paths = {name: open_cache(home, folder, description) / _ROWS for name, folder in names.items()}
    use_cache = arguments.get("load_from_cache_file")
    use_cache = datasets.is_caching_enabled() if use_cache is None else use_cache
    missing = {path: parts[name] for name, path in paths.items() if not use_cache or not path.exists()}
    if missing:
        watched.start(label, sum(map(_size, missing.values())), 0, effective_limit().bytes)
        try:
            for path, part in missing.items():
                _write(part, path, watched, features)
        finally:
            watched.finish()
    results = {}
    for name, part in parts.items():
        fingerprint = arguments.get(f"{name}_new_fingerprint" if name else "new_fingerprint")
        results[name] = _open_written(part, paths[name], names[name], features, fingerprint)
    return datasets.DatasetDict(results) if has_splits else results[""]


def _open_written(dataset: Any, path: Path, key: str, features: Any, fingerprint: str | None) -> Any:
    schema = (features or dataset.features).arrow_schema
    own = fingerprint_of(dataset) if features is None else key
    result = open_dataset([path], schema, own, info=dataset.info, split=dataset.split, name=fingerprint)
    form = dataset.format
    if form["type"] is None and form["columns"] == dataset.column_names:
        return result
    return result.with_format(form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"])


def _size(dataset: Any) -> int:
    """Return the bytes of the rows as `datasets` estimates them, without unselected rows of the table."""
    return int(dataset.data.nbytes) * len(dataset) // max(len(dataset.data), 1)


def _write(dataset: Any, path: Path, watched: Progress, features: Any = None) -> None:
    """Write all rows to a file atomically."""
    schema, size, rows = (features or dataset.features).arrow_schema, _size(dataset), 0
    waiting = path.with_name(f"{_ROWS}.{os.getpid()}.part")
    try:
        with open(waiting, "wb") as file:
            with pa.ipc.new_stream(file, schema) as writer:
                for table in dataset_tables(dataset):
                    writer.write_table(table.cast(schema))
                    before, rows = rows, rows + len(table)
                    watched.advance(size * rows // len(dataset) - size * before // len(dataset))
            file.flush()
            os.fsync(file.fileno())
        os.replace(waiting, path)
    except OSError as error:
        raise DestinationUnavailableError(
            f"The cache folder {str(path.parent)!r} cannot be written: {reason(error)}.",
            hint="Free disk space, or choose another folder with cache_dir=.",
        ) from error
    finally:
        waiting.unlink(missing_ok=True)


def _wrong_type(dataset: Any) -> InputError:
    return InputError(
        f"This is a {type(dataset).__name__}, not a datasets.Dataset.", hint="datasets.load_dataset(…) returns one."
    )


def _check_type(dataset: Any, function: str) -> Any:
    datasets = import_datasets(function)
    if not isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        raise _wrong_type(dataset)
    return dataset


def shuffle(
    dataset: _D,
    seed: int | dict[str, int | None] | None = None,
    generator: Any = None,
    keep_in_memory: bool = False,
    load_from_cache_file: bool | None = None,
    indices_cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    new_fingerprint: str | None = None,
    *,
    seeds: int | dict[str, int | None] | None = None,
    generators: Mapping[str, Any] | None = None,
    indices_cache_file_names: Mapping[str, str | None] | None = None,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """Shuffle as `Dataset.shuffle` and write the rows in their new order.

    The other arguments are those of `datasets`.

    Args:
        seeds: For a DatasetDict: one seed, or a dict of seeds by split; `seed` may be one too.
        generators: For a DatasetDict: a dict of generators by split; `generator` may be one too.
        cache_dir: Folder of the result. (default: BRIM_CACHE, or the user's cache folder)
        progress: True to show progress everywhere, False to show nothing. (default: in a terminal or notebook)

    Returns:
        The dataset, memory-mapped from the cache; the same call finds it there.

    Raises:
        ArgumentError: Seeds and generators do not fit the dataset.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> sorted(brim.shuffle(dataset, seed=7, progress=False)["n"])
        [1, 2, 3]
    """
    arguments, checked = locals(), _check_type(dataset, "brim.shuffle")
    has_splits = isinstance(checked, dict)
    if not has_splits and (seeds is not None or generators is not None):
        raise ArgumentError(
            "seeds= and generators= can only be used with a DatasetDict.", hint="Use seed= or generator=."
        )
    if seed is not None and seeds is not None:
        raise ArgumentError("seed= cannot be used with seeds=.", hint="Leave out one of them.")
    if has_splits and generator is not None and not isinstance(generator, Mapping):
        raise ArgumentError(
            "A DatasetDict needs one generator per split.", hint="Write generators={'train': …, 'test': …}."
        )
    random = {"generators": generators or generator} if has_splits else {"generator": generator}
    ordered = checked.shuffle(seed if seeds is None else seeds, **random, keep_in_memory=True)
    result: _D = _rewritten(ordered, "shuffle", arguments)
    return result


def sort(
    dataset: _D,
    column_names: str | Sequence[str],
    reverse: bool | Sequence[bool] = False,
    null_placement: str = "at_end",
    keep_in_memory: bool = False,
    load_from_cache_file: bool | None = None,
    indices_cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    new_fingerprint: str | None = None,
    *,
    indices_cache_file_names: Mapping[str, str | None] | None = None,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """Sort as `Dataset.sort` and write the rows in their new order. Only the columns to sort by are in memory.

    The other arguments are those of `datasets`.

    Args:
        cache_dir: Folder of the result. (default: BRIM_CACHE, or the user's cache folder)
        progress: True to show progress everywhere, False to show nothing. (default: in a terminal or notebook)

    Returns:
        The dataset, memory-mapped from the cache; the same call finds it there.

    Raises:
        InputError: The argument is not a Dataset or a DatasetDict.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.sort(dataset, "n", reverse=True, progress=False)["n"][:]
        [3, 2, 1]
    """
    arguments, checked = locals(), _check_type(dataset, "brim.sort")
    # With keep_in_memory=True, `datasets` cannot sort a dataset on disk, so it gets a file for the indices of rows.
    with tempfile.TemporaryDirectory(prefix="brim-order-", dir=scratch_folder()) as folder:
        order: dict[str, Any] = {"reverse": reverse, "null_placement": null_placement, "load_from_cache_file": False}
        if isinstance(checked, dict):
            order["indices_cache_file_names"] = {name: f"{folder}/{n}.arrow" for n, name in enumerate(checked)}
        else:
            order["indices_cache_file_name"] = f"{folder}/0.arrow"
        ordered = checked.sort(column_names, **order)
        result: _D = _rewritten(ordered, "sort", arguments)
    return result


def concatenate_datasets(
    dsets: Iterable[_D],
    info: Any = None,
    split: Any = None,
    axis: int = 0,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """Concatenate as `datasets.concatenate_datasets` and write the rows.

    The other arguments are those of `datasets`.

    Args:
        cache_dir: Folder of the result. (default: BRIM_CACHE, or the user's cache folder)
        progress: True to show progress everywhere, False to show nothing. (default: in a terminal or notebook)

    Returns:
        The dataset, memory-mapped from the cache; the same call finds it there.

    Raises:
        InputError: An element of the list is not a Dataset.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> len(brim.concatenate_datasets([dataset, dataset], progress=False))
        6
    """
    arguments, datasets = locals(), import_datasets("brim.concatenate_datasets")
    concatenated = datasets.concatenate_datasets(list(dsets), info=info, split=split, axis=axis)
    result: _D = _rewritten(concatenated, "concatenate", arguments)
    return result


def train_test_split(
    dataset: Any,
    test_size: float | int | None = None,
    train_size: float | int | None = None,
    shuffle: bool = True,
    stratify_by_column: str | None = None,
    seed: int | None = None,
    generator: Any = None,
    keep_in_memory: bool = False,
    load_from_cache_file: bool | None = None,
    train_indices_cache_file_name: str | None = None,
    test_indices_cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    train_new_fingerprint: str | None = None,
    test_new_fingerprint: str | None = None,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> DatasetDict:
    """Split as `Dataset.train_test_split` and write the rows of both splits.

    The other arguments are those of `datasets`.

    Args:
        cache_dir: Folder of the result. (default: BRIM_CACHE, or the user's cache folder)
        progress: True to show progress everywhere, False to show nothing. (default: in a terminal or notebook)

    Returns:
        A DatasetDict of train and test, memory-mapped from the cache.

    Raises:
        InputError: The argument is not a Dataset.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.train_test_split(dataset, test_size=1, seed=7, progress=False).num_rows
        {'train': 2, 'test': 1}
    """
    arguments, datasets = locals(), import_datasets("brim.train_test_split")
    if not isinstance(dataset, datasets.Dataset):
        raise _wrong_type(dataset)
    with tempfile.TemporaryDirectory(prefix="brim-order-", dir=scratch_folder()) as folder:  # see `sort`
        parts = dataset.train_test_split(
            test_size=test_size,
            train_size=train_size,
            shuffle=shuffle,
            stratify_by_column=stratify_by_column,
            seed=seed,
            generator=generator,
            load_from_cache_file=False,
            train_indices_cache_file_name=f"{folder}/train.arrow",
            test_indices_cache_file_name=f"{folder}/test.arrow",
        )
        result: DatasetDict = _rewritten(parts, "split", arguments)
    return result
