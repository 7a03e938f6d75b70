"""Plans of computed jobs: map, tokenize and embed as words in a file, and the job made again from them.

Nothing but words is kept: a function is "MODULE:FUNCTION", a tokenizer or model a name or a path. What a machine may
take (memory, workers, where its state is) is its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Literal, Unpack

from brim.api.compute_api import embed_job, map_job, tokenize_job
from brim.api.job_options import (
    ComputeGiven,
    EmbedGiven,
    MapGiven,
    Running,
    RunningGiven,
    TokenizeGiven,
    as_text,
    spelled_out,
)
from brim.buckets.bucket_address import Access
from brim.choices import one_of
from brim.errors import InputError
from brim.jobs.job import Job
from brim.jobs.unit_parts import JobPlan, SavedComputation, save_job_plan
from brim.progress import Progress
from brim.schedule.worker_process import caller_bytes
from brim.steps.map_options import MapOptions

_GIVEN: dict[str, type[ComputeGiven]] = {"map": MapGiven, "tokenize": TokenizeGiven, "embed": EmbedGiven}
_OF_A_MACHINE = ("memory", "workers", "state", "stop_file", "stop")
_NOT_IN_PARTS = ("fresh", "keep_done", "engine", "address")


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
    """Write a plan of map, tokenize or embed, which machines then do in parts (`open_job`).

    `by` is the function ("MODULE:FUNCTION"), the tokenizer or the model; `options` are those of the verb's function.
    """
    one_of("verb", verb, tuple(_GIVEN))
    held_bytes = caller_bytes()
    known = {field.name for field in fields(MapOptions)} if verb == "map" else set()
    of_map = MapOptions(**{name: value for name, value in options.items() if name in known})
    given: Any = _GIVEN[verb](**{name: value for name, value in options.items() if name not in known})
    named: dict[str, Any] = {"source": source, "destination": destination}
    if verb == "map":
        named["function"] = by
        job = map_job(options=of_map, given=given, held_bytes=held_bytes, **named)
        return write_plan(path, job, given, named, of_map, progress, held=caller_bytes)
    if verb == "tokenize":
        named |= {"tokenizer": by, "column": column or "text"}
        job, _ = tokenize_job(given=given, note=lambda text: None, held_bytes=held_bytes, **named)
    else:
        named |= {"model": by, "column": column, "image": image}
        job = embed_job(given=given, held_bytes=held_bytes, **named)
    return write_plan(path, job, given, named, progress=progress, held=caller_bytes)


def write_plan(
    path: str | os.PathLike[str],
    job: Job,
    given: ComputeGiven,
    named: Mapping[str, Any],
    options: MapOptions | None = None,
    progress: Progress | None = None,
    *,
    held: Callable[[], int],
) -> SavedComputation:
    """Save what a job is, for parts. `named` are the words that the verb's own function takes."""
    for name in _NOT_IN_PARTS:
        if getattr(given, name) != _default(given, name):
            raise InputError(f"--{name.replace('_', '-')} is not for a plan that is done in parts.")
    said = {field.name: getattr(given, field.name) for field in fields(given) if field.name not in _OF_A_MACHINE}
    words = {**{name: _kept(name, value) for name, value in named.items()}, "given": said}
    if options is not None:
        words["options"] = asdict(options)
    try:
        words = json.loads(json.dumps(words))
    except TypeError as error:
        raise InputError(
            f"A plan holds plain values only, and one of the options is none ({error}).",
            hint="Name a function by MODULE:FUNCTION, and give it text and numbers.",
        ) from error
    access = Access(given.endpoint_url)
    save_job_plan(path, job, words, progress, access)
    return SavedComputation(path, lambda plan: job, access, held)


@spelled_out(RunningGiven)
def open_job(
    path: str | os.PathLike[str], *, endpoint_url: str | None = None, **options: Unpack[Running]
) -> SavedComputation:
    """A plan of map, tokenize or embed that was saved, as this machine works on it: `part("3/100")` computes a part,
    `finish()` puts together and publishes what all parts computed, `run()` does all that is missing, `status`
    tells how far it is. `endpoint_url` is the store that the plan itself is in. What this process holds at each of
    these calls is not counted as `memory` of the job.
    """
    return opened_job(path, Access(endpoint_url), RunningGiven(**options), caller_bytes)


def opened_job(
    path: str | os.PathLike[str], access: Access, running: RunningGiven, held: Callable[[], int]
) -> SavedComputation:
    """As above. `held` tells what is held beside the job by whoever calls: `caller_bytes`, or `no_caller`."""
    held_bytes = held()
    return SavedComputation(path, lambda plan: _job(plan, running, held_bytes), access, held)


def no_caller() -> int:
    """What is held beside a job of the command line: its process is there for the job alone."""
    return 0


def _job(plan: JobPlan, running: RunningGiven, held_bytes: int) -> Job:
    try:
        words = dict(plan.words)
        here = {name: getattr(running, name) for name in _OF_A_MACHINE}
        given: Any = replace(_GIVEN[plan.verb](**words.pop("given")), **here)
        options: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in words.pop("options", {}).items()
        }
        if plan.verb == "map":
            return map_job(options=MapOptions(**options), given=given, held_bytes=held_bytes, **words)
        if plan.verb == "tokenize":
            return tokenize_job(given=given, note=lambda text: None, held_bytes=held_bytes, **words)[0]
        return embed_job(given=given, held_bytes=held_bytes, **words)
    except (TypeError, KeyError) as error:
        raise InputError(
            f"The plan has words that this brim does not know ({error}).", hint="Save it again with this version."
        ) from error


def _kept(name: str, value: Any) -> Any:
    """A word as other machines understand it: paths from the root of the file system, objects not at all."""
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise InputError(
            f"A plan that is done in parts names its {name}; it cannot hold one that is in memory.",
            hint="Give a path, or MODULE:FUNCTION.",
        )
    text = as_text(value) or ""
    if "://" in text:
        return text
    file, colon, called = text.rpartition(":")
    if colon and name in ("function", "model") and os.path.isfile(file):  # FILE.py:FUNCTION
        return f"{os.path.abspath(file)}:{called}"
    return os.path.abspath(text) if name in ("source", "destination") or os.path.exists(text) else text


def _default(given: ComputeGiven, name: str) -> Any:
    return next(field.default for field in fields(given) if field.name == name)
