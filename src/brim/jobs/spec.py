"""What is to be done and how, for every verb, and the checks that all of them go through before anything runs.

An unknown value, an option that does not apply, a source that is its own destination, more than the Hub takes, a limit
that is too small: each is said here, once. What needs the destination's ledger (another dataset, files that brim did
not write) is looked at by the job (job.py), under its lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from brim.buckets.bucket_address import Access, BucketAddress
from brim.choices import at_least, one_of
from brim.errors import InputError
from brim.jobs.content import Content, PlanContent
from brim.jobs.layout import Layout, dataset_layout
from brim.memory.limit import Limit, effective_limit, usable_cores
from brim.outputs.output import Output
from brim.plans.describe_plan import BuildForecast
from brim.plans.fingerprint import digest_json
from brim.records import dataclass
from brim.rows.unit import RowSource
from brim.schedule.messages import OnError
from brim.schedule.scheduler import Scaling
from brim.sizes import parse_size
from brim.state.stop import Stop, heard_at_once, stop_file_lies
from brim.steps.step import Step
from brim.stores.destination import (
    Destination,
    HubAddress,
    HubOptions,
    check_shards,
    hub_limits,
    refuse_holder,
    refuse_source,
    refuse_within,
)

_VERSION = 1  # raise it when the same computed job would give other rows or bytes
_HUB_ONLY = ("config", "message", "public", "direct", "create_pull", "via")


@dataclass(frozen=True, slots=True)
class How:
    """How to run, apart from what. Nothing here but `on_error` decides a byte of the result."""

    memory: str | int | float | None = None
    workers: int | None = None
    on_error: OnError = "stop"
    fresh: bool = False
    update: bool = False  # what is unchanged of another dataset is kept
    append: bool = False  # rows come behind those that are there
    keep_done: bool = False  # a changed function continues where the earlier one ended
    state: str | None = None
    stop_file: str | None = None
    stop: Stop | None = None  # by which the caller may end it
    hub: HubOptions = field(default_factory=HubOptions)
    access: Access = field(default_factory=Access)  # to the bucket that is the destination
    scaling: Scaling = field(default_factory=Scaling)
    held_bytes: int = 0  # what this process holds for others: beside the limit, not within it

    def __post_init__(self) -> None:
        one_of("on-error", self.on_error, get_args(OnError))
        at_least("workers", self.workers, 1)
        if self.memory is not None:
            parse_size(self.memory)
        if self.fresh and self.update:
            raise InputError("Choose one of --fresh (start over) and --update (keep what is unchanged).")
        for name, other in (("fresh", self.fresh), ("update", self.update)):
            if self.append and other:
                raise InputError(f"Choose one of --append (rows come behind those that are there) and --{name}.")
        if self.append and self.hub.direct:
            raise InputError("--append is published in one step, so that --direct has no place with it.")
        if self.fresh and self.keep_done:
            raise InputError("Choose one of --fresh (start over) and --keep-done (keep what is done).")
        if self.stop_file:
            stop_file_lies(Path(self.stop_file))


@dataclass(frozen=True)
class Spec:
    """One job. Without a `step`, the shards of a plan are packaged as they are and `forecast` says what that takes;
    with one, rows go through it and become the `output`."""

    verb: str
    source: PlanContent | RowSource
    layout: Layout
    how: How
    limit: Limit
    step: Step | None = None
    output: Output | None = None
    forecast: BuildForecast | None = None
    label: str = ""  # what whoever watches is told instead of the verb

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What decides the result: the same facts are the same job."""
        if self.step is None or self.output is None:
            return self.source.facts
        assert not isinstance(self.source, PlanContent)
        return computed_facts(self.verb, self.source, self.step, self.output, self.how.on_error)

    @cached_property
    def fingerprint(self) -> str:
        return self.source.fingerprint if isinstance(self.source, PlanContent) else digest_json(self.facts)


def stop_files(state: Path, how: How) -> list[Path]:
    """What a run obeys: a file beside its books, and the user's own, which comes last."""
    return [state / "stop", *([Path(how.stop_file)] if how.stop_file else [])]


@contextmanager
def heard_while_reading(
    destination: str | os.PathLike[str] | None, how: How, *, as_file: bool = False
) -> Iterator[None]:
    """While a source is read and a job is made, before it has its books: a stop is heard, and a wish to stop that lies
    there already is an InputError before anything is loaded. Without a destination, only the caller may ask."""
    layout: Layout
    if destination is None:
        with heard_at_once(asked=how.stop):
            yield
        return
    if as_file:
        from brim.jobs.file_layout import file_layout  # as below

        layout = file_layout(destination, how.state, how.access)
    else:
        layout = dataset_layout(destination, how.state, how.hub, how.access)
    files = stop_files(layout.state, how)
    for file in files:
        stop_file_lies(file)
    with heard_at_once(*files, asked=how.stop):
        yield


def computed_facts(verb: str, source: RowSource, step: Step, output: Output, on_error: str) -> dict[str, Any]:
    """What decides the rows that are computed, and their bytes."""
    return {
        "kind": verb,
        "version": _VERSION,
        "source": source.facts,
        "step": step.facts,
        "output": output.facts | {"on_error": on_error},
    }


def computed_spec(
    verb: str, source: RowSource, step: Step, output: Output, layout: Layout, how: How, label: str = ""
) -> Spec:
    """Rows through a step: map, tokenize, embed."""
    limit = effective_limit(how.memory)
    limit = replace(limit, bytes=limit.bytes + how.held_bytes)
    return Spec(verb, source, layout, how, limit, step, output, label=label)


def dataset_spec(
    verb: str, source: RowSource, step: Step, output: Output, destination: str | os.PathLike[str], how: How
) -> Spec:
    """Rows through a step to shards with a card: in a folder, on the Hub, or in a bucket."""
    layout = dataset_layout(destination, how.state, how.hub, how.access)
    return computed_spec(verb, source, step, output, layout, how)


def vector_file_spec(source: RowSource, step: Step, destination: str | os.PathLike[str], how: How) -> Spec:
    """Rows through a model to one file of vectors."""
    from brim.jobs.file_layout import file_layout  # other jobs have no use for them, and would hold them
    from brim.outputs.vector_output import VectorOutput

    layout = file_layout(destination, how.state, how.access)
    return computed_spec("embed", source, step, VectorOutput(layout.name, step.batch_rows or 1000), layout, how)


def preflight(spec: Spec) -> None:
    """Everything that can be refused before anything is made at the destination."""
    check_options(spec.verb, spec.how, spec.layout.destination)
    refuse_own_source(spec.source, spec.layout)
    if isinstance(spec.source, PlanContent):
        check_hub_limits(spec.source, spec.layout.destination)
    if spec.output is not None:
        spec.output.check_room(spec.limit.bytes)


def check_options(verb: str, how: How, destination: Destination | None) -> None:
    """Options that have no meaning for this verb or destination are an error, not silence."""
    if how.keep_done and verb != "map":
        raise InputError(f"--keep-done is for a function of yours that has changed, and {verb} has none.")
    if how.update and verb != "build":
        raise InputError(f"--update is for brim build: {verb} keeps what is unchanged by itself.")
    if how.append and verb not in ("build", "select"):
        raise InputError(f"--append is for brim build and brim select: what {verb} computes is one result.")
    if destination is None or isinstance(destination, HubAddress):
        return
    plain = HubOptions()
    for name in _HUB_ONLY:
        if getattr(how.hub, name) != getattr(plain, name):
            option = {"message": "commit-message", "create_pull": "create-pr"}.get(name, name)
            what = "on this machine" if isinstance(destination, Path) else "a bucket"
            raise InputError(f"--{option} is for the Hub, and the destination is {what}.")


def refuse_own_source(source: PlanContent | RowSource, layout: Layout) -> None:
    """A source is never in what the job writes, whatever the paths are called."""
    if isinstance(source, PlanContent):
        files = source.plan.table.files
        refuse_source(layout.destination, files.root, None, files, layout.taken)
        for folder in source.plan.table.within:
            refuse_within(layout.destination, folder)
        # Values may have been taken from far away already, to a spool.
        for path in (*source.plan.table.far, *map(files.on_disk.full_path, files.on_disk.remotes)):
            refuse_holder(layout.destination, path)
    elif source.files is not None:
        # The name of what is no path (a dataset that is open, a folder of images as rows) leads nowhere.
        place = source.name if "root" in source.reading.options else source.files.root
        refuse_source(layout.destination, place, None, source.files, layout.taken)


def check_hub_limits(content: Content, destination: Destination | None) -> None:
    """More shards, or larger ones, than the Hub takes are an error before the first is sent."""
    if isinstance(destination, HubAddress):
        largest = max((shard.file_bytes for shard in content.shards), default=0)
        check_shards(len(content.shards), largest, content.size(content.shards))


def limits_of(content: Content, hub: HubOptions) -> list[str]:
    """What the Hub may refuse of a dataset that has none of its own limits against it."""
    largest = max((shard.file_bytes for shard in content.shards), default=0)
    return hub_limits(len(content.shards), largest, content.size(content.shards), hub.public)


def usual_workers(destination: Destination | None) -> int:
    """One more than cores: while one waits for the disk or the line, the others hash. Not to a bucket, where several
    parts of each shard are on their way anyway."""
    cores = usable_cores()
    return min(max(cores, 2) if isinstance(destination, BucketAddress) else cores + 1, 8)
