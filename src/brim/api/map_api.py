"""Replacements for `ds.map` and `ds.filter`: the same arguments in the same order, with a memory limit and resume."""

from __future__ import annotations

import functools
import os
import re
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pyarrow as pa

from brim.api.compute_api import map_job, run_job, start_worker
from brim.api.overloads import refuse_without_destination, with_optional_destination
from brim.api.recorded_run import shown
from brim.api.row_reading import row_options
from brim.compute.outputs.output import CachedRows
from brim.compute.rows.open_rows import open_rows
from brim.compute.rows.unit import RowSource
from brim.compute.steps.functions import AtEnd
from brim.compute.steps.map_options import NO_COLUMNS, UNCHANGED, MapStepOptions
from brim.compute.steps.map_step import INDICES, FilterStep, MapStep
from brim.compute.steps.row_features import import_datasets
from brim.compute.steps.step_process import make_step
from brim.errors import ArgumentError, InputError, named
from brim.execution.worker_process import caller_bytes
from brim.jobs.cache_entries import cache_home, cache_key, cache_max, open_dataset, remove_folder, trim_caches
from brim.jobs.destination_paths import cache_paths
from brim.jobs.job import Job
from brim.jobs.preflight import ComputePlan, JobSettings, job_settings
from brim.jobs.results import MapResult
from brim.jobs.shard_set import without_function
from brim.options.compute_options import (
    SUFFIX,
    FilterFunctionOptions,
    FilterRowsOptions,
    MapFunctionOptions,
    MapToCacheOptions,
    MapToDestinationOptions,
    RowOutputOptions,
)
from brim.options.declare import declared_options, takes
from brim.plans.fingerprint import digest_json
from brim.progress import Progress
from brim.sources.datasets_private import format_of_stream, is_stream, with_rows

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_MAP_NAMES = {"workers": "num-proc"}
_CACHE_NAMES = {**_MAP_NAMES, "fresh": "load_from_cache_file=False"}


@takes(MapToDestinationOptions, "map")
def _map(options: MapToDestinationOptions) -> MapResult:
    call = _Call(options, _MAP_NAMES if options.num_proc is not None else {})
    if options.with_rank and options.engine != "local":
        raise InputError("with_rank= cannot be used with --engine=ray.", hint="Leave out one of them.")
    if _is_dict(options.dataset):
        raise InputError("A destination has one split, and this is a DatasetDict.", hint="Map one of its splits.")
    with call.option_names():
        resolved = call.resolved
        start_worker(MapStep, resolved.engine, resolved.workers)
        job = map_job(resolved, held_bytes=caller_bytes(), dataset_format=_format_of(options.dataset))
        return run_job(job, call.progress, options.report)


@takes(MapToCacheOptions, "map")
def _map_to_cache(options: MapToCacheOptions) -> Dataset | DatasetDict:
    """Apply a function to every row or batch: `Dataset.map` within a memory limit, which resumes after a crash.

    The arguments and the results are those of `Dataset.map`; below are those that differ from it. Called again, the
    result is read from the cache. Of several processes that make the same call, one computes and the others wait. An
    IterableDataset is computed at once, into a Dataset. `memory` is the limit of the job; what this process uses when
    it calls is not counted. An exception of the function is raised with its type, and is a `brim.UserFunctionError`.

    Returns:
        A Dataset or DatasetDict that is mapped from the cache; with a destination a `brim.MapResult`.

    Raises:
        InputError: An argument or a column is wrong.
        UserFunctionError: The function failed.
        MemoryLimitError: Not even one batch fits the limit.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.map(dataset, lambda row: {"n": 2 * row["n"]}, memory="500MB", progress=False)["n"][:]
        [2, 4, 6]
        >>> brim.map("corpus.jsonl", "steps.py:clean", destination="clean", memory="500MB", progress=False).rows
        3
    """
    call = _Call(options, _CACHE_NAMES)
    refuse_without_destination(call.resolved, *declared_options(RowOutputOptions))
    function = options.function

    def step_of(part: Any, split: str | None) -> MapStep:
        own = AtEnd(function, split) if options.with_split and callable(function) else function
        mapping = MapStepOptions(**options.values(MapFunctionOptions), **_format_of(part), side_effects=_is_rows(part))
        return make_step(own, mapping) if isinstance(own, str) else MapStep(own, mapping)

    return call.run(MapStep, step_of, _mapped, removed=options.remove_columns or ())


map = with_optional_destination("map", _map, _map_to_cache)


@takes(FilterRowsOptions)
def filter(options: FilterRowsOptions) -> Dataset | DatasetDict:
    """Keep the rows for which a function is true: `Dataset.filter` within a memory limit, which resumes after a crash.

    The arguments and the results are those of `Dataset.filter`; below are those that differ from it. Of a Dataset or
    DatasetDict only the numbers of the rows are written, as `datasets` does; of other sources the rows. Called again,
    the result is read from the cache.

    Returns:
        A Dataset or DatasetDict that is mapped from the cache.

    Raises:
        InputError: An argument or a column is wrong.
        UserFunctionError: The function failed.

    Examples:
        >>> dataset = datasets.Dataset.from_dict({"n": [1, 2, 3]})
        >>> brim.filter(dataset, lambda row: row["n"] > 1, memory="500MB", progress=False)["n"][:]
        [2, 3]
    """
    call = _Call(options, _CACHE_NAMES)
    refuse_without_destination(call.resolved, *declared_options(RowOutputOptions))
    function = options.function

    def step_of(part: Any, split: str | None) -> MapStep:
        if getattr(part, "list_indexes", list)():
            raise InputError(
                "The dataset has indexes, which would be wrong after a filter.", hint="Remove them: ds.drop_index(…)."
            )
        if isinstance(function, str):
            raise InputError("brim.filter takes a function, not its name.", hint="Import the function and pass it.")
        mapping = MapStepOptions(**options.values(FilterFunctionOptions), **_format_of(part))
        return FilterStep(function, mapping, numbers=_is_rows(part))

    result: Dataset | DatasetDict = call.run(FilterStep, step_of, _filtered)
    return result


OpenResult = Callable[[Any, Any, str | None], Any]


_Options = TypeVar("_Options", bound=MapToDestinationOptions | MapToCacheOptions | FilterRowsOptions)


class _Call(Generic[_Options]):
    """One call, for a dataset or for each of several splits.

    `names` are the arguments of `datasets` that errors name instead of brim's options.
    """

    def __init__(self, options: _Options, names: Mapping[str, str]) -> None:
        self.options, self.progress, self._names = options, shown(options.progress), names
        self._label = options.desc or ("filter" if isinstance(options, FilterRowsOptions) else "map")
        self._note_without_effect()
        if getattr(options, "with_split", False) and not _is_dict(options.dataset):
            raise InputError("with_split= can only be used with a DatasetDict.", hint="Leave it out.")

    def option_names(self) -> AbstractContextManager[None]:
        changed = {item.name for item in self.options.changed()}
        return named({option: name for option, name in self._names.items() if option not in changed})

    @cached_property
    def resolved(self) -> _Options:
        """Return the options with `workers` and `fresh` set from `num_proc` and `load_from_cache_file`."""
        options = self.options
        if options.num_proc is not None and options.workers is not None:
            raise InputError("num_proc= and workers= are the same.", hint="Leave out one of them.")
        loads = options.load_from_cache_file
        if loads is None and (datasets := sys.modules.get("datasets")) is not None:
            loads = datasets.is_caching_enabled()
        with self.option_names():
            return replace(
                options, workers=options.workers or options.num_proc or None, fresh=options.fresh or loads is False
            )

    def _note_without_effect(self) -> None:
        """Print a note about arguments of `datasets` that have no effect in brim; they do not change the rows."""
        options = self.options
        is_set = {
            "keep_in_memory": options.keep_in_memory,
            "cache_file_name": options.cache_file_name is not None,
            "cache_file_names": options.cache_file_names is not None,
            "suffix_template": options.suffix_template != SUFFIX,
        }
        fields = {field for _, field, _, _ in string.Formatter().parse(options.suffix_template) if field}
        if fields != {"rank", "num_proc"}:
            raise ArgumentError(
                "suffix_template must have exactly the fields {rank} and {num_proc}.", hint="Leave it out."
            )
        if options.cache_file_name is not None and not os.path.splitext(options.cache_file_name)[1]:
            raise ArgumentError(f"cache_file_name={options.cache_file_name!r} has no extension.", hint="Leave it out.")
        if is_set["keep_in_memory"] and (is_set["cache_file_name"] or is_set["cache_file_names"]):
            raise ArgumentError("keep_in_memory and cache_file_name exclude each other.", hint="Leave one of them out.")
        if useless := [name for name, value in is_set.items() if value]:
            predicate = "has no effect" if len(useless) == 1 else "have no effect"
            self.progress.note(
                f"{' and '.join(useless)} {predicate}: the result is mapped from brim's cache (cache_dir=)"
            )
        fingerprint = options.new_fingerprint
        if fingerprint is not None and not re.fullmatch(r"[^<>:/\\|?*\0]{1,64}", fingerprint):
            raise ArgumentError(
                f"new_fingerprint={fingerprint!r} is not a valid fingerprint.",
                hint="Use up to 64 characters that are allowed in a file name.",
            )

    def run(
        self,
        kind: type[MapStep],
        step_of: Callable[[Any, str | None], MapStep],
        open_result: OpenResult,
        removed: Sequence[str] = (),
    ) -> Any:
        """Compute the result for a dataset or for each split. A split without rows only loses its `removed` columns."""
        dataset = self.options.dataset
        with self.option_names():
            resolved = self.resolved
            start_worker(kind, resolved.engine, resolved.workers)
            # Check options before opening the source. The memory in use now belongs to the caller, not to the job.
            settings = job_settings(JobSettings, resolved, held_bytes=caller_bytes())
            cache_max()
            parts = dict(dataset.items()) if _is_dict(dataset) else {None: dataset}
            jobs, total_bytes = {}, []
            for split, part in parts.items():
                source, jobs[split] = self._job(part, split, settings, step_of)
                total_bytes.append(source.total_bytes)
            several = len(parts) > 1
            with self.progress.joined(self._label, total_bytes) if several else nullcontext(self.progress) as watched:
                results = {}
                for split, part in parts.items():
                    if _is_rows(part) and not len(part):  # `Dataset.map` does not call the function either
                        results[split] = part.remove_columns(list(removed)) if removed else part
                    else:
                        results[split] = self._run_part(part, jobs[split], watched, open_result)
        return import_datasets("several splits").DatasetDict(results) if _is_dict(dataset) else results[None]

    def _job(
        self, part: Any, split: str | None, settings: JobSettings, step_of: Callable[[Any, str | None], MapStep]
    ) -> tuple[RowSource, Job]:
        """Return the rows of a dataset or split, and the job that fills the cache of this call."""
        step, name = step_of(part, split), self.options.name
        name = name if name is None or split is None else f"{name}/{split}"
        source = open_rows(part, row_options(self.options, part, name))
        step.options.check(source.schema)
        if not step.digest.stable:
            self.progress.note(
                "brim cannot detect whether this function has changed, so a later call will not find its result"
            )
        output = CachedRows(step.options.writer_batch_size or 1000, functools.partial(step.empty_schema, source.schema))
        plan = ComputePlan("map", source, step, output, settings.on_error)
        facts = cache_key(plan.facts)
        # The first part is the same for every version of the function, so that a changed function can resume.
        folder = f"{digest_json(without_function(facts))[:12]}-{digest_json(facts)[:12]}"
        about = {"what": step.function.name, "source": source.name}
        paths = cache_paths(cache_home(self.options.cache_dir), folder, about, adopts=settings.keep_done)
        return source, Job(plan, paths, settings, label=self._label)

    def _run_part(self, part: Any, job: Job, watched: Progress, open_result: OpenResult) -> Any:
        cached = run_job(job, watched, self.options.report).cached
        assert cached is not None
        result = open_result(part, cached, self.options.new_fingerprint)
        if result is part:  # called for its side effects: the next call must repeat them, so nothing stays cached
            remove_folder(job.paths.state_dir)
        trim_caches(cache_home(self.options.cache_dir))
        return result


def _mapped(part: Any, cached: Any, fingerprint: str | None) -> Any:
    if cached.schema.names == [UNCHANGED]:
        return part
    if cached.schema.names == [NO_COLUMNS]:
        cached = replace(cached, files=(), schema=pa.schema([]))
    # A pandas table has an `info` too.
    info, split = (part.info, part.split) if _is_rows(part) or _is_stream(part) else (None, None)
    mapped = open_dataset(cached.files, cached.schema, cached.fingerprint, info=info, split=split, name=fingerprint)
    return _with_format_of(part, mapped)


def _filtered(part: Any, cached: Any, fingerprint: str | None) -> Any:
    if cached.schema.names != [INDICES]:
        return _mapped(part, cached, fingerprint)
    numbers = open_dataset(cached.files, cached.schema, cached.fingerprint, name=fingerprint)
    return with_rows(part, numbers)


def _is_dict(dataset: Any) -> bool:
    return isinstance(dataset, Mapping)  # a pandas table has `items` and `values` too


def _is_rows(part: Any) -> bool:
    """Return whether it is a Dataset, not a stream: its rows exist and can be returned unchanged."""
    return type(part).__module__.split(".")[0] == "datasets" and not is_stream(part)


def _is_stream(part: Any) -> bool:
    return type(part).__module__.split(".")[0] == "datasets" and is_stream(part)


def _format_of(dataset: Any) -> dict[str, Any]:
    """Return the options of a step that give its function rows in the format set on the dataset."""
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


def _with_format_of(dataset: Any, result: Any) -> Any:
    """Return a result with the format of the dataset that it was computed from, also for new columns."""
    if _is_stream(dataset):
        return result.with_format(format_of_stream(dataset))
    format = getattr(dataset, "format", None)
    if not isinstance(format, dict):
        return result
    hidden = {*dataset.column_names} - {*format["columns"]}
    if format["type"] is None and not hidden:
        return result
    columns = [name for name in result.column_names if name not in hidden]
    return result.with_format(format["type"], columns, format["output_all_columns"], **format["format_kwargs"])
