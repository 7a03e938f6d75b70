"""In place of `ds.map` and `ds.push_to_hub`: the same words, within a limit, and it goes on after a crash.

And what `map` and its siblings have kept on the way.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from brim.api.compute_api import map_job, run_job
from brim.api.job_options import MapGiven, MapKeywords, refuse_without_place, spelled_out
from brim.api.recorded_run import bar_or_notes
from brim.errors import InputError, named
from brim.jobs.build_job import Build, BuildOptions
from brim.jobs.caches import Cached, CacheLayout, cache_home, list_caches, open_dataset, remove_cache
from brim.jobs.job import Built, Computed, Job
from brim.jobs.spec import How, computed_facts, computed_spec
from brim.jobs.units import without_function
from brim.memory.meter import process_bytes
from brim.outputs.output import CachedRows
from brim.plans.cut_shards import CutOptions
from brim.plans.file_checks import CheckOptions
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.rows.open_rows import open_rows
from brim.rows.unit import RowSource
from brim.sizes import parse_size
from brim.sources.dataset_source import dataset_source
from brim.steps.map_options import InputKind, MapOptions
from brim.steps.map_step import MapStep
from brim.steps.step_process import make_step
from brim.stores.hub_client import own_name
from brim.stores.hub_options import SCHEME, HubAddress, HubOptions, Via, parse_hub_address, repo_name_is_valid

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_PUSH_NAMES = {
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
    with named(_PUSH_NAMES):
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


def _address(repo_id: str, revision: str | None, token: str | None) -> HubAddress:
    if repo_id.startswith(SCHEME):
        found = parse_hub_address(repo_id)
        return HubAddress(found.repo, revision or found.revision)
    if repo_id.startswith("buckets/"):
        raise InputError("brim does not publish to buckets.", hint="Give the name of a dataset, ORG/NAME.")
    repo = repo_id if "/" in repo_id else f"{own_name(token)}/{repo_id}"
    if not repo_name_is_valid(repo):
        raise InputError(f"{repo_id!r} is not the name of a repository on the Hub.", hint="Write ORG/NAME.")
    return HubAddress(repo, revision or "main")


_MAP_NAMES = {"workers": "num-proc"}
_CACHE_NAMES = {**_MAP_NAMES, "fresh": "load_from_cache_file=False"}


@overload
def map(
    dataset: Any,
    function: Callable[..., Any] | str | None = ...,
    *,
    destination: str | os.PathLike[str],
    batched: bool = ...,
    batch_size: int | None = ...,
    drop_last_batch: bool = ...,
    writer_batch_size: int | None = ...,
    remove_columns: str | Sequence[str] | None = ...,
    with_indices: bool = ...,
    input_columns: str | Sequence[str] | None = ...,
    fn_kwargs: dict[str, Any] | None = ...,
    num_proc: int | None = ...,
    features: Any = ...,
    desc: str | None = ...,
    splittable: bool | None = ...,
    input: InputKind = ...,
    name: str | None = ...,
    progress: Progress | None = ...,
    report: str | os.PathLike[str] | None = ...,
    **options: Unpack[MapKeywords],
) -> Computed: ...
@overload
def map(
    dataset: Any,
    function: Callable[..., Any] | str | None = ...,
    *,
    destination: None = ...,
    batched: bool = ...,
    batch_size: int | None = ...,
    drop_last_batch: bool = ...,
    writer_batch_size: int | None = ...,
    remove_columns: str | Sequence[str] | None = ...,
    with_indices: bool = ...,
    input_columns: str | Sequence[str] | None = ...,
    fn_kwargs: dict[str, Any] | None = ...,
    num_proc: int | None = ...,
    features: Any = ...,
    load_from_cache_file: bool | None = ...,
    desc: str | None = ...,
    splittable: bool | None = ...,
    input: InputKind = ...,
    cache_dir: str | os.PathLike[str] | None = ...,
    name: str | None = ...,
    progress: Progress | None = ...,
    report: str | os.PathLike[str] | None = ...,
    **options: Unpack[MapKeywords],
) -> Dataset | DatasetDict: ...
@spelled_out(MapGiven)
def map(
    dataset: Any,
    function: Callable[..., Any] | str | None = None,
    *,
    destination: str | os.PathLike[str] | None = None,
    batched: bool = False,
    batch_size: int | None = 1000,
    drop_last_batch: bool = False,
    writer_batch_size: int | None = 1000,
    remove_columns: str | Sequence[str] | None = None,
    with_indices: bool = False,
    input_columns: str | Sequence[str] | None = None,
    fn_kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    features: Any = None,
    load_from_cache_file: bool | None = True,
    desc: str | None = None,
    splittable: bool | None = None,
    input: InputKind = "python",
    cache_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[MapKeywords],
) -> Any:
    """Apply a function to every row or batch: the arguments and the results of `Dataset.map`, within `memory`.

    `dataset` is a datasets.Dataset or DatasetDict, the path of JSONL, CSV, Parquet, Arrow or text files, or an
    iterator of dicts (or a function that makes one). Files may lie in a bucket, s3://BUCKET/PREFIX: `endpoint_url` is
    the store if it is not Amazon's, `anonymous` reads without credentials. The result is a Dataset that is
    memory-mapped from `cache_dir`. Called again, it is read from there; after a crash, finished units are not done
    again. An iterator is known again by `name`.

    With a `destination` (a folder, hf://datasets/ORG/NAME, s3://BUCKET/PREFIX) the rows go there as shards, as
    `brim map` does it. `function` may be "MODULE:FUNCTION", which workers alone import.

    `memory` is for the job: what this process holds when it calls is not counted. `num_proc` and `workers` are one.

    `input="arrow"` gives the function a pyarrow.Table, "numpy" a dict of arrays. `splittable=True` says that a batch
    done in parts gives the same rows, so that brim may do that when memory is short. `on_error="skip"` leaves out
    rows on which the function fails, "quarantine" keeps them in a file. `keep_done=True` keeps what was finished
    although the function has changed since.
    """
    given = MapGiven(**options)
    if num_proc is not None and given.workers is not None:
        raise InputError("num_proc= and workers= are the same.", hint="Give one of them.")
    given = replace(given, workers=given.workers if num_proc is None else num_proc)
    given = replace(given, fresh=given.fresh or not load_from_cache_file)
    if destination is None:
        refuse_without_place(given, "format", "rows_per_shard", "split")
    watched = progress or bar_or_notes()

    def choices(part: Any) -> MapOptions:
        return MapOptions(
            batched=batched,
            batch_size=batch_size,
            drop_last_batch=drop_last_batch,
            writer_batch_size=writer_batch_size,
            remove_columns=_names(remove_columns),
            with_indices=with_indices,
            input_columns=_names(input_columns),
            fn_kwargs=fn_kwargs or {},
            features=features,
            input=input,
            splittable=splittable,
            **_format_of(part),
        )

    def one(part: Any) -> Any:
        # What was said is looked at before the source is. What this process holds already is the caller's.
        how = given.how(process_bytes(os.getpid()))
        options = choices(part)
        source = open_rows(part, given.row_options(name=name))
        options.check(source.schema)
        step = make_step(function, options) if isinstance(function, str) else MapStep(function, options)
        if not step.digest.stable:
            watched.note("brim cannot tell whether this function has changed, so its result will not be found again")
        kept = run_job(_cached_job(source, step, how, cache_home(cache_dir), desc or "map"), watched, report).kept
        assert kept is not None
        made = open_dataset(
            kept.files,
            kept.schema,
            kept.fingerprint,
            info=getattr(part, "info", None),
            split=getattr(part, "split", None),
        )
        return _with_format_of(part, made)

    many_splits = hasattr(dataset, "items") and hasattr(dataset, "values")
    if destination is not None:
        if many_splits:
            raise InputError("A destination takes one split, and this is a DatasetDict.", hint="Map one of its splits.")
        with named(_MAP_NAMES if num_proc is not None else {}):
            held_bytes = process_bytes(os.getpid())
            how_mapped = choices(dataset)
            job = map_job(dataset, function, destination, how_mapped, given, held_bytes=held_bytes, name=name)
            return run_job(job, watched, report)
    with named({name: word for name, word in _CACHE_NAMES.items() if name not in options}):
        if many_splits:
            return type(dataset)({split: one(part) for split, part in dataset.items()})
        return one(dataset)


def _cached_job(source: RowSource, step: MapStep, how: How, home: Path, label: str) -> Job:
    """The job that fills the cache of this call."""
    output = CachedRows(step.options.writer_batch_size or 1000, lambda had: step.empty_schema(source.schema, had))
    facts = computed_facts("map", source, step, output, how.on_error)
    # The first part is the same for every version of the function, so that another one can go on.
    name = f"{digest_json(without_function(facts))[:12]}-{digest_json(facts)[:12]}"
    about = {"what": step.function.name, "source": source.name}
    layout = CacheLayout(home, name, about, adopt=how.keep_done)
    return Job(computed_spec("map", source, step, output, layout, how, label))


def _names(columns: str | Sequence[str] | None) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


def _format_of(dataset: Any) -> dict[str, Any]:
    """The format that a dataset of `datasets` gives its rows in."""
    format = getattr(dataset, "format", None)
    if not isinstance(format, dict) or format.get("type") is None:
        return {}
    return {
        "format_type": format["type"],
        "format_columns": tuple(format.get("columns") or ()) or None,
        "format_kwargs": dict(format.get("format_kwargs") or {}),
    }


def _with_format_of(dataset: Any, made: Any) -> Any:
    """What was made of a dataset gives its rows as the dataset does; new columns too."""
    format = getattr(dataset, "format", None)
    if not isinstance(format, dict):
        return made
    hidden = {*dataset.column_names} - {*format["columns"]}
    if format["type"] is None and not hidden:
        return made
    columns = [name for name in made.column_names if name not in hidden]
    return made.with_format(format["type"], columns, format["output_all_columns"], **format["format_kwargs"])


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
