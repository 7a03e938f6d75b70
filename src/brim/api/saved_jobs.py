"""Plans of computed jobs: the options of map, tokenize and embed in a file, and the job made from them again.

A plan contains plain values only: a function is "MODULE:FUNCTION", a tokenizer or model a name or a path. Options of a
machine (memory, workers, its state folder) are not in the plan. Options have the names on disk that they had first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, Literal

from brim.api.compute_api import embed_job, map_job, tokenize_job
from brim.errors import ArgumentError, InputError
from brim.execution.worker_process import caller_bytes
from brim.jobs.job import Job
from brim.jobs.saved_plans import JobPlan, SavedComputation, save_job_plan
from brim.options.build_options import OpenJobOptions
from brim.options.compute_options import (
    EmbedJobOptions,
    EmbedToDestinationOptions,
    MapFunctionOptions,
    MapJobOptions,
    MapToDestinationOptions,
    TokenizeJobOptions,
    TokenizeToDestinationOptions,
)
from brim.options.declare import declared_options, make_options, old_names, takes
from brim.options.groups import ComputedJobOptions, RunOptions
from brim.progress import Progress
from brim.storage.location import Access

JobOfCommand = MapToDestinationOptions | TokenizeToDestinationOptions | EmbedToDestinationOptions
_KINDS: dict[str, tuple[type[JobOfCommand], type[ComputedJobOptions]]] = {
    "map": (MapToDestinationOptions, MapJobOptions),
    "tokenize": (TokenizeToDestinationOptions, TokenizeJobOptions),
    "embed": (EmbedToDestinationOptions, EmbedJobOptions),
}
# Values that a plan stores outside of its options: the name on disk and the name of the option.
_STORED_NAMES = {
    "map": {"source": "dataset", "destination": "destination", "function": "function"},
    "tokenize": {name: name for name in ("source", "destination", "tokenizer", "column")},
    "embed": {name: name for name in ("source", "destination", "model", "column", "image")},
}
_NOT_IN_PARTS = ("fresh", "keep_done", "engine", "address")
# Arguments of `Dataset.map` that have no effect on a job with a destination.
_WITHOUT_EFFECT = {"keep_in_memory", "load_from_cache_file", "cache_file_name"}
_WITHOUT_EFFECT |= {"num_proc", "suffix_template", "new_fingerprint", "desc"}
# Options of the map step that plans of earlier versions contain, always with their defaults.
_OF_A_STEP = ("format_type", "format_columns", "format_kwargs", "side_effects")


def save_job(
    path: str | os.PathLike[str],
    verb: Literal["map", "tokenize", "embed"],
    source: str | os.PathLike[str],
    by: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    column: str | None = None,
    image: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SavedComputation:
    """Save a plan of map, tokenize or embed, which several machines then process in parts (`brim.open_job`).

    Args:
        path: Where to save the plan, a file or s3://BUCKET/KEY.
        verb: "map", "tokenize" or "embed".
        source: The rows, as for the function of that name.
        by: The function ("MODULE:FUNCTION"), the tokenizer or the model.
        destination: Where the result is written.
        column: Column of text.
        image: Column of images, for embed.
        progress: A `brim.Progress` that shows the progress of the first unit.
        options: The other options of `brim.map`, `brim.tokenize` or `brim.embed`.

    Returns:
        The saved plan.

    Raises:
        InputError: An option is wrong or cannot be saved.

    Examples:
        >>> saved = brim.save_job("clean.plan", "map", "corpus.jsonl", "steps.py:clean", "cleaned")
        >>> saved.part("1/2").parts
        2
    """
    if verb not in _KINDS:
        raise ArgumentError(f"verb= takes map, tokenize or embed, not {verb!r}.", option="verb")
    tool = {"map": "function", "tokenize": "tokenizer", "embed": "model"}[verb]
    options |= {_STORED_NAMES[verb]["source"]: source, tool: by, "destination": destination}
    options |= {} if column is None or verb == "map" else {"column": column}
    options |= {"image": image} if verb == "embed" else {}
    job_options: JobOfCommand = make_options(_KINDS[verb][0], "save_job", (), options)
    return write_plan(path, job_options, progress, measure_caller=caller_bytes)


def write_plan(
    path: str | os.PathLike[str],
    options: JobOfCommand,
    progress: Progress | None = None,
    *,
    measure_caller: Callable[[], int],
) -> SavedComputation:
    """Make the job that the options describe, and save it as a plan that can be processed in parts."""
    verb = next(verb for verb, (kind, _) in _KINDS.items() if isinstance(options, kind))
    for item in options.changed():
        if item.name in _NOT_IN_PARTS:
            raise InputError(
                f"{item.spelling} cannot be used for a plan that is processed in parts.", hint="Leave it out."
            )
    names = _STORED_NAMES[verb]
    stored: dict[str, Any] = {key: _portable(key, getattr(options, name)) for key, name in names.items()}
    stored["given"] = _stored(options, _KINDS[verb][1], {*names.values(), *declared_options(RunOptions)})
    if stored["given"].get("chat_template") is not None:
        stored["given"]["chat_template"] = os.path.abspath(stored["given"]["chat_template"])
    if verb == "map":
        stored["options"] = _stored(options, MapFunctionOptions, _WITHOUT_EFFECT)
    try:
        stored = json.loads(json.dumps(stored))
    except TypeError as error:
        raise InputError(
            f"A plan can only store texts, numbers and lists of them ({error}).",
            hint="Name a function by MODULE:FUNCTION, and its arguments by texts and numbers.",
        ) from error
    job, access = _make_job(options, measure_caller()), Access(options.endpoint_url)
    save_job_plan(path, job, stored, progress, access)
    return SavedComputation(path, lambda plan: job, access, measure_caller)


@takes(OpenJobOptions)
def open_job(options: OpenJobOptions) -> SavedComputation:
    """Open a saved plan of map, tokenize or embed: `part("3/100")`, `finish()`, `run()` and `status`.

    A plan of a build is opened by `brim.open_plan`. The memory that this process uses when it calls one of these
    methods is not counted as memory of the job.

    Returns:
        The saved plan.

    Raises:
        InputError: The file is not a plan of map, tokenize or embed, or its source has changed.

    Examples:
        >>> saved = brim.save_job("all.plan", "map", "corpus.jsonl", "steps.py:clean", "all")
        >>> brim.open_job("all.plan").run().rows
        3
    """
    return open_saved_job(options.path, Access(options.endpoint_url), options, caller_bytes)


def open_saved_job(
    path: str | os.PathLike[str], access: Access, running: RunOptions, measure_caller: Callable[[], int]
) -> SavedComputation:
    """Open a plan.

    `measure_caller` returns the bytes that the caller uses for other work: `caller_bytes`, or `no_caller`.
    """
    held_bytes = measure_caller()

    def job_of(plan: JobPlan) -> Job:
        return _make_job(_saved_options(plan, running), held_bytes)

    return SavedComputation(path, job_of, access, measure_caller)


def no_caller() -> int:
    """Return 0: the process of a command works only for its job, so no memory belongs to a caller."""
    return 0


def _saved_options(plan: JobPlan, running: RunOptions) -> JobOfCommand:
    """Combine the options of a saved plan with those of this run."""
    try:
        stored, (kind, _) = dict(plan.words), _KINDS[plan.verb]
        renamed = old_names(kind)
        values = {renamed.get(name, name): value for name, value in stored.pop("given").items()}
        step = stored.pop("options", {})
        values |= {name: value for name, value in step.items() if name not in _OF_A_STEP}
        values |= {_STORED_NAMES[plan.verb][name]: value for name, value in stored.items()}
        return kind(**values, **running.values(RunOptions))
    except (TypeError, KeyError) as error:
        raise InputError(
            f"This version of brim does not know an option of the plan ({error}).",
            hint="Save the plan again with this version.",
        ) from error


def _make_job(options: JobOfCommand, held_bytes: int) -> Job:
    if isinstance(options, MapToDestinationOptions):
        return map_job(options, held_bytes=held_bytes)
    if isinstance(options, TokenizeToDestinationOptions):
        return tokenize_job(options, note=lambda text: None, held_bytes=held_bytes)
    return embed_job(options, held_bytes=held_bytes)


def _stored(options: JobOfCommand, group: type[Any], left_out: set[str]) -> dict[str, Any]:
    """Return the values of a group under the names on disk."""
    items = [item for item in declared_options(group).values() if item.name not in left_out]
    return {item.option.old or item.name: getattr(options, item.name) for item in items}


def _portable(name: str, value: Any) -> Any:
    """Return a value as other machines read it: absolute paths; objects in memory are refused."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise InputError(
            f"A plan must name its {name}: an object in memory cannot be saved.",
            hint="Write a path, or MODULE:FUNCTION.",
        )
    text = os.fspath(value)
    if "://" in text:
        return text
    file, colon, function = text.rpartition(":")
    if colon and name in ("function", "model") and os.path.isfile(file):  # FILE.py:FUNCTION
        return f"{os.path.abspath(file)}:{function}"
    return os.path.abspath(text) if name in ("source", "destination") or os.path.exists(text) else text
