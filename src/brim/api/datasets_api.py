"""In place of methods of `datasets`: the same words, within a limit, and what was begun goes on after a crash.

`push_to_hub`; rows in another order, written out at flat memory; and what `map` and its siblings have kept on the way.
`map` and `filter` themselves are in map_api.

Of `sort`, `shuffle` and the like, the names, arguments, rows and order are those of `datasets`, which decides the order
itself; what it keeps as a list of numbers over the old rows is written here as new rows, a few megabytes at a time, and
mapped from disk.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from brim import cuts
from brim.api.recorded_run import shown
from brim.choices import switches
from brim.errors import ArgumentError, DestinationError, InputError, SinkFailed, named
from brim.jobs.build_job import Build, BuildOptions
from brim.jobs.caches import Cached, cache_home, list_caches, open_cache, open_dataset, remove_cache
from brim.jobs.content import MEMORY
from brim.jobs.job import Built
from brim.memory.limit import effective_limit
from brim.plans.cut_shards import DEFAULT_SHARD_BYTES, CutOptions, metadata_bytes
from brim.plans.file_checks import CheckOptions
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.records import dataclass
from brim.rows.open_rows import dataset_tables
from brim.sizes import parse_size
from brim.sources.dataset_source import dataset_source
from brim.sources.datasets_private import fingerprint_of
from brim.sources.file_table import FileTable
from brim.state.durable import reason
from brim.state.scratch import scratch_folder
from brim.state.stop import Stop
from brim.steps.row_features import import_datasets
from brim.stores.destination import SCHEME, HubAddress, HubOptions, Via, parse_hub_address, repo_name_is_valid
from brim.stores.hub_client import own_name

if TYPE_CHECKING:
    from datasets import DatasetDict

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
    switches(remove=remove, unfinished=unfinished)
    if not isinstance(older_than, int | float) or not older_than >= 0:
        raise InputError(f"--older-than takes a number of days, not {older_than!r}.")
    chosen = [one for one in caches(cache_dir) if one.age_days >= older_than and not (unfinished and one.done)]
    return [replace(one, removed=remove and remove_cache(one)) for one in chosen]


_D = TypeVar("_D")  # a Dataset stays a Dataset, a DatasetDict a DatasetDict
_ROWS = "rows.arrow"
CacheDir = str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class _Caching:
    """The arguments by which the originals are told where to keep the numbers of rows, and how.

    They decide no row. `without_effect` are names and values of those that do nothing here: one line tells so.
    """

    load_from_cache_file: bool | None = None
    fingerprints: Mapping[str, str | None] = field(default_factory=dict)  # of the results, by split; "" for a Dataset
    without_effect: Mapping[str, Any] = field(default_factory=dict)

    def tell(self, watched: Progress) -> None:
        usual = {"keep_in_memory": False, "writer_batch_size": 1000, "disable_nullable": False}
        given = [name for name, value in self.without_effect.items() if value != usual.get(name)]
        if given:
            verb = "has" if len(given) == 1 else "have"
            watched.note(f"{' and '.join(given)} {verb} no effect: the rows are mapped from brim's cache (cache_dir=)")


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
    """The rows of a Dataset or DatasetDict in their order, as rows of their own, mapped from `cache_dir`."""
    useless = {
        "keep_in_memory": keep_in_memory,
        "cache_file_name": cache_file_name,
        "cache_file_names": cache_file_names,
        "writer_batch_size": writer_batch_size,
        "disable_nullable": disable_nullable,
        "num_proc": num_proc,
    }
    caching = _Caching(None, {"": new_fingerprint}, useless)
    made: _D = _flattened(dataset, "flatten", cache_dir, progress, caching, features)
    return made


def _flattened(
    dataset: Any,
    what: str,
    cache_dir: CacheDir,
    progress: Progress | bool | None,
    caching: _Caching,
    features: Any = None,
) -> Any:
    """What is not there yet is written, under one bar for all splits."""
    datasets, watched = import_datasets("brim.flatten_indices"), shown(progress)
    many = isinstance(dataset, datasets.DatasetDict)
    parts = dict(dataset) if many else {"": dataset}
    for one in parts.values():
        if not isinstance(one, datasets.Dataset):
            raise InputError(f"This is a {type(one).__name__}, not a datasets.Dataset.")
    caching.tell(watched)
    home, told = cache_home(cache_dir), {"what": "rows", "source": "a dataset"}
    kinds = "" if features is None else f"-{digest_json(features.to_dict())[:12]}"
    names = {name: f"rows-{fingerprint_of(one)}{kinds}" for name, one in parts.items()}
    paths = {name: open_cache(home, folder, told) / _ROWS for name, folder in names.items()}
    again = caching.load_from_cache_file
    again = not (datasets.is_caching_enabled() if again is None else again)
    lacking = {path: parts[name] for name, path in paths.items() if again or not path.exists()}
    if lacking:
        watched.start(what, sum(map(_size, lacking.values())), 0, effective_limit().bytes)
        try:
            for path, one in lacking.items():
                _write(one, path, watched, features)
        finally:
            watched.finish()
    made = {
        name: _opened(one, paths[name], names[name], features, caching.fingerprints.get(name))
        for name, one in parts.items()
    }
    return datasets.DatasetDict(made) if many else made[""]


def _opened(dataset: Any, path: Path, key: str, features: Any, fingerprint: str | None) -> Any:
    schema = (features or dataset.features).arrow_schema
    own = fingerprint_of(dataset) if features is None else key
    made = open_dataset([path], schema, own, info=dataset.info, split=dataset.split, name=fingerprint)
    form = dataset.format
    if form["type"] is None and form["columns"] == dataset.column_names:
        return made
    return made.with_format(form["type"], form["columns"], form["output_all_columns"], **form["format_kwargs"])


def _size(dataset: Any) -> int:
    """What its rows take, as `datasets` estimates it: those of the table that are not among them count for none."""
    return int(dataset.data.nbytes) * len(dataset) // max(len(dataset.data), 1)


def _write(dataset: Any, path: Path, watched: Progress, features: Any = None) -> None:
    """All rows to a file that appears whole or not at all."""
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
        raise SinkFailed(
            f"The cache folder {str(path.parent)!r} cannot take the rows: {reason(error)}.",
            hint="Make room, or choose another one with cache_dir=.",
        ) from error
    finally:
        waiting.unlink(missing_ok=True)


def _known(dataset: Any, what: str) -> Any:
    datasets = import_datasets(what)
    if not isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        raise InputError(f"This is a {type(dataset).__name__}, not a datasets.Dataset.")
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
    """`Dataset.shuffle`, with the rows written out in their new order.

    Of a DatasetDict, `seeds` and `generators` may be dicts by the names of its splits; so may `seed` and `generator`.
    """
    given = _known(dataset, "brim.shuffle")
    many = isinstance(given, dict)
    if not many and (seeds is not None or generators is not None):
        raise ArgumentError("seeds= and generators= are for a DatasetDict.", hint="Give seed= or generator=.")
    if seed is not None and seeds is not None:
        raise ArgumentError("Choose one of seed= and seeds=.")
    if many and generator is not None and not isinstance(generator, Mapping):
        raise ArgumentError(
            "A DatasetDict takes one generator for each split.", hint="Give generators={'train': …, 'test': …}."
        )
    random = {"generators": generators or generator} if many else {"generator": generator}
    ordered = given.shuffle(seed if seeds is None else seeds, **random, keep_in_memory=True)
    useless = {
        "keep_in_memory": keep_in_memory,
        "indices_cache_file_name": indices_cache_file_name,
        "indices_cache_file_names": indices_cache_file_names,
        "writer_batch_size": writer_batch_size,
    }
    caching = _Caching(load_from_cache_file, {"": new_fingerprint}, useless)
    made: _D = _flattened(ordered, "shuffle", cache_dir, progress, caching)
    return made


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
    """`Dataset.sort`, with the rows written out in their new order. Only the columns to sort by are held."""
    given = _known(dataset, "brim.sort")
    useless = {
        "keep_in_memory": keep_in_memory,
        "indices_cache_file_name": indices_cache_file_name,
        "indices_cache_file_names": indices_cache_file_names,
        "writer_batch_size": writer_batch_size,
    }
    # With keep_in_memory=True, `datasets` refuses to sort what is on disk: it gets a file for the numbers of rows.
    with tempfile.TemporaryDirectory(prefix="brim-order-", dir=scratch_folder()) as folder:
        order: dict[str, Any] = {"reverse": reverse, "null_placement": null_placement, "load_from_cache_file": False}
        if isinstance(given, dict):
            order["indices_cache_file_names"] = {name: f"{folder}/{n}.arrow" for n, name in enumerate(given)}
        else:
            order["indices_cache_file_name"] = f"{folder}/0.arrow"
        ordered = given.sort(column_names, **order)
        caching = _Caching(load_from_cache_file, {"": new_fingerprint}, useless)
        made: _D = _flattened(ordered, "sort", cache_dir, progress, caching)
    return made


def concatenate_datasets(
    dsets: Iterable[_D],
    info: Any = None,
    split: Any = None,
    axis: int = 0,
    *,
    cache_dir: CacheDir = None,
    progress: Progress | bool | None = None,
) -> _D:
    """`datasets.concatenate_datasets`, with the rows written out below (or beside) each other."""
    datasets = import_datasets("brim.concatenate_datasets")
    joined = datasets.concatenate_datasets(list(dsets), info=info, split=split, axis=axis)
    made: _D = _flattened(joined, "concatenate", cache_dir, progress, _Caching())
    return made


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
    """`Dataset.train_test_split`, with the rows of both sides written out."""
    datasets = import_datasets("brim.train_test_split")
    if not isinstance(dataset, datasets.Dataset):
        raise InputError(f"This is a {type(dataset).__name__}, not a datasets.Dataset.")
    useless = {
        "keep_in_memory": keep_in_memory,
        "train_indices_cache_file_name": train_indices_cache_file_name,
        "test_indices_cache_file_name": test_indices_cache_file_name,
        "writer_batch_size": writer_batch_size,
    }
    fingerprints = {"train": train_new_fingerprint, "test": test_new_fingerprint}
    with tempfile.TemporaryDirectory(prefix="brim-order-", dir=scratch_folder()) as folder:  # as in `sort`
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
        caching = _Caching(load_from_cache_file, fingerprints, useless)
        made: DatasetDict = _flattened(parts, "split", cache_dir, progress, caching)
    return made
