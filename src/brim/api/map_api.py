"""In place of `ds.map` and `ds.filter`: the same words in their order, within a limit, and it goes on after a crash."""

from __future__ import annotations

import functools
import os
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import pyarrow as pa

from brim.api.compute_api import map_job, run_job, start_worker
from brim.api.job_options import MapGiven, MapKeywords, refuse_without_place, spelled_out
from brim.api.recorded_run import Together, shown
from brim.errors import ArgumentError, InputError, named
from brim.jobs.caches import CacheLayout, cache_home, cache_key, cache_max, open_dataset, remove_folder, trim_caches
from brim.jobs.content import without_function
from brim.jobs.job import Computed, Job
from brim.jobs.spec import How, computed_facts, computed_spec
from brim.outputs.output import CachedRows
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.records import dataclass
from brim.rows.open_rows import open_rows
from brim.rows.unit import RowSource
from brim.schedule.worker_process import caller_bytes
from brim.sources.datasets_private import format_of_stream, is_stream, with_rows
from brim.steps.functions import AtEnd
from brim.steps.map_options import NO_COLUMNS, UNCHANGED, InputKind, MapOptions
from brim.steps.map_step import INDICES, FilterStep, MapStep
from brim.steps.row_features import import_datasets
from brim.steps.step_process import make_step

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

Columns = str | Sequence[str] | None
Function = Callable[..., Any]
_SUFFIX = "_{rank:05d}_of_{num_proc:05d}"
_MAP_NAMES = {"workers": "num-proc"}
_CACHE_NAMES = {**_MAP_NAMES, "fresh": "load_from_cache_file=False"}


@overload
def map(
    dataset: Any,
    function: Function | str | None = ...,
    with_indices: bool = ...,
    with_rank: bool = ...,
    input_columns: Columns = ...,
    batched: bool = ...,
    batch_size: int | None = ...,
    drop_last_batch: bool = ...,
    remove_columns: Columns = ...,
    keep_in_memory: bool = ...,
    load_from_cache_file: bool | None = ...,
    cache_file_name: str | None = ...,
    writer_batch_size: int | None = ...,
    features: Any = ...,
    disable_nullable: bool = ...,
    fn_kwargs: dict[str, Any] | None = ...,
    num_proc: int | None = ...,
    suffix_template: str = ...,
    new_fingerprint: str | None = ...,
    desc: str | None = ...,
    try_original_type: bool | None = ...,
    on_mixed_types: Literal["use_json"] | None = ...,
    *,
    destination: str | os.PathLike[str],
    splittable: bool | None = ...,
    input: InputKind = ...,
    name: str | None = ...,
    progress: Progress | bool | None = ...,
    report: str | os.PathLike[str] | None = ...,
    **options: Unpack[MapKeywords],
) -> Computed: ...
@overload
def map(
    dataset: Any,
    function: Function | str | None = ...,
    with_indices: bool = ...,
    with_rank: bool = ...,
    input_columns: Columns = ...,
    batched: bool = ...,
    batch_size: int | None = ...,
    drop_last_batch: bool = ...,
    remove_columns: Columns = ...,
    keep_in_memory: bool = ...,
    load_from_cache_file: bool | None = ...,
    cache_file_name: str | None = ...,
    writer_batch_size: int | None = ...,
    features: Any = ...,
    disable_nullable: bool = ...,
    fn_kwargs: dict[str, Any] | None = ...,
    num_proc: int | None = ...,
    suffix_template: str = ...,
    new_fingerprint: str | None = ...,
    desc: str | None = ...,
    try_original_type: bool | None = ...,
    on_mixed_types: Literal["use_json"] | None = ...,
    *,
    with_split: bool = ...,
    cache_file_names: Mapping[str, str | None] | None = ...,
    destination: None = ...,
    splittable: bool | None = ...,
    input: InputKind = ...,
    cache_dir: str | os.PathLike[str] | None = ...,
    name: str | None = ...,
    progress: Progress | bool | None = ...,
    report: str | os.PathLike[str] | None = ...,
    **options: Unpack[MapKeywords],
) -> Dataset | DatasetDict: ...
@spelled_out(MapGiven)
def map(
    dataset: Any,
    function: Function | str | None = None,
    with_indices: bool = False,
    with_rank: bool = False,
    input_columns: Columns = None,
    batched: bool = False,
    batch_size: int | None = 1000,
    drop_last_batch: bool = False,
    remove_columns: Columns = None,
    keep_in_memory: bool = False,
    load_from_cache_file: bool | None = None,
    cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    features: Any = None,
    disable_nullable: bool = False,
    fn_kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    suffix_template: str = _SUFFIX,
    new_fingerprint: str | None = None,
    desc: str | None = None,
    try_original_type: bool | None = True,
    on_mixed_types: Literal["use_json"] | None = "use_json",
    *,
    with_split: bool = False,
    cache_file_names: Mapping[str, str | None] | None = None,
    destination: str | os.PathLike[str] | None = None,
    splittable: bool | None = None,
    input: InputKind = "python",
    cache_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: Progress | bool | None = None,
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[MapKeywords],
) -> Any:
    """Apply a function to every row or batch: the arguments and the results of `Dataset.map`, within `memory`.

    `dataset` is a datasets.Dataset or DatasetDict, the path of JSONL, CSV, Parquet, Arrow or text files, or an
    iterator of dicts (or a function that makes one). Files may lie in a bucket, s3://BUCKET/PREFIX: `endpoint_url` is
    the store if it is not Amazon's, `anonymous` reads without credentials. The result is a Dataset that is
    memory-mapped from `cache_dir`. Called again, it is read from there; after a crash, finished units are not done
    again. Called by several processes at once, one computes and the others wait for it. An iterator is known again by
    `name`, together with the code that makes it and the values around that. An IterableDataset is computed now, into a
    Dataset.

    With a `destination` (a folder, hf://datasets/ORG/NAME, s3://BUCKET/PREFIX) the rows go there as shards, as
    `brim map` does it. `function` may be "MODULE:FUNCTION", which workers alone import.

    `memory` is for the job: what this process holds when it calls is not counted. `num_proc` and `workers` are one.
    `with_rank` gives the number of the worker, from 0.

    `input="arrow"` gives the function a pyarrow.Table, "numpy" a dict of arrays. `splittable=True` says that a batch
    done in parts gives the same rows, so that brim may do that when memory is short or rows fail. `on_error="skip"`
    leaves out rows on which the function fails (a whole batch, unless it is splittable), "quarantine" keeps them in a
    file. `keep_done=True` keeps what was finished although the function has changed since.

    What the function raises is raised: it is of that type, and a `brim.FunctionFailed`.
    """
    watched = shown(progress)
    call = _Call(
        watched,
        _given(options, num_proc, load_from_cache_file),
        cache_dir,
        name,
        report,
        desc or "map",
        new_fingerprint,
        renames=_CACHE_NAMES if destination is None else _MAP_NAMES if num_proc is not None else {},
        spared=frozenset(options),
        function=function,
    )
    call.without_effect(keep_in_memory, cache_file_name, cache_file_names, suffix_template)
    _refuse_misplaced(dataset, with_split, input_columns, batched)
    mapped = MapOptions(
        batched=batched,
        batch_size=batch_size,
        drop_last_batch=drop_last_batch,
        writer_batch_size=writer_batch_size,
        remove_columns=_names(remove_columns),
        with_indices=with_indices,
        with_rank=with_rank,
        input_columns=_names(input_columns),
        fn_kwargs=fn_kwargs or {},
        features=features,
        input=input,
        splittable=splittable,
        disable_nullable=disable_nullable,
        try_original_type=try_original_type is not False,
        on_mixed_types=on_mixed_types,
    )
    start_worker(MapStep, call.given.engine, call.given.workers)
    if destination is not None:
        if with_rank and call.given.engine != "local":
            raise InputError("with_rank= is for the workers of one machine.", hint="Leave it out, or --engine=ray.")
        if _is_dict(dataset):
            raise InputError("A destination takes one split, and this is a DatasetDict.", hint="Map one of its splits.")
        with call.named():
            held = caller_bytes()
            how_mapped = replace(mapped, **_format_of(dataset))
            return run_job(
                map_job(dataset, function, destination, how_mapped, call.given, held_bytes=held, name=name),
                watched,
                report,
            )
    refuse_without_place(call.given, "format", "rows_per_shard", "split")

    def step_of(part: Any, split: str | None) -> MapStep:
        own = AtEnd(function, split) if with_split and callable(function) else function
        settings = replace(mapped, **_format_of(part), side_effects=_is_rows(part))
        return make_step(own, settings) if isinstance(own, str) else MapStep(own, settings)

    return call.run(dataset, step_of, _mapped, removed=mapped.remove_columns or ())


@spelled_out(MapGiven)
def filter(
    dataset: Any,
    function: Function | str | None = None,
    with_indices: bool = False,
    with_rank: bool = False,
    input_columns: Columns = None,
    batched: bool = False,
    batch_size: int | None = 1000,
    keep_in_memory: bool = False,
    load_from_cache_file: bool | None = None,
    cache_file_name: str | None = None,
    writer_batch_size: int | None = 1000,
    fn_kwargs: dict[str, Any] | None = None,
    num_proc: int | None = None,
    suffix_template: str = _SUFFIX,
    new_fingerprint: str | None = None,
    desc: str | None = None,
    *,
    cache_file_names: Mapping[str, str | None] | None = None,
    input: InputKind = "python",
    cache_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    progress: Progress | bool | None = None,
    report: str | os.PathLike[str] | None = None,
    **options: Unpack[MapKeywords],
) -> Dataset | DatasetDict:
    """The rows for which a function is true: the arguments and the results of `Dataset.filter`, within `memory`.

    `dataset` is what `map` takes. Of a Dataset or DatasetDict only the numbers of its rows are written, as the
    original does; of anything else (files, an iterator, an IterableDataset) the rows themselves. Called again it is
    read from the cache; after a crash, finished units are not done again.
    """
    call = _Call(
        shown(progress),
        _given(options, num_proc, load_from_cache_file),
        cache_dir,
        name,
        report,
        desc or "filter",
        new_fingerprint,
        renames=_CACHE_NAMES,
        spared=frozenset(options),
        function=function,
    )
    call.without_effect(keep_in_memory, cache_file_name, cache_file_names, suffix_template)
    refuse_without_place(call.given, "format", "rows_per_shard", "split")
    filtered = MapOptions(
        batched=batched,
        batch_size=batch_size,
        writer_batch_size=writer_batch_size,
        with_indices=with_indices,
        with_rank=with_rank,
        input_columns=_names(input_columns),
        fn_kwargs=fn_kwargs or {},
        input=input,
    )

    def step_of(part: Any, split: str | None) -> MapStep:
        if getattr(part, "list_indexes", list)():
            raise InputError(
                "The dataset has indexes attached, which a filter would make wrong.", hint="ds.drop_index(…) first."
            )
        settings = replace(filtered, **_format_of(part))
        if isinstance(function, str):
            raise InputError("brim.filter takes a function, not its name.", hint="Import it and give it.")
        return FilterStep(function, settings, numbers=_is_rows(part))

    start_worker(FilterStep, call.given.engine, call.given.workers)
    made: Dataset | DatasetDict = call.run(dataset, step_of, _filtered)
    return made


Opened = Callable[[Any, Any, str | None], Any]


@dataclass(frozen=True)
class _Call:
    """One call, for a dataset or for each of several splits."""

    watched: Progress
    given: MapGiven
    cache_dir: str | os.PathLike[str] | None
    name: str | None
    report: str | os.PathLike[str] | None
    label: str
    new_fingerprint: str | None
    renames: Mapping[str, str]
    spared: frozenset[str]  # words that were said as brim has them
    function: Any = None

    def named(self) -> Any:
        return named({name: word for name, word in self.renames.items() if name not in self.spared})

    def without_effect(
        self,
        keep_in_memory: bool,
        cache_file_name: str | None,
        cache_file_names: Mapping[str, str | None] | None,
        suffix_template: str,
    ) -> None:
        """Words of the original that decide no row: they are taken, and one line tells that they do nothing here."""
        said = {
            "keep_in_memory": keep_in_memory,
            "cache_file_name": cache_file_name is not None,
            "cache_file_names": cache_file_names is not None,
            "suffix_template": suffix_template != _SUFFIX,
        }
        fields = {field for _, field, _, _ in string.Formatter().parse(suffix_template) if field}
        if fields != {"rank", "num_proc"}:
            raise ArgumentError("suffix_template has not exactly the fields rank and num_proc.")
        if cache_file_name is not None and not os.path.splitext(cache_file_name)[1]:
            raise ArgumentError(f"cache_file_name={cache_file_name!r} has no extension.", hint="Leave it out.")
        if keep_in_memory and (cache_file_name is not None or cache_file_names is not None):
            raise ArgumentError("keep_in_memory and cache_file_name exclude each other.", hint="Leave one of them out.")
        if useless := [word for word, was_said in said.items() if was_said]:
            one = len(useless) == 1
            words = f"{' and '.join(useless)} {'has' if one else 'have'} no effect"
            self.watched.note(f"{words}: the result is mapped from brim's cache (cache_dir=)")
        if self.new_fingerprint is not None and not re.fullmatch(r"[^<>:/\\|?*\0]{1,64}", self.new_fingerprint):
            raise ArgumentError(
                f"new_fingerprint={self.new_fingerprint!r} cannot be one.",
                hint="It has up to 64 characters that may be part of a file's name.",
            )

    def run(
        self,
        dataset: Any,
        step_of: Callable[[Any, str | None], MapStep],
        opened: Opened,
        removed: Sequence[str] = (),
    ) -> Any:
        """What comes of a dataset, or of each split. One without rows has nothing `removed` but columns."""
        with self.named():
            # What was said is looked at before the source is. What this process holds already is the caller's.
            how = self.given.how(caller_bytes())
            cache_max()
            parts = dict(dataset.items()) if _is_dict(dataset) else {None: dataset}
            jobs = {split: self._job(part, split, how, step_of) for split, part in parts.items()}
            with self._bar([source.total_bytes for source, _ in jobs.values()]) as watched:
                made = {
                    split: _emptied(part, removed)
                    if _is_empty(part)
                    else self._one(part, jobs[split][1], watched, opened)
                    for split, part in parts.items()
                }
        return import_datasets("several splits").DatasetDict(made) if _is_dict(dataset) else made[None]

    def _bar(self, total_bytes: list[int | None]) -> AbstractContextManager[Progress]:
        return nullcontext(self.watched) if len(total_bytes) == 1 else Together(self.watched, self.label, total_bytes)

    def _job(
        self, part: Any, split: str | None, how: How, step_of: Callable[[Any, str | None], MapStep]
    ) -> tuple[RowSource, Job]:
        step = step_of(part, split)
        name = self.name if self.name is None or split is None else f"{self.name}/{split}"
        source = open_rows(part, self.given.row_options(part, name))
        step.options.check(source.schema)
        if not step.digest.stable:
            self.watched.note(
                "brim cannot tell whether this function has changed, so its result will not be found again"
            )
        return source, _cached_job(source, step, how, cache_home(self.cache_dir), self.label)

    def _one(self, part: Any, job: Job, watched: Progress, opened: Opened) -> Any:
        kept = run_job(job, watched, self.report).kept
        assert kept is not None
        made = opened(part, kept, self.new_fingerprint)
        step = job.spec.step
        if isinstance(step, MapStep) and callable(self.function) and not step.give_back(self.function):
            self.watched.note(
                "the function changed itself in several workers: that stays there (num_proc=1 brings it back)"
            )
        if made is part:  # only its side effects were wanted: they are wanted again the next time
            remove_folder(job.spec.layout.state)
        trim_caches(cache_home(self.cache_dir))
        return made


def _mapped(part: Any, kept: Any, fingerprint: str | None) -> Any:
    if kept.schema.names == [UNCHANGED]:
        return part
    if kept.schema.names == [NO_COLUMNS]:
        kept = replace(kept, files=(), schema=pa.schema([]))
    own = _is_rows(part) or _is_stream(part)  # a pandas table has an `info` too
    info, split = (part.info, part.split) if own else (None, None)
    made = open_dataset(kept.files, kept.schema, kept.fingerprint, info=info, split=split, name=fingerprint)
    return _with_format_of(part, made)


def _filtered(part: Any, kept: Any, fingerprint: str | None) -> Any:
    if kept.schema.names != [INDICES]:
        return _mapped(part, kept, fingerprint)
    numbers = open_dataset(kept.files, kept.schema, kept.fingerprint, name=fingerprint)
    return with_rows(part, numbers)


def _given(options: Any, num_proc: int | None, load_from_cache_file: bool | None) -> MapGiven:
    given = MapGiven(**options)
    if num_proc is not None and given.workers is not None:
        raise InputError("num_proc= and workers= are the same.", hint="Give one of them.")
    workers = given.workers if num_proc is None else num_proc or None
    if load_from_cache_file is None and (datasets := sys.modules.get("datasets")) is not None:
        load_from_cache_file = datasets.is_caching_enabled()
    return replace(given, workers=workers, fresh=given.fresh or load_from_cache_file is False)


def _refuse_misplaced(dataset: Any, with_split: bool, input_columns: Any, batched: Any) -> None:
    """A DatasetDict has one argument more, in the middle: who gives the rest by position means something else."""
    if isinstance(input_columns, bool) or not isinstance(batched, bool | int):
        raise InputError(
            "Arguments after with_rank are in the order of Dataset.map, which DatasetDict.map has not.",
            hint="Give them by name: with_split=, input_columns=.",
        )
    if with_split and not _is_dict(dataset):
        raise InputError("with_split= is for a DatasetDict: this has no splits.", hint="Leave it out.")


def _is_dict(dataset: Any) -> bool:
    return isinstance(dataset, Mapping)  # a pandas table has `items` and `values` too


def _is_rows(part: Any) -> bool:
    """Whether it is a Dataset: rows that are there, and can be given back as they are."""
    return type(part).__module__.split(".")[0] == "datasets" and not is_stream(part)


def _is_stream(part: Any) -> bool:
    return type(part).__module__.split(".")[0] == "datasets" and is_stream(part)


def _is_empty(part: Any) -> bool:
    return _is_rows(part) and not len(part)


def _emptied(part: Any, removed: Sequence[str]) -> Any:
    """What the original makes of a Dataset without rows, whatever the function."""
    return part.remove_columns(list(removed)) if removed else part


def _cached_job(source: RowSource, step: MapStep, how: How, home: Path, label: str) -> Job:
    """The job that fills the cache of this call."""
    output = CachedRows(step.options.writer_batch_size or 1000, functools.partial(step.empty_schema, source.schema))
    verb = "map"
    facts = cache_key(computed_facts(verb, source, step, output, how.on_error))
    # The first part is the same for every version of the function, so that another one can go on.
    name = f"{digest_json(without_function(facts))[:12]}-{digest_json(facts)[:12]}"
    about = {"what": step.function.name, "source": source.name}
    layout = CacheLayout(home, name, about, adopt=how.keep_done)
    return Job(computed_spec(verb, source, step, output, layout, how, label))


def _names(columns: Columns) -> tuple[str, ...] | None:
    return (columns,) if isinstance(columns, str) else None if columns is None else tuple(columns)


def _format_of(dataset: Any) -> dict[str, Any]:
    """The format that a dataset of `datasets` gives its rows in."""
    if _is_stream(dataset):
        return {"format_type": format_of_stream(dataset)}
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
    if _is_stream(dataset):
        return made.with_format(format_of_stream(dataset))
    format = getattr(dataset, "format", None)
    if not isinstance(format, dict):
        return made
    hidden = {*dataset.column_names} - {*format["columns"]}
    if format["type"] is None and not hidden:
        return made
    columns = [name for name in made.column_names if name not in hidden]
    return made.with_format(format["type"], columns, format["output_all_columns"], **format["format_kwargs"])
